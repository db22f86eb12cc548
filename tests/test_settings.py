"""Limits of single values and contradictions between values, from Python and from YAML."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.errors import UserError
from alignment.settings import NonNegativeFloat, PositiveFloat, PositiveInt, Rule, Settings, Share, refusal


@dataclass(frozen=True)
class Optim(Settings):
    rate: PositiveFloat
    betas: tuple[Share, Share] = (0.9, 0.99)
    eps: PositiveFloat = 1e-8
    decay: NonNegativeFloat = 0
    schedule: Literal["linear", "cosine"] | None = None

    RULES = (Rule("eps", lambda c: c.eps > c.rate, "({self.eps}) must be below rate"),)


@dataclass(frozen=True)
class Stage(Settings):
    policy: str
    optim: Optim
    tokens: PositiveInt | Literal["auto"] = 8
    factors: dict[str, PositiveFloat] = field(default_factory=dict)
    coef: float = 1.0

    @property
    def decays(self) -> bool:
        return self.optim.decay > 0

    RULES = (
        Rule("coef", lambda c: c.decays and c.coef == 0, "is 0"),
        Rule("policy", lambda c: refusal(int, c.policy) and c.policy != "base"),
    )


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"rate": 0}, "rate"),
        ({"rate": float("nan")}, "rate"),
        ({"rate": 1, "betas": (0.5, 1.5)}, "betas"),
        ({"rate": 1, "decay": -1e-9}, "decay"),
        ({"rate": 1, "eps": 2}, "eps"),
        ({"rate": 1, "schedule": "cosin"}, "schedule"),
    ],
)
def test_a_value_out_of_its_limits_is_refused_where_settings_are_made(values, key):
    with pytest.raises(ValueError, match=f"^{key} "):
        Optim(**values)


def test_values_at_their_limits_are_taken():
    Optim(1e-30, (0, 1), 1e-30, 0, "cosine")
    Stage("base", Optim(1), 1, {"a": 1e-9})
    Stage("base", Optim(1), "auto")


def keys(values: dict) -> list[str]:
    """The keys that are wrong in a document."""
    with pytest.raises(UserError) as caught:
        build(Stage, SourcedYaml(values))
    return [line.split(": ")[1] for line in str(caught.value).splitlines()]


def test_limits_and_contradictions_of_all_sections_come_at_once():
    wrong = {"policy": "1b", "optim": {"rate": -1, "decay": 1}, "tokens": 0, "coef": 0, "factors": {"a": 0}}
    assert sorted(keys(wrong)) == ["coef", "factors.a", "optim.rate", "policy", "tokens"]


def test_a_contradiction_is_not_named_where_a_wrong_value_may_have_made_it():
    assert keys({"policy": "base", "optim": {"rate": -1, "eps": 5}}) == ["optim.rate"]
    assert keys({"policy": "base", "optim": {"rate": 1, "decay": -1}, "coef": 0}) == ["optim.decay"]
    assert keys({"policy": "base", "optim": {"rate": 1, "decay": 1}, "coef": 0}) == ["coef"]

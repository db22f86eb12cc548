"""Configs: what is read, and that every mistake is named with its place and a way out."""

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml

import alignment.config.load
from alignment.algorithms.runs import to_dict
from alignment.config.load import load_config
from alignment.config.yaml_source import parse_yaml
from alignment.errors import UserError
from alignment.settings import PositiveFloat, Settings


@dataclass(frozen=True)
class Optim(Settings):
    learning_rate: PositiveFloat
    betas: tuple[float, float] = (0.9, 0.999)
    schedule: Literal["cosine", "linear"] = "cosine"


@dataclass(frozen=True)
class LowRank:
    kind: Literal["lora"] = "lora"
    rank: int = 8


@dataclass(frozen=True)
class Prefix:
    kind: Literal["prefix"] = "prefix"
    tokens: int = 4


@dataclass(frozen=True)
class Stage:
    policy: str
    optim: Optim
    train: str | list[str] = "rows.jsonl"
    adapter: LowRank | Prefix | None = None
    single: Prefix | None = None
    model: dict[str, Any] = field(default_factory=dict)
    batch_size: int = 32
    resume: bool = True
    max_new_tokens: int | None = None
    hub_token: str | None = None


GOOD = """\
policy: base
optim:
  learning_rate: 1e-4
  betas: [0.8, 1]
adapter: {kind: prefix, tokens: 2}
model: {model_type: llama, rope_scaling: {factor: 8.0}}
"""


def load(tmp_path: Path, text: str, *overrides: str) -> Stage:
    (tmp_path / "stage.yaml").write_text(text)
    return load_config(Stage, str(tmp_path / "stage.yaml"), list(overrides))


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as error:
        load(tmp_path, text, *overrides)
    return str(error.value).replace(str(tmp_path) + "/", "").splitlines()


def test_a_config_is_read_with_nested_sections_unions_and_defaults(tmp_path):
    assert load(tmp_path, GOOD) == Stage(
        policy="base",
        optim=Optim(1e-4, (0.8, 1.0)),
        adapter=Prefix(tokens=2),
        model={"model_type": "llama", "rope_scaling": {"factor": 8.0}},
    )


def test_plain_scalars_follow_yaml_1_2():
    assert parse_yaml("[1e-4, 1E-4, 0.0001, 1.e-4, +1e-4]", "f").values == [1e-4] * 5
    text = "[no, on, 2026-01-01, 1:30, 010, 1_000, ~, .5, -.inf, '1e-4']"
    assert parse_yaml(text, "f").values == [
        "no", "on", "2026-01-01", "1:30", "010", 1000, None, 0.5, -math.inf, "1e-4",
    ]  # fmt: skip


def test_an_unknown_key_gets_its_nearest_match_and_its_line(tmp_path):
    assert problems(tmp_path, GOOD.replace("learning_rate", "learning_rat")) == [
        "stage.yaml:2: optim.learning_rate: is missing; add it",
        "stage.yaml:3: optim.learning_rat: unknown key; did you mean 'learning_rate'?",
    ]


def test_all_problems_come_at_once(tmp_path):
    text = """\
optim:
  learning_rate: 1e-3x
  schedule: cosin
train: 3
batch_size: 32.5
resume: yes
adapter:
  kind: lora
  rnk: 2
"""
    assert problems(tmp_path, text) == [
        "stage.yaml:1: policy: is missing; add it",
        "stage.yaml:2: optim.learning_rate: must be a number, got '1e-3x'",
        "stage.yaml:3: optim.schedule: must be 'cosine' or 'linear', got 'cosin'",
        "stage.yaml:4: train: must be text or a list, got 3; put it in quotes",
        "stage.yaml:9: adapter.rnk: unknown key; did you mean 'rank'?",
        "stage.yaml:5: batch_size: must be a whole number, got 32.5",
        "stage.yaml:6: resume: must be true or false, got 'yes'",
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("batch_size: 1.0", "batch_size: must be a whole number, got 1.0"),
        ("batch_size: '32'", "batch_size: must be a whole number, got '32'"),
        ("batch_size:", "batch_size: must be a whole number, got null"),
        ("resume: 1", "resume: must be true or false, got 1"),
        ("train: [a, 2]", "train[1]: must be text, got 2; put it in quotes"),
        ("adapter: {kind: lorra}", "adapter.kind: must be 'lora' or 'prefix', got 'lorra'"),
        ("adapter: {rnk: 2}", "adapter.rnk: unknown key; did you mean 'rank'?"),
        ("adapter: 4", "adapter: must be a section of keys, got 4"),
        ("adapter: lora", "adapter: must be a section of keys, got 'lora'; say adapter.kind=lora"),
        ("single: prefix", "single: must be a section of keys, got 'prefix'; say single.kind=prefix"),
        ("adapter: {kind: prefix, tokens: many}", "adapter.tokens: must be a whole number, got 'many'"),
        ("single: {kind: lora}", "single.kind: must be 'prefix', got 'lora'"),
        ("model: [1]", "model: must be a section of keys, got [1]"),
        ("on: 1", "on: unknown key; known: adapter, batch_size, hub_token, max_new_tokens, model, optim, policy,"),
    ],
)
def test_one_wrong_value_gives_one_line(tmp_path, line, message):
    text = f"policy: base\noptim: {{learning_rate: 1}}\n{line}\n"
    (problem,) = problems(tmp_path, text)
    assert problem.startswith(f"stage.yaml:3: {message}")


def test_a_wrong_sibling_does_not_hide_a_section_of_the_wrong_kind(tmp_path):
    text = "policy: base\noptim: {learning_rate: 1}\nsingle: {kind: lora}\nbatch_size: many\n"
    assert [problem.split(": ")[1] for problem in problems(tmp_path, text)] == ["single.kind", "batch_size"]


def test_overrides_win_and_the_last_one_wins(tmp_path):
    config = load(tmp_path, GOOD, "optim.learning_rate=1e-2", "batch_size=1", "batch_size=2", "train=[a, b]")
    assert (config.optim.learning_rate, config.batch_size, config.train) == (1e-2, 2, ["a", "b"])
    assert config.optim.betas == (0.8, 1.0)


def test_an_override_makes_the_section_it_needs_and_can_clear_one(tmp_path):
    assert load(tmp_path, GOOD, "single.tokens=9").single == Prefix(tokens=9)
    assert load(tmp_path, GOOD, "adapter=null").adapter is None
    assert load(tmp_path, GOOD, "adapter={kind: lora, rank: 3}").adapter == LowRank(rank=3)


def test_an_override_can_repair_a_broken_file_value(tmp_path):
    assert load(tmp_path, GOOD + "batch_size: many\n", "batch_size=4").batch_size == 4


def test_wrong_overrides_are_all_named_as_overrides(tmp_path):
    assert problems(tmp_path, GOOD, "optim.learning_rte=1", "batch_size=x") == [
        "override: optim.learning_rte: unknown key; did you mean 'learning_rate'?",
        "override: batch_size: must be a whole number, got 'x'",
    ]
    assert problems(tmp_path, GOOD, "batch_size", "policy.x=1", "train=[1") == [
        "override: 'batch_size' is not of the form key=value, such as optim.learning_rate=1e-4",
        "override: policy.x: policy is not a section, so policy.x cannot be set in it",
        "override: train: is not valid YAML: expected ',' or ']', but got '<stream end>'",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("policy: [a\nbatch_size: 2\n", "stage.yaml:2: is not valid YAML"),
        ("policy: a\npolicy: b\n", "stage.yaml:2: policy: is given twice; keep one"),
        ("policy: &a [*a]\n", "policy[0]: an alias that contains itself"),
        ("policy: !!python/name:os.system ''\n", "stage.yaml:1: is not valid YAML"),
        ("- a\n- b\n", "stage.yaml:1: config: must be a section of keys"),
    ],
)
def test_text_that_is_no_config_is_refused_with_its_line(tmp_path, text, message):
    assert message in problems(tmp_path, text)[0]


@pytest.mark.parametrize("line", ["k{}: 1\n", "- {}\n"])
def test_a_file_of_very_many_keys_is_refused_before_it_is_read_whole(tmp_path, line):
    began = time.monotonic()
    assert "more than 10000 values" in problems(tmp_path, "".join(map(line.format, range(22_000))))[0]
    assert "bytes; a config may have" in problems(tmp_path, "".join(map(line.format, range(200_000))))[0]
    assert time.monotonic() - began < 10


def test_an_empty_file_is_a_config_without_keys(tmp_path):
    assert problems(tmp_path, "") == [
        "stage.yaml:1: policy: is missing; add it",
        "stage.yaml:1: optim: is missing; add it",
    ]


def test_a_path_wins_over_a_packaged_name(tmp_path, monkeypatch):
    packaged, here = tmp_path / "package" / "configs", tmp_path / "here"
    (packaged / "stage").mkdir(parents=True)
    (here / "stage").mkdir(parents=True)
    (packaged / "stage" / "tiny.yaml").write_text(GOOD)
    monkeypatch.setattr(alignment.config.load, "packaged_folder", lambda kind: packaged)
    monkeypatch.chdir(here)
    assert load_config(Stage, "stage/tiny").policy == "base"
    (here / "stage" / "tiny").write_text(GOOD.replace("base", "mine"))
    assert load_config(Stage, "stage/tiny").policy == "mine"
    with pytest.raises(UserError, match=r"stage/tny: there is no such file.*did you mean 'stage/tiny'\?"):
        load_config(Stage, "stage/tny")
    (here / "base.yaml").write_text(GOOD)
    with pytest.raises(UserError, match=r"did you mean 'base\.yaml'\?"):
        load_config(Stage, "bse.yaml")
    with pytest.raises(UserError) as error:
        load_config(Stage, "nothing")
    assert "--help" in str(error.value) and "stage/tiny" not in str(error.value)


def test_secrets_are_left_out_and_words_about_text_stay(tmp_path):
    config = load(tmp_path, GOOD, "hub_token=hush", "max_new_tokens=7", "model={api_key: hush, eos_token: x, n: [1]}")
    plain = to_dict(config)
    assert "hush" not in yaml.safe_dump(plain)
    assert plain["max_new_tokens"] == 7
    assert plain["model"] == {"eos_token": "x", "n": [1]}
    assert plain["adapter"] == {"kind": "prefix", "tokens": 2}
    assert plain["optim"]["betas"] == [0.8, 1.0]

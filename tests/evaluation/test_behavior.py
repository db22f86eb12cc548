"""Behavioral tests: cases and templates, the rule of each kind of test, the models, and what is refused before one is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from alignment.config.load import load_config, packaged_folder
from alignment.errors import UserError
from alignment.evaluation import behavior
from alignment.evaluation.behavior import BehaviorConfig, ResponsesConfig, failure_rates, label_predictions, run
from alignment.evaluation.behavior_cases import BehaviorCase, Prediction, fill_templates, judge_case, read_cases
from alignment.generation import SamplingConfig
from alignment.loading import load_model
from alignment.reward_model import load_reward_model

TEMPLATES = packaged_folder("configs") / "evaluate" / "behavior"


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


# The rules, worked out by hand. A classifier gives probabilities of negative, neutral and positive.


def labeled(*values: float) -> Prediction:
    names = ("0", "1", "2")
    return Prediction(names[max(range(3), key=lambda i: values[i])], dict(zip(names, values, strict=True)))


def case(kind: Any, texts: int = 2, **keys: Any) -> BehaviorCase:
    return BehaviorCase(test="t", type=kind, examples=[f"text {i}" for i in range(texts)], **keys)


SURE, DOUBTFUL, WRONG = labeled(0.05, 0.05, 0.9), labeled(0.2, 0.25, 0.55), labeled(0.7, 0.2, 0.1)
NEUTRAL = labeled(0.2, 0.6, 0.2)


@pytest.mark.parametrize(
    ("rule", "answers", "failed", "excess"),
    [
        ({"kind": "MFT", "label": 2}, [SURE], False, 0.1),  # 1 - 0.9
        ({"kind": "MFT", "label": 2}, [WRONG], True, 0.9),
        ({"kind": "MFT", "label": [1, 2]}, [NEUTRAL], False, 0.2),
        ({"kind": "MFT", "label": 1, "accept": {"1": [1, 2]}}, [SURE], False, 0.05),
        ({"kind": "MFT", "label": 1}, [SURE], True, 0.95),
        ({"kind": "INV"}, [SURE, DOUBTFUL], False, 0.25),  # moves by 0.35, but the label is the same
        ({"kind": "INV"}, [SURE, WRONG], True, 0.7),  # positive: 0.9 to 0.1, over 0.1
        ({"kind": "INV"}, [DOUBTFUL, labeled(0.5, 0.04, 0.46)], False, -0.01),  # another label, but only 0.09 less
        ({"kind": "DIR", "change": "does not fall"}, [SURE, DOUBTFUL], True, 0.25),
        ({"kind": "DIR", "change": "does not fall"}, [SURE, labeled(0.1, 0.1, 0.8)], False, 0.0),  # just the tolerance
        ({"kind": "DIR", "change": "does not rise"}, [DOUBTFUL, SURE], True, 0.25),
        ({"kind": "DIR", "change": "does not rise"}, [SURE, DOUBTFUL], None, 0.0),  # 0.9 has no room to rise by more
        ({"kind": "DIR", "change": "does not rise", "skip": [1]}, [NEUTRAL, WRONG], None, 0.0),
        # positive minus negative: 0.85, then 0.35, then -0.6
        ({"kind": "DIR", "change": "does not fall", "of": {"0": -1, "2": 1}}, [SURE, DOUBTFUL], True, 0.4),
        ({"kind": "DIR", "change": "does not rise", "of": {"0": -1, "2": 1}}, [SURE, WRONG], False, -1.55),
        ({"kind": "DIR", "change": "falls", "of": {"2": 1}}, [SURE, WRONG], False, -0.7),
        ({"kind": "DIR", "change": "rises", "of": {"2": 1}, "tolerance": 0}, [SURE, SURE], True, 0.0),
    ],
)
def test_a_case_of_each_kind_fails_as_worked_out(rule, answers, failed, excess):
    found = judge_case(case(**rule, texts=max(2, len(answers))), answers)
    assert found.failed is failed
    assert found.excess == pytest.approx(excess, abs=1e-9)


@pytest.mark.parametrize(
    ("rule", "scores", "failed"),
    [
        ({"kind": "DIR", "change": "falls", "tolerance": 0}, [-3.0, -3.1], False),
        ({"kind": "DIR", "change": "falls", "tolerance": 0}, [-3.0, -3.0], True),  # a tie is no preference
        ({"kind": "DIR", "change": "does not rise", "tolerance": 0.5}, [1.0, 1.4], False),
        ({"kind": "INV", "tolerance": 0.5}, [1.0, 1.4], False),
        ({"kind": "INV", "tolerance": 0.5}, [1.0, 0.4], True),
    ],
)
def test_a_model_that_only_scores_is_judged_by_its_scores(rule, scores, failed):
    assert judge_case(case(**rule), [Prediction(None, {"score": score}) for score in scores]).failed is failed


def test_the_worst_text_of_a_case_is_the_one_that_fails_most():
    found = judge_case(case("INV", 4), [SURE, DOUBTFUL, WRONG, labeled(0.6, 0.2, 0.2)])
    assert (found.failed, found.worst) == (True, 2)
    assert judge_case(case("MFT", 3, label=2), [SURE, WRONG, NEUTRAL]).worst == 1


def test_a_model_of_two_labels_is_neutral_where_it_is_undecided():
    p = torch.tensor([0.1, 0.4, 0.5, 0.6, 0.7])  # of positive
    found = label_predictions(["0", "2"], torch.stack([1 - p, p], -1).log(), neutral=1)
    assert [one.label for one in found] == ["0", "1", "1", "1", "2"]
    assert found[3].values == pytest.approx({"1": 0.7, "2": 0.3})  # 1 - 3 * 0.1
    assert found[1].values == pytest.approx({"1": 0.7, "0": 0.3})
    assert found[4].values == pytest.approx({"0": 0.3, "2": 0.7})
    same = label_predictions(["entailment", "not", "not"], torch.tensor([[0.4, 0.35, 0.25]]).log())
    assert same[0].label == "entailment" and same[0].values["not"] == pytest.approx(0.6)


# Planted models: rates by hand over the same nine cases

CASES = [
    *(BehaviorCase(test="words", type="MFT", capability="words", label=2, examples=[w]) for w in ("good", "fine")),
    *(BehaviorCase(test="bad words", type="MFT", capability="words", label=0, examples=[w]) for w in ("bad", "poor", "sad")),
    *(
        BehaviorCase(test="names", type="INV", capability="names", examples=[f"Ann is {w}", f"Bob is {w}"])
        for w in ("good", "bad")
    ),
    *(
        BehaviorCase(test="and", type="DIR", capability="more", change="does not rise", of={"2": 1}, examples=[w, f"{w} and bad"])
        for w in ("good", "fine")
    ),
]


def right(text: str) -> float:
    return 0.1 if any(word in text for word in ("bad", "poor", "sad")) else 0.9


PLANTED = {
    "always positive": (lambda text: 0.9, {"words": 0, "bad words": 3, "names": 0, "and": 0}),
    "flips at a name": (lambda text: 1 - right(text) if "Bob" in text else right(text), {"words": 0, "bad words": 0, "names": 2, "and": 0}),
    "right": (right, {"words": 0, "bad words": 0, "names": 0, "and": 0}),
    "likes length": (lambda text: min(0.99, len(text) / 14), {"words": 2, "bad words": 0, "names": 0, "and": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_planted_classifiers_have_the_failure_rates_worked_out_by_hand(name, monkeypatch, tmp_path, capsys):
    positive, expected = PLANTED[name]

    def answers(config: BehaviorConfig, texts: list[str]) -> list[Prediction]:
        p = torch.tensor([positive(text) for text in texts])
        return label_predictions(["0", "2"], torch.stack([1 - p, p], -1).log())

    monkeypatch.setattr(behavior, "predict", answers)
    monkeypatch.setattr(behavior, "given_labels", lambda config: ["0", "2"])
    monkeypatch.setattr(behavior, "read_cases", lambda tests, expectations: CASES)
    results = json.loads(run(BehaviorConfig(str(tmp_path), ["planted.jsonl"], classifier="planted")).read_text())
    assert {test: own["failed"] for test, own in results["tests"].items()} == expected
    counted = {"words": 5, "names": 2, "more": 2}
    for capability, own in results["capabilities"].items():
        failed = sum(expected[test] for test, one in results["tests"].items() if one["capability"] == capability)
        assert own["failure"]["rate"] == pytest.approx(failed / counted[capability])
        assert own["failure"]["low"] <= own["failure"]["rate"] <= own["failure"]["high"]
    if name == "flips at a name":
        [worst, _] = results["tests"]["names"]["examples"]
        assert worst["text"].startswith("Ann") and worst["variant"].startswith("Bob")
        assert worst["excess"] == pytest.approx(0.7)
    page = (tmp_path / "behavior.html").read_text()
    assert "bad words" in page and "words" in capsys.readouterr().out


def test_cases_that_say_nothing_are_in_no_rate_and_wilson_gives_the_interval():
    results = [True] * 3 + [False] * 7 + [None] * 2
    judged = [(BehaviorCase(test="t", type="MFT", label=1, examples=[str(i)]), behavior.CaseResult(r)) for i, r in enumerate(results)]
    own = failure_rates(judged, "test")["t"]
    assert (own["cases"], own["say_nothing"], own["failed"]) == (12, 2, 3)
    assert [own["failure"][key] for key in ("rate", "low", "high")] == pytest.approx([0.3, 0.1078, 0.6032], abs=1e-4)  # Wilson
    nothing = failure_rates([(judged[0][0], behavior.CaseResult(None))], "test")["t"]
    assert nothing["failure"] is None

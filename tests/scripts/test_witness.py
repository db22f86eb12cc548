"""The script that compares what the stages compute: any bit that differs is found, and every tiny config has a case."""

import copy
import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import witness

ROOT = Path(__file__).parents[2]

OLD = {
    "sft": {"metrics": [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25}], "weights": "abc"},
    "generate": {"texts": [{"response": "yes", "log_probs": [-0.1, 0.0]}]},
}


@pytest.mark.parametrize(
    ("case", "path", "value", "found"),
    [
        (
            "sft",
            ("metrics", 1, "loss"),
            math.nextafter(0.25, 1),
            "metrics.2.loss: 0.25 before, 0.25000000000000006 now",
        ),
        ("sft", ("weights",), "abd", 'weights: "abc" before, "abd" now'),
        ("sft", ("metrics", 0, "kl"), 0.0, "metrics.1.kl: nothing before, 0.0 now"),
        ("generate", ("texts", 0, "log_probs", 1), -0.0, "texts.1.log_probs.2: 0.0 before, -0.0 now"),
        ("generate", ("texts", 0, "response"), "no", 'texts.1.response: "yes" before, "no" now'),
    ],
)
def test_one_changed_value_is_the_one_difference(case, path, value, found):
    new = copy.deepcopy(OLD)
    place = new[case]
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    assert witness.compare(OLD, new) == [f"{case}: {found}"]


def test_what_is_gone_and_what_is_new_are_differences():
    assert witness.compare(OLD, {"sft": {"metrics": OLD["sft"]["metrics"]}}) == [
        'sft: weights: "abc" before, nothing now'
    ]
    assert witness.compare(OLD, {"dpo": {}}) == ["dpo: only in the new record"]


def test_the_exit_code_and_the_last_word(tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in ("old", "part", "other")}
    other = {"sft": {**OLD["sft"], "weights": "abd"}, "generate": OLD["generate"]}
    for name, cases in (("old", OLD), ("part", {"sft": OLD["sft"]}), ("other", other)):
        files[name].write_text(json.dumps({"cases": cases}))
    assert witness.main(["compare", str(files["old"]), str(files["old"])]) == 0
    assert capsys.readouterr().out == "2 cases equal\n"
    assert witness.main(["compare", str(files["old"]), str(files["part"])]) == 0
    assert (
        "1 cases equal\n1 of 2 cases are not in the new record, and were not compared: generate"
        in capsys.readouterr().out
    )
    assert witness.main(["compare", str(files["old"]), str(files["other"])]) == 1


def test_every_tiny_config_and_launch_file_has_a_case():
    cases = witness.build_cases().values()
    tiny = {f"{path.parent.name}/{path.stem}" for path in (ROOT / "configs").glob("*/*tiny*.yaml")}
    assert tiny == {word for case in cases for word in case.command.split() if "/" in word}
    assert {case.launch for case in cases} - {None} == {path.stem for path in (ROOT / "configs/launch").glob("*.yaml")}


def test_a_case_comes_with_those_whose_models_it_uses():
    cases = witness.build_cases()
    assert [case.name for case in witness.select(cases, ["dpo lora"])] == ["pretrain causal", "sft", "dpo lora"]
    assert len(witness.select(cases, [])) == len(cases)
    names = list(cases)
    assert all(
        names.index(model.partition("/")[0]) < names.index(name)
        for name in names
        for model in cases[name].models.values()
        if model
    )
    with pytest.raises(SystemExit, match="no case is called 'dp'"):
        witness.select(cases, ["dp"])

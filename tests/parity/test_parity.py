"""I11: our models equal transformers' for every architecture and way to run it; cases and measures are the script's."""

import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from alignment.errors import UserError
from alignment.models.families import FAMILIES
from alignment.models.huggingface.checkpoint import load_pretrained, save_model

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"
sys.path.insert(0, str(SCRIPTS))  # the script imports its neighbors by their bare names
import parity  # noqa: E402
import parity_measures  # noqa: E402
import parity_reference  # noqa: E402

CASES = [case for family in parity_reference.families() for case in parity_reference.read_cases(family).values()]
NAMES = [f"{case.family}-{case.name}" for case in CASES]
HEADS = [(case, task) for case in CASES for task in case.heads]
EXACT = {"export": 0.0, "greedy": 0, "beam": 0}


@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_i11_everything_equals_transformers(case, tmp_path):
    """[H19, H20]"""
    found = parity.case_measures(case, tmp_path)
    expected = {"left", "right", "ragged", "grad", "export"}
    assert set(found) == expected | ({"cache", "greedy", "beam"} if case.kind != "encoder" else set())
    assert {way: value for way, value in found.items() if way in EXACT} == {w: 0 for w in EXACT if w in found}
    assert all(value <= 1e-4 for value in found.values()), found


@pytest.mark.parametrize(("case", "task"), HEADS, ids=[f"{case.family}-{task}" for case, task in HEADS])
def test_heads_give_transformers_scores_and_go_back_bit_by_bit(case, task, tmp_path):
    for labels in (2,) if task == "span" else (3, 1):
        theirs, again = tmp_path / str(labels), tmp_path / f"{labels} again"
        assert parity_measures.head_difference(case, task, labels, theirs) <= 1e-4
        save_model(load_pretrained(theirs, task), again)
        auto_class = getattr(transformers, parity_reference.HEAD_DOORS[task])
        expected, found = (auto_class.from_pretrained(each).state_dict() for each in (theirs, again))
        assert expected.keys() == found.keys()
        saved = load_file(again / "model.safetensors").keys()
        idle = FAMILIES[case.model_type].ignored_tensors  # such as a pooler that transformers builds and does not read
        for name, tensor in expected.items():
            ignored = name not in saved and any(re.fullmatch(pattern, name) for pattern in idle)
            assert ignored or torch.equal(found[name], tensor), name


@pytest.mark.parametrize("family", parity_reference.families())
def test_damage_is_refused_by_name(family, tmp_path):
    case = next(iter(parity_reference.read_cases(family).values()))
    parity_reference.write_checkpoint(case, tmp_path)
    refused = parity_measures.refusals(tmp_path)
    assert refused == {"missing tensor": True, "extra tensor": True, "unknown key": True}


def test_every_family_of_ours_has_a_row():
    assert {case.model_type for case in CASES} == set(FAMILIES)


def test_positions_to_255_are_tested_in_every_family():
    for family in parity_reference.families():
        assert max(case.lengths[0] for case in parity_reference.read_cases(family).values()) >= 256, family


@pytest.fixture
def pair(tmp_path):
    """A case, transformers' model of it and ours."""
    case = parity_reference.read_cases("llama")["grouped queries"]
    return case, parity_reference.write_checkpoint(case, tmp_path / "model"), load_pretrained(tmp_path / "model")


@pytest.mark.parametrize("name", ["blocks.1.attention.key.weight", "blocks.2.feedforward_norm.weight", "embed.weight"])
def test_each_measure_sees_a_weight_that_is_one_percent_off(pair, name, tmp_path):
    case, reference, model = pair
    with torch.no_grad():
        model.trunk.get_parameter(name).mul_(1.01)
    found: dict[str, float] = parity_measures.logit_differences(case, reference, model)
    found["grad"] = parity_measures.gradient_difference(case, reference, model, tmp_path / "gradients")
    found["export"] = parity_measures.export_difference(case, reference, model, tmp_path / "export")
    assert min(found.values()) > 1e-4, found


def test_searches_see_another_models_tokens(pair):
    case, reference, model = pair
    assert parity_measures.generation_differences(case, reference, model) == {"greedy": 0, "beam": 0}
    with torch.no_grad():
        model.head.weight.copy_(model.head.weight.roll(1, 0))
    found = parity_measures.generation_differences(case, reference, model)
    assert found["greedy"] == found["beam"] == 16


def test_gradients_of_the_reference_come_back_under_its_files_names(tmp_path):
    """GPT-NeoX keeps its head as lm_head in memory and as embed_out on disk."""
    case = parity_reference.read_cases("gpt_neox")["plain"]
    reference = parity_reference.write_checkpoint(case, tmp_path / "model")
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    (reference.lm_head.weight * 3).sum().backward()
    saved = parity_measures.gradients_as_saved(reference, tmp_path / "gradients")
    assert (saved["embed_out.weight"] == 3).all() and "lm_head.weight" not in saved
    assert all((tensor == 0).all() for name, tensor in saved.items() if name != "embed_out.weight")
    assert all(torch.equal(tensor, before[name]) for name, tensor in reference.state_dict().items())


def test_the_script_prints_a_row_per_family_and_fails_outside_the_bound(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parity.py", "--family", "gpt2"])
    plain = parity_reference.read_cases("gpt2")["plain"]
    monkeypatch.setattr(parity, "read_cases", lambda family: {"plain": plain})
    assert parity.main() == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1 and output.startswith("gpt2 ") and output.rstrip().endswith("ok")
    assert "greedy 16/16  beam 16/16" in output and "refusals 3/3" in output and "export 0.0e+00" in output
    monkeypatch.setattr(parity, "BOUND", 1e-12)
    assert parity.main() == 1
    assert "OUTSIDE" in capsys.readouterr().out


def test_a_row_that_cannot_open_is_reported_and_the_next_one_goes_on(monkeypatch, capsys):
    def refuse(*_):
        raise UserError("tensor a is missing\ntensor b is missing")

    monkeypatch.setattr(sys, "argv", ["parity.py", "--family", "gpt2", "llama"])
    monkeypatch.setattr(parity, "load_pretrained", refuse)
    assert parity.main() == 1
    rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        [family, "FAILED", "plain:", "tensor", "a", "is", "missing"] for family in ("gpt2", "llama")
    ]


def test_an_inexact_export_or_search_is_outside_whatever_its_size():
    assert parity.holds({"left": 9e-5, "export": 0.0, "greedy": 0, "beam": 0})
    for way, value in (("left", 2e-4), ("export", 1e-9), ("greedy", 1), ("beam", 1), ("grad", float("inf"))):
        assert not parity.holds({"left": 0.0, way: value}), way

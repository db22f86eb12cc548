"""I11: logits equal transformers' for every architecture and way to run it; the case table is the parity script's."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from alignment.models.checkpoint import hf_names, load_language_model, to_hf
from alignment.ragged import Ragged

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "parity.py"
spec = importlib.util.spec_from_file_location("parity_script", SCRIPT)
parity = importlib.util.module_from_spec(spec)
sys.modules["parity_script"] = parity
spec.loader.exec_module(parity)

ALL = [(family, name) for family, cases in parity.CASES.items() for name in cases]


@pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{family}-{name}" for family, name in ALL])
def test_i11_logits_equal_transformers(family, name, tmp_path):
    differences = parity.case_differences(family, parity.CASES[family][name], tmp_path)
    assert set(differences) == {"left", "right", "cache"}
    assert max(differences.values()) <= 1e-4, differences


@pytest.mark.parametrize(("family", "name"), ALL, ids=[f"{family}-{name}" for family, name in ALL])
def test_gradients_equal_transformers(family, name, tmp_path):
    """Packed documents of several lengths, so several rectangles, against one document at a time over there."""
    config = parity.CASES[family][name]
    reference = parity.write_checkpoint(family, config, tmp_path)
    model = load_language_model(tmp_path)
    rows = parity.documents(config["vocab_size"], (60, 33, 7, 90, 16))
    (-model(batch=Ragged.build(rows)).log_probs.sum()).backward()
    for row in rows:
        ids = torch.tensor([row])
        F.cross_entropy(reference(ids).logits[0, :-1], ids[0, 1:], reduction="sum").backward()
    ours = to_hf({name: parameter.grad for name, parameter in model.named_parameters()}, hf_names(model))
    theirs = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        if name.endswith("k_proj.bias"):  # shifts all scores of a query alike: the true gradient is 0, both are noise
            continue
        assert (ours[name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


def test_the_script_prints_a_row_per_family_and_fails_outside_the_bound(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["parity.py", "--family", "gpt2"])
    monkeypatch.setattr(parity, "CASES", {"gpt2": {"plain": parity.CASES["gpt2"]["plain"]}})
    assert parity.main() == 0
    assert capsys.readouterr().out.count("gpt2 ") == 1
    monkeypatch.setattr(parity, "BOUND", 1e-12)
    assert parity.main() == 1
    assert "OUTSIDE" in capsys.readouterr().out

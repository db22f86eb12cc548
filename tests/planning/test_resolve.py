"""training.micro_batch_tokens: auto in a run: resolved once, written down, kept by a resume."""

import pytest
import yaml

from alignment.cli import main
from alignment.planning import resolve
from alignment.training import TrainingConfig


def test_a_run_writes_its_choice_and_a_resume_keeps_it(checkpoints, world, tmp_path, monkeypatch, capsys):
    values = {
        "policy": str(checkpoints["llama"]), "output": str(tmp_path / "run"),
        "data": {"train": world["demonstrations"], "max_length": 128}, "optim": {"learning_rate": 1e-3},
        "training": {"max_steps": 2, "batch_size": 4, "micro_batch_tokens": "auto", "save_every_steps": 1},
    }  # fmt: skip
    file = tmp_path / "sft.yaml"
    file.write_text(yaml.safe_dump(values))
    assert main(["sft", str(file)]) == 0
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["micro_batch_tokens"]
    assert isinstance(chosen, int) and chosen > 0
    assert f"training.micro_batch_tokens: auto: {chosen}" in capsys.readouterr().err

    monkeypatch.setattr(resolve, "_choose", lambda config: pytest.fail("a resume chose again"))
    assert main(["sft", str(file)]) == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["micro_batch_tokens"]
    assert kept == chosen


def test_a_config_that_was_not_resolved_says_who_does_it():
    with pytest.raises(ValueError, match="resolve_micro_batch"):
        _ = TrainingConfig(micro_batch_tokens="auto").tokens_per_forward
    assert TrainingConfig(micro_batch_tokens=64).tokens_per_forward == 64

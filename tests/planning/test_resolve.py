"""training.micro_batch_tokens: auto in a run: resolved once, written down, kept by a resume."""

from importlib import import_module

import pytest
import yaml

from alignment.cli import main
from alignment.planning import plan
from alignment.training import TrainingConfig
from tests.distributed.processes import run_ranks


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

    monkeypatch.setattr(plan, "_choose", lambda config: pytest.fail("a resume chose again"))
    assert main(["sft", str(file)]) == 0
    kept = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["training"]["micro_batch_tokens"]
    assert kept == chosen


def test_a_config_that_was_not_resolved_says_who_does_it():
    with pytest.raises(ValueError, match="resolve_micro_batch") as refused:
        _ = TrainingConfig(micro_batch_tokens="auto").tokens_per_forward
    named = next(word for word in str(refused.value).split() if word.startswith("alignment."))
    module, _, function = named.rpartition(".")
    assert callable(getattr(import_module(module), function))
    assert TrainingConfig(micro_batch_tokens=64).tokens_per_forward == 64


@pytest.mark.distributed_slow
def test_where_nothing_fits_all_ranks_end_with_one_message(checkpoints, world, tmp_path):
    """Both ranks run the command; 1 GB is too little for any run, since libraries alone are counted with 0.8 GB."""
    values = {
        "policy": str(checkpoints["llama"]), "output": str(tmp_path / "run"),
        "data": {"train": world["demonstrations"], "max_length": 128},
        "training": {"max_steps": 1, "batch_size": 4, "micro_batch_tokens": "auto"},
    }  # fmt: skip
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(values))
    output = run_ranks(2, "tests.planning.short_of_memory", str(tmp_path / "sft.yaml"), str(tmp_path), seconds=120)
    said = output + (tmp_path / "rank-1").read_text()
    assert said.count("not even one row of") == 1, said

"""`--dry-run` of every training stage: the stage's own checks, its plan, its first rows; nothing trained, nothing written."""

from pathlib import Path

import pytest
import yaml

from alignment import cli
from alignment.training import Engine

STAGES = {  # command -> overrides of its packaged config, and what the lines on the first update must hold
    "pretrain": ([], ["[<s>|Hotel|", "[counts] is trained on"]),
    "pretrain pretrain/tiny_masked": ([], ["the objective masked draws in each epoch anew"]),
    "sft": (["policy={policy}", "data.max_length=300"], ["\n|Concierge|: [", "count: context 0-"]),
    "sft sft/tiny loss_on=all": (["policy={policy}"], ["count: context 0-0, counts 1-"]),
    "reward": (["policy={policy}"], [" chosen\n", " rejected\n"]),
    "dpo": (["policy={policy}", "reference_log_probs=cache"], [" chosen\n", " rejected\n"]),
    "ppo": (
        ["policy={policy}", "reward_model={reward}"],
        ["the tokens of sampled responses count", " 0 count: context"],
    ),
    "online-dpo": (["policy={policy}", "reward_model={reward}"], ["the tokens of sampled responses count"]),
    "distill": (["policy={policy}", "teacher={policy}"], ["the tokens of sampled responses count"]),
    "finetune": (["policy={policy}"], ["labels [", "their labels count"]),
}


@pytest.fixture(autouse=True)
def models(stage, monkeypatch, tmp_path) -> dict[str, Path]:
    """A policy and a reward model, an empty working directory, and from here on an engine that refuses to train."""
    found = {"policy": stage("sft") / "model", "reward": stage("reward") / "model"}
    monkeypatch.chdir(tmp_path)

    def update(*_, **__):
        raise AssertionError("a dry run must not train")

    monkeypatch.setattr(Engine, "update", update)
    return found


@pytest.mark.parametrize("words", STAGES)
def test_a_dry_run_shows_plan_and_first_rows_and_writes_nothing(models, capsys, words):
    overrides, expected = STAGES[words]
    command, *rest = words.split()
    config = rest or [f"{command.replace('-', '_')}/tiny"]
    settings = [each.format(**models) for each in overrides]
    assert cli.main([command, *config, *settings, "output=out", "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "needed by all processes" in shown and "first update: 16 rows, of which 3 are shown" in shown
    assert all(text.replace("\n|C", "\\n|C") in shown for text in expected)
    assert shown.endswith("dry run: nothing was trained or written to out\n")
    assert list(Path().iterdir()) == []


def test_a_dry_run_finds_what_the_stage_would(stage, models, capsys, tmp_path):
    """Mistakes of the config, rows, chat template, model, positions and output, each as the run itself reports it."""
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n')
    for setting, message in {
        "optim.learning_rate=x": "must be a number",
        "data.train=nowhere.jsonl": "nowhere.jsonl",
        "data.train=bad.jsonl": "bad.jsonl: no demonstrations here",
        "chat_template=chatml": "chat_template",
        "policy=nowhere": "nowhere",
        "max_length=2": "unknown key",
        "adapter={kind: lora, rank: 4, alpha: 8, layers: nowhere}": "nowhere",
        "training.trackers=[nobody]": "unknown tracker 'nobody'",
        f"output={stage('sft')}": "of a run with other settings",
    }.items():
        arguments = ["sft", "sft/tiny", f"policy={models['policy']}", "output=out", setting, "--dry-run"]
        assert cli.main(arguments) == 2, setting
        assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_dry_run_of_a_finished_run_says_so_and_leaves_it(stage, capsys):
    done = stage("sft")
    before = {path: path.stat().st_mtime_ns for path in done.rglob("*")}
    settings = yaml.safe_load((done / "config.yaml").read_text())
    Path("mine.yaml").write_text(yaml.safe_dump(settings))
    capsys.readouterr()
    for again in ([], ["--again"]):
        assert cli.main(["sft", "mine.yaml", "--dry-run", *again]) == 0
        shown = capsys.readouterr().out
        assert "first update: 8 rows" in shown and ("this run is finished" in shown) == (not again)
    assert {path: path.stat().st_mtime_ns for path in done.rglob("*")} == before


def test_a_dry_run_ends_early_where_the_plan_does_not_fit(models, capsys, monkeypatch):
    monkeypatch.setattr("alignment.planning.layout.total_memory", lambda: 1000)
    monkeypatch.setattr("alignment.algorithms.sft.load_policy", None)
    assert cli.main(["sft", "sft/tiny", f"policy={models['policy']}", "output=out", "--dry-run"]) == 2
    assert "sft/tiny does not fit" in capsys.readouterr().err


def test_a_dry_run_is_one_process_and_plans_several(models, capsys, monkeypatch):
    words = ["sft", "sft/tiny", f"policy={models['policy']}", "data.max_length=300", "output=out", "--dry-run"]
    assert cli.main([*words, "--gpus", "8"]) == 0
    assert "one device of ddp on 8" in capsys.readouterr().out
    monkeypatch.setattr("alignment.commands.dry_run.launched_size", lambda: 2)
    assert cli.main(words) == 2
    assert "--dry-run is for one process" in capsys.readouterr().err

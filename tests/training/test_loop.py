"""The loop: resumes exactly, stops when asked, stops before damage; the run's directory is as promised."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from alignment.errors import UserError
from alignment.training import Engine, LossSum, NonFiniteError, Run, TrainingConfig, fit, latest_checkpoint
from alignment.training.run import truncate_lines
from tests.training.toys import ToyStream, collate_by, squared_error, toy_engine, weights

ROOT = Path(__file__).parents[2]


def train(output: Path, *, stop_after: int = 0, learning_rate: float = 1e-2, **settings) -> Engine:
    """Five updates with dropout, a checkpoint every second one, optionally stopped by SIGTERM."""
    training = TrainingConfig(**{"max_steps": 5, "save_every_steps": 2, **settings})
    engine = toy_engine(dropout=0.1, training=training, learning_rate=learning_rate)
    config = {"output": str(output), "optim": {"learning_rate": learning_rate}, "training": {"trackers": []}}

    def loss_fn(batch) -> LossSum:
        if engine.step + 1 == stop_after and batch.row_ids[0].endswith("-0"):  # once: a second signal would be final
            os.kill(os.getpid(), signal.SIGTERM)
        return squared_error(engine.model)(batch)

    with Run(output, config, stage="toy") as run:
        fit(engine, ToyStream(), collate_by(3), loss_fn, training, run)
    return engine


def lines(output: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    text = (output / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in text.splitlines()]


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_stopped_and_resumed_equals_uninterrupted_bit_by_bit(tmp_path, stop_after):
    whole = train(tmp_path / "whole")
    with pytest.raises(SystemExit) as caught:
        train(tmp_path / "parts", stop_after=stop_after)
    assert caught.value.code == 143
    found = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert found is not None and found.name == f"step-{stop_after:06d}"
    parts = train(tmp_path / "parts")
    assert all(torch.equal(value, weights(parts)[name]) for name, value in weights(whole).items())
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "whole")] == [1, 2, 3, 4, 5]


def test_log_lines_after_the_checkpoint_are_forgotten_on_resume(tmp_path):
    whole = train(tmp_path / "whole")
    parts = tmp_path / "parts"
    train(parts)
    for name in ("step-000005",):  # as if the run had died in update 5, logged but not saved
        for file in (parts / "checkpoints" / name).iterdir():
            file.unlink()
        (parts / "checkpoints" / name).rmdir()
    again = train(parts)
    assert lines(parts) == lines(tmp_path / "whole")
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(whole).items())


def test_a_line_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    truncate_lines(path, 2)
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(tmp_path)
    again = train(tmp_path)
    assert again.step == 5
    assert all(torch.equal(value, weights(again)[name]) for name, value in weights(first).items())


def test_resume_with_another_learning_rate_is_refused_and_with_another_memory_setting_is_not(tmp_path):
    with pytest.raises(SystemExit):
        train(tmp_path, stop_after=3)
    with pytest.raises(UserError, match=r"config\.optim\.learning_rate: 0\.01 -> 0\.02"):
        train(tmp_path, learning_rate=2e-2)
    train(tmp_path, keep_checkpoints=1)


def test_resume_off_does_not_overwrite_an_earlier_run(tmp_path):
    with pytest.raises(SystemExit):
        train(tmp_path, stop_after=3)
    with pytest.raises(UserError, match="resume is off"):
        train(tmp_path, resume=False)


def test_nothing_that_is_not_finite_reaches_the_disk(tmp_path):
    training = TrainingConfig(max_steps=5, save_every_steps=1)
    engine = toy_engine(training=training)

    def loss_fn(batch) -> LossSum:
        good = squared_error(engine.model)(batch)
        return LossSum(good.total * (float("nan") if engine.step + 1 == 3 else 1.0), good.metrics)

    with Run(tmp_path, {}, stage="toy") as run, pytest.raises(NonFiniteError, match="update 3"):
        fit(engine, ToyStream(), collate_by(4), loss_fn, training, run)
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and found.name == "step-000002"
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_evaluation_is_logged_where_due_and_draws_do_not_disturb_training(tmp_path):
    plain = train(tmp_path / "plain")
    training = TrainingConfig(max_steps=5, evaluate_every_steps=2)
    engine = toy_engine(dropout=0.1, training=training)

    def evaluate() -> dict[str, float]:
        return {"held_out_loss": float(torch.rand(()))}

    with Run(tmp_path / "checked", {}, stage="toy") as run:
        fit(engine, ToyStream(), collate_by(3), squared_error(engine.model), training, run, evaluate=evaluate)
    assert [line["step"] for line in lines(tmp_path / "checked") if "held_out_loss" in line] == [2, 4, 5]
    assert all(torch.equal(value, weights(engine)[name]) for name, value in weights(plain).items())


def test_the_directory_is_as_documented(tmp_path):
    data = tmp_path / "rows.jsonl"
    data.write_text('{"text": "a"}\n')
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "config.json").write_text("{}")
    config = {"data": {"train": str(data)}, "policy": str(parent), "training": {"trackers": []}}
    output = tmp_path / "run"
    with Run(output, config, stage="sft", parents=[str(parent)]) as run:
        for step in run.steps(0, 1):
            run.log(step + 1, {"loss": 1.0, "tokens": 40.0, "odd": float("inf")})
            run.sample(step + 1, prompt="p", response="r")
        run.note("2 rows dropped: empty text")
    assert yaml.safe_load((output / "config.yaml").read_text()) == config
    (line,) = [json.loads(text) for text in (output / "metrics.jsonl").read_text().splitlines()]
    assert line["step"] == 1 and line["tokens_per_second"] > 0 and line["odd"] is None
    assert json.loads((output / "samples.jsonl").read_text()) == {"step": 1, "prompt": "p", "response": "r"}
    assert list((output / "tensorboard").iterdir())
    lineage = json.loads((output / "lineage.json").read_text())
    assert lineage["stage"] == "sft" and lineage["notes"] == ["2 rows dropped: empty text"]
    assert set(lineage["data"]) == {"data.train"} and lineage["parents"][str(parent)]
    assert len(lineage["code"]["source"]) == 64


def test_a_directory_in_use_is_refused_with_its_holder(tmp_path):
    with Run(tmp_path, {}, stage="toy"):
        held = subprocess.run(
            [sys.executable, "-c", f"from alignment.training import Run; Run({str(tmp_path)!r}, {{}}, stage='toy')"],
            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert held.returncode != 0 and f"process {os.getpid()} on" in held.stderr
    with Run(tmp_path, {}, stage="toy"):
        pass


def test_an_unknown_tracker_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match="unknown tracker 'wandbb'"):
        Run(tmp_path, {"training": {"trackers": ["wandbb"]}}, stage="toy")


ENDLESS = """
import sys, time
from tests.training.toys import *
from alignment.training import *
training = TrainingConfig(max_steps=10**6)
engine = toy_engine(training=training, steps=10**6)
def loss_fn(batch):
    time.sleep(0.02 if engine.step < 3 else float(sys.argv[2]))
    return squared_error(engine.model)(batch)
with Run(sys.argv[1], {}, stage="toy") as run:
    fit(engine, ToyStream(), collate_by(8), loss_fn, training, run)
"""


@pytest.mark.parametrize(
    ("kind", "seconds", "twice", "code"),
    [(signal.SIGTERM, 0.02, False, 143), (signal.SIGINT, 0.02, False, 130), (signal.SIGTERM, 60.0, True, -15)],
)
def test_a_signal_ends_the_run_with_a_checkpoint_and_a_second_one_at_once(tmp_path, kind, seconds, twice, code):
    child = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, str(tmp_path), str(seconds)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = tmp_path / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (log.exists() and log.read_text().count("\n") >= 3):
        assert time.monotonic() < deadline and child.poll() is None
        time.sleep(0.05)
    time.sleep(0.3)
    child.send_signal(kind)
    if twice:
        time.sleep(0.5)
        child.send_signal(kind)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == code
    found = latest_checkpoint(tmp_path / "checkpoints")
    if twice:
        assert found is None
    else:
        assert found is not None and int(found.name[5:]) == json.loads(log.read_text().splitlines()[-1])["step"]
        assert "a checkpoint is saved" in errors

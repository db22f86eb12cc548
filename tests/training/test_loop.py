"""The loop: resumes exactly, stops when asked, stops before damage; the run's directory is as promised."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from alignment.errors import UserError
from alignment.files import hash_of, sha256
from alignment.training import Engine, LossSum, Run, TrainingConfig, fit, latest_checkpoint, loop
from alignment.training.run.directory import truncate_lines
from tests.training.toys import ToyStream, collate_by, equal, lines, squared_error, toy_engine

ROOT = Path(__file__).parents[2]


def train(
    output: Path, *, stop_after: int = 0, learning_rate: float = 1e-2, dropout: float = 0.1, **settings
) -> Engine:
    """Five updates with dropout, a checkpoint every second one, optionally stopped by SIGTERM."""
    training = TrainingConfig(**{"max_steps": 5, "save_every_steps": 2, **settings})
    engine = toy_engine(dropout=dropout, training=training, learning_rate=learning_rate)
    config = {"output": str(output), "optim": {"learning_rate": learning_rate}, "training": {"trackers": []}}

    def loss_fn(batch) -> LossSum:
        if engine.step + 1 == stop_after and batch.row_ids[0].endswith("-0"):  # once: a second signal would be final
            os.kill(os.getpid(), signal.SIGTERM)
        return squared_error(engine.model)(batch)

    with Run(output, config, stage="toy") as run:
        fit(engine, ToyStream(), collate_by(3), loss_fn, training=training, run=run)
    return engine


@pytest.mark.parametrize("stop_after", [1, 3, 4])
def test_stopped_and_resumed_equals_uninterrupted_bit_by_bit(tmp_path, stop_after):
    whole = train(tmp_path / "whole")
    with pytest.raises(SystemExit) as caught:
        train(tmp_path / "parts", stop_after=stop_after)
    assert caught.value.code == 143
    found = latest_checkpoint(tmp_path / "parts" / "checkpoints")
    assert found is not None and found.name == f"step-{stop_after:06d}"
    parts = train(tmp_path / "parts")
    assert equal(parts, whole)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    assert [line["step"] for line in lines(tmp_path / "whole")] == [1, 2, 3, 4, 5]


def test_resume_refuses_another_learning_rate_but_not_memory_settings(tmp_path):
    with pytest.raises(SystemExit):
        train(tmp_path, stop_after=3)
    with pytest.raises(UserError, match=r"config\.optim\.learning_rate: 0\.01 -> 0\.02"):
        train(tmp_path, learning_rate=2e-2)
    train(tmp_path, keep_last_checkpoints=1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_another_number_of_processes_goes_on_but_not_with_dropout(tmp_path, dropout):
    whole = train(tmp_path / "whole", dropout=dropout)
    with pytest.raises(SystemExit):
        train(tmp_path / "parts", dropout=dropout, stop_after=3)
    path = tmp_path / "parts" / "checkpoints" / "step-000003"
    state = json.loads((path / "state.json").read_text())
    state["environment"]["world_size"] = 2
    (path / "state.json").write_text(json.dumps(state))
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["state.json"] = sha256(path / "state.json")
    manifest.pop("sum")
    (path / "manifest.json").write_text(json.dumps({**manifest, "sum": hash_of(manifest)}))
    if dropout:
        with pytest.raises(UserError, match=r"saved by 2 processes, and now there are 1.*dropout.*resume with 2"):
            train(tmp_path / "parts", dropout=dropout)
    else:
        parts = train(tmp_path / "parts", dropout=dropout)
        assert equal(parts, whole)
        assert not list(path.parent.glob("damaged-*"))  # it went on from the changed one


def test_a_resume_under_other_code_is_noted_and_one_under_the_same_is_not(tmp_path, monkeypatch, capsys):
    for step in (2, 4):
        with pytest.raises(SystemExit):
            train(tmp_path, stop_after=step)
    assert "another version" not in capsys.readouterr().err
    monkeypatch.setattr("alignment.training.run.lineage.code_hash", lambda: "0" * 64)
    train(tmp_path)
    assert "warning" in (err := capsys.readouterr().err) and "another version of this library" in err
    assert "another version" in (tmp_path / "lineage.json").read_text()


@pytest.mark.parametrize("name", ["checkpoints", "model", "tensorboard"])
def test_a_file_in_the_place_of_a_directory_is_refused_at_the_start(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"{name}: is a file"):
        train(tmp_path)


def test_an_output_that_is_a_file_is_said_to_be_one(tmp_path):
    (tmp_path / "d.jsonl").write_text("{}")
    with pytest.raises(UserError, match=r"d\.jsonl: .*is a file"):
        train(tmp_path / "d.jsonl")


def train_by_clock(
    output: Path,
    monkeypatch,
    *,
    seconds: float,
    steps: int,
    save_seconds: float = 0.0,
    fails_after: int = 0,
    **settings,
) -> tuple[Engine, list[int]]:
    """A run with dropout, whose updates and saves take so long by its clock; the steps after which it saved."""
    training = TrainingConfig(max_steps=steps, **settings)
    engine = toy_engine(dropout=0.1, steps=steps, training=training)
    saved: list[int] = []
    save = loop.save_checkpoint

    def save_slowly(root, step, *arguments, **options):
        saved.append(step)
        return save(root, step, *arguments, **options)

    def loss_fn(batch) -> LossSum:
        if fails_after and engine.step == fails_after:
            raise RuntimeError("killed")
        return squared_error(engine.model)(batch)

    with monkeypatch.context() as patch, Run(output, {}, stage="toy") as run:
        patch.setattr(loop, "save_checkpoint", save_slowly)
        patch.setattr(time, "monotonic", lambda: seconds * engine.step + save_seconds * len(saved))
        fit(engine, ToyStream(), collate_by(3), loss_fn, training=training, run=run)
    return engine, saved


@pytest.mark.parametrize(
    ("clock", "expected"),
    [
        ({"seconds": 10.0, "steps": 20}, [*range(2, 21, 2)]),  # each tenth
        ({"seconds": 1.0, "steps": 24}, [12, 24]),  # each tenth (3 updates), at least 10 s apart
        ({"seconds": 3.0, "steps": 10}, [4, 8, 10]),  # the end counts from the start
        ({"seconds": 0.4, "steps": 20}, []),  # over in 8 s
        ({"seconds": 400.0, "steps": 80}, [*range(2, 81, 2)]),  # every ten minutes: 800 s
        # 50 times the 8 s of a save are 400 s until the next one
        ({"seconds": 10.0, "steps": 100, "save_seconds": 8.0}, [10, 50, 90, 100]),
    ],
)
def test_a_run_saves_by_itself_as_its_clock_says_and_ends_as_without_saves(tmp_path, monkeypatch, clock, expected):
    engine, saved = train_by_clock(tmp_path / "saved", monkeypatch, **clock)
    assert saved == expected
    plain, _ = train_by_clock(tmp_path / "plain", monkeypatch, **clock, save_every_steps=0)
    assert equal(plain, engine)
    left = sorted(path.name for path in (tmp_path / "saved" / "checkpoints").glob("*"))
    assert left == [f"step-{step:06d}" for step in expected[-1:]]  # that of the end alone


def test_a_run_that_died_goes_on_from_what_it_saved_by_itself(tmp_path, monkeypatch):
    clock = {"seconds": 10.0, "steps": 20}
    whole, _ = train_by_clock(tmp_path / "whole", monkeypatch, **clock)
    with pytest.raises(RuntimeError, match="killed"):
        train_by_clock(tmp_path / "parts", monkeypatch, **clock, fails_after=15)
    assert sorted(os.listdir(tmp_path / "parts" / "checkpoints")) == ["step-000012", "step-000014"]
    parts, saved = train_by_clock(tmp_path / "parts", monkeypatch, **clock)
    assert saved == [16, 18, 20]
    assert equal(parts, whole)
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")  # those after the checkpoint were forgotten


def test_a_full_disk_does_not_end_a_run_without_checkpoints(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    engine, saved = train_by_clock(tmp_path / "auto", monkeypatch, seconds=10.0, steps=4)
    assert (engine.step, saved) == (4, []) and "1000 are free" in capsys.readouterr().err
    with pytest.raises(UserError, match="1000 are free"):
        train_by_clock(tmp_path / "asked", monkeypatch, seconds=10.0, steps=4, save_every_steps=2)


def test_a_start_from_nothing_says_how_many_updates_are_lost(tmp_path, monkeypatch, capsys):
    with pytest.raises(RuntimeError, match="killed"):
        train_by_clock(tmp_path, monkeypatch, seconds=0.1, steps=5, fails_after=3)
    capsys.readouterr()
    train_by_clock(tmp_path, monkeypatch, seconds=0.1, steps=5)
    assert "3 updates of an earlier start are lost" in capsys.readouterr().err
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5]


def test_evaluation_is_logged_where_due_and_draws_do_not_disturb_training(tmp_path):
    plain = train(tmp_path / "plain")
    training = TrainingConfig(max_steps=5, evaluate_every_steps=2)
    engine = toy_engine(dropout=0.1, training=training)

    def evaluate() -> dict[str, float]:
        return {"held_out_loss": float(torch.rand(()))}

    loss_fn = squared_error(engine.model)
    with Run(tmp_path / "checked", {}, stage="toy") as run:
        fit(engine, ToyStream(), collate_by(3), loss_fn, training=training, run=run, evaluate=evaluate)
    assert [line["step"] for line in lines(tmp_path / "checked") if "held_out_loss" in line] == [2, 4, 5]
    assert equal(engine, plain)


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
            run.log_samples(step + 1, [{"prompt": "p", "response": "r"}])
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
    fit(engine, ToyStream(), collate_by(8), loss_fn, training=training, run=run)
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


class Interrupting:
    """A model that "is written" to a file, and a SIGTERM that comes while it is."""

    def __init__(self, output: Path, interrupt: bool = True):
        self.path, self.interrupt, self.calls = output / "model", interrupt, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.interrupt and self.calls == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        self.path.mkdir(exist_ok=True)
        (self.path / "weights").write_text("whole")


@pytest.fixture
def as_command():
    """SIGTERM ends the process through every `finally`, as under the command line."""

    def terminate(number, frame):
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, terminate)
    yield
    signal.signal(signal.SIGTERM, before)


def fitted(output: Path, save, evaluate=None, steps: int = 3) -> Engine:
    """Three updates without checkpoints of their own; `save` writes the model."""
    training = TrainingConfig(max_steps=steps)
    with Run(output, {}, stage="toy") as run:
        engine = toy_engine(training=training, steps=steps)
        loss_fn, more = squared_error(engine.model), {"evaluate": evaluate, "save": save}
        fit(engine, ToyStream(), collate_by(4), loss_fn, training=training, run=run, **more)
    return engine


def test_a_signal_during_writing_waits_and_a_checkpoint_is_saved(tmp_path, as_command, capsys):
    save = Interrupting(tmp_path)
    with pytest.raises(SystemExit) as caught:
        fitted(tmp_path, save)
    assert caught.value.code == 143 and "a checkpoint is saved" in capsys.readouterr().err
    assert (save.path / "weights").read_text() == "whole"
    assert latest_checkpoint(tmp_path / "checkpoints") == tmp_path / "checkpoints" / "step-000003"
    again = fitted(tmp_path, save)
    assert again.step == 3 and save.calls == 2, "nothing is trained again, and the model is there"


def test_a_signal_after_the_last_update_is_handed_on(tmp_path, as_command, capsys):
    done = []
    with pytest.raises(SystemExit) as caught, Run(tmp_path, {}, stage="toy") as run:
        for step in run.steps(0, 1):
            run.log(step + 1, {"loss": 1.0})
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("written")
    assert caught.value.code == 143 and done == ["written"]
    assert "its model is written" in capsys.readouterr().err


def test_an_error_in_the_last_evaluation_does_not_lose_the_model(tmp_path):
    def evaluate() -> dict[str, float]:
        raise torch.OutOfMemoryError("out of memory")

    save = Interrupting(tmp_path, interrupt=False)
    with pytest.raises(torch.OutOfMemoryError):
        fitted(tmp_path, save, evaluate)
    assert (save.path / "weights").read_text() == "whole"


@pytest.mark.parametrize("kept", ["checkpoints", "model", "metrics.jsonl"])
def test_what_a_run_with_other_settings_has_made_is_not_replaced(tmp_path, kept):
    train(tmp_path, save_every_steps=2 if kept == "checkpoints" else 0)
    if kept == "model":
        (tmp_path / "metrics.jsonl").unlink()
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "weights").write_text("precious")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and file.name != ".lock"}
    with pytest.raises(UserError) as caught:
        train(tmp_path, learning_rate=2e-2)
    assert f"{tmp_path}: holds" in str(caught.value) and kept in str(caught.value)
    assert "config.optim.learning_rate: 0.01 -> 0.02" in str(caught.value)
    assert "Choose another output directory, or delete this one" in str(caught.value)
    assert before == {file: file.read_bytes() for file in before}
    train(tmp_path)


def test_other_data_and_another_stage_are_refused_before_a_model_is_loaded(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}\n")
    config = {"data": {"train": str(rows)}}
    with Run(tmp_path / "run", config, stage="sft") as run:
        run.log(1, {"loss": 1.0})
    with pytest.raises(UserError, match="stage: 'sft' -> 'dpo'"):
        Run(tmp_path / "run", config, stage="dpo")
    rows.write_text("{} \n")
    with pytest.raises(UserError, match=r"data\.data\.train: "):
        Run(tmp_path / "run", config, stage="sft")


def test_a_model_that_no_run_has_written_is_not_replaced(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="holds model that no run"):
        Run(tmp_path, {}, stage="toy")


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl"])
@pytest.mark.parametrize("line", [b"loss 3", b"[1, 2]", b'{"loss": 1}', b'{"step": "2"}', b'{"step": "\xff"}'])
def test_a_foreign_log_is_named_with_its_line_before_a_model_is_loaded(tmp_path, name, line):
    train(tmp_path)
    good = b'{"step": 1, "text": "a\\u2028b"}\n'
    (tmp_path / name).write_bytes(good + line + b"\n" + good)
    config = {"output": str(tmp_path), "optim": {"learning_rate": 1e-2}, "training": {"trackers": []}}
    with pytest.raises(UserError, match=rf"{name}:2: not a line of a run's log.*; delete the line, or the file"):
        Run(tmp_path, config, stage="toy")


def test_texts_with_other_line_ends_and_a_letter_cut_in_half_are_no_damage(tmp_path):
    path = tmp_path / "samples.jsonl"
    with Run(tmp_path, {}, stage="toy") as run:
        run.log_samples(1, [{"response": "one\u2028two\x85three"}])
        run.log_samples(2, [{"response": "later"}])
    with open(path, "ab") as file:
        file.write('{"step": 2, "response": "ä'.encode()[:-1])
    truncate_lines(path, 1)
    assert [json.loads(line)["response"] for line in path.read_text().split("\n")[:-1]] == ["one\u2028two\x85three"]


def test_a_full_disk_under_the_metrics_is_named(tmp_path, monkeypatch):
    def fails(*arguments: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    with Run(tmp_path, {}, stage="toy") as run:
        monkeypatch.setattr("builtins.open", fails)
        with pytest.raises(UserError, match=r"metrics\.jsonl: the disk is full: \d+ bytes .* \d+ are free"):
            run.log(1, {"loss": 1.0})
        monkeypatch.undo()


def test_a_hub_model_is_known_by_its_commit(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "0123456789" * 4
    model = tmp_path / "models--org--name"
    (model / "snapshots" / commit).mkdir(parents=True)
    (model / "snapshots" / commit / "config.json").write_text("{}")
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    with Run(tmp_path / "run", {}, stage="toy", parents=["org/name", "org/other"]) as run:
        assert run.identity["parents"] == {"org/name": commit, "org/other": None}

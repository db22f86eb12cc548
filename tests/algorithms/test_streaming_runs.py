"""Runs over streamed rows: every stage that can, stopped and resumed to the bit, and what is refused before a model is read."""

import json
import shutil
from pathlib import Path

import pytest

from alignment.algorithms.sft import SamplesConfig
from alignment.data.config import DataConfig, SourceConfig
from alignment.errors import UserError
from alignment.training import TrainingConfig
from tests.stopping import assert_goes_on

ROWS = {"sft": "demonstrations", "reward": "comparisons", "dpo": "comparisons", "pretrain": "pretrain"}
ROW_COUNTS = {"sft": 24, "reward": 24, "dpo": 24, "pretrain": 40}


@pytest.fixture
def streamed(checkpoints, world):
    """`streamed(kind, training={...}, **data settings)`: changes of a stage's config, for 7 updates of 8 rows."""

    def changes(kind, training=(), **data):
        data = {"train": world[ROWS[kind]], "max_length": 256, "streaming": True, "shuffle_buffer": 10, **data}
        return {
            "data": DataConfig(**data),
            "training": TrainingConfig(**{"batch_size": 8, "max_steps": 7, "save_every_steps": 1, **dict(training)}),
        }

    return changes


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("stop", [2, 5])
def test_stopped_and_resumed_is_the_same_to_the_bit(kind, stop, streamed, make_stage, checkpoints, tmp_path):
    """24 or 40 rows in windows of 10: the run crosses windows and ends of epochs, and stops inside a window."""
    assert_goes_on(
        lambda name: make_stage(kind, checkpoints["llama"], tmp_path / name, **streamed(kind)), stop, tmp_path
    )
    state = json.loads((tmp_path / "whole" / "checkpoints" / "step-000007" / "state.json").read_text())
    assert state["state"]["stream"]["step"] == 7
    notes = " ".join(json.loads((tmp_path / "parts" / "lineage.json").read_text())["notes"])
    assert ("epoch 1 has ended" in notes) is (8 * stop <= ROW_COUNTS[kind])  # what came before was not read again


def test_nothing_of_the_training_rows_is_kept_on_disk(streamed, ran, checkpoints, tmp_path, monkeypatch, world):
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    changes = streamed("sft", evaluation=world["demonstrations"])
    ran("sft", checkpoints["llama"], tmp_path / "run", **changes, samples=SamplesConfig(prompts=2))
    assert len(list((tmp_path / "cache").rglob("manifest.json"))) == 1  # the held-out rows
    notes = " ".join(json.loads((tmp_path / "run" / "lineage.json").read_text())["notes"])
    assert "streamed from 1 files" in notes and "a bad row may be found late" in notes and "epoch 1 has ended" in notes


def test_sources_by_weights_have_their_metrics(streamed, ran, checkpoints, tmp_path, world, read_metrics):
    shutil.copy(world["demonstrations"], tmp_path / "other.jsonl")
    train = [SourceConfig(world["demonstrations"], "one", 3.0), SourceConfig(str(tmp_path / "other.jsonl"), "two", 1.0)]
    changes = streamed("sft", train=train, mixing="weights")
    ran("sft", checkpoints["llama"], tmp_path / "run", **changes)
    lines = read_metrics(tmp_path / "run")
    assert {"loss/one", "loss/two"} <= {key for line in lines for key in line}


@pytest.fixture
def spoiled(streamed, make_stage, checkpoints, tmp_path, world, monkeypatch):
    """`spoiled(line)`: row 17 of the demonstrations is this one; a run that reads it with its second window of 12 rows."""
    monkeypatch.setattr("alignment.data.streaming.FIRST_ROWS", 8)

    def build(line):
        lines = Path(world["demonstrations"]).read_text().splitlines()
        (tmp_path / "rows.jsonl").write_text("\n".join([*lines[:16], line or lines[16], *lines[17:]]))
        changes = streamed("sft", train=str(tmp_path / "rows.jsonl"), max_length=2000, shuffle_buffer=12)
        return make_stage("sft", checkpoints["llama"], tmp_path / "run", **changes)

    return build


def test_a_bad_row_ends_the_run_with_its_line(spoiled, tmp_path, read_metrics):
    run, config = spoiled('{"prompt": "a"')
    with pytest.raises(UserError, match=r"rows\.jsonl:17:15: not JSON"):
        run(config)
    assert len(read_metrics(tmp_path / "run")) == 1
    run, config = spoiled("")
    with pytest.raises(UserError, match=r"data\.train"):  # other files are another run
        run(config)


def test_rows_beyond_the_positions_of_the_model_end_the_run(spoiled, tmp_path, read_metrics):
    run, config = spoiled(json.dumps({"prompt": "a " * 2000, "completion": "b"}))
    with pytest.raises(UserError, match=r"1 of 12 documents do not fit .*rows\.jsonl:17 \(2000 tokens"):
        run(config)
    assert len(read_metrics(tmp_path / "run")) == 1


def test_epochs_give_a_streamed_run_no_end(streamed, make_stage, checkpoints, tmp_path):
    run, config = make_stage("sft", str(tmp_path / "no model"), tmp_path, **streamed("sft", {"max_steps": None}))
    with pytest.raises(UserError, match=r"training\.max_steps is missing"):
        run(config)


def test_ppo_refuses_streamed_prompts(stage, make_stage, tmp_path, world):
    data = DataConfig(world["prompts"], max_length=256, streaming=True)
    run, config = make_stage(
        "ppo", str(stage("sft") / "model"), tmp_path, data=data, reward_model=str(stage("reward") / "model")
    )
    with pytest.raises(UserError, match=r"data\.streaming: sft, reward, dpo and pretrain"):
        run(config)

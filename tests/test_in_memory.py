"""Stages on rows in memory: the run of the command on the same rows, its model and metrics, and what is refused."""

import json
from pathlib import Path

import datasets
import pytest
import torch

import alignment
from alignment.errors import UserError

TINY = {
    "training": {"max_steps": 2, "batch_size": 4},
    "optim": {"learning_rate": 1e-3},
    "data": {"max_length": 256},
}


@pytest.fixture(scope="module")
def rows(world):
    return {
        kind: [json.loads(line) for line in Path(world[kind]).read_text().splitlines()]
        for kind in ("demonstrations", "comparisons", "prompts")
    }


def test_sft_gives_the_run_of_the_command(tmp_path, rows, world, checkpoints, make_stage, read_metrics):
    result = alignment.sft(policy=checkpoints["llama"], rows=rows["demonstrations"], output=tmp_path / "run", **TINY)
    assert result.path == tmp_path / "run"
    assert result.metrics == read_metrics(tmp_path / "run") and len(result.metrics) == 2
    from alignment.algorithms import sft
    from alignment.data.config import DataConfig
    from alignment.training import OptimConfig, TrainingConfig

    sft.run(
        sft.SFTConfig(
            policy=checkpoints["llama"], data=DataConfig(train=world["demonstrations"], max_length=256),
            output=str(tmp_path / "command"), training=TrainingConfig(max_steps=2, batch_size=4),
            optim=OptimConfig(learning_rate=1e-3),
        )
    )  # fmt: skip
    same = alignment.load_model(str(tmp_path / "command/model")).state_dict()
    trained = result.model.state_dict()
    assert all(torch.equal(trained[name], same[name]) for name in same)


def test_reward_dpo_and_ppo_follow_each_other(tmp_path, rows, checkpoints):
    policy = checkpoints["llama"]
    judge = alignment.reward(
        policy=policy, rows=datasets.Dataset.from_list(rows["comparisons"]), output=tmp_path / "reward", **TINY
    )
    assert len(judge.model.score(["a guest", "another"])) == 2
    tuned = alignment.dpo(
        policy=policy, rows=iter(rows["comparisons"]), evaluation_rows=rows["comparisons"][:4], output=tmp_path / "dpo",
        loss="ipo", **TINY | {"training": TINY["training"] | {"evaluate_every_steps": 1}},
    )  # fmt: skip
    assert "held_out_loss" in tuned.metrics[-1]
    learner = alignment.ppo(
        policy=policy, rows=rows["prompts"], output=tmp_path / "ppo", reward_model=str(judge.path / "model"),
        max_new_tokens=8, pretrain_coef=0.0, **TINY | {"training": {"max_steps": 1, "batch_size": 4}},
    )  # fmt: skip
    assert "score" in learner.metrics[-1]


def test_other_rows_are_another_run(tmp_path, rows, checkpoints):
    call = {"policy": checkpoints["llama"], "output": str(tmp_path / "run"), **TINY}
    first = alignment.sft(rows=rows["demonstrations"][:8], **call)
    again = alignment.sft(rows=rows["demonstrations"][:8], **call)
    assert [line["loss"] for line in again.metrics] == [line["loss"] for line in first.metrics]
    with pytest.raises(UserError, match="train"):
        alignment.sft(rows=rows["demonstrations"][8:16], **call)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        ([], {}, "train: there are no rows"),
        ("rows.jsonl", {}, "got str; rows are a list of mappings"),
        ([{"prompt": "a", "completion": "b"}, ["c"]], {}, "train: row 2: a row is a mapping of columns, got list"),
        ([{"prompt": "a", "completion": {1, 2}}], {}, "train: row 1: .* set is not JSON serializable"),
        ([{"prompt": "a", "completion": float("nan")}], {}, "train: row 1: "),
        ([{"prompt": "a"}], {"optim": {"learning_rat": 1.0}}, r"sft\(\.\.\.\): optim.learning_rat"),
        ([{"prompt": "a"}], {"data": {"train": "x.jsonl"}}, "data.train: rows are given too"),
        ([{"prompt": "a"}], {"data": "x.jsonl"}, "data: give its settings as a mapping"),
    ],
)
def test_wrong_calls_end_in_one_message(tmp_path, rows, changes, message):
    with pytest.raises(UserError, match=message):
        alignment.sft(policy=str(tmp_path), rows=rows, output=tmp_path / "run", **changes)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_a_failed_write_leaves_no_rows(tmp_path):
    from alignment.pipeline.in_memory import write_lines

    def rows():
        yield {"text": "one"}
        raise RuntimeError("the source broke")

    with pytest.raises(RuntimeError, match="the source broke"):
        write_lines(rows(), tmp_path, "train")
    assert list(tmp_path.iterdir()) == []

"""Reward models: what they learn, and the numbers on the way."""

import json
import random
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.reward import objective_loss_fn
from alignment.data.batches import Example, collate_pairs
from alignment.data.config import DataConfig
from alignment.losses.preference import bradley_terry_loss
from alignment.models.outputs import ValueOutput
from alignment.reward_model import load_reward_model
from alignment.training import OptimConfig, TrainingConfig
from tests.examples import pair_example

WORDS = ["the spa", "a tour", "the bus", "breakfast", "the pool", "parking"]


def planted(path, count, seed):
    """Pairs in which the friendly answer is always preferred; which words surround it says nothing."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        chosen, rejected = (
            f" {rng.choice(WORDS)} is {mood} and {rng.choice(WORDS)} too" for mood in ("lovely", "awful")
        )
        rows.append({"prompt": f"How is {rng.choice(WORDS)}?", "chosen": chosen, "rejected": rejected})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_planted_preference_is_learned(checkpoints, make_stage, tmp_path, read_metrics):
    data = DataConfig(
        train=planted(tmp_path / "train.jsonl", 64, 0), evaluation=planted(tmp_path / "held_out.jsonl", 32, 1)
    )
    training, optim = TrainingConfig(batch_size=16, epochs=6), OptimConfig(learning_rate=3e-3)
    run, config = make_stage(
        "reward", checkpoints["llama"], tmp_path / "run", data=data, training=training, optim=optim
    )
    model = load_reward_model(str(run(config)))
    last = read_metrics(tmp_path / "run")[-1]
    assert last["held_out_accuracy"] > 0.9 and last["held_out_loss"] < 0.5
    friendly, rude = model.score(
        [
            ("How is the bus?", " the bus is lovely and a tour too"),
            ("How is the bus?", " the bus is awful and a tour too"),
        ]
    )
    assert friendly > rude


def test_centering_costs_the_square_of_the_sum():
    """Scores 1 and 3, read at the last tokens: 0.01 * 4^2."""
    side = Example.single([1, 5, 2], [False, True, True], "r")
    [batch] = collate_pairs([pair_example(side, side, None, "r")], 100)
    values = torch.full((len(batch.ragged.tokens),), 1e9)
    values[batch.ragged.last] = torch.tensor([1.0, 3.0])
    model = lambda batch, tokens: ValueOutput(values=values[tokens])  # noqa: E731
    plain, centered = (objective_loss_fn(model, "bradley_terry", center_coef=coef)(batch).total for coef in (0.0, 0.01))
    assert_close(centered - plain, torch.tensor(0.16))


def test_margins_of_the_rows_reach_the_loss(ran, checkpoints, tmp_path, read_metrics):
    losses = []
    for margin in (None, 5.0):
        rows = [json.loads(line) for line in Path(planted(tmp_path / "rows.jsonl", 8, 0)).read_text().splitlines()]
        path = tmp_path / f"{margin}.jsonl"
        path.write_text("".join(json.dumps(row | ({"margin": margin} if margin else {})) + "\n" for row in rows))
        output = tmp_path / f"run{margin}"
        ran("reward", checkpoints["llama"], output, data=DataConfig(train=str(path)))
        losses.append(read_metrics(output)[0]["loss"])
    # softplus(5 - m) for small score differences m
    assert losses[1] == pytest.approx(
        bradley_terry_loss(torch.zeros(1), torch.zeros(1), torch.tensor([5.0])).item(), abs=1.0
    )
    assert losses[1] > losses[0] + 3

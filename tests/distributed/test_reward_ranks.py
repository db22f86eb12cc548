"""Reward models from rankings, on two processes against one."""

import json
import random

import pytest
from safetensors.torch import load_file

from tests.conftest import read_lines, write_lines
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.distributed_slow


def rankings(path):
    """7 prompts, an unequal share for each of two ranks, with 2 to 5 responses, some of them tied."""
    rng, rows = random.Random(0), []
    for number in range(7):
        size = 2 + number % 4
        responses = [f" answer {rng.randrange(10**6)}" * rng.randint(1, 3) for _ in range(size)]
        rows.append(
            {
                "prompt": f"Question {number}?",
                "responses": responses,
                "ranks": [0, *(rng.randint(1, 3) for _ in responses[1:])],
            }
        )
    write_lines(path, rows)
    return path


@pytest.mark.parametrize("settings", [["loss=ranking"], ["loss=rao_kupper", "ensemble={members: 3, bootstrap: true}"]])
def test_rankings_on_two_processes_give_the_weights_of_one(tmp_path, checkpoints, settings):
    rows = rankings(tmp_path / "rows.jsonl")
    models, metrics = [], []
    for count in (1, 2):
        output = tmp_path / str(count)
        run_ranks(
            count, "alignment", "reward", "reward/tiny", f"policy={checkpoints['llama']}", f"data.train={rows}",
            "data.evaluation=null", "training.batch_size=7", "training.max_steps=4", "training.micro_batch_tokens=96",
            f"output={output}", *settings,
        )  # fmt: skip
        models.append(load_file(output / "model" / "model.safetensors"))
        metrics.append(read_lines(output / "metrics.jsonl"))
        assert json.loads((output / "model" / "canaries.json").read_text())["canaries"]
    assert models[0].keys() == models[1].keys()
    assert max(float((models[1][name] - one).norm() / one.norm()) for name, one in models[0].items()) <= 1e-5
    for one, two in zip(*metrics, strict=True):
        for key in ("loss", "accuracy", "margin", "top1"):
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-5), key

"""The script that measures memory: its table by hand, and one small measurement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import memory  # noqa: E402


def test_weights_alive_count_each_tensor_once():
    import torch

    before = memory.weights_alive()
    one = torch.nn.Linear(100, 50, bias=False)
    other = torch.nn.Linear(100, 50, bias=False)
    assert memory.weights_alive() - before == 2 * 100 * 50 * 4
    other.weight = one.weight
    assert memory.weights_alive() - before == 100 * 50 * 4


@pytest.mark.slow
def test_a_measurement_of_a_tiny_model_gives_its_bytes():
    command = [sys.executable, "scripts/memory.py", "--small", "--only", "ppo lora", "ppo lora float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    low, whole = (row["weights"] for row in rows)
    parameters = 1000 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96)  # of the matrices, which the four networks hold once
    assert whole - low == pytest.approx(2 * parameters / 1e6, abs=0.1)

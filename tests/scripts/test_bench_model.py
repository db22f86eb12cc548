"""The speed script: what it counts, and that both sides run on the same batch. No speed is asserted."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench_model

TINY = bench_model.GPT2 | {"vocab_size": 31, "n_embd": 16, "n_layer": 2, "n_head": 2}


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setitem(bench_model.SIZES, "nano", TINY)
    monkeypatch.setattr(bench_model, "matrix_rate", lambda device, dtype: 1e9)


def test_half_of_the_rectangle_is_padding():
    lengths = bench_model.LENGTHS["half"](64)
    assert max(lengths) == bench_model.WIDTH and sum(lengths) / (64 * bench_model.WIDTH) == pytest.approx(0.5, abs=0.01)


def test_operations_are_matrices_and_the_causal_half_of_attention(tiny):
    import torch

    ours, theirs = bench_model.models("nano", "cpu", torch.float32)
    bench = bench_model.Bench(ours, theirs, [[1] * 5, [2] * 3], "cpu")
    layer = 4 * 16 * 16 + 2 * 16 * 64  # query, key, value, output; up, down
    matrices = 2 * layer + 31 * 16  # and the head
    attention = 2 * 2 * 16 * (5 * 6 // 2 + 3 * 4 // 2) * 2  # layers, two products, width, pairs in sight, multiply-add
    assert bench_model.operations(bench, [5, 3]) == 2 * matrices * 8 + attention


@pytest.mark.parametrize("work", ["forward", "train", "decode"])
def test_a_line_for_each_side(work, tiny, monkeypatch, capsys):
    arguments = f"bench_model.py --sizes nano --batches half --work {work} --rounds 1".split()
    monkeypatch.setattr(sys, "argv", arguments)
    bench_model.main()
    rate, ours, theirs = map(json.loads, capsys.readouterr().out.strip().splitlines())
    assert rate["bench"] == "matrix_rate"
    assert (ours["impl"], theirs["impl"]) == ("alignment", "transformers") and ours["ratio"] > 0
    assert ours["bench"] == theirs["bench"] == work and min(ours["seconds_median"], theirs["seconds_median"]) > 0

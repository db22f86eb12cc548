"""The benchmark of generation: what it compares and prints. No speed is asserted."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import bench_generation

from alignment.models.huggingface.checkpoint import load_language_model, save_model

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.fixture
def contestants(tmp_path, monkeypatch):
    monkeypatch.setitem(bench_generation.SIZES, "nano", bench_generation.SIZES["nano"] | TINY)
    workload = bench_generation.Workload([[5, 6, 7], [8] * 9, [9, 10], [11], [12, 13]], [3, 8, 1, 6, 4], 2, 0.0)
    save_model(bench_generation.random_model("nano"), tmp_path)
    exact = load_language_model(tmp_path).double().eval()
    return bench_generation.build_contestants(tmp_path, workload), workload, exact


def test_both_libraries_and_caches_write_the_same_tokens(contestants, capsys):
    generate, workload, exact = contestants
    measured = bench_generation.run_rounds(generate, workload, 2, exact)
    bench_generation.report({"bench": "generation ends", "size": "nano"}, workload, measured, 1e-9)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [line["impl"] for line in lines] == ["alignment", "transformers dynamic", "transformers static"]
    assert all(line["rounds"] == 2 and line["seconds_min"] <= line["seconds_median"] for line in lines)
    assert "ratio" not in lines[0] and all(line["ratio"] > 0 and line["near_ties"] == 0 for line in lines[1:])


def test_other_tokens_or_lengths_end_the_run(contestants):
    generate, workload, exact = contestants
    for change in (lambda row: [*row[:-1], (row[-1] + 1) % 640], lambda row: row[:-1]):
        broken = {**generate, "other": lambda change=change: [change(row) for row in generate["alignment"]()]}
        with pytest.raises(SystemExit, match="other: "):
            bench_generation.run_rounds(broken, workload, 1, exact)


def test_a_difference_between_equal_logits_is_a_near_tie(contestants):
    generate, workload, exact = contestants
    response = generate["alignment"]()[1]
    twin = (response[-1] + 1) % 640
    other = [*response[:-1], twin]
    assert not bench_generation.is_near_tie(exact, workload.prompts[1], response, other)
    with torch.no_grad():
        exact.head.weight[twin] = exact.head.weight[response[-1]]
    assert bench_generation.is_near_tie(exact, workload.prompts[1], response, other)

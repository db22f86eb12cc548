"""The script of `make test-gpu`, on a CPU: its figures, and those of the other parts where one fails."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(output: Path, *parts: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, results.json and table.md of the script with these parts."""
    command = [sys.executable, "scripts/gpu.py", "--size", "tiny", "--output", str(output), "--only", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    results = json.loads((output / "results.json").read_text(encoding="utf-8"))
    return done.returncode, results, (output / "table.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_figures_of_training_and_decoding_are_written(tmp_path):
    code, results, table = run(tmp_path / "gpu", "train", "decode")
    assert code == 0 and results["machine"].keys() == {"device", "cards", "torch", "cuda"}
    train, decode = results["parts"]["train"], results["parts"]["decode"]
    assert train["exit"] == decode["exit"] == 0
    assert train["tokens_per_second"] > 0 and 0 < train["mfu"] < 1 and decode["tokens_per_second"] > 0
    for part, values in results["parts"].items():
        assert f"| {part}: tokens per second | {values['tokens_per_second']} |" in table
    assert f"| train: mfu | {train['mfu']} |" in table and "FAILED" not in table


def test_a_part_that_fails_leaves_the_figures_of_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, results, table = run(tmp_path / "gpu", "graphs", "decode")
    assert code == 1 and results["parts"]["graphs"].keys() == {"exit", "seconds"}
    assert results["parts"]["graphs"]["exit"] == 1 and results["parts"]["decode"]["exit"] == 0
    assert "| graphs | FAILED, see graphs.log |" in table
    assert f"| decode: tokens per second | {results['parts']['decode']['tokens_per_second']} |" in table
    assert "cuda_graphs: there is no GPU; set it to false" in (tmp_path / "gpu" / "graphs.log").read_text(
        encoding="utf-8"
    )

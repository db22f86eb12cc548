"""The benchmark of the trainers: what it counts and prints. No speed is asserted."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState

from tests.conftest import read_lines

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import bench
from measuring import write_rows


def test_the_warm_up_is_left_out_of_the_speed(monkeypatch):
    times = iter([10.0, 11.0, 13.0, 15.0])
    monkeypatch.setattr(bench.time, "time", lambda: next(times))
    processor = iter([1.0, 2.0, 3.0, 4.0])
    monkeypatch.setattr(bench.time, "process_time", lambda: next(processor))
    clock = bench.Clock()
    for tokens in (1000, 1000, 300, 500):
        clock.note(tokens, rows=8)
    monkeypatch.setattr(bench.psutil, "Process", lambda: SimpleNamespace(create_time=lambda: 7.5))
    figures = clock.figures()
    assert figures["tokens_per_second"] == 800 / 4
    assert figures["tokens_per_cpu_second"] == 800 / 2
    assert figures["rows_per_second"] == 16 / 4
    assert figures["first_step_seconds"] == 2.5


@pytest.fixture
def accelerate_afresh():
    """A process in which accelerate has no precision yet, before and after."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("accelerate_afresh")
@pytest.mark.parametrize(("adapter", "precision"), [("none", "fp32"), ("lora", "bf16")])
def test_ours_and_trl_train_the_same_rows(tmp_path, adapter, precision):
    rows = [{"prompt": f"{i} and 1 is", "completion": f" {i + 1}"} for i in range(8)]
    file = Path(write_rows(tmp_path / "rows.jsonl", rows))
    checkpoint = bench.make_checkpoint(tmp_path / "model", file, "nano")
    settings = {
        "kind": "sft",
        "checkpoint": str(checkpoint),
        "rows": str(file),
        "steps": 3,
        "batch": 8,
        "adapter": adapter,
        "precision": precision,
        "own": {},
    }
    ours, theirs = (run(settings, tmp_path / run.__name__).updates for run in (bench.run_ours, bench.run_trl))
    assert [update[1:3] for update in ours] == [update[1:3] for update in theirs]
    assert [update[2] for update in theirs] == [8.0] * 3


@pytest.mark.real_data
@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_hh_rows_are_short_and_of_the_kind(kind, tmp_path):
    if not (Path(bench.os.environ.get("ALIGNMENT_DATA", "../shared/data")) / "hh_rlhf").is_dir():
        pytest.skip("no real data")
    columns = {"prompt", "completion"} if kind == "sft" else {"prompt", "chosen", "rejected"}
    rows = read_lines(bench.hh_rows(kind, tmp_path, 20))
    assert [set(row) for row in rows] == [columns] * 20

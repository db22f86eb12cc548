"""Ranks that differ or fail: all end within seconds, and the screen says which one and why.

The processes are started here without a launcher, which would end the others itself.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.processes import ROOT, free_port

SECONDS = 30  # from the end of the rank that fails to the end of the others


def run_two(
    directory: Path, fault: str, *arguments: str, **by_rank: tuple[str, str]
) -> tuple[list[int], list[str], float]:
    """Exit codes and standard errors by rank, and seconds between the first and the last end.

    Args:
        by_rank: variables of the environment, a value for each rank.
    """
    port, started = free_port(), []
    for rank in ("0", "1"):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.distributed.failing", str(directory), fault, *arguments]
        environment = {**os.environ, **ranks, **place, "PYTHONPATH": str(ROOT)}
        environment |= {name: values[int(rank)] for name, values in by_rank.items()}
        with open(directory / f"rank-{rank}.err", "w") as error:
            started.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=error, stderr=error))
    try:
        until = time.monotonic() + 120
        while all(process.poll() is None for process in started) and time.monotonic() < until:
            time.sleep(0.1)
        first = time.monotonic()
        for process in started:
            process.wait(timeout=SECONDS)
        seconds = time.monotonic() - first
    finally:
        for process in started:
            process.kill()
    return [p.returncode for p in started], [(directory / f"rank-{r}.err").read_text() for r in (0, 1)], seconds


@pytest.fixture
def settings(tmp_path, world, checkpoints) -> list[str]:
    """A small SFT run whose rows each rank reads from its own directory."""
    for rank in ("rank-0", "rank-1"):
        (tmp_path / rank).mkdir()
        shutil.copy(world["demonstrations"], tmp_path / rank / "rows.jsonl")
    return [
        "sft", "sft/tiny", f"policy={checkpoints['llama']}", "data.train=rows.jsonl", "data.evaluation=null",
        f"output={tmp_path}/run", "training.max_steps=3", "training.batch_size=4",
    ]  # fmt: skip


@pytest.mark.distributed
def test_a_file_missing_on_rank_1_is_told_by_rank_1_and_ends_rank_0(tmp_path, settings):
    (tmp_path / "rank-1" / "rows.jsonl").unlink()
    codes, errors, _ = run_two(tmp_path, "none", *settings)
    assert codes == [1, 2]
    assert "error: rank 1: " in errors[1] and "rows.jsonl" in errors[1]
    assert "error: rank 0 ends because rank 1 failed: UserError" in errors[0] and "rows.jsonl" in errors[0]
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.distributed_slow
def test_other_rows_on_rank_1_are_refused_before_the_first_update(tmp_path, settings):
    lines = (tmp_path / "rank-1" / "rows.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rank-1" / "rows.jsonl").write_text("".join([*lines[1:], lines[0]]))
    codes, errors, _ = run_two(tmp_path, "none", *settings)
    assert codes == [2, 2]
    told = [text for text in errors if "rank 1 has not what rank 0 has: data.train.hash of the rows" in text]
    assert len(told) == 1  # both know it, one says it
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.distributed_slow
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_rank_that_fails_in_training_ends_the_other_with_a_sentence(tmp_path, settings, fault):
    codes, errors, seconds = run_two(tmp_path, fault, *settings)
    assert codes == [1, 1 if fault == "raise" else -9]
    if fault == "raise":
        assert "error: rank 1: ValueError: no such luck" in errors[1]
        assert "error: rank 0 ends because rank 1 failed: ValueError: no such luck" in errors[0]
    else:
        assert "error: rank 0 ends: it lost the connection to another rank, which was killed" in errors[0]
    assert "Traceback" not in errors[0]
    assert seconds < SECONDS


@pytest.mark.distributed_slow
def test_another_model_on_rank_1_is_refused_before_anything_is_loaded(tmp_path, settings, checkpoints):
    for rank in ("rank-0", "rank-1"):
        shutil.copytree(checkpoints["llama"], tmp_path / rank / "start")
    settings = ["policy=start" if setting.startswith("policy=") else setting for setting in settings]
    path = tmp_path / "rank-1" / "start" / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1  # of the same size, and as readable
    path.write_bytes(bytes(content))
    codes, errors, _ = run_two(tmp_path, "none", *settings)
    assert codes == [2, 2]
    assert "rank 1 has not what rank 0 has: start.model.safetensors: " in "".join(errors)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()

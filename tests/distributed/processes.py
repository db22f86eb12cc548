"""Start one Python module in several processes, as a launcher would, and wait for them; compare what they trained."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

ROOT = Path(__file__).parents[2]
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
ZERO = {stage: {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)} for stage in (2, 3)}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
EVERY_KIND = ["ddp", "fsdp2", *(pytest.param(name, marks=needs_deepspeed) for name in ("zero2", "zero3"))]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run_ranks(count: int, module: str, *arguments: str, seconds: int = 240, **environment: str) -> str:
    """`python -m module arguments` in `count` processes; gives rank 0's output, all of it is the message on failure."""
    port, started = free_port(), []
    for rank in range(count):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        settings = {**os.environ, "PYTHONPATH": str(ROOT), **(ranks | where if count > 1 else where), **environment}
        command = [sys.executable, "-m", module, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started.append(subprocess.Popen(command, env=settings, cwd=ROOT, **pipes))
    try:
        outputs = [process.communicate(timeout=seconds)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert all(process.returncode == 0 for process in started), "\n".join(outputs)
    return outputs[0]


def is_running(pid: int) -> bool:
    """True for a process that has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def relative_error(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest |one - other| / |other| of any tensor; both must have the same names and shapes."""
    assert {name: value.shape for name, value in one.items()} == {name: value.shape for name, value in other.items()}
    norms = {name: max(float(value.double().norm()), 1e-12) for name, value in other.items()}
    return max(float((one[name].double() - other[name].double()).norm()) / norms[name] for name in one)

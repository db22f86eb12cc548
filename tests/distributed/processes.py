"""Start one Python module in several processes, as a launcher would, and wait for them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


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

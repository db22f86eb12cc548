"""How long the idle threads of PyTorch's OpenMP keep a processor busy before they sleep."""

import os
import time
from pathlib import Path

SPINS = 1000  # libgomp takes as many itself where it knows of more threads than processors; it sees no other process
VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
READINGS, SECONDS_BETWEEN = 3, 0.005


def shorten_waiting() -> None:
    """Let threads that wait for each other sleep after microseconds, on a machine that is busy; before torch's first import.

    By default they spin for milliseconds, which is faster on an idle machine: an update of a small model took 0.26 s on
    two cores, and 0.31 s with `SPINS`. Where other processes want the processors, the thread that all wait for is kept
    from running by those that spin: beside one such process it took 0.87 s, and 0.53 s with `SPINS`
    (scripts/bench_waiting.py). The count is fixed when torch starts, so what the machine does then decides. A
    GOMP_SPINCOUNT or OMP_WAIT_POLICY that is set stays as it is. No number that is computed depends on it.

    Source: libgomp's manual, GOMP_SPINCOUNT.
    """
    if not any(name in os.environ for name in VARIABLES) and is_busy():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def is_busy(load: Path = Path("/proc/loadavg")) -> bool:
    """Whether other processes want the processors that this one's threads will need; False where the system does not say.

    Short-lived ones do not count: each of a few readings must find too many.

    Args:
        load: Linux's file, whose fourth field begins with the number of threads that run or wait to, this one included.
    """
    processors = os.cpu_count() or 1
    threads = os.environ.get("OMP_NUM_THREADS", "")
    own = min(int(threads), processors) if threads.isdigit() else processors
    for number in range(READINGS):
        if number:
            time.sleep(SECONDS_BETWEEN)
        try:
            running = int(load.read_text().split()[3].partition("/")[0])
        except (OSError, IndexError, ValueError):
            return False
        if running - 1 + own <= processors:
            return False
    return True

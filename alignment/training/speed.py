"""Seconds of the phases of an iteration, and the most that a device computes: a table of GPUs, measured on a processor."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

PEAK_TFLOPS = {  # device -> dense bf16 with float32 sums, float32; from the vendors' data sheets
    "RTX 4090": (165.2, 82.6),
    "A100": (312.0, 19.5),
    "H100": (989.4, 66.9),
    "H200": (989.4, 66.9),
}
PEAK_BANDWIDTH = {"RTX 4090": 1.0e12, "A100": 1.6e12, "H100": 3.35e12, "H200": 4.8e12}  # bytes per second of memory


@dataclass
class PhaseClock:
    """Adds up the seconds of each phase; waits for a GPU at its ends, so that they count where they are spent."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure what runs while it is open."""
        began = self._now()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + self._now() - began

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


@cache
def peak_tflops(device: torch.device, precision: str) -> float | None:
    """10^12 operations per second of matrix products on a device in a run's precision; None: not known."""
    if device.type == "cpu":
        return measured_tflops(precision)
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_name(device)
    rates = next((rates for name, rates in PEAK_TFLOPS.items() if name in found), None)
    return None if rates is None else rates[0 if precision == "bf16" else 1]


def measured_tflops(precision: str, size: int = 1024) -> float:
    """The rate of a matrix product on this processor."""
    x = torch.ones(size, size, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    torch.mm(x, x)
    start = time.perf_counter()
    for _ in range(3):
        torch.mm(x, x)
    return 3 * 2 * size**3 / (time.perf_counter() - start) / 1e12

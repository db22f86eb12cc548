"""Seconds of an iteration's phases, and the most that a device computes: a table of GPUs, measured on a processor."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

import torch

from alignment.training.settings import Precision

PEAK_TFLOPS = {  # device -> dense, with float32 sums; from the vendors' data sheets
    "RTX 4090": {"bf16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "A100": {"bf16": 312.0, "tf32": 156.0, "fp32": 19.5},
    "H100": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
    "H200": {"bf16": 989.4, "tf32": 494.7, "fp32": 66.9},
}
PEAK_BANDWIDTH = {"RTX 4090": 1.0e12, "A100": 1.6e12, "H100": 3.35e12, "H200": 4.8e12}  # bytes per second of memory
# Compute capability -> operations of a multiprocessor in a cycle of the largest clock, bf16 and float32: the data
# sheets' rates over the multiprocessors and that clock. Of GeForce cards the tensor cores sum in float32 at half the
# rate.
PER_CYCLE = {
    (8, 0): (2048, 128), (8, 6): (1024, 256), (8, 7): (1024, 256), (8, 9): (1024, 256), (9, 0): (3785, 256),
    (10, 0): (7737, 256), (10, 3): (7737, 256), (12, 0): (1024, 256), (12, 1): (1024, 256),
}  # fmt: skip


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
def peak_tflops(device: torch.device, precision: Precision) -> float | None:
    """10^12 operations per second of matrix products on a device in a run's precision; None: not known."""
    if device.type == "cpu":
        return measured_tflops(precision)
    if device.type != "cuda":
        return None
    card = torch.cuda.get_device_properties(device)
    per_cycle = PER_CYCLE.get((card.major, card.minor))
    if per_cycle is None:
        return None
    half, full = per_cycle
    if (card.major, card.minor) != (8, 0) and "GeForce" in card.name:
        half //= 2
    rate = {"bf16": half, "tf32": max(half / 2, full), "fp32": full}[precision]
    return rate * card.multi_processor_count * card.clock_rate * 1e3 / 1e12


def card_bandwidth(device: torch.device | int) -> float:
    """Bytes per second that a card reads from its memory: two transfers in a cycle, of the whole width of its bus."""
    card = torch.cuda.get_device_properties(device)
    return 2 * card.memory_clock_rate * 1e3 * card.memory_bus_width / 8


def measured_tflops(precision: str, size: int = 1024) -> float:
    """The rate of a matrix product on this processor."""
    x = torch.ones(size, size, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    torch.mm(x, x)
    start = time.perf_counter()
    for _ in range(3):
        torch.mm(x, x)
    return 3 * 2 * size**3 / (time.perf_counter() - start) / 1e12

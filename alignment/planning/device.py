"""The device that a plan is for: its memory, what of it a process needs beside tensors, and its speed."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from alignment.training.speed import PEAK_BANDWIDTH, PEAK_TFLOPS, measured_tflops

GB = 10**9  # as vendors count; GiB are 2^30
CUDA_BYTES, NCCL_BYTES, CPU_BYTES = int(0.8 * GB), int(0.6 * GB), int(0.4 * GB)
FRAGMENTATION = 0.03  # of the peak, that the allocator of a GPU cannot use
CPU_BANDWIDTH = 2e10  # bytes per second, of a usual processor
CPU_SHARE, GPU_SHARE = 0.8, 0.9  # of the free memory, that a choice of micro_batch_tokens may count on


@dataclass(frozen=True)
class Device:
    """One device of a run.

    Attributes:
        gpu: whether it is one; else the processor, whose memory all processes of the machine share.
        memory: bytes; None: not known, so that nothing is said about whether a run fits.
        name: of its kind, or what is assumed.
        tflops: the most it computes in the run's precision, 10^12 operations per second.
        bandwidth: bytes per second that it reads from its memory.
        assumed: whether the kind was guessed, from the memory or for want of a table's row.
    """

    gpu: bool
    memory: int | None
    name: str
    tflops: float
    bandwidth: float = CPU_BANDWIDTH
    assumed: bool = False

    def reserve(self, peak: int, gpus: int) -> int:
        """Bytes of a process beside its tensors: libraries, communication, what the allocator cannot use."""
        if not self.gpu:
            return CPU_BYTES
        return CUDA_BYTES + (NCCL_BYTES if gpus > 1 else 0) + int(FRAGMENTATION * peak)

    def room(self, gpus: int) -> int | None:
        """Bytes that the tensors of one process can take; None where the memory is not known."""
        if self.memory is None:
            return None
        own = self.memory if self.gpu else self.memory // gpus
        return own - self.reserve(own, gpus)


def find_device(gpu_memory: float | None, gpus: int | None, precision: str, tflops: float | None) -> Device:
    """The device that was asked for: a GPU where there is one or its memory or number is given, else this processor.

    Args:
        gpu_memory: 10^9 bytes.
        gpus: number of GPUs.
        precision: of the run.
        tflops: the device's peak rate; None: from a table, or measured on a processor.
    """
    found = torch.cuda.is_available()
    if gpu_memory is None and gpus is None and not found:
        return Device(False, total_memory(), "this machine's processor", tflops or measured_tflops(precision))
    memory = None if gpu_memory is None else int(gpu_memory * GB)
    if memory is None and found:
        memory = torch.cuda.get_device_properties(0).total_memory
    here = torch.cuda.get_device_name(0) if found and gpu_memory is None else ""
    known = next((name for name in PEAK_TFLOPS if name in here), None)
    name = known or ("A100" if here else _name_by_memory(memory))
    rate = tflops or PEAK_TFLOPS[name][0 if precision == "bf16" else 1]
    return Device(True, memory, name, rate, PEAK_BANDWIDTH[name], assumed=known is None)


def _name_by_memory(memory: int | None) -> str:
    """A usual card with so much memory."""
    if memory is None or memory > 90 * GB:
        return "H100" if memory is None else "H200"
    return "RTX 4090" if memory <= 24.5 * GB else "A100" if memory <= 41 * GB else "H100"


def total_memory() -> int:
    """Bytes of this machine's memory, or of the limit of its container."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, int(text)) if text.isdecimal() else whole


def free_memory() -> int:
    """Bytes of this process's device that are free now."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return min(found.get("MemAvailable", total_memory()), total_memory())

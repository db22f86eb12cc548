"""The devices of a run: their memory and speed, and the parts of a network that each of them holds."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import psutil
import torch
from torch import Tensor, nn

from alignment.config.load import find_packaged
from alignment.config.yaml_source import read_yaml
from alignment.errors import UserError
from alignment.training.backends.base import blocks_of, outermost
from alignment.training.speed import PEAK_BANDWIDTH, PEAK_TFLOPS, card_bandwidth, measured_tflops, peak_tflops

Backend = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]

GB = 10**9  # as vendors count; GiB are 2^30
CUDA_BYTES = int(0.8 * GB)
NCCL_BYTES = int(0.6 * GB)
CPU_BYTES = int(0.4 * GB)
FRAGMENTATION = 0.03  # of the peak, that the allocator of a GPU cannot use
CPU_BANDWIDTH = 2e10  # bytes per second, of a usual processor
DDP_BUCKET_BYTES = 128 * 2**20  # gradients that are summed at once
ZERO_BUCKET_BYTES = 2 * 5 * 10**8 * 4  # DeepSpeed's reduce and allgather buckets: 5e8 numbers each by default
MACHINE_GPUS = 8  # of a machine, unless a launch file says it
LINK_BANDWIDTH = 3e11  # bytes per second that one GPU gathers inside a machine, over NVLink
NETWORK_BANDWIDTH = 5e10  # across machines, over a network of 400 Gbit/s
PREFETCHED_BLOCKS = 2  # of FSDP2 and ZeRO-3: the block that runs and the next one


@dataclass(frozen=True)
class Device:
    """One device of a run."""

    gpu: bool  # False: the processor, whose memory all processes of the machine share
    memory: int | None  # bytes; None: not known, so that nothing is said about whether a run fits
    name: str
    tflops: float  # the most it computes in the run's precision, 10^12 operations per second
    bandwidth: float = CPU_BANDWIDTH  # bytes per second that it reads from its memory
    assumed: bool = False  # the kind was guessed, from the memory or for want of a table's row

    def reserve(self, peak: int, gpus: int) -> int:
        """Bytes of a process beside its tensors: libraries, communication, what the allocator cannot use."""
        if not self.gpu:
            return CPU_BYTES
        return CUDA_BYTES + (NCCL_BYTES if gpus > 1 else 0) + int(FRAGMENTATION * peak)

    def available_bytes(self, gpus: int) -> int | None:
        """Bytes that the tensors of one process can take; None where the memory is not known."""
        if self.memory is None:
            return None
        memory = self.memory if self.gpu else self.memory // gpus
        return memory - self.reserve(memory, gpus)


def find_device(gpu_memory: float | None, gpus: int | None, precision: str, tflops: float | None) -> Device:
    """The device asked for: a GPU where there is one or its memory (GB) or number is given, else this processor.

    `tflops`: the device's peak rate; None: from a table, or measured on a processor.
    """
    has_gpu = torch.cuda.is_available()
    if gpu_memory is None and gpus is None and not has_gpu:
        return Device(False, total_memory(), "this machine's processor", tflops or measured_tflops(precision))
    memory = None if gpu_memory is None else int(gpu_memory * GB)
    if memory is None and has_gpu:
        card = torch.cuda.get_device_name(0)
        memory = torch.cuda.get_device_properties(0).total_memory
        if rate := tflops or peak_tflops(torch.device("cuda", 0), precision):
            return Device(True, memory, card, rate, card_bandwidth(0))
    usual = {24.5: "RTX 4090", 41: "A100", 90: "H100", math.inf: "H200"}  # the largest memory of a usual card
    by_memory = next(name for most, name in usual.items() if memory is None or memory <= most * GB)
    name = "H100" if memory is None else by_memory
    return Device(True, memory, name, tflops or PEAK_TFLOPS[name][precision], PEAK_BANDWIDTH[name], assumed=True)


def total_memory() -> int:
    """Bytes of this machine's memory, or of the limit of its container."""
    whole = psutil.virtual_memory().total
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(whole, int(text)) if text.isdecimal() else whole


def free_memory() -> int:
    """Bytes of this process's device that are free now."""
    if torch.cuda.is_available():
        return torch.cuda.mem_get_info()[0]
    return min(psutil.virtual_memory().available, total_memory())


@dataclass(frozen=True)
class Layout:
    """The parts of a network in training that each device holds."""

    backend: Backend = "single"
    gpus: int = 1  # processes, one per device
    shard_over: int = 1  # devices that one copy of the weights is spread over; fewer than `gpus` under hybrid sharding
    offload: bool = False  # weights, gradients and optimizer state live in host memory (CPU offload)
    offload_optimizer: bool = False  # optimizer state alone does
    reshard: bool = True  # a block's weights are sharded again after its forward

    @property
    def sharded(self) -> bool:
        """True where weights are sharded."""
        return self.backend in ("fsdp2", "zero3")

    @property
    def link(self) -> float:
        """Bytes per second at which one device gathers weights from the others."""
        return LINK_BANDWIDTH if self.shard_over <= MACHINE_GPUS else NETWORK_BANDWIDTH

    @property
    def weights_share(self) -> float:
        """Part of the weights on one device between the steps."""
        if not self.sharded:
            return 1.0
        return 0.0 if self.offload else 1 / self.shard_over

    @property
    def gradients_share(self) -> float:
        """Part of the gradients on one device."""
        if self.offload:
            return 0.0
        return 1 / self.shard_over if self.sharded or self.backend == "zero2" else 1.0

    @property
    def optimizer_share(self) -> float:
        """Part of the optimizer's state on one device."""
        if self.offload or self.offload_optimizer:
            return 0.0
        return 1 / self.shard_over if self.shards_optimizer else 1.0

    @property
    def shards_optimizer(self) -> bool:
        """True where each network is spread by itself, so that several cannot lie over one set of frozen weights."""
        return self.backend not in ("single", "ddp")

    @property
    def has_masters(self) -> bool:
        """True where the optimizer steps on copies of the trained weights, as DeepSpeed's does."""
        return self.backend.startswith("zero")

    def outside_bytes(self, model: nn.Module) -> int:
        """Bytes that the shard lacks of the weights outside of blocks, which FSDP2 keeps whole after a forward."""
        return int(_bytes(_parts(model)[1]) * (1 - self.weights_share)) if self.sharded else 0

    def transient_bytes(self, model: nn.Module, *, backward: bool) -> int:
        """Bytes that one device holds for a moment beside its shards while a trained network runs.

        Sharded weights: what is outside of blocks, whole, and of the blocks that run what the shard lacks; in a
        backward pass the gradients of the block that runs and their copy that is sent. Else the buckets of gradients
        that are sent.
        """
        trained = [x for x in model.parameters() if x.requires_grad]
        if self.backend == "ddp":
            return min(DDP_BUCKET_BYTES, _bytes(trained))
        if not self.sharded:
            return min(ZERO_BUCKET_BYTES, 2 * _bytes(trained)) if self.has_masters else 0
        blocks, outside = _parts(model)
        sizes = sorted((_bytes(block) for block in blocks), reverse=True)
        running = sum(sizes[:PREFETCHED_BLOCKS] if self.reshard else sizes)
        weights = self.outside_bytes(model) + int(running * (1 - self.weights_share))
        if not backward:
            return weights
        if self.backend == "zero3":
            return weights + min(ZERO_BUCKET_BYTES, 2 * _bytes(trained))
        sent = [2 * _bytes(x for x in block if x.requires_grad) for block in blocks]
        largest = max([*sent, *(_bytes([x]) for x in outside if x.requires_grad)], default=0)
        return weights + int(largest * (1 - self.gradients_share))


def _parts(model: nn.Module) -> tuple[list[list[nn.Parameter]], list[nn.Parameter]]:
    """The parameters of each block, which is sharded by itself, and those outside of blocks."""
    blocks = [list(block.parameters()) for block in outermost(blocks_of(model))]
    inside = {id(x) for block in blocks for x in block}
    return blocks, [x for x in model.parameters() if id(x) not in inside]


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the weights that are sharded; the quantized ones are whole on every device."""
    return sum(x.nbytes for x in tensors if x.is_floating_point())


def read_layout(launch: str | None, gpus: int | None) -> Layout:
    """The layout that `--launch` and `--gpus` ask for, as the training verbs understand them.

    Args:
        launch: Accelerate's launch file, or a packaged name; None: the whole model on every device. Where it says one
            machine, up to 8 GPUs are taken to be in each.
        gpus: number of processes; None: that of the launch file, or one.
    """
    if launch is None:
        return Layout("single" if gpus in (None, 1) else "ddp", gpus or 1)
    file = find_packaged(launch, "launch")
    values: dict[str, Any] = read_yaml(file).values
    kinds = {"MULTI_GPU": "ddp", "MULTI_CPU": "ddp", "FSDP": "fsdp2", "DEEPSPEED": "deepspeed"}
    if (kind := str(values.get("distributed_type"))) not in kinds:
        raise UserError(f"{file}: distributed_type {kind} is none of MULTI_GPU, FSDP and DEEPSPEED")
    processes = gpus or int(values.get("num_processes", 1))
    sent = {key.upper(): str(value) for key, value in (values.get("fsdp_config") or {}).items()}
    for key, value in (values.get("deepspeed_config") or {}).items():
        sent[f"ACCELERATE_DEEPSPEED_{key.upper()}"] = str(value)
    machines = int(values.get("num_machines", 1))
    if machines == 1:
        machines = math.ceil(processes / MACHINE_GPUS)
    sent["LOCAL_WORLD_SIZE"] = str(processes // machines)
    layout = layout_from_env("single" if processes == 1 and kind != "DEEPSPEED" else kinds[kind], processes, sent)
    if processes % layout.shard_over:
        raise UserError(
            f"{file}: hybrid sharding takes equally many GPUs of each machine, and {processes} on {machines} machines "
            "are not; give another --gpus, or a launch file of your own with num_machines"
        )
    return layout


def layout_from_env(kind: str, size: int, sent: Mapping[str, str]) -> Layout:
    """Layout of `size` processes of a kind of process group, from the variables that Accelerate's launcher sends."""

    def value(name: str, default: str) -> str:
        return sent.get(name, default).lower()

    if kind == "deepspeed":
        stage = value("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
        if stage not in ("1", "2", "3"):
            raise UserError(f"launch file: zero_stage {stage} is none of 1, 2 and 3")
        weights, state = (value(f"ACCELERATE_DEEPSPEED_OFFLOAD_{x}_DEVICE", "none") for x in ("PARAM", "OPTIMIZER"))
        return Layout(cast(Backend, f"zero{stage}"), size, size, weights != "none", state != "none")
    if kind != "fsdp2":
        return Layout(cast(Backend, kind), size)
    hybrid = value("FSDP_SHARDING_STRATEGY", "") in ("hybrid_shard", "4")
    return Layout(
        "fsdp2",
        size,
        shard_over=int(value("LOCAL_WORLD_SIZE", str(size))) if hybrid else size,
        offload=value("FSDP_OFFLOAD_PARAMS", "false") == "true",
        reshard=value("FSDP_RESHARD_AFTER_FORWARD", "true") == "true",
    )

"""How a model lies on the devices of a run: what each holds whole, what in shards, and what is whole for a moment."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from alignment.config.load import find_packaged
from alignment.config.yaml_source import read_yaml
from alignment.errors import UserError

Backend = Literal["single", "ddp", "fsdp2", "zero1", "zero2", "zero3"]

DDP_BUCKET_BYTES = 128 * 2**20  # gradients that are summed at once
ZERO_BUCKET_BYTES = 2 * 5 * 10**8 * 4  # DeepSpeed's reduce and allgather buckets: 5e8 numbers each by default
PREFETCHED_BLOCKS = 2  # of FSDP2 and ZeRO-3: the block that runs and the next one


@dataclass(frozen=True)
class Layout:
    """Where the parts of a network lie.

    Attributes:
        backend: what spreads the model over the processes.
        gpus: processes, one per device.
        shard_over: devices that one copy of the weights is spread over; fewer than `gpus` under hybrid sharding.
        offload: weights, gradients and optimizer state live in host memory (CPU offload).
        offload_optimizer: optimizer state alone does.
        reshard: a block's weights are sharded again after its forward.
    """

    backend: Backend = "single"
    gpus: int = 1
    shard_over: int = 1
    offload: bool = False
    offload_optimizer: bool = False
    reshard: bool = True

    @property
    def sharded(self) -> bool:
        """Whether weights are sharded."""
        return self.backend in ("fsdp2", "zero3")

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
        return 1.0 if self.backend in ("single", "ddp") else 1 / self.shard_over

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer steps on copies of the trained weights, as DeepSpeed's does."""
        return self.backend.startswith("zero")

    @property
    def shares_base(self) -> bool:
        """Whether several networks can lie over one set of frozen weights."""
        return self.backend in ("single", "ddp")

    def unsharded_bytes(self, model: nn.Module, trained_bytes: int) -> int:
        """Bytes that one device holds for a moment beside its shards while the model runs.

        Args:
            model: the network; its blocks are the children of its module lists.
            trained_bytes: of the trained weights, whose gradients are sent in buckets.
        """
        if self.backend == "ddp":
            return min(DDP_BUCKET_BYTES, trained_bytes) if trained_bytes > 0 else 0
        if self.backend in ("zero1", "zero2"):
            return min(ZERO_BUCKET_BYTES, 2 * trained_bytes)
        if not self.sharded:
            return 0
        blocks = sorted((_bytes(block) for block in _blocks(model)), reverse=True)
        running = sum(blocks[:PREFETCHED_BLOCKS]) if self.reshard else sum(blocks)
        return self.outside_bytes(model) + int(running * (1 - self.weights_share))

    def outside_bytes(self, model: nn.Module) -> int:
        """Bytes that are missing in the shard of the weights outside of blocks; FSDP2 keeps them whole after a forward."""
        if not self.sharded:
            return 0
        outside = _bytes(model) - sum(_bytes(block) for block in _blocks(model))
        return int(outside * (1 - self.weights_share))

    def unsharded_gradient_bytes(self, model: nn.Module, trained_bytes: int) -> int:
        """Bytes of gradients that one device holds for a moment beside its shards in a backward pass.

        Under FSDP2: those of the block that runs and their copy that is sent; or, after all blocks, that of the head,
        which is sent together with the embedding's.
        """
        if self.backend == "zero3":
            return min(ZERO_BUCKET_BYTES, 2 * trained_bytes)
        if not self.sharded:
            return 0
        blocks = _blocks(model)
        inside = {id(parameter) for block in blocks for parameter in block.parameters()}
        outside = [_trained(x) for x in model.parameters() if id(x) not in inside]
        sent = max((sum(map(_trained, block.parameters())) for block in blocks), default=0)
        return int(max(max(outside, default=0), 2 * sent) * (1 - self.gradients_share))


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded by themselves: outermost children of module lists."""
    found: list[nn.Module] = []
    for child in model.children():
        inner = list(child) if isinstance(child, nn.ModuleList) else _blocks(child)
        found += inner
    return found


def _bytes(module: nn.Module) -> int:
    """Bytes of the weights that are sharded; the quantized ones are whole on every device."""
    return sum(x.numel() * x.element_size() for x in module.parameters() if x.is_floating_point())


def _trained(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.element_size() if parameter.requires_grad else 0


# From a launch file


def read_layout(launch: str | None, gpus: int | None) -> Layout:
    """The layout that `--launch` and `--gpus` ask for, as the training verbs understand them.

    Args:
        launch: Accelerate's launch file, or a packaged name; None: the whole model on every device.
        gpus: number of processes; None: that of the launch file, or one.

    Raises:
        UserError: no such file, or a kind of launch that no backend here runs.
    """
    if launch is None:
        return Layout("single" if gpus in (None, 1) else "ddp", gpus or 1)
    file = find_packaged(launch, "launch")
    values: dict[str, Any] = read_yaml(file).values
    processes = gpus or int(values.get("num_processes", 1))
    kind = str(values.get("distributed_type"))
    if processes == 1 and kind != "DEEPSPEED":
        return Layout("single")
    if kind == "MULTI_GPU" or kind == "MULTI_CPU":
        return Layout("ddp", processes)
    if kind == "FSDP":
        return _fsdp_layout(values.get("fsdp_config") or {}, processes, int(values.get("num_machines", 1)))
    if kind == "DEEPSPEED":
        return _zero_layout(values.get("deepspeed_config") or {}, processes)
    raise UserError(f"{file}: distributed_type {kind} is none of MULTI_GPU, FSDP and DEEPSPEED")


def _fsdp_layout(config: Mapping[str, object], processes: int, machines: int) -> Layout:
    hybrid = str(config.get("fsdp_sharding_strategy", "")).lower() in ("hybrid_shard", "4")
    return Layout(
        "fsdp2",
        processes,
        shard_over=processes // machines if hybrid else processes,
        offload=str(config.get("fsdp_offload_params", False)).lower() == "true",
        reshard=str(config.get("fsdp_reshard_after_forward", True)).lower() == "true",
    )


def _zero_layout(config: Mapping[str, object], processes: int) -> Layout:
    stage = int(str(config.get("zero_stage", 2)))
    if stage not in (1, 2, 3):
        raise UserError(f"launch file: zero_stage {stage} is none of 1, 2 and 3")
    return Layout(
        f"zero{stage}",  # type: ignore[arg-type]
        processes,
        shard_over=processes,
        offload=config.get("offload_param_device", "none") not in ("none", None),
        offload_optimizer=config.get("offload_optimizer_device", "none") not in ("none", None),
    )

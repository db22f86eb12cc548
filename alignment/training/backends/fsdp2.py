"""FSDP2: torch's fully_shard, one group of parameters per block; each rank reads its shards straight from the files."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import broadcast
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from alignment.errors import UserError
from alignment.training.backends.base import (
    Backend,
    RowSource,
    autocast_context,
    autocast_forward,
    blocks_of,
    check_finite,
    computing_types,
    whole_bytes,
    whole_parameters,
)
from alignment.training.backends.state_files import local_rows
from alignment.training.distributed import ProcessGroup, fsdp_settings, launched_size
from alignment.training.optim import OptimConfig, build_optimizer


class FSDP2Backend(Backend):
    """Weights, gradients and optimizer state sharded over ranks; a block's weights are gathered while it runs."""

    collective_forward = True

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group = process_group
        self.config = config
        device = process_group.device
        self.model = self.unwrapped = autocast_forward(model, device, precision, keep_casts=False)
        self.autocast = autocast_context(device, precision, keep_casts=False)
        self._precision = precision
        self._reshard_after_forward = fsdp_settings()["RESHARD_AFTER_FORWARD"] == "true"
        shard_model(model, process_group, precision)
        self.optimizer = build_optimizer(model, config)

    def backward(self, loss: Tensor, last: bool) -> None:
        # FSDP2 averages over ranks; every backward reduces, so that a rank never holds more than its shard of
        # gradients.
        (loss * self.process_group.size).backward()

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        modules = fsdp_modules(self.unwrapped)
        for module in modules:
            module.reshard()
        with (
            whole_parameters(self.unwrapped, self._computing_types(), self._all_gather),
            without_gathering(modules),
            self.autocast(),
        ):
            yield

    def whole_bytes(self) -> int:
        return whole_bytes(self._computing_types(), lambda parameter: isinstance(parameter, DTensor))

    @contextmanager
    def sharded_decoding(self) -> Iterator[None]:
        root: Any = fsdp_modules(self.unwrapped)[0]
        root.unshard()  # the root's own weights: FSDP2 would keep them after the first forward anyhow
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)
        for name in ("prefill", "decode"):
            register_fsdp_forward_method(root, name)
        try:
            with self.autocast():
                yield
        finally:
            for name in ("prefill", "decode"):
                delattr(root, name)  # the wrapper on the instance; the method of the class is back
            root.set_reshard_after_forward(self._reshard_after_forward)
            root.set_reshard_after_forward(False, recurse=False)  # its backward follows at once and needs whole weights
            root.reshard()

    def _computing_types(self) -> dict[nn.Parameter, torch.dtype]:
        """The type of each parameter's whole copy; where FSDP2 gathers in another type than it stores, that one."""
        types = computing_types(self.unwrapped, self._precision)
        for module in fsdp_modules(self.unwrapped):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for managed in group.fsdp_params:
                    if managed.param_dtype is not None:
                        types[managed.sharded_param] = managed.param_dtype
        return types

    def _all_gather(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        if not isinstance(parameter, DTensor):
            return None
        with torch.no_grad():
            copy: Any = parameter.to(self.process_group.device, dtype)
            return copy.full_tensor()

    def trained_weights(self) -> dict[str, Tensor]:
        for module in fsdp_modules(self.unwrapped):  # the root's weights may still be whole after a forward
            module.reshard()
        return super().trained_weights()


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose weights are sharded together, the whole model first. FSDP2 makes it the root of the others."""
    root: Any = model
    # FSDP2 makes the first module that runs its root. It must be the whole model, even if only parts of it run.
    root._get_fsdp_state()._lazy_init()
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def without_gathering(modules: list[FSDPModule]) -> Iterator[None]:
    """While open, these modules' forwards gather and shard nothing; casts of their inputs and outputs go on."""
    states = [module._get_fsdp_state() for module in modules]
    groups = [state._fsdp_param_groups for state in states]
    for state in states:
        state._fsdp_param_groups = []
    try:
        yield
    finally:
        for state, param_groups in zip(states, groups, strict=True):
            state._fsdp_param_groups = param_groups


# Sharding


def shard_model(model: nn.Module, process_group: ProcessGroup, precision: str) -> None:
    """Shard each block (a child of a ModuleList) by itself, then the rest.

    Of an unread parameter each rank reads the rows of its own shard; what has been read or drawn starts with rank 0's
    values. Quantized weights, which are frozen, stay whole on each rank: FSDP2 cannot cut their blocks.
    """
    stored = _move_unread_to_meta(model)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(process_group.device))
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            broadcast(tensor.detach(), src=0)
    check_finite(model)
    _wrap_blocks(model, process_group, precision)
    offloaded = fsdp_settings()["OFFLOAD_PARAMS"] == "true"
    _read_shards(model, stored, torch.device("cpu") if offloaded else process_group.device)


def _wrap_blocks(model: nn.Module, process_group: ProcessGroup, precision: str) -> None:
    """Make each block, and what is outside of blocks, a group of parameters that is gathered and sharded together.

    In bf16 a block's linear layers are a group of their own, gathered in bfloat16: under autocast they compute with
    weights rounded in the same way, so no number changes. Gradients are reduced in float32.
    """
    settings = fsdp_settings()
    on_gpu = process_group.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": _device_mesh(process_group, hybrid=settings["SHARDING_STRATEGY"] in ("hybrid_shard", "4")),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu)
        if settings["OFFLOAD_PARAMS"] == "true"
        else OffloadPolicy(),
        "ignored_params": {parameter for parameter in model.parameters() if not parameter.is_floating_point()},
    }
    types = computing_types(model, precision)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    blocks: list[Any] = []
    for block in reversed(blocks_of(model)):  # from the inside out, as fully_shard requires
        reshard = {"reshard_after_forward": settings["RESHARD_AFTER_FORWARD"] == "true"}
        if layers := _bfloat16_layers(block, types):
            fully_shard(layers, mp_policy=policy, **reshard, **options)
            blocks.append(layers[0])
        fully_shard(block, **reshard, **options)
        blocks.append(block)
    fully_shard(model, **options)
    if settings["FORWARD_PREFETCH"] == "true":
        ordered: list[Any] = [module for module in model.modules() if module in blocks]
        for block, after in pairwise(ordered):
            block.set_modules_to_forward_prefetch([after])


def _bfloat16_layers(block: nn.Module, types: Mapping[nn.Parameter, torch.dtype]) -> list[nn.Module]:
    """The layers inside a trained block that compute in bfloat16; none if it is compiled: they would cut its graph."""
    compiled = getattr(block, "_compiled_call_impl", None) is not None
    if compiled or not all(parameter.requires_grad for parameter in block.parameters()):
        return []
    done = {id(module) for inner in block.modules() if isinstance(inner, FSDPModule) for module in inner.modules()}
    return [
        module
        for module in block.modules()
        if type(module) is nn.Linear
        and module is not block
        and id(module) not in done
        and all(types[parameter] == torch.bfloat16 for parameter in module.parameters())
    ]


def _device_mesh(process_group: ProcessGroup, *, hybrid: bool) -> Any:
    """The ranks as one line, or for hybrid sharding as nodes x ranks of a node: copies across nodes, shards within."""
    kind = process_group.device.type
    size = process_group.size
    local = int(os.environ.get("LOCAL_WORLD_SIZE", launched_size()))
    if not hybrid:
        return init_device_mesh(kind, (size,))
    if size % local:
        raise UserError(
            f"launch configuration: hybrid sharding needs equally many processes on each node, and {size} processes "
            f"are not a multiple of {local}; leave fsdp_sharding_strategy out"
        )
    return init_device_mesh(kind, (size // local, local), mesh_dim_names=("nodes", "ranks"))


def _move_unread_to_meta(model: nn.Module) -> dict[str, RowSource]:
    """Put parameters on the meta device in place of the unread ones; where their data lies, by first name."""
    stored: dict[str, RowSource] = {}
    replaced: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}  # the old one too, so that its id stays its own
    for prefix, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or not hasattr(parameter, "stored"):
                continue
            if id(parameter) not in replaced:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                replaced[id(parameter)] = (nn.Parameter(empty, requires_grad=parameter.requires_grad), parameter)
                stored[f"{prefix}.{name}" if prefix else name] = parameter.stored  # type: ignore[attr-defined]
            module._parameters[name] = replaced[id(parameter)][0]
    return stored


@torch.no_grad()
def _read_shards(model: nn.Module, stored: dict[str, RowSource], device: torch.device) -> None:
    """Read this rank's rows of each parameter on the meta device; shared parameters stay shared."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            owners.setdefault(id(parameter), []).append((module, name))
    for full_name, parameter in list(model.named_parameters()):
        if not parameter.is_meta:
            continue
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        shape = parameter.shape
        start, stop = local_rows(parameter)
        local = torch.empty((stop - start, *shape[1:]), dtype=parameter.dtype, device=device)
        if stop > start:
            local.copy_(stored[full_name].rows(start, stop))
        shard = DTensor.from_local(
            local, mesh, parameter.placements, run_check=False, shape=shape, stride=parameter.stride()
        )
        filled = nn.Parameter(shard, requires_grad=parameter.requires_grad)
        for module, name in owners[id(parameter)]:
            setattr(module, name, filled)
    model.load_state_dict({}, strict=False)  # its hooks let FSDP2 take the new shards, padded to equal sizes

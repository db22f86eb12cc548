"""FSDP2 sharding of a model: the mesh of ranks, the groups of parameters, and shards read straight from their files."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from alignment.errors import UserError
from alignment.training.backends.state_files import local_rows
from alignment.training.backends.whole_weights import computing_types
from alignment.training.distributed import FSDPSettings, ProcessGroup


class RowSource(Protocol):
    """The place of an unread parameter's data, its attribute `stored`; models/huggingface makes them."""

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of the parameter; to be copied from."""
        ...


def shard_model(model: nn.Module, process_group: ProcessGroup, settings: FSDPSettings, precision: str) -> None:
    """Shard each block (a child of a ModuleList) by itself, then the rest.

    An unread parameter is never whole on any rank: each reads the rows of its own shard from the file. What has been
    read or drawn (adapters, new heads, buffers) starts with rank 0's values. Quantized weights, which are frozen, stay
    whole on each rank: FSDP2 cannot cut their blocks.

    Raises:
        UserError: the mesh does not fit the number of processes, or a trained parameter is not a number.
    """
    from torch.distributed import broadcast

    stored = _move_unread_to_meta(model)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(process_group.device))
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            broadcast(tensor.detach(), src=0)
    check_finite(model)
    _wrap_blocks(model, process_group, settings, precision)
    _read_shards(model, stored, torch.device("cpu") if settings.cpu_offload else process_group.device)


def _wrap_blocks(model: nn.Module, process_group: ProcessGroup, settings: FSDPSettings, precision: str) -> None:
    """Make each block, and what is outside of blocks, a group of parameters that is gathered and sharded together.

    In bf16 the float32 shards of a block's linear layers are gathered in bfloat16, in half the bytes: under autocast these
    layers compute with weights rounded in the same way, so no number changes. They are a group of their own then, beside
    the block's norms, which compute in float32. Gradients are reduced in float32.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    on_gpu = process_group.device.type == "cuda"
    options: dict[str, Any] = {
        "mesh": device_mesh(process_group, settings),
        "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu) if settings.cpu_offload else OffloadPolicy(),
        "ignored_params": {parameter for parameter in model.parameters() if not parameter.is_floating_point()},
    }
    types = computing_types(model, precision)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    blocks: list[Any] = []
    for module in reversed(list(model.modules())):  # from the inside out, as fully_shard requires
        if isinstance(module, nn.ModuleList):
            for block in module:
                if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # those are never called
                    reshard = {"reshard_after_forward": settings.reshard_after_forward}
                    if layers := bfloat16_layers(block, types):
                        fully_shard(layers, mp_policy=policy, **reshard, **options)
                        blocks.append(layers[0])
                    fully_shard(block, **reshard, **options)
                    blocks.append(block)
    fully_shard(model, **options)
    if settings.forward_prefetch:
        ordered: list[Any] = [module for module in model.modules() if module in blocks]
        for block, after in pairwise(ordered):
            block.set_modules_to_forward_prefetch([after])


def bfloat16_layers(block: nn.Module, types: Mapping[nn.Parameter, torch.dtype]) -> list[nn.Module]:
    """The trained layers of a block that compute with weights rounded to bfloat16; none where the block is compiled.

    A group within a compiled block would cut its graph. Under an adapter the frozen weights have the checkpoint's type.
    """
    compiled = getattr(block, "_compiled_call_impl", None) is not None
    if compiled or not all(parameter.requires_grad for parameter in block.parameters()):
        return []
    done = {id(module) for inner in block.modules() if isinstance(inner, FSDPModule) for module in inner.modules()}
    return [
        module
        for module in block.modules()
        if type(module) is nn.Linear
        and id(module) not in done
        and all(types[parameter] == torch.bfloat16 for parameter in module.parameters())
    ]


def device_mesh(process_group: ProcessGroup, settings: FSDPSettings) -> Any:
    """The ranks as one line, or for hybrid sharding as nodes x ranks of a node: copies across nodes, shards within.

    Raises:
        UserError: the ranks are not equally many on each node.
    """
    from torch.distributed.device_mesh import init_device_mesh

    kind, size, local = process_group.device.type, process_group.size, settings.ranks_per_node
    if not settings.hybrid:
        return init_device_mesh(kind, (size,))
    if size % local:
        raise UserError(
            f"launch configuration: hybrid sharding needs equally many processes on each node, and {size} processes are not "
            f"a multiple of {local}; leave fsdp_sharding_strategy out"
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


def check_finite(model: nn.Module) -> None:
    """Refuse new parameters that were computed from unread ones, which are NaN.

    Raises:
        UserError: naming them.
    """
    bad = [
        name
        for name, parameter in model.named_parameters()
        if not (parameter.is_meta or hasattr(parameter, "stored"))
        and parameter.is_floating_point()
        and parameter.isnan().any()
    ]
    if bad:
        raise UserError(
            f"{', '.join(bad[:5])}: not a number at the start of the training; an adapter that starts from the values of the "
            "frozen weights needs them read before it is attached, or the checkpoint is damaged"
        )


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
        mesh, shape = parameter.device_mesh, parameter.shape
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

"""Whole weights for sampling where they are sharded: each gathered once, in the type that its layer computes in.

The sharded parameters themselves stay as they are; while the whole ones stand in their locations nothing can be trained.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The children of every ModuleList that are called: transformer blocks, and experts within them; outer ones first."""
    return [
        block
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for block in module
        if not isinstance(block, nn.ModuleList | nn.ModuleDict)  # those are never called
    ]


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that lie in no other one of the list."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]


def computing_types(model: nn.Module, precision: str) -> dict[nn.Parameter, torch.dtype]:
    """The type in which whole copies of parameters give the same numbers as the parameters themselves.

    Under autocast a linear layer rounds its weight and bias to bfloat16 before it uses them, so a copy that is already
    rounded gives the same bits in half the memory. This holds for the plain linear layers inside of blocks.
    Embeddings, norms and heads compute in float32. Layers under an adapter keep their type as well: some adapters (DoRA)
    read the weights in other operations.

    Args:
        precision: of the run, fp32 or bf16.

    Returns:
        The type of each parameter, frozen or not.
    """
    types = {parameter: parameter.dtype for parameter in model.parameters()}
    if precision != "bf16":
        return types
    uses: dict[nn.Parameter, list[bool]] = {}
    blocks = outermost(blocks_of(model))
    within = {id(module) for block in blocks for module in block.modules()}
    adapted = {id(child) for module in model.modules() if hasattr(module, "base_layer") for child in module.modules()}
    for module in model.modules():
        plain = type(module) is nn.Linear and id(module) in within and id(module) not in adapted
        for parameter in module._parameters.values():
            if parameter is not None:
                uses.setdefault(parameter, []).append(plain and parameter.dtype == torch.float32)
    return types | {parameter: torch.bfloat16 for parameter, plain in uses.items() if all(plain)}


def whole_bytes(types: Mapping[nn.Parameter, torch.dtype], is_sharded: Callable[[nn.Parameter], bool]) -> int:
    """Bytes that whole copies of the sharded parameters take on each device."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) * dtype.itemsize
        for parameter, dtype in types.items()
        if is_sharded(parameter)
    )


@contextmanager
def whole_parameters(
    model: nn.Module,
    types: Mapping[nn.Parameter, torch.dtype],
    gather: Callable[[nn.Parameter, torch.dtype], Tensor | None],
) -> Iterator[None]:
    """While open, whole copies of the sharded parameters stand in the model; opening is a collective operation.

    Args:
        types: the type of each copy.
        gather: (parameter, type) -> the whole tensor; None for a parameter that is whole already.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that several modules share is gathered once
    locations: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in copies:
                    whole = gather(parameter, types[parameter])
                    copies[parameter] = parameter if whole is None else nn.Parameter(whole, requires_grad=False)
                if copies[parameter] is not parameter:
                    module._parameters[name] = copies[parameter]
                    locations.append((module, name, parameter))
        yield
    finally:
        for module, name, parameter in locations:
            module._parameters[name] = parameter

"""Bytes that the weights of models take in memory, each tensor counted once however many models and names hold it."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

# Where bitsandbytes keeps the constants of quantized weights: on the parameter, or on its layer after the first call.
QUANTIZATION = ("quant_state", "CB", "SCB", "state")

Bytes = dict[tuple[torch.device, int], int]  # device and address of a tensor -> its bytes


def held_tensors(model: nn.Module) -> Iterator[Tensor]:
    """A model's parameters, buffers and quantization constants; one that several layers hold comes several times."""
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        yield from tensors
        for holder in (module, *tensors):
            yield from _constants(holder)


def held_bytes(model: nn.Module) -> Bytes:
    """Bytes of a model's parameters, buffers and quantization constants on this process, by address.

    Of a sharded tensor this process's part counts. Tensors on the meta device take nothing.
    """
    sizes: Bytes = {}
    for tensor in held_tensors(model):
        tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3's part of a parameter
        tensor = getattr(tensor, "_local_tensor", tensor)  # FSDP2's
        if not tensor.is_meta and tensor.numel():
            key = (tensor.device, tensor.data_ptr())
            sizes[key] = max(sizes.get(key, 0), tensor.numel() * tensor.element_size())
    return sizes


def total_bytes(*models: nn.Module) -> int:
    """Bytes of the weights of several models together; what they share counts once."""
    return sum({place: size for model in models for place, size in held_bytes(model).items()}.values())


def describe_weights(model: nn.Module) -> str:
    """One sentence: the weights of a model that are frozen and that train, their types and bytes."""
    holders = {id(weight): (weight, layer) for layer in model.modules() for weight in layer.parameters(recurse=False)}
    groups: dict[tuple[str, str], list[tuple[int, int]]] = {}  # (frozen or trained, type) -> (numbers, bytes) of each
    for parameter, layer in holders.values():
        size = parameter.nbytes
        kind = str(parameter.dtype).removeprefix("torch.")
        if not parameter.is_floating_point():  # quantized: with what its layer needs to dequantize it
            kind = "nf4" if hasattr(parameter, "quant_state") else "int8"
            held = (*_constants(layer), *_constants(parameter), parameter)
            size = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
        use = "trained" if parameter.requires_grad else "frozen"
        groups.setdefault((use, kind), []).append((parameter.numel(), size))
    parts = []
    for (use, kind), tensors in groups.items():
        numbers, sizes = zip(*tensors, strict=True)
        count = f"{len(tensors)} tensors" if use == "frozen" else f"{sum(numbers):,} numbers"
        parts.append(f"{count} {use} in {kind} ({written(sum(sizes))})")
    return "weights: " + ", ".join(parts)


def written(count: float) -> str:
    """A number of bytes in words, such as 1.24 GB; 1 GB is 10^9 bytes."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 999.5 * size else f"{count / size:,.0f} {unit}"
    return f"{count:.0f} bytes"


def _constants(holder: object) -> Iterator[Tensor]:
    """Tensors of a quantized parameter or layer that are neither parameters nor buffers."""
    values = [vars(holder).get(name) for name in QUANTIZATION]
    while values:
        value = values.pop(0)
        if isinstance(value, Tensor):
            yield value
        elif type(value).__module__.startswith("bitsandbytes"):
            values += vars(value).values()

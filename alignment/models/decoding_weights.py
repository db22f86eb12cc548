"""The weights of a decoder while responses are decoded: fewer products, each in the type that it is computed in.

A step of decoding reads every weight for a few tokens, so that starting its kernels takes longer than they run. Within
`decoding_weights` queries, keys and values are one product, as are the gate and the first layer of a feed-forward, and
the low-rank updates of LoRA are part of their matrices. That takes a copy of these weights. It is made for small
models, and on a GPU with room for it where weights have to be rounded or merged.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alignment.models.layers.attention import Attention, CrossAttention, Joined
from alignment.models.layers.feedforward import FeedForward
from alignment.models.layers.norms import computing_type
from alignment.models.transformer import Transformer

SMALL = 64 * 2**20  # bytes of weights whose copy costs nothing beside the cache
MOST_OF_FREE = 0.25  # share of a GPU's free memory that a copy may take; the rest is the cache's


@contextmanager
def decoding_weights(model: nn.Module) -> Iterator[None]:
    """Within the block the decoder's layers have joined and merged weights; these must not change meanwhile.

    Layers that are quantized, sharded, compiled or hooked stay as they are, as do those with DoRA.
    """
    changed: list[tuple[nn.Module, str, object]] = []
    try:
        for trunk in (module for module in model.modules() if isinstance(module, Transformer) and not module.compiled):
            _join(trunk, changed)
        yield
    finally:
        for module, name, before in reversed(changed):
            setattr(module, name, before)


@torch.no_grad()
def _join(trunk: Transformer, changed: list[tuple[nn.Module, str, object]]) -> None:
    """Give the layers of a trunk their weights; notes what was there before."""

    def change(module: nn.Module, name: str, value: object) -> None:
        changed.append((module, name, getattr(module, name)))
        setattr(module, name, value)

    dtype = computing_type(trunk.embed.weight)
    groups = list[tuple[nn.Module, str, list[Any]]]()
    for module in trunk.modules():
        together = _read_together(module)
        groups += [(module, "joined", together)] if together else []
        alone = [(name, child) for name, child in module.named_children() if _is_lora(child) and child not in together]
        groups += [(module, name, [child]) for name, child in alone if _merges(child)]
    if sum(layer.weight.nbytes for _, _, layers in groups for layer in layers) > SMALL:
        groups = [group for group in groups if any(_is_lora(x) or x.weight.dtype != dtype for x in group[2])]
    numbers = sum(layer.weight.numel() for _, _, layers in groups for layer in layers)
    if numbers * dtype.itemsize > SMALL and not fits_on_gpu(trunk.embed.weight.device, numbers * dtype.itemsize):
        return
    for module, name, layers in groups:
        weight, bias = _joined(layers, dtype)
        if name == "joined":
            change(module, name, (weight, bias))
            continue
        with torch.device("meta"):
            merged = nn.Linear(layers[0].in_features, layers[0].out_features, bias=False)
        merged.weight = nn.Parameter(weight, requires_grad=False)
        merged.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        change(module, name, merged)


def fits_on_gpu(device: torch.device, size: int) -> bool:
    """True on a GPU where a copy of `size` bytes leaves most of the free memory to the cache."""
    if device.type != "cuda":
        return False
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return size <= MOST_OF_FREE * (torch.cuda.mem_get_info(device)[0] + unused)


def _read_together(module: nn.Module) -> list[nn.Module]:
    """The layers of a module that read one input and can be one product; empty: there are none."""
    layers: list[nn.Module] = []
    if isinstance(module, Attention) and not isinstance(module, CrossAttention):
        layers = [module.query, module.key, module.value]
    elif isinstance(module, FeedForward) and module.gate is not None:
        layers = [module.gate, module.up]
    return layers if all(map(_merges, layers)) else []


def _joined(layers: Sequence[nn.Module], dtype: torch.dtype) -> Joined:
    """One weight [sum of outputs, inputs] and bias of several layers, their updates merged."""
    linear: Sequence[Any] = layers
    weights = [sum(_updates(layer), layer.weight).to(dtype) for layer in linear]
    biases = [layer.bias for layer in linear]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases).to(dtype)


def _updates(layer: nn.Module) -> Iterator[Tensor]:
    if _is_lora(layer):
        lora: Any = layer
        yield from (lora.get_delta_weight(name) for name in lora.active_adapters if name in lora.lora_A)


def _is_lora(layer: nn.Module) -> bool:
    return hasattr(layer, "get_delta_weight") and hasattr(layer, "lora_A")


def _merges(layer: nn.Module) -> bool:
    """True for a linear layer, perhaps under LoRA, whose weight is all that acts on its input."""
    if _is_lora(layer):
        lora: Any = layer
        plain = not lora.merged and not lora.disable_adapters and not any(lora.use_dora.values())
        return plain and _merges(lora.base_layer)
    whole = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.weight.numel() > 0
    return whole and not layer._forward_hooks and not layer._forward_pre_hooks

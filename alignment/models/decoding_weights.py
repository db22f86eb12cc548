"""The weights of a decoder while responses are decoded: fewer products, each in the type that it is computed in.

A step of decoding reads every weight for a few tokens, so that starting its kernels takes longer than they run. Within
`decoding_weights` queries, keys and values are one product, as are the gate and the first layer of a feed-forward, and the
low-rank updates of LoRA are part of their matrices. That takes a copy of these weights, which is made where one is needed
anyway, to round or to merge them, and for small models.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from alignment.models.layers.attention import Attention, CrossAttention, Joined
from alignment.models.layers.feedforward import FeedForward
from alignment.models.transformer import Transformer

SMALL = 64 * 2**20  # bytes of a model's joined weights that are copied for the sake of fewer products alone


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

    groups = [(module, layers) for module in trunk.modules() if (layers := _read_together(module))]
    dtype = _computing_type(trunk.embed.weight)
    small = sum(layer.weight.nbytes for _, layers in groups for layer in layers) <= SMALL
    for module, layers in groups:
        if small or any(_is_lora(layer) or layer.weight.dtype != dtype for layer in layers):
            change(module, "joined", _joined(layers, dtype))
    for module in [*trunk.modules()]:
        for name, layer in module.named_children():
            if _is_lora(layer) and _merges(layer):
                weight, bias = _joined([layer], dtype)
                with torch.device("meta"):
                    merged = nn.Linear(layer.in_features, layer.out_features, bias=False)
                merged.weight = nn.Parameter(weight, requires_grad=False)
                merged.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
                change(module, name, merged)


def _read_together(module: nn.Module) -> list[Any]:
    """The layers of a module that read one input and can be one product; empty: there are none."""
    layers: list[Any] = []
    if isinstance(module, Attention) and not isinstance(module, CrossAttention):
        layers = [module.query, module.key, module.value]
    elif isinstance(module, FeedForward) and module.gate is not None:
        layers = [module.gate, module.up]
    return layers if all(map(_merges, layers)) else []


def _joined(layers: Sequence[Any], dtype: torch.dtype) -> Joined:
    """One weight [sum of outputs, inputs] and bias of several layers, their updates merged."""
    weights = [sum(_updates(layer), layer.weight).to(dtype) for layer in layers]
    biases = [layer.bias for layer in layers]
    return torch.cat(weights), None if biases[0] is None else torch.cat(biases).to(dtype)


def _updates(layer: Any) -> Iterator[Tensor]:
    if _is_lora(layer):
        yield from (layer.get_delta_weight(name) for name in layer.active_adapters if name in layer.lora_A)


def _is_lora(layer: nn.Module) -> bool:
    return hasattr(layer, "get_delta_weight") and hasattr(layer, "lora_A")


def _merges(layer: Any) -> bool:
    """True for a linear layer, perhaps under LoRA, whose weight is all that acts on its input."""
    if _is_lora(layer):
        plain = not layer.merged and not layer.disable_adapters and not any(layer.use_dora.values())
        return plain and _merges(layer.base_layer)
    whole = type(layer) is nn.Linear and type(layer.weight) is nn.Parameter and layer.weight.numel() > 0
    return whole and not layer._forward_hooks and not layer._forward_pre_hooks


def _computing_type(weight: Tensor) -> torch.dtype:
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype

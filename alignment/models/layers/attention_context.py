"""Builds each layer's `AttentionContext` for one forward: what layers have in common (masks, angles, biases) is made once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.layers.cross_attention import key_mask
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import PaddedLayout, distances, pack, visible
from alignment.models.layers.rotary import Rotary, Rotation
from alignment.models.layers.sdpa import Look, NewTokens, look_at_documents, look_with_kernel
from alignment.models.spec import AttentionSpec, BlockSpec
from alignment.models.spec_disentangled import DisentangledSpec
from alignment.models.spec_positions import LongScaling, RotarySpec
from alignment.ragged import Ragged

KERNEL_WIDEST, KERNEL_MULTIPLE = 256, 8  # head widths that the variable-length kernel takes


class Bearings(NamedTuple):
    """Modules that turn places into angles and distances into biases, shared by all layers of a trunk."""

    rotaries: Mapping[RotarySpec, Rotary]
    distance: nn.Module | None


def rotations(
    layers: Sequence[BlockSpec], bearings: Bearings, places: Tensor, longest: int, sizes: Callable[[], Tensor]
) -> list[Rotation | None]:
    """Angles for each layer, [N] places; layers alike share them."""
    made = {spec: rotary(places, longest, sizes) for spec, rotary in bearings.rotaries.items()}
    specs = [getattr(layer.attention, "rotary", None) for layer in layers]
    return [None if spec is None else made[spec] for spec in specs]


def document_looks(
    layers: Sequence[BlockSpec], bearings: Bearings, batch: Ragged, packing: PaddedLayout, prefix: Tensor | None
) -> list[Look]:
    """How each layer sees whole documents, padded to rectangles. `prefix` [layers, 2, P, KV, K] precedes all of them."""
    offset = 0 if prefix is None else prefix.shape[2]

    @cache
    def masks(causal: bool, window: int | None, biased: bool) -> list[Tensor | None]:
        distance = bearings.distance if biased else None
        rectangles = zip(packing.groups, packing.lengths, strict=True)
        return [
            rectangle_mask(lengths, columns, offset, causal, window, distance, batch.tokens.device)
            for (_, columns), lengths in rectangles
        ]

    looks: list[Look] = []
    for layer, block in enumerate(layers):
        spec = block.attention
        if isinstance(spec, DisentangledSpec):
            if prefix is not None:
                raise UserError("attention on content and place apart takes no prefix; use LoRA instead")
            looks.append(_look_of_its_own)
            continue
        own_prefix = None if prefix is None else prefix[layer]
        biased = spec.distance is not None
        looks.append(look_at_documents(packing, spec, masks(spec.causal, spec.window, biased), own_prefix))
    return looks


def _look_of_its_own(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    raise ValueError("this layer's attention does its own looking")


def rectangle_mask(
    lengths: Sequence[int],
    columns: int,
    offset: int,
    causal: bool,
    window: int | None,
    distance: nn.Module | None,
    device: torch.device | str,
) -> Tensor | None:
    """What a rectangle's scores need beyond the causal flag: booleans, or numbers to add; None where nothing.

    Args:
        lengths: real tokens of each row.
        columns: tokens of each row, padding included; `offset` prefix slots come before them as keys.
        distance: gives biases for distances, [Q, S] -> [H, Q, S].

    Returns:
        None, [1 or B, 1 or H, columns, offset + columns], or [B, 1, 1, columns].
    """
    keys = offset + columns
    windowed = window is not None and window < keys
    real = None if causal else key_mask([offset + length for length in lengths], keys, device)
    if not windowed and distance is None and not (causal and offset):
        return real
    apart = distances(columns, keys, device)
    seen = visible(apart, causal, window)[None, None]
    if real is not None:
        # A padded query may be out of reach of every real key; it then sees itself, for a softmax over nothing is NaN.
        seen = (seen & real) | (apart == 0)
    return seen if distance is None else distance(apart)[None].masked_fill(~seen, -torch.inf)


def kernel_looks(layers: Sequence[BlockSpec], batch: Ragged) -> list[Look]:
    """The same through the variable-length kernel."""

    @cache
    def look(spec: Hashable) -> Look:
        assert isinstance(spec, AttentionSpec)
        return look_with_kernel(batch.starts, max(batch.lengths), spec)

    return [look(layer.attention) for layer in layers]


def kernel_applies(layers: Sequence[BlockSpec], weight: Tensor, training: bool) -> bool:
    """Whether every layer is plain enough for the variable-length kernel, and the device has it."""
    return (
        _in_half_precision_on_cuda(weight)
        and has_kernel(weight.device)
        and all(
            isinstance(spec, AttentionSpec)
            and spec.head_dim <= KERNEL_WIDEST
            and spec.head_dim % KERNEL_MULTIPLE == 0
            and spec.softcap is None
            and spec.distance is None
            and not (training and spec.dropout)
            for spec in (layer.attention for layer in layers)
        )
    )


def has_kernel(device: torch.device | int) -> bool:
    """Whether a CUDA device is new enough for the variable-length kernel: compute capability 8.0 (Ampere) and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _in_half_precision_on_cuda(weight: Tensor) -> bool:
    if not weight.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return dtype in (torch.bfloat16, torch.float16)


def pack_documents(layers: Sequence[BlockSpec], batch: Ragged) -> PaddedLayout:
    """The batch's documents as rectangles."""
    return pack(batch.lengths, layers[0].attention.heads, batch.tokens.device)


def step_masks(
    layers: Sequence[BlockSpec], bearings: Bearings, places: Tensor, addresses: Tensor, width: int
) -> list[NewTokens]:
    """For each layer what one new token per row, at `places` [B], may see of `width` slots."""
    apart = torch.arange(width, device=places.device) - places[:, None, None]  # [B, 1, width]

    @cache
    def new(window: int | None, biased: bool) -> NewTokens:
        seen = visible(apart, True, window)[:, None]
        if biased and bearings.distance is not None:
            seen = bearings.distance(apart).masked_fill(~seen, -torch.inf)
        return NewTokens(addresses, width, seen)

    specs = [layer.attention for layer in layers]
    return [new(spec.window, spec.distance is not None) for spec in specs if isinstance(spec, AttentionSpec)]


def check_original_context(cache: Cache, layers: Sequence[BlockSpec]) -> None:
    """Refuse a row's first token beyond the original context of stretched positions (Phi-3).

    All that the row holds was computed with other angles than a document of this length has.
    """
    scalings = {getattr(getattr(layer.attention, "rotary", None), "scaling", None) for layer in layers}
    for original in (scaling.original_positions for scaling in scalings if isinstance(scaling, LongScaling)):
        if cache.longest >= original and (cache.lengths == original).any():
            raise UserError(
                f"a document that began within the model's original {original} positions cannot be continued beyond "
                "them, for there all its positions are told otherwise; shorten the prompt or lower max_new_tokens so "
                f"that both fit into {original}, or give more than {original} tokens to begin with"
            )

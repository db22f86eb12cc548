"""Builds every layer's `AttentionContext` for one forward: masks, angles and biases that layers share are made once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.layers.attention import AttentionSpec
from alignment.models.layers.attention_context import AttentionContext, AttentionFn
from alignment.models.layers.block import BlockSpec
from alignment.models.layers.cross_attention import CachedCrossAttention, Source, cross_attentions, with_memory_write
from alignment.models.layers.disentangled import DisentangledSpec
from alignment.models.layers.kv_cache import Cache, CrossAttentionCache
from alignment.models.layers.padded_layout import (
    PaddedLayout,
    pad_layout,
    padding_mask,
    rectangle_mask,
    visible,
)
from alignment.models.layers.rotary import LongScaling, Rotary, RotarySpec, Rotation
from alignment.models.layers.sdpa import (
    CachedAttention,
    NewTokens,
    PaddedAttention,
    VarlenAttention,
    varlen_applies,
    with_cache_write,
)
from alignment.models.layers.shared_layout import continued_mask, piece_starts, shared_keys, shared_layout
from alignment.ragged import Ragged, SharedPrompts


class PositionModules(NamedTuple):
    """Modules that turn positions into angles and relative positions into biases, shared by all layers of a trunk."""

    rotaries: Mapping[RotarySpec, Rotary]
    bias: nn.Module | None


class CacheWrite(NamedTuple):
    """Where the keys and values of a batch go: `addresses` [N * KV] of `cache`, from `Cache.addresses`."""

    cache: Cache
    addresses: Tensor


def training_contexts(
    layers: Sequence[BlockSpec],
    modules: PositionModules,
    batch: Ragged,
    *,
    parameter: Tensor,
    training: bool,
    prefix: Tensor | None = None,
    relative: Tensor | None = None,
    source: Source | None = None,
    cache_write: CacheWrite | None = None,
) -> list[AttentionContext]:
    """Each layer's context for whole documents, in training and in prefill.

    Args:
        parameter: any of the model's, for its type and device.
        training: whether dropout acts.
        prefix: keys and values in front of every document, [layers, 2, P, KV, K]; positions then start at P.
        relative: DeBERTa's vectors of relative positions, [2 * S, D].
        source: what an encoder read, one document for each of the batch's.
        cache_write: where keys and values are also written to.
    """
    if batch.shared is not None and not shares_prompts(layers):
        raise ValueError("this model's tokens see what follows them, so that no prompt is the same for two responses")
    offset = 0 if prefix is None else prefix.shape[2]
    layout = None
    if prefix is None and varlen_applies([layer.attention for layer in layers], parameter, training):
        attends = varlen_attentions(layers, batch)
    elif batch.shared is not None:
        attends = shared_attentions(layers, modules, batch, batch.shared, prefix=prefix)
    else:
        layout = pad_layout(batch.lengths, layers[0].attention.heads, batch.tokens.device)
        attends = padded_attentions(layers, modules, batch, layout, prefix)
    if cache_write is not None:
        attends = [with_cache_write(*cache_write, layer, attend) for layer, attend in enumerate(attends)]
    positions = batch.positions + offset if offset else batch.positions
    sizes = partial(_token_sizes, batch, offset)
    turns = rotations(layers, modules, positions, max(batch.lengths) + offset, sizes)
    memory = None if cache_write is None else cache_write.cache
    across = [None] * len(layers) if source is None else _cross_attentions(layers, source, batch, memory)
    return [
        AttentionContext(attend, turn, cross, layout, relative)
        for attend, turn, cross in zip(attends, turns, across, strict=True)
    ]


def decoding_contexts(layers: Sequence[BlockSpec], modules: PositionModules, cache: Cache) -> list[AttentionContext]:
    """Each layer's context for one new token per row of the cache, which stands at position `cache.lengths`."""
    check_original_context(cache, layers)
    positions, width, memory = cache.lengths, cache.longest + 1, cache.memory
    addresses = cache.addresses(torch.arange(len(positions), device=positions.device), positions)
    turns = rotations(layers, modules, positions, width, lambda: positions + 1)
    news = new_tokens(layers, modules, positions, addresses, width, dtype=cache.keys[0].dtype)
    return [
        AttentionContext(
            CachedAttention(cache, layer, new, block.attention),  # type: ignore[arg-type]
            turn,
            None if memory is None or block.cross is None else CachedCrossAttention(memory, layer, block.cross),
        )
        for layer, (block, turn, new) in enumerate(zip(layers, turns, news, strict=True))
    ]


def rotations(
    layers: Sequence[BlockSpec], modules: PositionModules, positions: Tensor, longest: int, sizes: Callable[[], Tensor]
) -> list[Rotation | None]:
    """The rotation of each layer's queries and keys at `positions` [N]; layers with one spec share it."""
    made = {spec: rotary(positions, longest, sizes) for spec, rotary in modules.rotaries.items()}
    specs = [getattr(layer.attention, "rotary", None) for layer in layers]
    return [None if spec is None else made[spec] for spec in specs]


def _token_sizes(batch: Ragged, offset: int) -> Tensor:
    """Tokens of the document each token belongs to, prefix included, of the longest one for a shared prompt's, [N]."""
    if batch.shared is None:
        sizes = batch.sizes.repeat_interleave(batch.sizes, output_size=len(batch.tokens))
        return sizes + offset
    longest = [0] * len(batch.shared.lengths)
    for prompt, length in zip(batch.shared.of_documents, batch.lengths, strict=True):
        if prompt is not None:
            longest[prompt] = max(longest[prompt], length)
    sizes = torch.tensor([*longest, *batch.lengths])
    sizes = sizes.repeat_interleave(torch.tensor(batch.pieces), output_size=len(batch.tokens))
    return sizes.to(batch.tokens.device) + offset


def padded_attentions(
    layers: Sequence[BlockSpec], modules: PositionModules, batch: Ragged, layout: PaddedLayout, prefix: Tensor | None
) -> list[AttentionFn]:
    """Each layer's attention inside whole documents, padded to rectangles; see `training_contexts`."""
    offset = 0 if prefix is None else prefix.shape[2]

    @cache
    def masks(causal: bool, window: int | None, biased: bool) -> list[Tensor | None]:
        bias = modules.bias if biased else None
        return [
            rectangle_mask(
                lengths, columns, offset=offset, causal=causal, window=window, bias=bias, device=batch.tokens.device
            )
            for (_, columns), lengths in zip(layout.groups, layout.lengths, strict=True)
        ]

    attends: list[AttentionFn] = []
    for layer, block in enumerate(layers):
        spec = block.attention
        if isinstance(spec, DisentangledSpec):
            if prefix is not None:
                raise UserError("disentangled attention takes no prefix; use LoRA instead")
            attends.append(_no_attention)
            continue
        own_prefix = None if prefix is None else prefix[layer]
        layer_masks = masks(spec.causal, spec.window, spec.position_bias is not None)
        attends.append(PaddedAttention(layout, spec, layer_masks, own_prefix))
    return attends


def shared_attentions(
    layers: Sequence[BlockSpec],
    modules: PositionModules,
    batch: Ragged,
    shared: SharedPrompts,
    *,
    prefix: Tensor | None,
) -> list[AttentionFn]:
    """Each layer's attention in a batch with shared prompts: a document's own tokens read its prompt's keys too."""
    offset, device = 0 if prefix is None else prefix.shape[2], batch.tokens.device
    specs = [layer.attention for layer in layers if isinstance(layer.attention, AttentionSpec)]
    layout = shared_layout(batch.lengths, shared, specs[0].heads, device)

    @cache
    def masks(window: int | None, biased: bool) -> list[Tensor | None]:
        bias = modules.bias if biased else None
        return [
            continued_mask(rectangle, offset=offset, window=window, bias=bias, device=device)
            for rectangle in layout.rectangles
        ]

    return [
        PaddedAttention(
            layout.queries,
            spec,
            masks(spec.window, spec.position_bias is not None),
            None if prefix is None else prefix[layer],
            layout.keys,
        )
        for layer, spec in enumerate(specs)
    ]


def shares_prompts(layers: Sequence[BlockSpec]) -> bool:
    """Whether tokens see only what is before them in every layer: then a prompt is the same for all of its responses."""
    return all(isinstance(layer.attention, AttentionSpec) and layer.attention.causal for layer in layers)


def _no_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    raise ValueError("disentangled attention computes its own scores and does not call `attend`")


def varlen_attentions(layers: Sequence[BlockSpec], batch: Ragged) -> list[AttentionFn]:
    """Each layer's attention inside whole documents through the variable-length kernel."""

    @cache
    def attention(spec: Hashable) -> AttentionFn:
        assert isinstance(spec, AttentionSpec)
        return VarlenAttention(starts, max(batch.pieces), spec, keys)

    starts, keys = batch.starts, None
    if batch.shared is not None:
        keys = shared_keys(batch.lengths, batch.shared, batch.tokens.device)
        starts = piece_starts(batch)
    return [attention(layer.attention) for layer in layers]


def _cross_attentions(layers: Sequence[BlockSpec], source: Source, batch: Ragged, cache: Cache | None) -> list:
    """Each layer's attention on an encoder's states; with a cache, their keys and values are kept there."""
    attends = cross_attentions([layer.cross for layer in layers if layer.cross is not None], source, batch)
    if cache is None:
        return attends
    cache.memory = CrossAttentionCache(padding_mask(source.batch.sizes, max(source.batch.lengths)))
    return [with_memory_write(cache.memory, source, attend) for attend in attends]


def new_tokens(
    layers: Sequence[BlockSpec],
    modules: PositionModules,
    positions: Tensor,
    addresses: Tensor,
    width: int,
    *,
    dtype: torch.dtype | None = None,
) -> list[NewTokens]:
    """For each layer which of `width` slots one new token per row, at `positions` [B], attends to.

    Args:
        dtype: of masks that are added to the scores; None: they are booleans.
    """
    relative = torch.arange(width, device=positions.device) - positions[:, None, None]  # [B, 1, width]

    @cache
    def new(window: int | None, biased: bool) -> NewTokens:
        seen = visible(relative, True, window)[:, None]
        if biased and modules.bias is not None:
            seen = modules.bias(relative).masked_fill(~seen, -torch.inf)
        elif dtype is not None:  # what the kernel would make of booleans, once for all layers
            seen = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return NewTokens(addresses, width, seen)

    specs = [layer.attention for layer in layers]
    return [new(spec.window, spec.position_bias is not None) for spec in specs if isinstance(spec, AttentionSpec)]


def check_original_context(cache: Cache, layers: Sequence[BlockSpec]) -> None:
    """Refuse a row's first token beyond the original context of LongRoPE scaling (Phi-3).

    All keys that the row holds were rotated by other angles than a document of the new length has.
    """
    scalings = {getattr(getattr(layer.attention, "rotary", None), "scaling", None) for layer in layers}
    for original in (scaling.original_positions for scaling in scalings if isinstance(scaling, LongScaling)):
        if cache.longest >= original and (cache.lengths == original).any():
            raise UserError(
                f"a document that began within the model's original {original} positions cannot be continued beyond "
                "them, because there all its positions have other angles; shorten the prompt or lower max_new_tokens "
                f"so that both fit into {original}, or give more than {original} tokens to begin with"
            )

"""Attention of several new tokens per row behind what a cache row already holds: a prompt whose beginning is known.

One new token per row of the whole cache is `decoding_contexts`' in layer_contexts.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache as remember
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.models.layers.attention import AttentionSpec
from alignment.models.layers.attention_context import AttentionContext
from alignment.models.layers.block import BlockSpec
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.layer_contexts import PositionModules, rotations
from alignment.models.layers.padded_layout import PaddedLayout, choose_columns, in_rectangles, layout_of, pad, unpad
from alignment.models.layers.rotary import DynamicScaling, LongScaling
from alignment.models.layers.sdpa import attend
from alignment.models.layers.shared_layout import SharedRectangle, continued_mask
from alignment.ragged import Ragged


class ContinuedRows(NamedTuple):
    """New tokens behind documents in a cache, which already count in its lengths.

    Attributes:
        positions: of each new token in its document, which is its slot in the row, [N].
        addresses: where its keys and values are written, from `Cache.addresses`, [N * KV].
        sizes: tokens of the document that each new token belongs to, [N].
        longest: tokens of the longest document.
        layout: of the new tokens.
        rows: cache rows of each rectangle's documents.
        rectangles: what their queries and keys are.
    """

    positions: Tensor
    addresses: Tensor
    sizes: Tensor
    longest: int
    layout: PaddedLayout
    rows: tuple[Tensor, ...]
    rectangles: tuple[SharedRectangle, ...]


def continue_rows(batch: Ragged, cache: Cache, rows: Tensor, heads: int) -> ContinuedRows:
    """Lengthen cache `rows` [B], none of them empty, by the documents of the batch.

    Raises:
        ValueError: an empty row, more tokens than a row has room for, or a gradient that a cache would not keep.
    """
    if torch.is_grad_enabled():
        raise ValueError("a cache keeps no gradient: continue its rows under torch.no_grad()")
    lengths = cache.lengths[rows]
    before: list[int] = lengths.tolist()
    if not all(before):
        raise ValueError("a row without a token cannot be continued: fill it by a prefill")
    whole = [held + new for held, new in zip(before, batch.lengths, strict=True)]
    if max(whole) > cache.capacity:
        raise ValueError(f"the cache holds {cache.capacity} tokens per row, a document needs {max(whole)}")
    device, count = batch.tokens.device, len(batch.tokens)
    held, own_rows, sizes = (
        each.repeat_interleave(batch.sizes, output_size=count) for each in (lengths, rows, lengths + batch.sizes)
    )
    positions = batch.positions + held
    grouped = in_rectangles(choose_columns(batch.lengths, heads))
    query_columns = [(group, max(batch.lengths[i] for i in group)) for group, _ in grouped]
    rectangles = tuple(
        SharedRectangle(
            tuple(before[i] for i in group),
            tuple(batch.lengths[i] for i in group),
            columns,
            max(whole[i] for i in group),
        )
        for group, columns in query_columns
    )
    cache.lengths[rows] = lengths + batch.sizes
    cache.longest = max(cache.longest, *whole)
    return ContinuedRows(
        positions, cache.addresses(own_rows, positions), sizes, max(whole),
        layout_of(batch.lengths, query_columns, device),
        tuple(rows[torch.tensor(group, device=device)] for group, _ in grouped), rectangles,
    )  # fmt: skip


def continuing_contexts(
    layers: Sequence[BlockSpec], modules: PositionModules, cache: Cache, new: ContinuedRows
) -> list[AttentionContext]:
    """Each layer's context for new tokens that read their cache row and, causally, themselves."""
    device = new.positions.device

    @remember
    def masks(window: int | None, biased: bool) -> tuple[Tensor | None, ...]:
        bias = modules.bias if biased else None
        return tuple(
            continued_mask(rectangle, offset=0, window=window, bias=bias, device=device) for rectangle in new.rectangles
        )

    turns = rotations(layers, modules, new.positions, new.longest, lambda: new.sizes)
    contexts = []
    for layer, (block, turn) in enumerate(zip(layers, turns, strict=True)):
        spec = block.attention
        if not isinstance(spec, AttentionSpec) or not spec.causal or block.cross is not None:
            raise ValueError("only the rows of a decoder without an encoder can be continued")
        mask = masks(spec.window, spec.position_bias is not None)
        contexts.append(AttentionContext(ContinuedAttention(cache, layer, new, spec, mask), turn))
    return contexts


@dataclass(frozen=True)
class ContinuedAttention:
    """Attention of new tokens over their rows of the cache; their keys and values are written there first.

    Attributes:
        masks: of each rectangle, from `continued_mask`.
    """

    cache: Cache
    layer: int
    new: ContinuedRows
    spec: AttentionSpec
    masks: Sequence[Tensor | None]

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """query: [N, H, K]; key, value: [N, KV, K] -> [N, H, K]."""
        self.cache.write(self.layer, self.new.addresses, key, value)
        stores = self.cache.keys[self.layer], self.cache.values[self.layer]
        mixed = []
        queries = pad(query.to(stores[0].dtype), self.new.layout)
        for q, rows, rectangle, mask in zip(queries, self.new.rows, self.new.rectangles, self.masks, strict=True):
            k, v = (store[:, :, : rectangle.keys].index_select(0, rows).transpose(1, 2) for store in stores)
            mixed.append(attend(q, k, v, self.spec, mask=mask, causal=False, dropout=dropout))
        return unpad(mixed, self.new.layout)


def longest_continued(layers: Sequence[BlockSpec]) -> int | None:
    """Most tokens of a document whose beginning has the keys that it has alone; None: no limit.

    Beyond the original context of dynamic and LongRoPE scaling the angles of all tokens depend on the document's length.
    """
    rotaries = [layer.attention.rotary for layer in layers if isinstance(layer.attention, AttentionSpec)]
    scalings = [rotary.scaling for rotary in rotaries if rotary is not None]
    limits = [each.original_positions for each in scalings if isinstance(each, DynamicScaling | LongScaling)]
    return min(limits, default=None)

"""A decoder's view of what an encoder read: whole documents at once, or kept keys and values for decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.models.layers.kv_cache import CrossAttentionCache
from alignment.models.layers.padded_layout import PaddedLayout, gather, pad_layouts, seen_mask, spread
from alignment.models.layers.sdpa import CrossAttentionFn, attend, attend_from_one
from alignment.models.spec import AttentionSpec
from alignment.ragged import Ragged


@dataclass(frozen=True)
class Source:
    """What an encoder read, and its states, [M, D]."""

    states: Tensor
    batch: Ragged


def looks_across(specs: Sequence[AttentionSpec], source: Source, targets: Ragged) -> list[CrossAttentionFn]:
    """For each layer, attention of every target document on its source."""
    device = targets.tokens.device
    ours, theirs = pad_layouts(targets.lengths, source.batch.lengths, specs[0].heads, device)
    masks = [
        key_mask(lengths, columns, device) for lengths, (_, columns) in zip(theirs.lengths, theirs.groups, strict=True)
    ]
    return [look_at_source(spec, source.states, ours, theirs, masks) for spec in specs]


def key_mask(lengths: Sequence[int], columns: int, device: torch.device | str) -> Tensor | None:
    """[B, 1, 1, columns], True at real keys; None where all are."""
    return None if min(lengths) == columns else seen_mask(torch.tensor(lengths).to(device), columns)


def look_at_source(
    spec: AttentionSpec, states: Tensor, ours: PaddedLayout, theirs: PaddedLayout, masks: Sequence[Tensor | None]
) -> CrossAttentionFn:
    """Cross-attention from one layer's tokens on `states`."""

    def look(query: Tensor, remember: Callable[[Tensor], tuple[Tensor, Tensor]], dropout: float) -> Tensor:
        key, value = remember(states)
        rectangles = zip(spread(query, ours), spread(key, theirs), spread(value, theirs), masks, strict=True)
        return gather([attend(q, k, v, spec, mask, False, dropout) for q, k, v, mask in rectangles], ours)

    return look


def look_at_memory(memory: CrossAttentionCache, layer: int, spec: AttentionSpec) -> CrossAttentionFn:
    """Cross-attention from one new token per row on kept keys and values."""

    def look(query: Tensor, remember: Callable[[Tensor], tuple[Tensor, Tensor]], dropout: float) -> Tensor:
        return attend_from_one(query, memory.keys[layer], memory.values[layer], memory.mask, spec, dropout)

    return look


def remembering(memory: CrossAttentionCache, source: Source, look: CrossAttentionFn) -> CrossAttentionFn:
    """`look`, whose keys and values are also put into `memory`, as the next layer's."""
    lengths, width = source.batch.lengths, max(source.batch.lengths)

    def look_and_keep(query: Tensor, remember: Callable[[Tensor], tuple[Tensor, Tensor]], dropout: float) -> Tensor:
        key, value = remember(source.states)
        for store, x in ((memory.keys, key), (memory.values, value)):
            rows = torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True)
            store.append(rows.view(len(lengths), width, *x.shape[1:]).transpose(1, 2).contiguous())
        return look(query, lambda states: (key, value), dropout)

    return look_and_keep

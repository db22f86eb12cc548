"""Cross-attention on an encoder's states: on whole documents, or on kept keys and values in decoding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.models.layers.attention import AttentionSpec
from alignment.models.layers.attention_context import CrossAttentionFn
from alignment.models.layers.kv_cache import CrossAttentionCache
from alignment.models.layers.padded_layout import PaddedLayout, key_mask, pad, pad_layouts, unpad
from alignment.models.layers.sdpa import attend, attend_one_query
from alignment.ragged import Ragged

ProjectKeyValue = Callable[[Tensor], tuple[Tensor, Tensor]]  # states [M, D] -> keys and values, [M, KV, K] each


@dataclass(frozen=True)
class Source:
    """The documents that an encoder read, and its states, [M, D]."""

    states: Tensor
    batch: Ragged


@dataclass(frozen=True)
class PaddedCrossAttention:
    """Attention from every target document on its source document, one call per rectangle.

    Attributes:
        states: of the encoder, [M, D].
        targets, sources: layouts whose rectangles hold the same rows.
        masks: of each rectangle's keys, from `key_mask`.
    """

    spec: AttentionSpec
    states: Tensor
    targets: PaddedLayout
    sources: PaddedLayout
    masks: Sequence[Tensor | None]

    def __call__(self, query: Tensor, project_key_value: ProjectKeyValue, dropout: float) -> Tensor:
        """query: [N, H, K] -> [N, H, K]."""
        key, value = project_key_value(self.states)
        rectangles = zip(
            pad(query, self.targets), pad(key, self.sources), pad(value, self.sources), self.masks, strict=True
        )
        mixed = [attend(q, k, v, self.spec, mask=mask, causal=False, dropout=dropout) for q, k, v, mask in rectangles]
        return unpad(mixed, self.targets)


def cross_attentions(specs: Sequence[AttentionSpec], source: Source, targets: Ragged) -> list[CrossAttentionFn]:
    """Each layer's attention from every target document on its source."""
    device = targets.tokens.device
    target_layout, layout = pad_layouts(targets.lengths, source.batch.lengths, specs[0].heads, device)
    masks = [
        key_mask(lengths, columns, device) for lengths, (_, columns) in zip(layout.lengths, layout.groups, strict=True)
    ]
    return [PaddedCrossAttention(spec, source.states, target_layout, layout, masks) for spec in specs]


@dataclass(frozen=True)
class CachedCrossAttention:
    """Attention from one new token per row on the keys and values that were kept of its source."""

    memory: CrossAttentionCache
    layer: int
    spec: AttentionSpec

    def __call__(self, query: Tensor, project_key_value: ProjectKeyValue, dropout: float) -> Tensor:
        """query: [B, H, K] -> [B, H, K]."""
        memory, layer = self.memory, self.layer
        keys, values = memory.keys[layer], memory.values[layer]
        return attend_one_query(query, keys, values, self.spec, mask=memory.mask, dropout=dropout)


def with_memory_write(memory: CrossAttentionCache, source: Source, attend: CrossAttentionFn) -> CrossAttentionFn:
    """`attend` that also appends the keys and values of its layer to `memory`."""
    lengths, width = source.batch.lengths, max(source.batch.lengths)

    def write_and_attend(query: Tensor, project_key_value: ProjectKeyValue, dropout: float) -> Tensor:
        key, value = project_key_value(source.states)
        for store, x in ((memory.keys, key), (memory.values, value)):
            rows = torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True)
            store.append(rows.view(len(lengths), width, *x.shape[1:]).transpose(1, 2).contiguous())
        return attend(query, lambda states: (key, value), dropout)

    return write_and_attend

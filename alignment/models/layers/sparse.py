"""Attention of encoders for long documents: windows with global tokens (Longformer), blocks with random ones (BigBird).

Cost and memory grow with the length of a document; `windowed.attend_chunks` computes the scores.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.attention import AttentionContext, AttentionSpec
from alignment.models.layers.padded_layout import (
    GlobalTokens,
    PaddedLayout,
    key_mask,
    key_masks,
    pad,
    padding_mask,
    unpad,
)
from alignment.models.layers.sdpa import attend
from alignment.models.layers.windowed import ExtraKeys, attend_chunks, chunked, relative_positions

Parts = tuple[Tensor, Tensor, Tensor]  # of a rectangle, [B, T, H, K]: queries, keys and values
PAPER_LENGTHS = (1024, 3072, 4096)  # tokens, whole blocks, at which BigBird draws its blocks by the authors' first plan


@dataclass(frozen=True)
class _SparseSpec:
    attention: AttentionSpec  # heads, biases and dropout
    causal: Literal[False] = field(default=False, kw_only=True)

    @property
    def heads(self) -> int:
        return self.attention.heads


@dataclass(frozen=True)
class GlobalWindowSpec(_SparseSpec):
    """Tokens see those at most `reach` away and the global tokens, which see everything (Longformer)."""

    reach: int

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return GlobalWindowAttention(self, width)


@dataclass(frozen=True)
class BlockSparseSpec(_SparseSpec):
    """Blocks of `block` tokens see their neighbors, the first and the last block, and `random` others (BigBird).

    Attributes:
        max_positions: of the model, tokens.
        seed: of the random blocks, which are the same in every forward; in eval mode they all are the first block.
    """

    block: int
    random: int
    max_positions: int
    seed: int

    @property
    def longest_full(self) -> int:
        """Tokens of the longest document whose tokens all see each other."""
        return (5 + 2 * self.random) * self.block

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return BlockSparseAttention(self, width)


class SparseAttention(nn.Module):
    """output(the mix of the values that each token sees)."""

    data_dependent_shapes = True  # torch.compile leaves its forward out; see compilation.py

    def __init__(self, spec: _SparseSpec, width: int):
        super().__init__()
        attention = spec.attention
        inner = attention.heads * attention.head_dim
        self.query, self.key, self.value = (nn.Linear(width, inner, bias=attention.bias) for _ in range(3))
        self.output = nn.Linear(inner, width)
        self.spec = spec
        self.attention = attention

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        if context.layout is None:
            raise ValueError("this attention needs documents laid out in rectangles")
        return self.output(unpad(self._mixed(x, context, context.layout), context.layout).flatten(1))

    def _mixed(self, x: Tensor, context: AttentionContext, layout: PaddedLayout) -> list[Tensor]:
        """The mix of each rectangle's tokens, [B, T, H, K]."""
        raise NotImplementedError

    def _heads(self, x: Tensor, layer: nn.Module) -> Tensor:
        return layer(x).unflatten(-1, (self.attention.heads, -1))

    @property
    def _dropout(self) -> float:
        return self.attention.dropout if self.training else 0.0


class GlobalWindowAttention(SparseAttention):
    """A token sees the tokens at most `reach` away and the global ones; a global token sees all, by other projections.

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1.
    """

    def __init__(self, spec: GlobalWindowSpec, width: int):
        super().__init__(spec, width)
        inner = self.output.in_features
        self.query_global, self.key_global, self.value_global = (nn.Linear(width, inner) for _ in range(3))
        self.reach = spec.reach

    def _mixed(self, x: Tensor, context: AttentionContext, layout: PaddedLayout) -> list[Tensor]:
        chosen = context.global_tokens
        masks = key_masks(layout, x.device)
        parts = (pad(self._heads(x, layer), layout) for layer in (self.query, self.key, self.value))
        mixed = map(self._local, zip(*parts, strict=True), masks, chosen or [None] * len(masks))
        if chosen is None:
            return list(mixed)
        keys, values = (pad(self._heads(x, layer), layout) for layer in (self.key_global, self.value_global))
        return list(map(self._with_global, mixed, zip(pad(x, layout), keys, values, strict=True), masks, chosen))

    def _local(self, parts: Parts, real: Tensor | None, chosen: GlobalTokens | None) -> Tensor:
        """The mix of the tokens near each and of the global ones, [B, T, H, K]."""
        q, k, v = parts
        length = q.shape[1]
        extra = None
        seen = torch.ones(q.shape[:2], dtype=torch.bool, device=q.device) if real is None else real[:, 0, 0]
        if chosen is not None:
            at = torch.arange(len(q), device=q.device)[:, None], chosen.columns
            keys, values = (part[at].transpose(1, 2)[:, None] for part in (k, v))
            extra = ExtraKeys(keys, values, chosen.real[:, None, None, None])
            seen = seen & ~torch.zeros_like(seen).scatter(1, chosen.columns, chosen.real)
        chunk = min(self.reach, length)
        relative = relative_positions(chunk, chunk, chunk, q.device)
        near = (relative.abs() <= self.reach) & chunked(seen[:, None, :, None], chunk, chunk, chunk).mT
        # Padding and global tokens, whose mix is not used, see themselves: a softmax needs something.
        mask = near | (relative == 0)
        q, k, v = (part.transpose(1, 2) for part in parts)
        return attend_chunks(
            q,
            k,
            v,
            self.attention,
            mask=mask,
            chunk=chunk,
            before=chunk,
            after=chunk,
            extra=extra,
            dropout=self._dropout,
        ).transpose(1, 2)

    def _with_global(self, mixed: Tensor, parts: Parts, real: Tensor | None, chosen: GlobalTokens) -> Tensor:
        """`mixed` with what the global tokens make of all tokens in their places; `parts`: states, keys and values."""
        if not chosen.columns.shape[1]:
            return mixed
        x, k, v = parts
        at = torch.arange(len(x), device=x.device)[:, None], chosen.columns
        q, k, v = (part.transpose(1, 2) for part in (self._heads(x[at], self.query_global), k, v))
        attended = attend(q, k, v, self.attention, mask=real, dropout=self._dropout).transpose(1, 2)
        return mixed.index_put(at, torch.where(chosen.real[..., None, None], attended, mixed[at]))


class BlockSparseAttention(SparseAttention):
    """Documents in blocks; a block sees itself and its neighbors, the first and the last block, and some random ones.

    The first and the last block see everything. In a short document all tokens see each other.

    Source: Zaheer et al. 2020, arXiv:2007.14062, section 2 and appendix D; what is random, transformers,
    `models/big_bird`.
    """

    spec: BlockSparseSpec

    def _mixed(self, x: Tensor, context: AttentionContext, layout: PaddedLayout) -> list[Tensor]:
        parts = (pad(self._heads(x, layer), layout) for layer in (self.query, self.key, self.value))
        return list(map(self._rectangle, layout.lengths, *parts))

    def _rectangle(self, lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The mix of each row's tokens, [B, T, H, K]; short rows and long ones apart."""
        mixed = torch.zeros_like(q)
        for is_long, mix in ((False, self._full), (True, self._sparse)):
            rows = [row for row, length in enumerate(lengths) if (length > self.spec.longest_full) == is_long]
            if rows:
                sizes = [lengths[row] for row in rows]
                index = torch.tensor(rows, device=q.device)
                part = mix(sizes, *(x[index, : max(sizes)].transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
                mixed = mixed.index_copy(0, index, F.pad(part, (0, 0, 0, 0, 0, q.shape[1] - max(sizes))))
        return mixed

    def _full(self, lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The mix of all tokens, [B, H, T, K]."""
        return attend(q, k, v, self.attention, mask=key_mask(lengths, q.shape[2], q.device), dropout=self._dropout)

    def _sparse(self, lengths: Sequence[int], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The mix of the blocks that each block sees, [B, H, T, K]; without dropout, as in transformers' class."""
        size = self.spec.block
        length = q.shape[2]
        device = q.device
        counts = [-(-tokens // size) for tokens in lengths]
        q, k, v = (F.pad(x, (0, 0, 0, max(counts) * size - length)) for x in (q, k, v))
        real = padding_mask(torch.tensor(lengths, device=device), q.shape[2])  # [B, 1, 1, T]
        block = torch.arange(max(counts), device=device)
        last = torch.tensor(counts, device=device)[:, None] - 1
        between = ((block > 0) & (block < last)).repeat_interleave(size, 1)  # the ends are among the extra keys
        near = chunked(real.mT & between[:, None, :, None], size, size, size).mT
        chosen = torch.stack([self._chosen(count, max(counts)) for count in counts]).to(device)  # [B, blocks, H, 2 + R]
        row = torch.arange(len(q), device=device)[:, None]
        at = row[..., None, None], chosen, torch.arange(q.shape[1], device=device)[:, None]
        seen = real.view(len(q), -1, size)[at[:2]].flatten(3)
        keys, values = (chunked(x, size)[at].flatten(3, 4) for x in (k, v))
        extra = ExtraKeys(keys, values, seen.unsqueeze(3))
        mixed = attend_chunks(q, k, v, self.attention, mask=near, chunk=size, before=size, after=size, extra=extra)
        ends = row, torch.cat([torch.zeros_like(last), last], 1)
        asked = chunked(q, size)[ends].transpose(1, 2)  # [B, H, 2, block, K]
        whole = attend(asked.flatten(2, 3), k, v, self.attention, mask=real, dropout=0.0).view_as(asked)
        blocks = mixed.unflatten(2, (-1, size)).transpose(1, 2).index_put(ends, whole.transpose(1, 2))
        return blocks.transpose(1, 2).flatten(2, 3)[:, :, :length]

    def _chosen(self, count: int, columns: int) -> Tensor:
        """The blocks that each of `count` sees besides its neighbors, ends and random ones; [columns, H, 2 + R]."""
        ends = torch.tensor([0, count - 1]).expand(self.spec.heads, count - 2, 2)
        others = (
            torch.tensor(random_blocks(self.spec, count))
            if self.training
            else ends[..., :1].expand(-1, -1, self.spec.random)
        )
        return F.pad(torch.cat([ends, others], -1).transpose(0, 1), (0, 0, 0, 0, 1, columns - count + 1))


@lru_cache(maxsize=1024)
def random_blocks(spec: BlockSparseSpec, count: int) -> np.ndarray:
    """Random blocks that each block but the ends sees in training, of a document of `count` blocks, [H, count - 2, R].

    They are drawn as transformers draws them, whose layers begin with their number as the seed in every forward.
    """
    draw = np.random.RandomState(spec.seed)
    most = spec.max_positions // spec.block
    if count * spec.block in PAPER_LENGTHS and count <= most:
        drawn = [[_drawn_far(spec, draw, block, most) for block in range(1, most - 1)] for _ in range(spec.heads)]
        return np.array(drawn, np.int64)[:, : count - 2]
    drawn = [[_drawn_near(spec, draw, block) for _ in range(spec.heads)] for block in range(1, count - 1)]
    return np.array(drawn, np.int64).swapaxes(0, 1)


def _drawn_near(spec: BlockSparseSpec, draw: np.random.RandomState, block: int) -> list[int]:
    """Random blocks among the first 5 + 2 R, none of which the block sees anyway."""
    count = 5 + 2 * spec.random
    seen = {0, count - 1, block - 1, block, block + 1} | {1: {count - 2}, count - 2: {1}}.get(block, set())
    return [other for other in draw.permutation(count).tolist() if other not in seen][: spec.random]


def _drawn_far(spec: BlockSparseSpec, draw: np.random.RandomState, block: int, most: int) -> list[int]:
    """Random blocks among the first 1,024 tokens, by the authors' plan for a document of `most` blocks."""
    last = 1024 // spec.block - 1 if spec.block < 512 else most - 1
    middle = np.arange(1, most - 1)
    if block <= 2:
        middle = middle[block + 1 : last]
    elif block >= most - 3 or block - 2 > last:
        middle = middle[:last]
    elif block + 1 == last:
        middle = middle[: block - 2]
    else:
        middle = np.concatenate([middle[: block - 2], middle[block + 1 : last]])
    return draw.permutation(middle)[: spec.random].tolist()

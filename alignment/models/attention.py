"""Multi-head and grouped-query attention, and the ways to look: at whole documents, or from one new token per row.

One scaled-dot-product call, or one call of the variable-length kernel, does the work. No cross-attention.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.cache import Cache
from alignment.models.masks import Packing, causal_mask, gather, spread
from alignment.models.positions import Rotation, rotate
from alignment.models.spec import AttentionSpec

# (queries [N, H, K], keys [N, KV, K], values [N, KV, K], scale, dropout) -> [N, H, K]
Look = Callable[[Tensor, Tensor, Tensor, float, float], Tensor]


class Attention(nn.Module):
    """output(look(query(x), key(x), value(x))); which tokens are in sight is for `look` to know.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; grouped-query: Ainslie et al. 2023, arXiv:2305.13245.
    """

    def __init__(self, spec: AttentionSpec, width: int):
        super().__init__()
        self.query = nn.Linear(width, spec.heads * spec.head_width, bias=spec.bias)
        self.key = nn.Linear(width, spec.key_value_heads * spec.head_width, bias=spec.bias)
        self.value = nn.Linear(width, spec.key_value_heads * spec.head_width, bias=spec.bias)
        self.output = nn.Linear(spec.heads * spec.head_width, width, bias=spec.bias)
        self.spec = spec

    def forward(self, x: Tensor, rotation: Rotation | None, look: Look) -> Tensor:
        """x: [N, D] -> [N, D]."""
        head_width = self.spec.head_width
        query = self.query(x).view(len(x), -1, head_width)
        key = self.key(x).view(len(x), -1, head_width)
        value = self.value(x).view(len(x), -1, head_width)
        if rotation is not None:
            query, key = rotate(query, rotation), rotate(key, rotation)
        mixed = look(query, key, value, self.spec.scale, self.spec.dropout if self.training else 0.0)
        return self.output(mixed.reshape(len(x), -1))


def look_at_documents(packing: Packing, prefix: Tensor | None) -> Look:
    """Causal attention inside each document, padded to rectangles; `prefix` [2, P, KV, K] precedes every one."""

    def look(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        rectangles = zip(spread(query, packing), spread(key, packing), spread(value, packing), strict=True)
        return gather([_causal(q, k, v, prefix, scale, dropout) for q, k, v in rectangles], packing)

    return look


def _causal(q: Tensor, k: Tensor, v: Tensor, prefix: Tensor | None, scale: float, dropout: float) -> Tensor:
    """q: [B, T, H, K], k and v: [B, T, KV, K] -> [B, T, H, K]."""
    mask = None
    if prefix is not None:
        k, v = (_in_front(part, x) for part, x in zip(prefix, (k, v), strict=True))
        mask = causal_mask(q.shape[1], k.shape[1], q.device)
    mixed = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        dropout_p=dropout,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return mixed.transpose(1, 2)


def _in_front(prefix: Tensor, x: Tensor) -> Tensor:
    """prefix [P, KV, K] before every row of x [B, T, KV, K]."""
    return torch.cat([prefix.to(x.dtype).expand(len(x), *prefix.shape), x], dim=1)


def look_with_kernel(starts: Tensor, longest: int) -> Look:
    """The same on CUDA in half precision: the variable-length kernel takes documents end to end as they are."""
    from torch.nn.attention.varlen import varlen_attn

    def look(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        if dropout:
            raise ValueError("the variable-length kernel has no attention dropout; set it to 0 in the model's config")
        # (-1, 0): everything to the left, nothing to the right.
        mixed = varlen_attn(
            query, key, value, starts, starts, longest, longest,
            scale=scale, window_size=(-1, 0), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(mixed, Tensor)  # a pair only where statistics are asked for
        return mixed

    return look


@dataclass(frozen=True)
class NewTokens:
    """One new token per cache row: where its key goes and what it may see.

    Attributes:
        addresses: from `Cache.addresses`, [B * KV].
        width: slots of the longest row, the new token included.
        mask: [B, 1, 1, width].
    """

    addresses: Tensor
    width: int
    mask: Tensor


def look_at_cache(cache: Cache, layer: int, new: NewTokens) -> Look:
    """Attention of one new token per row over its row; its key and value are written first."""

    def look(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        cache.write(layer, new.addresses, key, value)
        keys, values = cache.read(layer, new.width)
        # Query heads that share a key head go in as its queries: [B, KV, H / KV, K], and no key is repeated.
        grouped = query.to(keys.dtype).view(len(query), keys.shape[1], -1, query.shape[-1])
        mixed = F.scaled_dot_product_attention(
            grouped, keys, values, attn_mask=new.mask, dropout_p=dropout, scale=scale
        )
        return mixed.reshape(query.shape)

    return look


def writing_to(cache: Cache, layer: int, addresses: Tensor, look: Look) -> Look:
    """`look`, which also leaves its keys and values at `addresses` of the cache."""

    def look_and_write(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        cache.write(layer, addresses, key, value)
        return look(query, key, value, scale, dropout)

    return look_and_write

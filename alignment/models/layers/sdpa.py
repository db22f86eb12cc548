"""What a layer may see: at whole documents, or from one new token per row of a cache, and over to an encoder's states.

A `Look` does the attention itself: one scaled-dot-product call per rectangle of documents, or one call of the
variable-length kernel. Who builds which, for each layer of a trunk, is in viewing.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import PaddedLayout, gather, spread
from alignment.models.layers.rotary import Rotation
from alignment.models.spec import AttentionSpec

# (queries [N, H, K], keys [N, KV, K], values [N, KV, K], dropout) -> [N, H, K]
Look = Callable[[Tensor, Tensor, Tensor, float], Tensor]
# (queries [N, H, K], states of the encoder -> its keys and values, dropout) -> [N, H, K]
CrossAttentionFn = Callable[[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]], float], Tensor]


@dataclass(frozen=True)
class AttentionContext:
    """All that one layer is told about the batch.

    Attributes:
        look: attention among the batch's own tokens.
        rotation: angles of their places, where the layer turns queries and keys.
        across: attention on an encoder's states.
        packing: how documents lie side by side, for attention that does more than `look` (DeBERTa).
        relative: vectors of distances, for the same, [2 * S, D].
        router_logits: left here by mixtures of experts.
    """

    look: Look
    rotation: Rotation | None = None
    across: CrossAttentionFn | None = None
    packing: PaddedLayout | None = None
    relative: Tensor | None = None
    router_logits: list[Tensor] = field(default_factory=list)


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """softmax(scale * q k + mask) v for rectangles.

    Args:
        q: [B, T, H, K]; k, v: [B, S, KV, K].
        mask: booleans (True = may attend) or what is added to the scores, broadcast to [B, H, T, S].
        causal: no mask, but a query sees no key after its own place; T = S.

    Returns:
        [B, T, H, K].
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if spec.softcap is not None:
        return _attend_capped(q, k, v, spec.scale, spec.softcap, mask, causal, dropout).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=spec.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return mixed.transpose(1, 2)


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, scale: float, cap: float, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """The same step by step: no fused kernel caps scores. [B, H, T, K]."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = scale * (q @ k.transpose(-1, -2))
    scores = cap * torch.tanh(scores / cap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, dropout) @ v


def look_at_documents(
    packing: PaddedLayout, spec: AttentionSpec, masks: Sequence[Tensor | None], prefix: Tensor | None
) -> Look:
    """Attention inside each document, padded to rectangles with a mask each; `prefix` [2, P, KV, K] precedes all."""

    def look(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        rectangles = zip(spread(query, packing), spread(key, packing), spread(value, packing), masks, strict=True)
        return gather([one(q, k, v, mask, dropout) for q, k, v, mask in rectangles], packing)

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float) -> Tensor:
        if prefix is not None:
            k, v = (_in_front(part, x) for part, x in zip(prefix, (k, v), strict=True))
        return attend(q, k, v, spec, mask, spec.causal and mask is None, dropout)

    return look


def _in_front(prefix: Tensor, x: Tensor) -> Tensor:
    """prefix [P, KV, K] before every row of x [B, T, KV, K]."""
    return torch.cat([prefix.to(x.dtype).expand(len(x), *prefix.shape), x], dim=1)


def look_with_kernel(starts: Tensor, longest: int, spec: AttentionSpec) -> Look:
    """The same on CUDA in half precision: the variable-length kernel takes documents end to end as they are."""
    from torch.nn.attention.varlen import varlen_attn

    left = -1 if spec.window is None else spec.window - 1  # -1: as far as the document goes
    window = (left, 0 if spec.causal else left)

    def look(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        if dropout:
            raise ValueError("the variable-length kernel has no attention dropout; set it to 0 in the model's config")
        mixed = varlen_attn(
            query, key, value, starts, starts, longest, longest,
            scale=spec.scale, window_size=window, enable_gqa=query.shape[1] != key.shape[1],
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
        mask: booleans or what is added to the scores, broadcast to [B, H, 1, width].
    """

    addresses: Tensor
    width: int
    mask: Tensor


def look_at_cache(cache: Cache, layer: int, new: NewTokens, spec: AttentionSpec) -> Look:
    """Attention of one new token per row over its row; its key and value are written first."""

    def look(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        cache.write(layer, new.addresses, key, value)
        keys, values = cache.read(layer, new.width)
        return attend_from_one(query, keys, values, new.mask, spec, dropout)

    return look


def attend_from_one(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, spec: AttentionSpec, dropout: float
) -> Tensor:
    """One query per row, [B, H, K], over keys and values [B, KV, S, K]; returns [B, H, K]."""
    shared = keys.shape[1]
    # Query heads that share a key head go in as its queries: [B, KV, H / KV, K], and no key is repeated.
    grouped = query.to(keys.dtype).view(len(query), shared, -1, query.shape[-1])
    if mask.shape[1] > 1:
        mask = mask.view(len(query), shared, -1, mask.shape[-1])
    if spec.softcap is not None:
        return _attend_capped(grouped, keys, values, spec.scale, spec.softcap, mask, False, dropout).reshape(
            query.shape
        )
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, dropout_p=dropout, scale=spec.scale)
    return mixed.reshape(query.shape)


def writing_to(cache: Cache, layer: int, addresses: Tensor, look: Look) -> Look:
    """`look`, which also leaves its keys and values at `addresses` of the cache."""

    def look_and_write(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        cache.write(layer, addresses, key, value)
        return look(query, key, value, dropout)

    return look_and_write

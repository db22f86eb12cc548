"""Scaled-dot-product attention: inside whole documents, padded or by the variable-length kernel, and from one new token."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.layers.attention import AttentionSpec
from alignment.models.layers.attention_context import AttentionFn
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.padded_layout import PaddedLayout, pad, unpad
from alignment.models.layers.shared_layout import SharedKeys

VARLEN_MAX_HEAD_DIM, VARLEN_HEAD_DIM_MULTIPLE = 256, 8  # head dimensions that the variable-length kernel takes


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """softmax(scale * q k + mask) v for rectangles.

    Args:
        q: [B, T, H, K]; k, v: [B, S, KV, K].
        mask: booleans (True = may attend) or what is added to the scores, broadcast to [B, H, T, S].
        causal: a query sees no key after its own position; without `mask`, and T = S.

    Returns:
        [B, T, H, K].
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if spec.softcap is not None:
        return _attend_capped(q, k, v, spec, mask=mask, causal=causal, dropout=dropout).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, dropout_p=dropout, scale=spec.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return mixed.transpose(1, 2)


def _attend_capped(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, mask: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """`attend` without a fused kernel, none of which caps scores; all [B, H, T, K]."""
    assert spec.softcap is not None
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = spec.scale * (q @ k.transpose(-1, -2))
    scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, dropout) @ v


@dataclass(frozen=True)
class PaddedAttention:
    """Attention inside each document, one call per rectangle of documents.

    Attributes:
        layout: of the queries; of the keys and values too, where `keys` is None.
        masks: of each rectangle, from `rectangle_mask` or `continued_mask`.
        prefix: keys and values in front of every document, [2, P, KV, K].
        keys: layout of keys and values, with the same rows.
    """

    layout: PaddedLayout
    spec: AttentionSpec
    masks: Sequence[Tensor | None]
    prefix: Tensor | None = None
    keys: PaddedLayout | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """query: [N, H, K]; key, value: [N, KV, K] -> [N, H, K]."""
        mixed = []
        keys = self.keys or self.layout
        rectangles = zip(pad(query, self.layout), pad(key, keys), pad(value, keys), self.masks, strict=True)
        for q, k, v, mask in rectangles:
            if self.prefix is not None:
                k, v = (_prepend(part, x) for part, x in zip(self.prefix, (k, v), strict=True))
            causal = self.spec.causal and mask is None
            mixed.append(attend(q, k, v, self.spec, mask=mask, causal=causal, dropout=dropout))
        return unpad(mixed, self.layout)


def _prepend(prefix: Tensor, x: Tensor) -> Tensor:
    """prefix [P, KV, K] in front of every row of x [B, T, KV, K]."""
    return torch.cat([prefix.to(x.dtype).expand(len(x), *prefix.shape), x], dim=1)


@dataclass(frozen=True)
class VarlenAttention:
    """Attention inside each document by the variable-length kernel: CUDA, half precision, documents end to end.

    Attributes:
        starts: of each document, then N; int32, [B + 1].
        longest: tokens of the longest document.
        shared: what each piece of a batch with shared prompts reads; `starts` and `longest` are then of the pieces.

    Where a sequence has more keys than queries, the kernel gives the last query the position of the last key, in causal
    and in sliding-window masks (FlashAttention 2.1 and later).
    """

    starts: Tensor
    longest: int
    spec: AttentionSpec
    shared: SharedKeys | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """query: [N, H, K]; key, value: [N, KV, K] -> [N, H, K]."""
        from torch.nn.attention.varlen import varlen_attn

        if dropout:
            raise ValueError("the variable-length kernel has no attention dropout; set it to 0 in the model's config")
        left = -1 if self.spec.window is None else self.spec.window - 1  # -1: no limit
        key_starts, longest_keys = self.starts, self.longest
        if self.shared is not None:
            key_starts, longest_keys = self.shared.starts, max(self.shared.lengths)
            key, value = self.shared.gather(key), self.shared.gather(value)
        mixed = varlen_attn(
            query, key, value, self.starts, key_starts, self.longest, longest_keys, scale=self.spec.scale,
            window_size=(left, 0 if self.spec.causal else left), enable_gqa=query.shape[1] != key.shape[1],
        )  # fmt: skip
        assert isinstance(mixed, Tensor)  # a pair only where statistics are asked for
        return mixed


def varlen_applies(specs: Sequence[object], parameter: Tensor, training: bool) -> bool:
    """Whether the variable-length kernel can compute every layer's attention, and the device has it."""
    return (
        _in_half_precision_on_cuda(parameter)
        and has_varlen_kernel(parameter.device)
        and varlen_computes(specs, training)
    )


def varlen_computes(specs: Sequence[object], training: bool) -> bool:
    """Whether the variable-length kernel can compute every layer's attention, on a device that has it."""
    return all(
        isinstance(spec, AttentionSpec)
        and spec.head_dim <= VARLEN_MAX_HEAD_DIM
        and spec.head_dim % VARLEN_HEAD_DIM_MULTIPLE == 0
        and spec.softcap is None
        and spec.position_bias is None
        and not (training and spec.dropout)
        for spec in specs
    )


def has_varlen_kernel(device: torch.device | int) -> bool:
    """Whether a CUDA device is new enough for the variable-length kernel: compute capability 8.0 (Ampere) and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def _in_half_precision_on_cuda(parameter: Tensor) -> bool:
    if not parameter.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else parameter.dtype
    return dtype in (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class NewTokens:
    """One new token per cache row: where its key is written and which slots it attends to.

    Attributes:
        addresses: from `Cache.addresses`, [B * KV].
        width: slots of the longest row, the new token included.
        mask: booleans or biases of the scores, broadcast to [B, H, 1, width].
    """

    addresses: Tensor
    width: int
    mask: Tensor


@dataclass(frozen=True)
class CachedAttention:
    """Attention of one new token per row over its row of the cache; its key and value are written first."""

    cache: Cache
    layer: int
    new: NewTokens
    spec: AttentionSpec

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        """query: [B, H, K]; key, value: [B, KV, K] -> [B, H, K]."""
        self.cache.write(self.layer, self.new.addresses, key, value)
        keys, values = self.cache.read(self.layer, self.new.width)
        return attend_one_query(query, keys, values, self.spec, mask=self.new.mask, dropout=dropout)


def attend_one_query(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, *, mask: Tensor, dropout: float
) -> Tensor:
    """One query per row, [B, H, K], over keys and values [B, KV, S, K]; returns [B, H, K]."""
    shared = keys.shape[1]
    # Query heads that share a key head go in as its queries: [B, KV, H / KV, K], and no key is repeated.
    grouped = query.to(keys.dtype).view(len(query), shared, -1, query.shape[-1])
    if mask.shape[1] > 1:
        mask = mask.view(len(query), shared, -1, mask.shape[-1])
    if spec.softcap is not None:
        mixed = _attend_capped(grouped, keys, values, spec, mask=mask, causal=False, dropout=dropout)
        return mixed.reshape(query.shape)
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, dropout_p=dropout, scale=spec.scale)
    return mixed.reshape(query.shape)


def with_cache_write(cache: Cache, addresses: Tensor, layer: int, attend: AttentionFn) -> AttentionFn:
    """`attend` that also writes the layer's keys and values to `addresses` of the cache."""

    def write_and_attend(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        cache.write(layer, addresses, key, value)
        return attend(query, key, value, dropout)

    return write_and_attend

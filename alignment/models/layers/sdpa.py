"""Scaled-dot-product attention: inside whole documents, over a cache row, and on an encoder's states."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.layers.attention import AttentionFn, AttentionSpec, CrossAttentionFn, ProjectKeyValue
from alignment.models.layers.kv_cache import Cache, CrossAttentionCache, TokenSlots
from alignment.models.layers.norms import on_gpu
from alignment.models.layers.padded_layout import PaddedLayout, key_masks, pad, pad_layouts, unpad
from alignment.ragged import Ragged

# head dimensions that the variable-length kernel takes
VARLEN_MAX_HEAD_DIM = 256
VARLEN_HEAD_DIM_MULTIPLE = 8
QUERY_BLOCK = 64  # queries whose scores `_BlockedAttention` holds at once


def attend(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, *, mask: Tensor | None, causal: bool = False, dropout: float
) -> Tensor:
    """softmax(scale * q k + mask) v.

    Args:
        q: [B, H, T, K]; k, v: [B, KV, S, K].
        mask: booleans (True = may attend) or numbers added to the scores, broadcast to [B, H, T, S].
        causal: a query sees no key after its own position; without `mask`, and T = S.

    Returns:
        [B, H, T, K].
    """
    if spec.softcap is None:
        # A plan's tensors lie on a CPU and choose as on a GPU.
        low = q.dtype == torch.bfloat16 and q.device.type == "cpu" and not on_gpu(q)
        plain = causal if mask is None else mask.dtype == torch.bool and mask.shape[1:3] == (1, q.shape[2])
        if low and plain and not dropout and not torch.compiler.is_compiling():
            grouped = q.reshape(-1, q.shape[1] // k.shape[1], *q.shape[2:])
            return _BlockedAttention.apply(grouped, k.flatten(0, 1), v.flatten(0, 1), _Scores(spec.scale, mask)).view(
                q.shape
            )
        # No fast kernel of a GPU shares key heads in float32.
        if q.is_cuda and q.dtype == torch.float32 and q.shape[1] != k.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            dropout_p=dropout,
            scale=spec.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    # No fused kernel caps scores.
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = spec.scale * (q @ k.transpose(-1, -2))
    scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, dropout) @ v


class _Scores(NamedTuple):
    """The factor on the scores, and True where a query sees a key, [1 or B, 1, T, S]; None: causal, T = S."""

    scale: float
    mask: Tensor | None


class _BlockedAttention(torch.autograd.Function):
    """Attention of bfloat16 on a CPU, a block of queries at a time; torch's kernel is as slow as float32's.

    q is [N, G, T, K]; k and v, which G heads share, are [N, S, K], N / B key heads of each of B rows. Scores, softmax
    and sums over blocks are in float32; the other products are of bfloat16.
    """

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, how: _Scores) -> Tensor:
        mixed = torch.empty_like(q)
        for block, seen in _blocks(q, how.mask):
            weights = _block_weights(q, k, how, block, seen)
            mixed[:, :, block] = (weights.to(v.dtype) @ v[:, seen]).view_as(q[:, :, block])
        ctx.save_for_backward(q, k, v, mixed)
        ctx.how = how
        return mixed

    @staticmethod
    @torch.autocast("cpu", enabled=False)
    def backward(ctx, *grad_outputs: Tensor):
        q, k, v, mixed = ctx.saved_tensors
        grad = grad_outputs[0]
        # d softmax(s) / d s = P (dP - sum_keys P dP), and that sum is the product of a query's output and its gradient.
        sums = (grad.float() * mixed).sum(-1, keepdim=True)
        to_q = torch.empty_like(q)
        to_k = torch.zeros(k.shape)
        to_v = torch.zeros(v.shape)
        for block, seen in _blocks(q, ctx.how.mask):
            weights = _block_weights(q, k, ctx.how, block, seen)
            to_mixed = grad[:, :, block].flatten(1, 2)
            to_v[:, seen] += weights.to(v.dtype).transpose(1, 2) @ to_mixed
            to_weights = to_mixed @ v[:, seen].transpose(1, 2)
            to_scores = weights.mul_(to_weights - sums[:, :, block].flatten(1, 2)).mul_(ctx.how.scale).to(q.dtype)
            to_q[:, :, block] = (to_scores @ k[:, seen]).view_as(q[:, :, block])
            to_k[:, seen] += to_scores.transpose(1, 2) @ q[:, :, block].flatten(1, 2)
        return to_q, to_k.to(k.dtype), to_v.to(v.dtype), None


def _blocks(q: Tensor, mask: Tensor | None) -> list[tuple[slice, slice]]:
    """The queries of [N, G, T, K] in blocks, and the keys that a block may see."""
    starts = range(0, q.shape[2], QUERY_BLOCK)
    return [
        (slice(start, start + QUERY_BLOCK), slice(start + QUERY_BLOCK if mask is None else mask.shape[-1]))
        for start in starts
    ]


def _block_weights(q: Tensor, k: Tensor, how: _Scores, block: slice, seen: slice) -> Tensor:
    """Attention weights of a block of queries on the keys that it may see, float32, [N, G * n, keys]."""
    queries = q[:, :, block]
    scores = queries.flatten(1, 2).float() @ k[:, seen].float().transpose(1, 2)
    scores.mul_(how.scale)
    if how.mask is None:
        later = torch.ones(queries.shape[2], queries.shape[2], dtype=torch.bool).triu(1)
        scores.view(*queries.shape[:3], -1)[..., block].masked_fill_(later, -torch.inf)
    else:
        rows = scores.view(len(how.mask), -1, queries.shape[2], scores.shape[-1])
        rows.masked_fill_(~how.mask[:, :, block], -torch.inf)
    return torch.softmax(scores, -1, out=scores)


def attend_one_query(
    query: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, *, mask: Tensor, dropout: float
) -> Tensor:
    """One query per row, [B, H, K], over keys and values [B, KV, S, K]; returns [B, H, K]."""
    shared = keys.shape[1]
    # Query heads that share a key head go in as its queries: [B, KV, H / KV, K], and no key is repeated.
    grouped = query.to(keys.dtype).view(len(query), shared, -1, query.shape[-1])
    if mask.shape[1] > 1:
        mask = mask.view(len(query), shared, -1, mask.shape[-1])
    return attend(grouped, keys, values, spec, mask=mask, dropout=dropout).reshape(query.shape)


def padded_attention(
    spec: AttentionSpec,
    queries: PaddedLayout,
    keys: PaddedLayout,
    masks: Sequence[Tensor | None],
    prefix: Tensor | None = None,
) -> AttentionFn:
    """Attention inside each document, one call per rectangle of documents.

    Args:
        masks: of each rectangle, from `attention_masks`.
        prefix: keys and values in front of every document, [2, P, KV, K].
    """

    def attend_documents(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        mixed = []
        for q, k, v, mask in zip(pad(query, queries), pad(key, keys), pad(value, keys), masks, strict=True):
            if prefix is not None:
                front = (part.to(k.dtype).expand(len(k), *part.shape) for part in prefix)
                k, v = (torch.cat(parts, dim=1) for parts in zip(front, (k, v), strict=True))
            q = q.transpose(1, 2)
            k = k.transpose(1, 2)
            v = v.transpose(1, 2)
            causal = spec.causal and mask is None
            mixed.append(attend(q, k, v, spec, mask=mask, causal=causal, dropout=dropout).transpose(1, 2))
        return unpad(mixed, queries)

    return attend_documents


def filling_attention(cache: Cache, layer: int, slots: TokenSlots, attend: AttentionFn) -> AttentionFn:
    """`attend` that first writes keys and values to their slots in a layer of the cache."""

    def attend_and_fill(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        cache.write(layer, slots, key, value)
        return attend(query, key, value, dropout)

    return attend_and_fill


def given_attention(index: Tensor, given: Tensor, attend: AttentionFn) -> AttentionFn:
    """`attend` where the tokens at `index` [n] have given keys and values, [2, n, KV, K], in place of their own."""

    def attend_given(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        key, value = (x.index_copy(0, index, part.to(x.dtype)) for x, part in zip((key, value), given, strict=True))
        return attend(query, key, value, dropout)

    return attend_given


def cached_attention(cache: Cache, layer: int, spec: AttentionSpec, mask: Tensor) -> AttentionFn:
    """Attention of one new token per row over its row of the cache, where its key and value are already.

    Args:
        mask: booleans or biases of the scores, broadcast to [B, H, 1, slots of the longest row in this layer].
    """

    def attend_row(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        keys, values = cache.read(layer, mask.shape[-1])
        return attend_one_query(query, keys, values, spec, mask=mask, dropout=dropout)

    return attend_row


def varlen_attention(
    spec: AttentionSpec,
    starts: Tensor,
    longest: int,
    key_starts: Tensor,
    longest_keys: int,
    *,
    keys: PaddedLayout | None = None,
) -> AttentionFn:
    """Attention inside each document by the variable-length kernel: CUDA, half precision, documents end to end.

    Where a sequence has more keys than queries, the kernel gives the last query the position of the last key, in causal
    and in sliding-window masks (FlashAttention 2.1 and later).

    Args:
        starts, key_starts: of each document's queries and keys, then their number; int32, [B + 1].
        longest, longest_keys: the most that a document has.
        keys: of a batch with shared prompts, from `shared_keys`; its pieces are then the documents.
    """
    left = -1 if spec.window is None else spec.window - 1  # -1: no limit

    def attend_documents(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        if dropout:
            raise ValueError("the variable-length kernel has no attention dropout; set it to 0 in the model's config")
        if keys is not None:
            key = keys.fill(key)
            value = keys.fill(value)
        mixed = varlen_attn(
            query,
            key,
            value,
            starts,
            key_starts,
            longest,
            longest_keys,
            scale=spec.scale,
            window_size=(left, 0 if spec.causal else left),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        assert isinstance(mixed, Tensor)  # a pair only where statistics are asked for
        return mixed

    return attend_documents


def varlen_applies(specs: Sequence[object], parameter: Tensor, training: bool) -> bool:
    """True where the device has the variable-length kernel, and it can compute every layer's attention."""
    if not parameter.is_cuda or not has_varlen_kernel(parameter.device):
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else parameter.dtype
    return dtype in (torch.bfloat16, torch.float16) and varlen_computes(specs, training)


def varlen_computes(specs: Sequence[object], training: bool) -> bool:
    """True where the variable-length kernel can compute every layer's attention, on a device that has it."""
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
    """True for CUDA devices that the variable-length kernel runs on: compute capability 8.0 (Ampere) and later."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


@dataclass(frozen=True)
class Source:
    """The documents that an encoder read, and its states, [M, D]."""

    states: Tensor
    batch: Ragged


def cross_attentions(
    specs: Sequence[AttentionSpec], source: Source, targets: Ragged, memory: CrossAttentionCache | None = None
) -> list[CrossAttentionFn]:
    """Each layer's attention from every target document on its source; `memory` keeps keys and values for decoding."""
    device = targets.tokens.device
    queries, keys = pad_layouts(targets.lengths, source.batch.lengths, specs[0].heads, device)
    masks = key_masks(keys, device)

    def attend_source(attend: AttentionFn, query: Tensor, project: ProjectKeyValue, dropout: float) -> Tensor:
        key, value = project(source.states)
        if memory is not None:
            memory.append(key, value, source.batch.lengths)
        return attend(query, key, value, dropout)

    return [
        partial(attend_source, padded_attention(replace(spec, causal=False), queries, keys, masks)) for spec in specs
    ]


def cached_cross_attention(memory: CrossAttentionCache, layer: int, spec: AttentionSpec) -> CrossAttentionFn:
    """Attention of one new token per row on the keys and values that were kept of its source."""

    def attend_memory(query: Tensor, project: ProjectKeyValue, dropout: float) -> Tensor:
        keys = memory.keys[layer]
        values = memory.values[layer]
        return attend_one_query(query, keys, values, spec, mask=memory.mask, dropout=dropout)

    return attend_memory

"""Attention whose cost grows more slowly than the square of a document's length: Linformer, Performer, Nyström, LSH.

Each is a spec that stands in `BlockSpec.attention`, a function with its arithmetic and a module. They read whole documents,
padded to rectangles; what a token gets depends on its own document alone. None keeps a cache, so none can generate.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.errors import UserError
from alignment.models.layers.attention import AttentionContext
from alignment.models.layers.padded_layout import pad, padding_mask, unpad

CHUNK = 64  # tokens whose causal sums are taken at once
OWN_SCORE = -1e5  # of a token's own key under LSH attention: counts only where it is the only one


@dataclass(frozen=True)
class LinformerSpec:
    """Keys and values are `projected` learned mixtures of the document's, each mixture a row of `max_positions` weights."""

    heads: int
    head_dim: int
    projected: int
    max_positions: int
    causal: ClassVar[Literal[False]] = False

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return LinformerAttention(self, width)


@dataclass(frozen=True)
class PerformerSpec:
    """exp(q k) is estimated by `features` random features of q and of k, so that no score is computed."""

    heads: int
    head_dim: int
    features: int
    causal: bool = False

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return PerformerAttention(self, width)


@dataclass(frozen=True)
class NystromSpec:
    """Scores of all pairs by those with `landmarks`, the means of as many segments of the document.

    Attributes:
        iterations: of the pseudo-inverse.
        kernel: tokens of the convolution of values that is added, odd; 0: none.
    """

    heads: int
    head_dim: int
    landmarks: int
    iterations: int = 6
    kernel: int = 33
    causal: ClassVar[Literal[False]] = False

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return NystromAttention(self, width)


@dataclass(frozen=True)
class LSHSpec:
    """A token sees those that its query's hash falls into one bucket with, in any of `rounds` hashes; queries are keys.

    Attributes:
        chunk: tokens; sorted by bucket, a chunk sees itself and the one before. Buckets hold half a chunk on average, or
            less; a document of one chunk has one bucket.
        max_positions: of the model, tokens.
    """

    heads: int
    head_dim: int
    chunk: int
    rounds: int
    max_positions: int
    causal: ClassVar[Literal[False]] = False

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return LSHAttention(self, width)


class _EfficientAttention(nn.Module):
    """output(mix(query(x), key(x), value(x))) of each rectangle of documents; `mix` computes in fp32 at least."""

    data_dependent_shapes = True  # torch.compile leaves its forward out; see compilation.py

    def __init__(self, heads: int, head_dim: int, width: int, *, shared: bool = False):
        super().__init__()
        inner = heads * head_dim
        self.query, self.value = nn.Linear(width, inner), nn.Linear(width, inner)
        self.key = None if shared else nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        self.heads = heads

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D], or [M, D] of the tokens that are needed."""
        layout = context.layout
        if layout is None:
            raise ValueError("this attention needs documents laid out in rectangles")
        layers = [layer for layer in (self.query, self.key, self.value) if layer is not None]
        rectangles = [pad(layer(x).unflatten(-1, (self.heads, -1)), layout) for layer in layers]
        mixed, dtype = [], torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):  # exponentials and a matrix inverse
            for lengths, parts in zip(layout.lengths, zip(*rectangles, strict=True), strict=True):
                own = torch.tensor(lengths).to(x.device, non_blocking=True)
                parts = [part.transpose(1, 2).to(dtype) for part in parts]  # [B, H, T, K]
                mixed.append(self.mix(*parts, own).transpose(1, 2).to(x.dtype))
        return self.output(context.needed(unpad(mixed, layout).flatten(1)))

    def mix(self, *parts: Tensor) -> Tensor:
        """Queries, keys and values [B, H, T, K], and lengths [B] -> [B, H, T, K]; padding comes back as anything finite."""
        raise NotImplementedError


def real_tokens(lengths: Tensor, columns: int) -> Tensor:
    """True at the tokens of each row, [B, 1, columns, 1]."""
    return padding_mask(lengths, columns).mT


class LinformerAttention(_EfficientAttention):
    """softmax(q (E k)^T / sqrt(K)) F v; E and F are the same for all heads.

    Source: Wang et al. 2020, arXiv:2006.04768, eq. 7, with headwise sharing.
    """

    def __init__(self, spec: LinformerSpec, width: int):
        super().__init__(spec.heads, spec.head_dim, width)
        self.project_key = nn.Linear(spec.max_positions, spec.projected, bias=False)
        self.project_value = nn.Linear(spec.max_positions, spec.projected, bias=False)

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """See `_EfficientAttention`; a document of more than `max_positions` tokens is refused."""
        most = self.project_key.in_features
        if context.layout is not None and (longest := max(map(max, context.layout.lengths))) > most:
            raise UserError(
                f"a document of {longest} tokens is longer than the {most} positions that Linformer's projections have; "
                "shorten it, or give LinformerSpec a larger max_positions"
            )
        return super().forward(x, context)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        """See `_EfficientAttention`."""
        real = real_tokens(lengths, q.shape[2])
        return linformer_attention(q, k * real, v * real, self.project_key.weight, self.project_value.weight)


def linformer_attention(q: Tensor, k: Tensor, v: Tensor, project_key: Tensor, project_value: Tensor) -> Tensor:
    """softmax(q (E k)^T / sqrt(K)) F v, [B, H, T, K] each; E and F [projected, positions], padding alone beyond these."""
    columns = min(k.shape[2], project_key.shape[1])
    project_key, project_value = (x[:, :columns].to(k.dtype) for x in (project_key, project_value))
    return F.scaled_dot_product_attention(q, project_key @ k[:, :, :columns], project_value @ v[:, :, :columns])


class PerformerAttention(_EfficientAttention):
    """Attention by positive orthogonal random features (FAVOR+), drawn once and kept with the weights.

    Source: Choromanski et al. 2021, arXiv:2009.14794, section 2; the redrawing in training is left out.
    """

    features: Tensor

    def __init__(self, spec: PerformerSpec, width: int):
        super().__init__(spec.heads, spec.head_dim, width)
        self.register_buffer("features", orthogonal_features(spec.features, spec.head_dim))
        self.causal = spec.causal

    def mix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        """See `_EfficientAttention`."""
        return performer_attention(q, k, v, self.features, real_tokens(lengths, q.shape[2]), causal=self.causal)


def orthogonal_features(count: int, width: int) -> Tensor:
    """Gaussian vectors [count, width], in blocks of `width` that are orthogonal; each alone is as if drawn freely.

    Source: Choromanski et al. 2021, arXiv:2009.14794, section 2.4.
    """
    blocks = -(-count // width)
    turns, triangles = torch.linalg.qr(torch.randn(blocks, width, width))
    # LAPACK chooses the signs by the first entries; with a positive diagonal every direction is as likely.
    directions = (turns * triangles.diagonal(dim1=1, dim2=2).sign()[:, None]).mT.flatten(0, 1)
    return directions[:count] * torch.randn(count, width).norm(dim=1, keepdim=True)


def log_features(x: Tensor, features: Tensor) -> Tensor:
    """Logarithms of positive features f with mean_r f_r(q) f_r(k) = exp(q k) in expectation; [..., K] -> [..., R].

    log f_r(x) = w_r x - |x|^2 / 2

    Source: Choromanski et al. 2021, arXiv:2009.14794, lemma 1.
    """
    return x @ features.to(x.dtype).T - x.square().sum(-1, keepdim=True) / 2


def performer_attention(q: Tensor, k: Tensor, v: Tensor, features: Tensor, real: Tensor, *, causal: bool) -> Tensor:
    """The estimate of softmax(q k^T / sqrt(K)) v, [B, H, T, K]; `real`: True at tokens, [B, 1, T, 1].

    Largest features are 1, of each query and of each document's keys: both factors cancel.
    """
    q, k = (log_features(x * x.shape[-1] ** -0.25, features) for x in (q, k))
    q = (q - q.amax(-1, keepdim=True).detach()).exp()
    k = k.masked_fill(~real, -torch.inf)
    k = (k - k.amax((-2, -1), keepdim=True).detach()).exp()
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)  # the last column sums the weights
    mixed = causal_products(q, k, v) if causal else q @ (k.mT @ v)
    return mixed[..., :-1] / mixed[..., -1:].clamp(min=torch.finfo(mixed.dtype).tiny)


def causal_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """sum over s <= t of (q_t k_s) v_s, without the products of all pairs; [B, H, T, R or K]."""
    length = q.shape[2]
    q, k, v = (F.pad(x, (0, 0, 0, -length % CHUNK)).unflatten(2, (-1, CHUNK)) for x in (q, k, v))
    before = F.pad((k.mT @ v).cumsum(2), (0, 0, 0, 0, 1, 0))[:, :, :-1]  # of the chunks in front
    return ((q @ k.mT).tril() @ v + q @ before).flatten(2, 3)[:, :, :length]


class NystromAttention(_EfficientAttention):
    """Attention by way of landmarks, and a convolution of each head's values.

    Source: Xiong et al. 2021, arXiv:2102.03902, section 3.2.
    """

    def __init__(self, spec: NystromSpec, width: int):
        super().__init__(spec.heads, spec.head_dim, width)
        self.convolution = None
        if spec.kernel:
            self.convolution = nn.Conv1d(spec.heads, spec.heads, spec.kernel, groups=spec.heads, bias=False)
        self.spec = spec

    def mix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        """See `_EfficientAttention`."""
        v = v * real_tokens(lengths, q.shape[2])
        mixed = nystrom_attention(q, k, v, lengths, landmarks=self.spec.landmarks, iterations=self.spec.iterations)
        if self.convolution is None:
            return mixed
        channels, kernel = v.permute(0, 3, 1, 2), self.convolution.weight.to(v.dtype)  # [B, K, H, T]
        # One kernel for all channels of a head; beyond a document's ends lie zeros.
        near = F.conv1d(channels.flatten(0, 1), kernel, padding=self.spec.kernel // 2, groups=len(kernel))
        return mixed + near.view(channels.shape).permute(0, 2, 3, 1)


def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, *, landmarks: int, iterations: int) -> Tensor:
    """softmax(q k~^T) softmax(q~ k~^T)^+ softmax(q~ k^T) v, scores divided by sqrt(K); q~, k~: means of segments.

    A document with fewer tokens than landmarks has as many landmarks as tokens; the others see only themselves and
    nothing sees them, which leaves the pseudo-inverse of the rest as it is.

    Args:
        q, k, v: [B, H, T, K]; v zero at padding.
        lengths: tokens of each row, [B].

    Source: Xiong et al. 2021, arXiv:2102.03902, eqs. 11 and 13.
    """
    segments = segment_weights(lengths, q.shape[2], landmarks).to(q.dtype)
    query_means, key_means = segments @ q, segments @ k
    used = segments.sum(-1)[..., None, :] > 0  # [B, 1, 1, m]
    own = torch.eye(landmarks, dtype=torch.bool, device=q.device)
    to_landmarks = _attention_weights(q, key_means, used)
    between = _attention_weights(query_means, key_means, torch.where(used.mT, used, own))
    mixed = F.scaled_dot_product_attention(query_means, k, v, attn_mask=real_tokens(lengths, q.shape[2]).mT)
    return to_landmarks @ (iterative_pseudo_inverse(between, iterations) @ mixed)


def _attention_weights(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1)


def segment_weights(lengths: Tensor, columns: int, count: int) -> Tensor:
    """Weights of each segment's mean, [B, 1, count, columns]; segments beyond a document's tokens have none.

    Token t of n lies in segment floor(t * min(count, n) / n).
    """
    positions = torch.arange(columns, device=lengths.device)
    of_token = positions * lengths.clamp(max=count)[:, None] // lengths[:, None]
    of_token = of_token.masked_fill(positions >= lengths[:, None], count)
    members = (of_token[:, None] == torch.arange(count, device=lengths.device)[:, None]).float()
    return (members / members.sum(-1, keepdim=True).clamp(min=1))[:, None]


def iterative_pseudo_inverse(matrix: Tensor, iterations: int) -> Tensor:
    """The Moore-Penrose inverse of [..., m, m] by iterations of third order, each matrix scaled on its own.

    Source: Xiong et al. 2021, arXiv:2102.03902, eq. 12; there one scale serves the whole batch.
    """
    inverse = matrix.mT / (matrix.sum(-1).amax(-1) * matrix.sum(-2).amax(-1))[..., None, None]
    one = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(iterations):
        product = matrix @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return inverse


class LSHAttention(_EfficientAttention):
    """Attention within the buckets of a locality-sensitive hash, whose rotations are drawn once and kept with the weights.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2. There the hash is drawn anew in every forward, and a key that
    several rounds find counts once.
    """

    rotations: Tensor

    def __init__(self, spec: LSHSpec, width: int):
        super().__init__(spec.heads, spec.head_dim, width, shared=True)
        most = int(_halves(torch.tensor(spec.max_positions), spec.chunk))
        self.register_buffer("rotations", torch.randn(2, spec.rounds, spec.head_dim, most))
        self.chunk = spec.chunk

    def mix(self, q: Tensor, v: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        """See `_EfficientAttention`."""
        count, halves = 2 * self.rotations.shape[-1], _halves(lengths, self.chunk)
        first, second = (hash_buckets(q.detach(), rotations, halves) for rotations in self.rotations)
        outside = ~real_tokens(lengths, q.shape[2]).mT  # [B, 1, 1, T]
        return lsh_attention(q, v, (count * first + second).masked_fill(outside, count**2), self.chunk)


def _halves(lengths: Tensor, chunk: int) -> Tensor:
    """Half of the values of each of a document's two hashes, whose pairs are its buckets, two for each chunk or more.

    One hash with as many values as there are buckets would cost the square of the length.
    """
    chunks = -(-lengths // chunk)
    return torch.where(chunks > 1, ((2 * chunks).sqrt() / 2).ceil().long(), 0)


def hash_buckets(x: Tensor, rotations: Tensor, halves: Tensor) -> Tensor:
    """argmax of [x R, -x R] over the first `halves` columns of R, [B, H, rounds, T]; 0 where a row has no halves.

    Args:
        x: [B, H, T, K].
        rotations: R of each round, [rounds, K, most halves].
        halves: half of the number of each row's buckets, [B].

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2.
    """
    turned = torch.einsum("bhtk,rkc->bhrtc", x, rotations.to(x.dtype))
    unused = torch.arange(rotations.shape[-1], device=x.device) >= halves[:, None]
    turned = torch.cat([turned, -turned], -1).masked_fill(unused.repeat(1, 2)[:, None, None, None], -torch.inf)
    return turned.argmax(-1)


def lsh_attention(q: Tensor, v: Tensor, buckets: Tensor, chunk: int) -> Tensor:
    """softmax(q k^T) v with k = q / |q|, over the keys of the query's bucket, rounds weighted by their sums of weights.

    Tokens are sorted by bucket, then position, and cut into chunks; a chunk sees itself and the one before. A token sees
    itself only where it sees no other.

    Args:
        q, v: [B, H, T, K].
        buckets: of each round, [B, H, rounds, T]; those of padding come last.

    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2; as in the published code, scores are not divided by sqrt(K).
    """
    length, rounds = q.shape[2], buckets.shape[2]
    order = buckets.argsort(dim=-1, stable=True)  # [B, H, rounds, T]
    missing = -length % chunk

    def sorted_chunks(x: Tensor) -> Tensor:
        """[B, H, T, K] -> [B, H, rounds, chunks, chunk, K]."""
        x = x[:, :, None].expand(-1, -1, rounds, -1, -1).gather(3, order[..., None].expand(*order.shape, x.shape[-1]))
        return F.pad(x, (0, 0, 0, missing)).unflatten(3, (-1, chunk))

    def with_previous(x: Tensor, fill: int = 0) -> Tensor:
        """[..., chunks, chunk, K] -> [..., chunks, 2 * chunk, K]."""
        return torch.cat([F.pad(x, (0, 0, 0, 0, 1, 0), value=fill)[..., :-1, :, :], x], dim=-2)

    bucket, place = (
        F.pad(x, (0, missing), value=-1).unflatten(3, (-1, chunk))[..., None] for x in (buckets.gather(3, order), order)
    )
    query, value = sorted_chunks(q), with_previous(sorted_chunks(v))
    scores = query @ with_previous(sorted_chunks(F.normalize(q, dim=-1))).mT
    scores = scores.masked_fill(place == with_previous(place, -2).mT, OWN_SCORE)
    scores = scores.masked_fill(bucket != with_previous(bucket, -2).mT, -torch.inf)
    total = scores.logsumexp(-1, keepdim=True)
    mixed = torch.cat([(scores - total).exp() @ value, total], -1).flatten(3, 4)[:, :, :, :length]
    back = order.argsort(-1)[..., None].expand(*order.shape, mixed.shape[-1])
    mixed = mixed.gather(3, back)
    return (mixed[..., -1:].softmax(2) * mixed[..., :-1]).sum(2)

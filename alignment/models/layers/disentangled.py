"""DeBERTa's layer: separate attention scores of content and of relative position, and a convolution. Encoders only."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.attention import AttentionContext
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.layers.padded_layout import PaddedLayout, key_masks, pad, unpad


@dataclass(frozen=True)
class ConvolutionSpec:
    """activation(convolution over `width` neighboring tokens); `width` is odd, `groups` of channels stay apart."""

    width: int
    activation: str
    groups: int = 1

    def build(self, channels: int, dropout: nn.Module) -> "Convolution":
        """x [N, channels] -> [N, channels]."""
        return Convolution(
            nn.Conv1d(channels, channels, self.width, padding=self.width // 2, groups=self.groups),
            ACTIVATIONS[self.activation],
            dropout,
        )


@dataclass(frozen=True)
class DisentangledSpec:
    """Attention with separate scores of content and of relative position (DeBERTa).

    Attributes:
        buckets: relative positions fall into 2 * buckets classes, logarithmic far away; 0: no classes.
        max_distance: the largest distance that has a class of its own.
        content_to_position, position_to_content: which of the two mixed terms are added to the scores.
        shared_projection: queries and keys of positions use the projections of the content.
        relative_dropout: probability on the vectors of relative positions.

    Source: He et al. 2020, arXiv:2006.03654, section 3.1.
    """

    heads: int
    head_dim: int
    buckets: int
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    shared_projection: bool
    dropout: float = 0.0
    relative_dropout: float = 0.0
    causal: Literal[False] = False

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return DisentangledAttention(self, width)


class RelativeEmbedding(nn.Module):
    """Vectors of relative positions that all layers share, [2 * S, D], normalized; row S + d: d tokens back."""

    def __init__(self, count: int, width: int, norm: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.norm = norm

    def forward(self) -> Tensor:
        """[2 * S, D]."""
        return self.norm(self.weight)


class DisentangledAttention(nn.Module):
    """score(i, j) = [q_i k_j + q_i K_d + k_j Q_d] / sqrt(width * terms), where d is the class of i - j.

    q and k are projections of the tokens, Q and K of the vectors of relative positions. A term that is left out is not
    counted.

    Source: He et al. 2020, arXiv:2006.03654, section 3.1, eq. 4. There the last term takes the class of j - i;
    published weights, and transformers, have i - j.
    """

    data_dependent_shapes = True  # torch.compile leaves its forward out; see compilation.py

    def __init__(self, spec: DisentangledSpec, width: int):
        super().__init__()
        terms = 1 + spec.content_to_position + spec.position_to_content
        if terms == 1:
            raise ValueError("without a term of relative positions this is plain attention: use AttentionSpec")
        inner = spec.heads * spec.head_dim
        self.query = nn.Linear(width, inner)
        self.key = nn.Linear(width, inner)
        self.value = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        separate = not spec.shared_projection
        self.position_key = nn.Linear(width, inner) if separate and spec.content_to_position else nn.Identity()
        self.position_query = nn.Linear(width, inner) if separate and spec.position_to_content else nn.Identity()
        self.spec = spec
        self.scale = (spec.head_dim * terms) ** -0.5

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        layout = context.layout
        spec = self.spec
        if context.relative is None or layout is None:
            raise ValueError(
                "this attention needs the vectors of relative positions, and documents laid out in rectangles"
            )
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        vectors = F.dropout(context.relative, spec.relative_dropout, self.training)
        to_key, to_query = (
            (self.key, self.query) if spec.shared_projection else (self.position_key, self.position_query)
        )
        relative_query = self._heads(to_query(vectors)) if spec.position_to_content else None
        relative_key = self._heads(to_key(vectors)) if spec.content_to_position else None
        mixed = []
        masks = key_masks(layout, x.device)
        for q, k, v, real in zip(pad(query, layout), pad(key, layout), pad(value, layout), masks, strict=True):
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))  # [B, H, T, K]
            positions = torch.arange(q.shape[2], device=q.device)
            rows = relative_rows(positions - positions[:, None], spec)  # [T, T]: of query i and key j
            terms = [] if relative_key is None else [_scores_at(q, relative_key, rows)]
            terms += [] if relative_query is None else [_scores_at(k, relative_query, rows.T).transpose(-1, -2)]
            bias = self.scale * sum(terms[1:], terms[0])
            bias = bias if real is None else bias.masked_fill(~real, -torch.inf)
            attended = F.scaled_dot_product_attention(
                q, k, v, attn_mask=bias, dropout_p=spec.dropout if self.training else 0.0, scale=self.scale
            )
            mixed.append(attended.transpose(1, 2))
        return self.output(unpad(mixed, layout).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.spec.heads, self.spec.head_dim))


def _scores_at(content: Tensor, projected: Tensor, rows: Tensor) -> Tensor:
    """content[t] . projected[rows[t, s]], [B, H, T, T]; content: [B, H, T, K], projected: [R, H, K]."""
    scores = content @ projected.permute(1, 2, 0)  # [B, H, T, R]
    return scores.gather(-1, rows.expand(*scores.shape[:2], *rows.shape))


def relative_rows(relative: Tensor, spec: DisentangledSpec) -> Tensor:
    """Row of the shared table for each relative position, key minus query; the same shape, in [0, 2 * S)."""
    back = -relative
    span = spec.buckets or spec.max_distance
    if spec.buckets:
        back = relative_classes(back, spec.buckets, spec.max_distance)
    return (back + span).clamp(0, 2 * span - 1)


def relative_classes(relative: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Classes of relative positions: exact up to half of `buckets`, then in logarithmic steps up to `max_distance`.

    Source: DeBERTa v2's published code; transformers, `models/deberta_v2`.
    """
    middle = buckets // 2
    far = relative.abs().clamp(min=middle).float()
    share = torch.log(far / middle) / torch.tensor(math.log((max_distance - 1) / middle), dtype=torch.float32)
    logarithmic = (torch.ceil(share * (middle - 1)) + middle).long()
    return torch.where(relative.abs() <= middle, relative, relative.sign() * logarithmic)


class Convolution(nn.Module):
    """activation(convolution(x)) over each document's tokens; beyond its ends lie zeros."""

    data_dependent_shapes = True  # torch.compile leaves its forward out; see compilation.py

    def __init__(self, layer: nn.Conv1d, activation: Callable[[Tensor], Tensor], dropout: nn.Module):
        super().__init__()
        self.layer = layer
        self.activation = activation
        self.dropout = dropout

    def forward(self, x: Tensor, layout: PaddedLayout) -> Tensor:
        """x: [N, D] -> [N, D]."""
        mixed = []
        for rectangle, real in zip(pad(x, layout), key_masks(layout, x.device), strict=True):
            zeroed = rectangle if real is None else rectangle * real[:, 0, 0, :, None]
            mixed.append(self.layer(zeroed.mT).mT)
        return self.activation(self.dropout(unpad(mixed, layout)))


class ConvolvedBlock(nn.Module):
    """norm(block(x) + convolution(x)).

    Source: the first layer of DeBERTa v2's larger models; transformers, `models/deberta_v2`.
    """

    def __init__(self, block: nn.Module, convolution: Convolution, norm: nn.Module):
        super().__init__()
        self.block = block
        self.convolution = convolution
        self.norm = norm

    def forward(self, x: Tensor, context: AttentionContext) -> Tensor:
        """x: [N, D] -> [N, D]."""
        if context.layout is None:
            raise ValueError("a convolution needs documents laid out in rectangles")
        return self.norm(self.block(x, context) + self.convolution(x, context.layout))

"""DeBERTa's layer: attention scores from content and from relative place apart, a convolution beside. Encoders only."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.cross_attention import key_mask
from alignment.models.layers.padded_layout import PaddedLayout, distances, gather, spread
from alignment.models.spec_disentangled import DisentangledSpec

if TYPE_CHECKING:
    from alignment.models.layers.sdpa import AttentionContext


class RelativeEmbedding(nn.Module):
    """Vectors of distances that all layers share, [2 * S, D], normed; row S + d is for d places back."""

    def __init__(self, count: int, width: int, norm: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.norm = norm

    def forward(self) -> Tensor:
        """[2 * S, D]."""
        return self.norm(self.weight)


class DisentangledAttention(nn.Module):
    """score(i, j) = [q_i k_j + q_i K_d + k_j Q_d] / sqrt(width * terms), where d is the class of the distance i - j.

    q and k come from what tokens hold, Q and K from the vectors of distances. A term that is left out is not counted.

    Source: He et al. 2020, arXiv:2006.03654, section 3.1, eq. 4. There the last term takes the class of j - i;
    published weights, and transformers, have i - j.
    """

    def __init__(self, spec: DisentangledSpec, width: int):
        super().__init__()
        terms = 1 + spec.content_to_position + spec.position_to_content
        if terms == 1:
            raise ValueError("without a term of distances this is plain attention: use AttentionSpec")
        inner = spec.heads * spec.head_dim
        self.query, self.key = nn.Linear(width, inner), nn.Linear(width, inner)
        self.value, self.output = nn.Linear(width, inner), nn.Linear(inner, width)
        if not spec.shared_projection:
            if spec.content_to_position:
                self.place_key = nn.Linear(width, inner)
            if spec.position_to_content:
                self.place_query = nn.Linear(width, inner)
        self.spec = spec
        self.scale = (spec.head_dim * terms) ** -0.5

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        packing = sight.packing
        if sight.relative is None or packing is None:
            raise ValueError("this attention needs the vectors of distances, and documents laid out in rectangles")
        query, key, value = (self._heads(layer(x)) for layer in (self.query, self.key, self.value))
        places = self._of_places(F.dropout(sight.relative, self.spec.relative_dropout, self.training))
        rectangles = zip(
            spread(query, packing), spread(key, packing), spread(value, packing), packing.lengths, strict=True
        )
        mixed = [self._attend(q, k, v, places, lengths) for q, k, v, lengths in rectangles]
        return self.output(gather(mixed, packing).flatten(1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.spec.heads, self.spec.head_dim))

    def _of_places(self, relative: Tensor) -> "Places":
        spec = self.spec
        query = self.query if spec.shared_projection else getattr(self, "place_query", None)
        key = self.key if spec.shared_projection else getattr(self, "place_key", None)
        return Places(
            self._heads(query(relative)) if query is not None and spec.position_to_content else None,
            self._heads(key(relative)) if key is not None and spec.content_to_position else None,
        )

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, places: "Places", lengths: tuple[int, ...]) -> Tensor:
        """One rectangle: [B, T, H, K] each; returns [B, T, H, K]."""
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        columns = q.shape[2]
        rows = relative_rows(distances(columns, columns, q.device), self.spec)  # [T, T]: of query i and key j
        terms = [] if places.key is None else [_picked(q, places.key, rows)]
        terms += [] if places.query is None else [_picked(k, places.query, rows.T).transpose(-1, -2)]
        bias, real = self.scale * sum(terms), key_mask(lengths, columns, q.device)
        assert isinstance(bias, Tensor)
        bias = bias if real is None else bias.masked_fill(~real, -torch.inf)
        dropout = self.spec.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=self.scale)
        return mixed.transpose(1, 2)


class Places(NamedTuple):
    """Queries and keys of distances, [2 * S, H, K] each; None where their term is left out."""

    query: Tensor | None
    key: Tensor | None


def _picked(content: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Score of token t with the vector that `rows`[t, s] names, [B, H, T, T], of content [B, H, T, K], places [R, H, K]."""
    scores = content @ places.permute(1, 2, 0)  # [B, H, T, R]
    return scores.gather(-1, rows.expand(*scores.shape[:2], *rows.shape))


def relative_rows(distance: Tensor, spec: DisentangledSpec) -> Tensor:
    """Row of the shared table for each distance, key place minus query place; the same shape, in [0, 2 * S)."""
    back = -distance
    span = spec.buckets or spec.max_distance
    if spec.buckets:
        back = distance_classes(back, spec.buckets, spec.max_distance)
    return (back + span).clamp(0, 2 * span - 1)


def distance_classes(distance: Tensor, buckets: int, max_distance: int) -> Tensor:
    """Classes of signed distances: exact up to half of `buckets`, then in logarithmic steps up to `max_distance`.

    Source: DeBERTa v2's published code; transformers, `models/deberta_v2`.
    """
    middle = buckets // 2
    far = distance.abs().clamp(min=middle).float()
    share = torch.log(far / middle) / torch.tensor(math.log((max_distance - 1) / middle), dtype=torch.float32)
    logarithmic = (torch.ceil(share * (middle - 1)) + middle).long()
    return torch.where(distance.abs() <= middle, distance, distance.sign() * logarithmic)


class Convolution(nn.Module):
    """activation(convolution(x)) over each document's tokens; beyond its ends lie zeros."""

    def __init__(self, layer: nn.Conv1d, activation: Callable[[Tensor], Tensor], dropout: nn.Module):
        super().__init__()
        self.layer, self.activation, self.dropout = layer, activation, dropout

    def forward(self, x: Tensor, packing: PaddedLayout) -> Tensor:
        """x: [N, D] -> [N, D]."""
        rectangles = zip(spread(x, packing), packing.lengths, strict=True)
        mixed = gather([self.layer(_zeros_at_padding(*pair).mT).mT for pair in rectangles], packing)
        return self.activation(self.dropout(mixed))


def _zeros_at_padding(rectangle: Tensor, lengths: tuple[int, ...]) -> Tensor:
    real = key_mask(lengths, rectangle.shape[1], rectangle.device)
    return rectangle if real is None else rectangle * real[:, 0, 0, :, None]


class ConvolvedBlock(nn.Module):
    """norm(block(x) + convolution(x)).

    Source: the first layer of DeBERTa v2's larger models; transformers, `models/deberta_v2`.
    """

    def __init__(self, block: nn.Module, convolution: Convolution, norm: nn.Module):
        super().__init__()
        self.block, self.convolution, self.norm = block, convolution, norm

    def forward(self, x: Tensor, sight: "AttentionContext") -> Tensor:
        """x: [N, D] -> [N, D]."""
        if sight.packing is None:
            raise ValueError("a convolution needs documents laid out in rectangles")
        return self.norm(self.block(x, sight) + self.convolution(x, sight.packing))

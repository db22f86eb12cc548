"""Added positions: vectors on the token embedding, and biases on attention scores (ALiBi's slopes, T5's buckets).

A bias takes relative positions, key position minus query position, so that the same code serves whole documents and one
new token.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LearnedPositionsSpec:
    """One trained vector per position, added to the token's; position 0 reads row `first` of the table."""

    count: int
    first: int = 0

    def build(self, width: int) -> nn.Module:
        """positions [N] -> vectors [N, width]."""
        return LearnedPositions(self.count, width, self.first)


@dataclass(frozen=True)
class SinusoidalPositionsSpec:
    """Sines and cosines of the position, added to the token's vector."""

    def build(self, width: int) -> nn.Module:
        """positions [N] -> vectors [N, width]."""
        return SinusoidalPositions(width)


PositionsSpec = LearnedPositionsSpec | SinusoidalPositionsSpec


class LearnedPositions(nn.Module):
    """One trained vector per position; position 0 reads row `first`: some families keep rows below for other uses."""

    def __init__(self, count: int, width: int, first: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(first + count, width))
        self.first = first

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [N] -> [N, D]."""
        return nn.functional.embedding(positions + self.first if self.first else positions, self.weight)


class SinusoidalPositions(nn.Module):
    """sin(position / 10000^(2 i / D)) in the even columns, the cosine in the odd ones. Nothing is trained or saved.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, positions: Tensor) -> Tensor:
        """positions: [N] -> [N, D], fp32."""
        exponents = torch.arange(0, self.width, 2, device=positions.device, dtype=torch.float32) / self.width
        angles = positions[:, None].float() * 10000.0**-exponents
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.width]


@dataclass(frozen=True)
class AlibiSpec:
    """Scores lowered in proportion to the distance, by a fixed slope per head; `scale` multiplies the slopes."""

    scale: float = 1.0
    bfloat16: bool = False  # the model was trained with slopes, positions and their products in bfloat16

    def build(self, heads: int, causal: bool) -> nn.Module:
        """relative positions [..., Q, T] -> biases [..., H, Q, T]."""
        return BFloat16Alibi(heads, self.scale) if self.bfloat16 else Alibi(heads, self.scale)


@dataclass(frozen=True)
class RelativeBiasSpec:
    """One trained number per head and bucket of relative positions, added to the scores; all layers share it (T5)."""

    buckets: int
    max_distance: int

    def build(self, heads: int, causal: bool) -> nn.Module:
        """relative positions [..., Q, T] -> biases [..., H, Q, T]."""
        return RelativeBias(self.buckets, self.max_distance, heads, bidirectional=not causal)


PositionBiasSpec = AlibiSpec | RelativeBiasSpec


class Alibi(nn.Module):
    """-slope * |relative position|; every head has its slope and nothing is trained.

    Source: Press et al. 2021, arXiv:2108.12409, section 3.
    """

    def __init__(self, heads: int, scale: float = 1.0):
        super().__init__()
        self.slopes = [scale * slope for slope in alibi_slopes(heads)]

    def forward(self, relative_positions: Tensor) -> Tensor:
        """relative_positions: [..., Q, T] -> [..., H, Q, T], fp32."""
        slopes = torch.tensor(self.slopes, device=relative_positions.device)
        return -slopes[:, None, None] * relative_positions.abs().float().unsqueeze(-3)


class BFloat16Alibi(nn.Module):
    """scale * bf16(bf16(slope) * bf16(position of the key)): ALiBi as computed by models that were trained in bfloat16.

    Without rounding this equals `Alibi`, because softmax ignores what all keys of a query have in common. With it,
    biases are steps that depend on the key's own position.

    Source: transformers, `models/falcon`, `build_alibi_tensor`.
    """

    def __init__(self, heads: int, scale: float = 1.0):
        super().__init__()
        self.slopes = alibi_slopes(heads)
        self.scale = scale

    def forward(self, relative_positions: Tensor) -> Tensor:
        """relative_positions: [..., Q, T], of keys at the positions 0 ... T - 1 -> [..., H, Q, T], fp32."""
        slopes = torch.tensor(self.slopes, device=relative_positions.device, dtype=torch.bfloat16)
        positions = torch.arange(relative_positions.shape[-1], device=relative_positions.device).bfloat16()
        bias = self.scale * (slopes[:, None] * positions).float()
        return bias[:, None].expand(*relative_positions.shape[:-2], -1, relative_positions.shape[-2], -1)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / n), h = 1 ... n, the largest power of two within `heads`; the rest from between, every second of 2n."""
    largest = 2 ** int(math.log2(heads))
    return [
        *(2 ** (-8 * h / largest) for h in range(1, largest + 1)),
        *(2 ** (-4 * h / largest) for h in range(1, 2 * (heads - largest), 2)),
    ]


class RelativeBias(nn.Module):
    """One trained number per head and bucket of relative positions.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    def __init__(self, buckets: int, max_distance: int, heads: int, bidirectional: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        self.max_distance = max_distance
        self.bidirectional = bidirectional

    def forward(self, relative_positions: Tensor) -> Tensor:
        """relative_positions: [..., Q, T] -> [..., H, Q, T]."""
        buckets = relative_buckets(relative_positions, len(self.weight), self.max_distance, self.bidirectional)
        return nn.functional.embedding(buckets, self.weight).movedim(-1, -3)


def relative_buckets(relative_positions: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each relative position: near ones alone, far ones in logarithmic steps up to `max_distance`.

    Args:
        relative_positions: key position minus query position, any shape.
        buckets: in all; with `bidirectional` half of them for keys to the right.

    Returns:
        long, the same shape, in [0, buckets).
    """
    offset = torch.zeros_like(relative_positions)
    if bidirectional:
        buckets //= 2
        offset = (relative_positions > 0).long() * buckets
        relative_positions = relative_positions.abs()
    else:
        relative_positions = (-relative_positions).clamp(min=0)
    exact = buckets // 2
    # Logarithms of 0 are avoided, not repaired: those positions have exact buckets.
    share = torch.log(relative_positions.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(relative_positions < exact, relative_positions, far)

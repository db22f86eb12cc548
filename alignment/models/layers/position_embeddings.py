"""Position vectors added to the token embedding: trained ones and sinusoids."""

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
    """One trained vector per position; position 0 reads row `first`, below which some families keep rows for other uses."""

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

"""Places added to the embedding: trained vectors and sinusoids. Rotary angles are in rotary.py, biases in distance.py."""

import torch
from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """One trained vector per place; place 0 reads row `first`, where some families keep rows for other uses."""

    def __init__(self, count: int, width: int, first: int = 0):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(first + count, width))
        self.first = first

    def forward(self, places: Tensor) -> Tensor:
        """places: [N] -> [N, D]."""
        return nn.functional.embedding(places + self.first if self.first else places, self.weight)


class SinusoidalPositions(nn.Module):
    """sin(place / 10000^(2 i / D)) in the even columns, the cosine in the odd ones. Nothing is trained or saved.

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, places: Tensor) -> Tensor:
        """places: [N] -> [N, D], fp32."""
        exponents = torch.arange(0, self.width, 2, device=places.device, dtype=torch.float32) / self.width
        angles = places[:, None].float() * 10000.0**-exponents
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, : self.width]

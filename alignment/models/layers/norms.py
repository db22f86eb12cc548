"""RMSNorm in the rounding orders of the references. LayerNorm is not here: torch's own sums in fp32 already."""

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), the quotient in fp32, then rounded to x's type, as Llama does.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.
    """

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> the same shape."""
        return self.weight * root_mean_square_removed(x.float(), self.eps).to(x.dtype)


class Float32RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), all of it in fp32 before rounding, as OLMo 2 does."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> the same shape."""
        return (self.weight * root_mean_square_removed(x.float(), self.eps)).to(x.dtype)


class UnitOffsetRMSNorm(nn.Module):
    """(1 + weight) * x / sqrt(mean(x^2) + eps), all of it in fp32 before rounding, as Gemma does."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> the same shape."""
        return (root_mean_square_removed(x.float(), self.eps) * (1 + self.weight.float())).to(x.dtype)


def root_mean_square_removed(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) over the last axis."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

"""RMSNorm in the rounding order of the reference. LayerNorm is not here: torch's own sums in fp32 already."""

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
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)

"""Norms: RMSNorm in the rounding orders of the references; LayerNorm is torch's own, which sums in fp32 already."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LayerNormSpec:
    """Mean and variance removed, then weight and bias; `bias` only with `weight`."""

    eps: float
    bias: bool = True
    weight: bool = True

    def build(self, width: int) -> nn.Module:
        """The norm of vectors [..., width]."""
        return nn.LayerNorm(width, eps=self.eps, elementwise_affine=self.weight, bias=self.bias)


@dataclass(frozen=True)
class RMSNormSpec:
    """Root mean square removed, then weight."""

    eps: float

    def build(self, width: int) -> nn.Module:
        """The norm of vectors [..., width]."""
        return RMSNorm(width, self.eps)


@dataclass(frozen=True)
class Float32RMSNormSpec:
    """RMSNorm that rounds after the weight and not before it (OLMo 2)."""

    eps: float

    def build(self, width: int) -> nn.Module:
        """The norm of vectors [..., width]."""
        return Float32RMSNorm(width, self.eps)


@dataclass(frozen=True)
class UnitOffsetRMSNormSpec:
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    eps: float

    def build(self, width: int) -> nn.Module:
        """The norm of vectors [..., width]."""
        return UnitOffsetRMSNorm(width, self.eps)


@dataclass(frozen=True)
class NoNormSpec:
    """The identity."""

    def build(self, width: int) -> nn.Module:
        """A module that returns its input."""
        return nn.Identity()


NormSpec = LayerNormSpec | RMSNormSpec | Float32RMSNormSpec | UnitOffsetRMSNormSpec | NoNormSpec


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
        return self.weight * self.normalized(x).to(x.dtype)

    def normalized(self, x: Tensor) -> Tensor:
        """x / sqrt(mean(x^2) + eps) over the last axis, fp32."""
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


class Float32RMSNorm(RMSNorm):
    """weight * x / sqrt(mean(x^2) + eps), all of it in fp32 before rounding, as OLMo 2 does."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> the same shape."""
        return (self.weight * self.normalized(x)).to(x.dtype)


class UnitOffsetRMSNorm(RMSNorm):
    """(1 + weight) * x / sqrt(mean(x^2) + eps), all of it in fp32 before rounding, as Gemma does."""

    def __init__(self, width: int, eps: float):
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> the same shape."""
        return (self.normalized(x) * (1 + self.weight.float())).to(x.dtype)

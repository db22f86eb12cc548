"""Norms: RMSNorm in the rounding orders of the references; LayerNorm is torch's own, which sums in fp32 already."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Order = Literal["round_first", "round_last", "unit_offset"]


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
    """Root mean square removed, then weight; `order` of the operations as in `RMSNorm`."""

    eps: float
    order: Order = "round_first"

    def build(self, width: int) -> nn.Module:
        """The norm of vectors [..., width]."""
        return RMSNorm(width, self.eps, self.order)


@dataclass(frozen=True)
class NoNormSpec:
    """The identity."""

    def build(self, width: int) -> nn.Module:
        """A module that returns its input."""
        return nn.Identity()


NormSpec = LayerNormSpec | RMSNormSpec | NoNormSpec


def on_gpu(x: Tensor) -> bool:
    """True for a tensor on a GPU, where a small operation takes the time of starting its kernel."""
    return x.is_cuda


def computing_type(x: Tensor) -> torch.dtype:
    """The type of the autocast around the call, or that of x without one."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def computed_in(x: Tensor) -> Tensor:
    """x in its `computing_type`: cast once for all layers that read it."""
    return x.to(computing_type(x))


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps), the quotient in fp32.

    Rounded to x's type before the product with the weight (`round_first`, Llama) or after it (`round_last`, OLMo 2);
    `unit_offset`: after it, and the product is with 1 + weight (Gemma).

    Source: Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4.
    """

    def __init__(self, width: int, eps: float, order: Order = "round_first"):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if order == "unit_offset" else torch.ones(width))
        self.eps = eps
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., D] -> the same shape."""
        if on_gpu(x):
            return self._fused(x)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.order == "round_first":
            return self.weight * normed.to(x.dtype)
        weight = 1 + self.weight.float() if self.order == "unit_offset" else self.weight
        return (weight * normed).to(x.dtype)

    def _fused(self, x: Tensor) -> Tensor:
        """The same by torch's fused kernel, which computes in fp32 and rounds its result."""
        if self.order == "round_first" and x.dtype != torch.float32:
            return self.weight * F.rms_norm(x, self.weight.shape, None, self.eps).to(x.dtype)
        weight = 1 + self.weight.float() if self.order == "unit_offset" else self.weight
        wide = x.to(torch.promote_types(x.dtype, weight.dtype))
        return F.rms_norm(wide, weight.shape, weight.to(wide.dtype), self.eps).to(x.dtype)

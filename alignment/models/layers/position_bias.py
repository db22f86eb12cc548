"""Scores that depend on how far apart two tokens stand: ALiBi's slopes and T5's trained buckets. Rotation is in rotary.py.

Both give a bias per head for a table of distances, key place minus query place, so that the same code serves whole
documents and one new token.
"""

import math

import torch
from torch import Tensor, nn


class Alibi(nn.Module):
    """-slope * |distance|; every head has its slope and nothing is trained.

    Source: Press et al. 2021, arXiv:2108.12409, section 3.
    """

    def __init__(self, heads: int, scale: float = 1.0):
        super().__init__()
        self.slopes = [scale * slope for slope in alibi_slopes(heads)]

    def forward(self, distances: Tensor) -> Tensor:
        """distances: [..., Q, T] -> [..., H, Q, T], fp32."""
        slopes = torch.tensor(self.slopes, device=distances.device)
        return -slopes[:, None, None] * distances.abs().float().unsqueeze(-3)


class BFloat16Alibi(nn.Module):
    """scale * bf16(bf16(slope) * bf16(place of the key)): ALiBi as models trained in bfloat16 know it.

    Without rounding this is `Alibi`, for softmax does not see what all keys of a query have in common. With it, biases
    are steps that depend on the key's own place.

    Source: transformers, `models/falcon`, `build_alibi_tensor`.
    """

    def __init__(self, heads: int, scale: float = 1.0):
        super().__init__()
        self.slopes, self.scale = alibi_slopes(heads), scale

    def forward(self, distances: Tensor) -> Tensor:
        """distances: [..., Q, T], of keys at the places 0 ... T - 1 -> [..., H, Q, T], fp32."""
        slopes = torch.tensor(self.slopes, device=distances.device, dtype=torch.bfloat16)
        places = torch.arange(distances.shape[-1], device=distances.device).bfloat16()
        bias = self.scale * (slopes[:, None] * places).float()
        return bias[:, None].expand(*distances.shape[:-2], -1, distances.shape[-2], -1)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8 h / n) for h = 1 ... n, the largest power of two within `heads`; the rest from between, every second of 2n."""
    largest = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * h / largest) for h in range(1, largest + 1)]
    between = [2 ** (-4 * h / largest) for h in range(1, 2 * (heads - largest), 2)]
    return slopes + between


class RelativeBias(nn.Module):
    """One trained number per head and bucket of distances.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 2.1.
    """

    def __init__(self, buckets: int, max_distance: int, heads: int, bidirectional: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(buckets, heads))
        self.max_distance, self.bidirectional = max_distance, bidirectional

    def forward(self, distances: Tensor) -> Tensor:
        """distances: [..., Q, T] -> [..., H, Q, T]."""
        buckets = relative_buckets(distances, len(self.weight), self.max_distance, self.bidirectional)
        return nn.functional.embedding(buckets, self.weight).movedim(-1, -3)


def relative_buckets(distances: Tensor, buckets: int, max_distance: int, bidirectional: bool) -> Tensor:
    """The bucket of each distance: near ones alone, far ones in logarithmic steps up to `max_distance`.

    Args:
        distances: key place minus query place, any shape.
        buckets: in all; with `bidirectional` half of them for keys to the right.

    Returns:
        long, the same shape, in [0, buckets).
    """
    offset = torch.zeros_like(distances)
    if bidirectional:
        buckets //= 2
        offset = (distances > 0).long() * buckets
        distances = distances.abs()
    else:
        distances = (-distances).clamp(min=0)
    exact = buckets // 2
    # Logarithms of 0 are avoided, not repaired: those places are exact ones.
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    far = (exact + (share * (buckets - exact)).long()).clamp(max=buckets - 1)
    return offset + torch.where(distances < exact, distances, far)

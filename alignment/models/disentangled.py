"""DeBERTa's attention: scores from content and from relative place apart. Encoders only, no cache.

Source: He et al. 2020, arXiv:2006.03654, section 3.1; buckets: He et al. 2021, arXiv:2111.09543.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from alignment.models.spec import DisentangledSpec

if TYPE_CHECKING:
    from alignment.models.sight import Sight


class RelativeEmbedding(nn.Module):
    """Vectors of distances that all layers share, [2 * S, D], normed."""

    def __init__(self, count: int, width: int, norm: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))
        self.norm = norm

    def forward(self) -> Tensor:
        """[2 * S, D]."""
        return self.norm(self.weight)


class DisentangledAttention(nn.Module):
    """Placeholder wiring; see the family."""

    def __init__(self, spec: DisentangledSpec, width: int):
        super().__init__()
        inner = spec.heads * spec.head_width
        self.query, self.key = nn.Linear(width, inner), nn.Linear(width, inner)
        self.value, self.output = nn.Linear(width, inner), nn.Linear(inner, width)
        self.spec = spec

    def forward(self, x: Tensor, sight: "Sight") -> Tensor:
        """x: [N, D] -> [N, D]."""
        raise NotImplementedError

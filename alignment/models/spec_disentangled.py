"""DeBERTa's own layer as frozen specifications: attention on place and content apart, a convolution beside it."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ConvolutionSpec:
    """activation(convolution over `width` neighboring tokens); `width` is odd, `groups` of channels stay apart."""

    width: int
    activation: str
    groups: int = 1


@dataclass(frozen=True)
class DisentangledSpec:
    """Attention on content and on relative place apart (DeBERTa).

    Attributes:
        buckets: distances are put into 2 * buckets classes, logarithmic far away; 0: none, plain distances.
        max_distance: the largest that is told apart.
        content_to_position, position_to_content: which of the two mixed terms are added.
        shared_projection: queries and keys of positions use those of the content.
        relative_dropout: probability on the vectors of distances.

    Source: He et al. 2020, arXiv:2006.03654, section 3.1.
    """

    heads: int
    head_dim: int
    buckets: int
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    shared_projection: bool
    dropout: float = 0.0
    relative_dropout: float = 0.0
    causal: Literal[False] = False

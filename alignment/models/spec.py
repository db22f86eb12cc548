"""What an architecture *is*: frozen specifications of its parts. No tensors (build.py), no file formats (families/).

A part is chosen by the type of its specification, not by a flag: a new kind of position or norm is one more dataclass
here and one more builder in build.py.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerNormSpec:
    """Mean and variance removed, then weight and bias."""

    eps: float


@dataclass(frozen=True)
class RMSNormSpec:
    """Root mean square removed, then weight."""

    eps: float


NormSpec = LayerNormSpec | RMSNormSpec


@dataclass(frozen=True)
class LearnedPositionsSpec:
    """One trained vector per place, added to the token's."""

    count: int


@dataclass(frozen=True)
class LinearScaling:
    """Every rotary frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth step between.

    Source: transformers, `rope_type="llama3"`; Dubey et al. 2024, arXiv:2407.21783, section 3.4.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class RotaryPositionsSpec:
    """Queries and keys turned by an angle that grows with the place."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


PositionsSpec = LearnedPositionsSpec | RotaryPositionsSpec


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention; grouped-query where `key_value_heads` is below `heads`, which it divides.

    Attributes:
        scale: factor on the scores, commonly head_width ** -0.5.
        bias: whether the four linear layers have one.
        dropout: probability on the attention weights, in training only.
    """

    heads: int
    key_value_heads: int
    head_width: int
    scale: float
    bias: bool
    dropout: float = 0.0


@dataclass(frozen=True)
class PlainFeedForwardSpec:
    """down(activation(up(x)))."""

    width: int
    activation: str
    bias: bool


@dataclass(frozen=True)
class GatedFeedForwardSpec:
    """down(activation(gate(x)) * up(x))."""

    width: int
    activation: str
    bias: bool


FeedForwardSpec = PlainFeedForwardSpec | GatedFeedForwardSpec


@dataclass(frozen=True)
class BlockSpec:
    """One pre-norm layer; `dropout` acts on what the attention and the feed-forward add."""

    attention: AttentionSpec
    feedforward: FeedForwardSpec
    norm: NormSpec
    dropout: float = 0.0


@dataclass(frozen=True)
class InitSpec:
    """Standard deviations of fresh weights; `residual_std` is for the layers that write into the residual stream."""

    std: float
    residual_std: float


@dataclass(frozen=True)
class TransformerSpec:
    """A whole decoder. Layers are listed one by one, so they may differ.

    Attributes:
        width: D, of the residual stream.
        max_positions: longest document, tokens, prefix included.
        tied_head: the language head is the token embedding.
    """

    vocabulary: int
    width: int
    max_positions: int
    positions: PositionsSpec
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    init: InitSpec
    tied_head: bool
    embedding_dropout: float = 0.0

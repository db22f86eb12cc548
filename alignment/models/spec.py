"""What an architecture *is*: frozen specifications of its parts. No tensors (build.py), no file formats (families/).

A part is chosen by the type of its specification, not by a flag: a new kind of position or norm is one more dataclass
here and one more builder in build.py. How places are told is in spec_positions.py, DeBERTa's layer in
spec_disentangled.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from alignment.models.spec_disentangled import ConvolutionSpec, DisentangledSpec
from alignment.models.spec_positions import AlibiSpec, PositionsSpec, RelativeBiasSpec, RotarySpec, RoundedAlibiSpec

UNLIMITED = 2**31  # tokens: longer than any document, where nothing in an architecture sets an end
Pooling = Literal["first", "last", "mean"]  # which of a document's vectors stands for it


@dataclass(frozen=True)
class LayerNormSpec:
    """Mean and variance removed, then weight and bias; `bias` only with `weight`."""

    eps: float
    bias: bool = True
    weight: bool = True


@dataclass(frozen=True)
class RMSNormSpec:
    """Root mean square removed, then weight."""

    eps: float


@dataclass(frozen=True)
class WideRMSNormSpec:
    """RMSNorm that rounds after the weight and not before it (OLMo 2)."""

    eps: float


@dataclass(frozen=True)
class UnitOffsetRMSNormSpec:
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    eps: float


@dataclass(frozen=True)
class NoNormSpec:
    """Nothing is done."""


NormSpec = LayerNormSpec | RMSNormSpec | WideRMSNormSpec | UnitOffsetRMSNormSpec | NoNormSpec


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention; grouped-query where `key_value_heads` is below `heads`, which it divides.

    Attributes:
        scale: factor on the scores, commonly head_dim ** -0.5.
        bias: whether query, key and value have one; `output_bias` for the layer after.
        dropout: probability on the attention weights, in training only.
        causal: a token sees itself and what is before it; else both sides.
        window: a token sees only what is less than so many places away; None: everything.
        softcap: scores become softcap * tanh(score / softcap).
        query_key_norm: norm of queries and keys, of each head by itself or of all heads as one vector.
        rotary, distance: how the place acts on the scores.
    """

    heads: int
    key_value_heads: int
    head_dim: int
    scale: float
    bias: bool
    output_bias: bool
    dropout: float = 0.0
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    query_key_norm: NormSpec | None = None
    norm_heads: Literal["each", "all"] = "each"
    rotary: RotarySpec | None = None
    distance: AlibiSpec | RoundedAlibiSpec | RelativeBiasSpec | None = None


@dataclass(frozen=True)
class PlainFeedForwardSpec:
    """down(activation(up(x))); `dropout` acts on what `down` reads."""

    width: int
    activation: str
    bias: bool
    dropout: float = 0.0


@dataclass(frozen=True)
class GatedFeedForwardSpec:
    """down(activation(gate(x)) * up(x)); `dropout` acts on what `down` reads."""

    width: int
    activation: str
    bias: bool
    dropout: float = 0.0


@dataclass(frozen=True)
class ExpertsSpec:
    """Several feed-forwards, of which each token takes `chosen`.

    Attributes:
        normalized: the weights of the chosen are made to sum to 1.
        balance_coef: factor on the load-balancing loss, in training only.
    """

    expert: PlainFeedForwardSpec | GatedFeedForwardSpec
    count: int
    chosen: int
    normalized: bool = True
    balance_coef: float = 0.0


FeedForwardSpec = PlainFeedForwardSpec | GatedFeedForwardSpec | ExpertsSpec


@dataclass(frozen=True)
class BlockSpec:
    """One layer; `dropout` acts on what attention and feed-forward add.

    Attributes:
        wiring: where the norms stand. pre: before each part. post: after each sum. sandwich: before each part and on
            what it adds. output: only on what it adds. parallel: both parts read the same x, each through its own
            norm. parallel_shared: both through one norm. residual: before each part, which adds to what it gave.
        attention_norm: where attention's norm is not `norm`.
        cross: attention on what an encoder read.
        convolution: beside the layer, of what it reads; added to what it gives.
    """

    attention: AttentionSpec | DisentangledSpec
    feedforward: FeedForwardSpec
    norm: NormSpec
    dropout: float = 0.0
    wiring: Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared", "residual"] = "pre"
    attention_norm: NormSpec | None = None
    cross: AttentionSpec | None = None
    convolution: ConvolutionSpec | None = None


@dataclass(frozen=True)
class InitSpec:
    """Standard deviations of fresh weights; `residual_std` is for the layers that write into the residual stream."""

    std: float
    residual_std: float


@dataclass(frozen=True)
class FanInInitSpec:
    """T5's start: a layer's deviation is its inputs to the power -1/2, token vectors have 1, queries a head's width less.

    Attributes:
        distance_std: of the biases for distances.
        factor: on all of them.
    """

    distance_std: float
    factor: float = 1.0


@dataclass(frozen=True)
class TransformSpec:
    """norm(activation(dense(x))): what some heads do before they predict."""

    width: int
    activation: str
    bias: bool
    norm: NormSpec = field(default_factory=NoNormSpec)


@dataclass(frozen=True)
class LanguageHeadSpec:
    """From hidden states to one logit per token: softcap(scale * predict(transform(x))).

    Attributes:
        offset: constants that are saved with the weights and not trained are added to the logits (BART).
    """

    transform: TransformSpec | None = None
    bias: bool = False
    offset: bool = False
    scale: float = 1.0
    softcap: float | None = None


@dataclass(frozen=True)
class ReadoutSpec:
    """From hidden states to `outputs` numbers, of a document (where `pooling` says of what) or of every token."""

    outputs: int
    transform: TransformSpec | None = None
    bias: bool = True
    dropout: float = 0.0
    pooling: Pooling | None = None
    input_dropout: float = 0.0


@dataclass(frozen=True)
class ProjectionSpec:
    """A linear layer from a token table of `width` columns to D (factorised embeddings).

    Attributes:
        before_positions: positions are D wide and added after it (OPT); else all that is added is narrow (ALBERT).
    """

    width: int
    bias: bool
    before_positions: bool


@dataclass(frozen=True)
class TransformerSpec:
    """A whole decoder or encoder. Blocks are listed one by one, so they may differ.

    Attributes:
        width: D, of the residual stream.
        max_positions: longest document, tokens, prefix included.
        positions: what is added to the embedding; rotary and distance biases are the attention's.
        norm: after the last block; `output_dropout` acts on what it gives.
        tied_head: the language head is the token embedding.
        order: which block each layer is; None: each its own (ALBERT: the same again and again).
        projection: where the token table is narrower than D.
        output_width: what a last linear layer goes back to before the head; None: there is none.
        embedding_scale: factor on token vectors.
        segments: kinds of sentences that have a vector of their own.
        relative: distances DeBERTa's layers share vectors for; 2 * relative rows, normed by `relative_norm`.
    """

    vocabulary: int
    width: int
    max_positions: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    init: InitSpec | FanInInitSpec
    tied_head: bool
    positions: PositionsSpec | None = None
    embedding_dropout: float = 0.0
    output_dropout: float = 0.0
    head: LanguageHeadSpec = field(default_factory=LanguageHeadSpec)
    order: tuple[int, ...] | None = None
    projection: ProjectionSpec | None = None
    output_width: int | None = None
    embedding_scale: float = 1.0
    embedding_norm: NormSpec | None = None
    segments: int = 0
    relative: int = 0
    relative_norm: NormSpec = field(default_factory=NoNormSpec)

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        """The block of each layer, in the order they act."""
        return self.blocks if self.order is None else tuple(self.blocks[i] for i in self.order)

    @property
    def causal(self) -> bool:
        """Whether tokens see only what is before them: a decoder."""
        return self.blocks[0].attention.causal

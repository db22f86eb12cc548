"""What an architecture *is*: frozen specifications of its parts. No tensors (build.py), no file formats (families/).

A part is chosen by the type of its specification, not by a flag: a new kind of position or norm is one more dataclass
here and one more builder in build.py. How places are told is in spec_positions.py.
"""

from dataclasses import dataclass, field
from typing import Literal

from alignment.models.spec_positions import AlibiSpec, PositionsSpec, RelativeBiasSpec, RotarySpec

Pooling = Literal["first", "last", "mean"]  # which of a document's vectors stands for it


@dataclass(frozen=True)
class LayerNormSpec:
    """Mean and variance removed, then weight and, commonly, bias."""

    eps: float
    bias: bool = True


@dataclass(frozen=True)
class RMSNormSpec:
    """Root mean square removed, then weight."""

    eps: float


@dataclass(frozen=True)
class UnitOffsetRMSNormSpec:
    """RMSNorm that multiplies by 1 + weight (Gemma)."""

    eps: float


@dataclass(frozen=True)
class NoNormSpec:
    """Nothing is done."""


NormSpec = LayerNormSpec | RMSNormSpec | UnitOffsetRMSNormSpec | NoNormSpec


@dataclass(frozen=True)
class AttentionSpec:
    """Multi-head attention; grouped-query where `key_value_heads` is below `heads`, which it divides.

    Attributes:
        scale: factor on the scores, commonly head_width ** -0.5.
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
    head_width: int
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
    distance: AlibiSpec | RelativeBiasSpec | None = None


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
        normalised: the weights of the chosen are made to sum to 1.
        balance_coef: factor on the load-balancing loss, in training only.
    """

    expert: PlainFeedForwardSpec | GatedFeedForwardSpec
    count: int
    chosen: int
    normalised: bool = True
    balance_coef: float = 0.0


FeedForwardSpec = PlainFeedForwardSpec | GatedFeedForwardSpec | ExpertsSpec


@dataclass(frozen=True)
class BlockSpec:
    """One layer; `dropout` acts on what attention and feed-forward add.

    Attributes:
        wiring: where the norms stand. pre: before each part. post: after each sum. sandwich: before each part and on
            what it adds. output: only on what it adds. parallel: both parts read the same x, each through its own
            norm. parallel_shared: both through one norm.
        attention_norm: where attention's norm is not `norm`.
        cross: attention on what an encoder read.
    """

    attention: "AttentionSpec | DisentangledSpec"
    feedforward: FeedForwardSpec
    norm: NormSpec
    dropout: float = 0.0
    wiring: Literal["pre", "post", "sandwich", "output", "parallel", "parallel_shared"] = "pre"
    attention_norm: NormSpec | None = None
    cross: AttentionSpec | None = None


@dataclass(frozen=True)
class DisentangledSpec:
    """Attention on content and on relative place apart (DeBERTa).

    Attributes:
        buckets: distances are put into 2 * buckets classes, logarithmic far away; 0: none, plain distances.
        max_distance: the largest that is told apart.
        content_to_position, position_to_content: which of the two mixed terms are added.
        shared_projection: queries and keys of positions use those of the content.

    Source: He et al. 2020, arXiv:2006.03654, section 3.1.
    """

    heads: int
    head_width: int
    buckets: int
    max_distance: int
    content_to_position: bool
    position_to_content: bool
    shared_projection: bool
    dropout: float = 0.0
    causal: Literal[False] = False


@dataclass(frozen=True)
class InitSpec:
    """Standard deviations of fresh weights; `residual_std` is for the layers that write into the residual stream."""

    std: float
    residual_std: float


@dataclass(frozen=True)
class FanInInitSpec:
    """T5's start: a layer's deviation is its inputs to the power -1/2, token vectors have 1, queries a head's width less."""


@dataclass(frozen=True)
class TransformSpec:
    """norm(activation(dense(x))): what some heads do before they predict."""

    width: int
    activation: str
    bias: bool
    norm: NormSpec = field(default_factory=NoNormSpec)


@dataclass(frozen=True)
class LanguageHeadSpec:
    """From hidden states to one logit per token: softcap(scale * predict(transform(x)))."""

    transform: TransformSpec | None = None
    bias: bool = False
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
        norm: after the last block.
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


@dataclass(frozen=True)
class EncoderDecoderSpec:
    """An encoder and a decoder whose blocks look at it; they share the token table, the head perhaps too."""

    encoder: TransformerSpec
    decoder: TransformerSpec
    start_token: int

    @property
    def vocabulary(self) -> int:
        """Tokens that can be read and written."""
        return self.decoder.vocabulary

    @property
    def max_positions(self) -> int:
        """Longest target document."""
        return self.decoder.max_positions

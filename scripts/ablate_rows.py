"""The rows of ablate.py: a vanilla decoder, and what each row exchanges in it. Nothing is trained here.

Source: Narang et al. 2021, arXiv:2102.11972, table 1, as far as our parts go; theirs are encoder-decoders.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    GatedFeedForwardSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
    RelativeBiasSpec,
    RMSNormSpec,
    RotarySpec,
    SinusoidalPositionsSpec,
)
from alignment.models.transformer import ProjectionSpec, TransformerSpec

Change = Callable[[TransformerSpec], TransformerSpec]


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        name: what `--rows` calls it.
        label: what the table calls it.
        parts: fields of the specification that differ from the vanilla model's, dotted; those of all blocks as one.
        change: vanilla -> this row's model.
    """

    name: str
    label: str
    parts: tuple[str, ...]
    change: Change


def vanilla(vocabulary: int, width: int, layers: int, tokens: int) -> TransformerSpec:
    """The baseline: ReLU, learned positions, LayerNorm before each part, every head its own keys, tied embeddings.

    Args:
        vocabulary: different characters.
        width: D; there are max(4, D / 64) heads.
        layers: even, for rows that halve or double them.
        tokens: longest document.
    """
    heads = heads_of(width)
    head_dim = width // heads
    attention = AttentionSpec(heads, heads, head_dim, head_dim**-0.5, bias=True, output_bias=True)
    block = BlockSpec(attention, PlainFeedForwardSpec(4 * width, "relu", bias=True), LayerNormSpec(1e-5))
    return TransformerSpec(
        vocabulary, width, tokens, (block,) * layers, LayerNormSpec(1e-5), _init(layers), tied_head=True,
        positions=LearnedPositionsSpec(tokens),
    )  # fmt: skip


def heads_of(width: int) -> int:
    """Heads of the baseline."""
    return max(4, width // 64)


def _init(layers: int) -> InitSpec:
    return InitSpec(std=0.02, residual_std=0.02 / (2 * layers) ** 0.5)


def _blocks(spec: TransformerSpec, change: Callable[[BlockSpec], BlockSpec]) -> TransformerSpec:
    return replace(spec, blocks=tuple(change(block) for block in spec.blocks))


def _attention(spec: TransformerSpec, **changes: Any) -> TransformerSpec:
    return _blocks(spec, lambda block: replace(block, attention=replace(block.attention, **changes)))


def _activation(spec: TransformerSpec, name: str) -> TransformerSpec:
    return _blocks(spec, lambda block: replace(block, feedforward=replace(block.feedforward, activation=name)))


def _gated(spec: TransformerSpec, gate: str) -> TransformerSpec:
    """Three matrices for two: two thirds of the width, to the next 8, keep the parameters.

    Source: Shazeer 2020, arXiv:2002.05202, section 3.
    """
    width = 8 * round(_plain(spec).width * 2 / 3 / 8)
    return _blocks(spec, lambda block: replace(block, feedforward=GatedFeedForwardSpec(width, gate, bias=True)))


def _plain(spec: TransformerSpec) -> PlainFeedForwardSpec:
    feedforward = spec.blocks[0].feedforward
    assert isinstance(feedforward, PlainFeedForwardSpec)
    return feedforward


def _experts(spec: TransformerSpec, experts_per_token: int) -> TransformerSpec:
    """Four feed-forwards as wide as the one they replace; two of them chosen as in Mixtral, or one as in Switch."""
    experts = ExpertsSpec(
        _plain(spec), count=4, experts_per_token=experts_per_token, normalized=experts_per_token > 1, balance_coef=0.01
    )
    return _blocks(spec, lambda block: replace(block, feedforward=experts))


def _rms_norm(spec: TransformerSpec) -> TransformerSpec:
    norm = RMSNormSpec(1e-5)
    return replace(_blocks(spec, lambda block: replace(block, norm=norm)), norm=norm)


def _wiring(spec: TransformerSpec, wiring: Any) -> TransformerSpec:
    return _blocks(spec, lambda block: replace(block, wiring=wiring))


def _post_norm(spec: TransformerSpec) -> TransformerSpec:
    return replace(_wiring(spec, "post"), norm=NoNormSpec())  # the last block ends with a norm already


def _sinusoidal(spec: TransformerSpec) -> TransformerSpec:
    """With the embeddings scaled as its authors do: fresh ones would be lost beside sines.

    Source: Vaswani et al. 2017, arXiv:1706.03762, sections 3.4 and 3.5.
    """
    return replace(spec, positions=SinusoidalPositionsSpec(), embedding_scale=spec.width**0.5)


def _rotary(spec: TransformerSpec) -> TransformerSpec:
    rotary = RotarySpec(10_000.0, spec.width // heads_of(spec.width))
    return replace(_attention(spec, rotary=rotary), positions=None)


def _position_bias(spec: TransformerSpec, bias: AlibiSpec | RelativeBiasSpec) -> TransformerSpec:
    return replace(_attention(spec, position_bias=bias), positions=None)


def _key_heads(spec: TransformerSpec, sharing: int) -> TransformerSpec:
    """`sharing` query heads to a key head; 0: all to one."""
    heads = heads_of(spec.width)
    return _attention(spec, key_value_heads=heads // sharing if sharing else 1)


def _window(spec: TransformerSpec) -> TransformerSpec:
    return _attention(spec, window=max(2, spec.max_positions // 4))


def _shared(spec: TransformerSpec) -> TransformerSpec:
    return replace(spec, blocks=spec.blocks[:1], order=(0,) * len(spec.blocks))


def _factorised(spec: TransformerSpec) -> TransformerSpec:
    narrow = spec.width // 4
    return replace(spec, projection=ProjectionSpec(narrow, bias=False, before_positions=True), output_width=narrow)


def _untied(spec: TransformerSpec) -> TransformerSpec:
    return replace(spec, tied_head=False)


def _reshaped(spec: TransformerSpec, layers: int, share: float) -> TransformerSpec:
    """Another depth at the same parameters: heads and feed-forward are `share` of what they were, D stays."""

    def change(block: BlockSpec) -> BlockSpec:
        heads = round(heads_of(spec.width) * share)
        attention = replace(block.attention, heads=heads, key_value_heads=heads)
        return replace(
            block, attention=attention, feedforward=replace(_plain(spec), width=round(_plain(spec).width * share))
        )

    return replace(spec, blocks=(change(spec.blocks[0]),) * layers, init=_init(layers))


def _deeper(spec: TransformerSpec) -> TransformerSpec:
    return _reshaped(spec, 2 * len(spec.blocks), 0.5)


def _shallower(spec: TransformerSpec) -> TransformerSpec:
    return _reshaped(spec, len(spec.blocks) // 2, 2.0)


ACTIVATION = ("blocks.feedforward.activation",)
FEEDFORWARD = ("blocks.feedforward",)
POSITION_BIAS = ("positions", "blocks.attention.position_bias")
HEADS = ("blocks.attention.key_value_heads",)
SHAPE = ("blocks", "blocks.attention.heads", *HEADS, "blocks.feedforward.width", "init.residual_std")

ROWS = {
    row.name: row
    for row in (
        Row("vanilla", "Vanilla (ReLU, learned positions, LayerNorm, pre-norm, tied)", (), lambda spec: spec),
        Row("gelu", "GELU", ACTIVATION, partial(_activation, name="gelu")),
        Row("swish", "Swish (SiLU)", ACTIVATION, partial(_activation, name="silu")),
        Row("elu", "ELU", ACTIVATION, partial(_activation, name="elu")),
        Row("selu", "SELU", ACTIVATION, partial(_activation, name="selu")),
        Row("sigmoid", "Sigmoid", ACTIVATION, partial(_activation, name="sigmoid")),
        Row("glu", "GLU", FEEDFORWARD, partial(_gated, gate="sigmoid")),
        Row("reglu", "ReGLU", FEEDFORWARD, partial(_gated, gate="relu")),
        Row("geglu", "GeGLU", FEEDFORWARD, partial(_gated, gate="gelu")),
        Row("swiglu", "SwiGLU", FEEDFORWARD, partial(_gated, gate="silu")),
        Row("liglu", "LiGLU (bilinear)", FEEDFORWARD, partial(_gated, gate="linear")),
        Row("rmsnorm", "RMSNorm", ("norm", "blocks.norm"), _rms_norm),
        Row("post-norm", "Post-norm", ("norm", "blocks.wiring"), _post_norm),
        Row("sandwich", "Sandwich norm", ("blocks.wiring",), partial(_wiring, wiring="sandwich")),
        Row("parallel", "Parallel block", ("blocks.wiring",), partial(_wiring, wiring="parallel")),
        Row("sinusoidal", "Sinusoidal positions", ("positions", "embedding_scale"), _sinusoidal),
        Row("rope", "Rotary positions", ("positions", "blocks.attention.rotary"), _rotary),
        Row("alibi", "ALiBi", POSITION_BIAS, partial(_position_bias, bias=AlibiSpec())),
        Row("t5-bias", "T5 relative bias", POSITION_BIAS, partial(_position_bias, bias=RelativeBiasSpec(32, 128))),
        Row("grouped-query", "Grouped-query attention (2 heads to a key)", HEADS, partial(_key_heads, sharing=2)),
        Row("multi-query", "Multi-query attention", HEADS, partial(_key_heads, sharing=0)),
        Row("window", "Sliding window (a quarter of the document)", ("blocks.attention.window",), _window),
        Row("shared", "Shared layers (ALBERT)", ("blocks", "order"), _shared),
        Row("factorised", "Factorised embeddings (D / 4)", ("projection", "output_width"), _factorised),
        Row("untied", "Untied embeddings", ("tied_head",), _untied),
        Row("moe", "Mixture of experts (2 of 4)", FEEDFORWARD, partial(_experts, experts_per_token=2)),
        Row("switch", "Switch (1 of 4)", FEEDFORWARD, partial(_experts, experts_per_token=1)),
        Row("deeper", "Twice the layers, half their heads and width", SHAPE, _deeper),
        Row("shallower", "Half the layers, twice their heads and width", SHAPE, _shallower),
    )
}

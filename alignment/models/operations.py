"""Arithmetic of one forward, counted from the specification alone: matrix products and attention. No clocks here.

Norms, activations, softmax, rotations and look-ups are left out, as is usual: they cost time but few operations.
"""

from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    ExpertsSpec,
    FeedForwardSpec,
    GatedFeedForwardSpec,
    PlainFeedForwardSpec,
)
from alignment.models.transformer import TransformerSpec


def forward_operations(spec: TransformerSpec, tokens: int) -> float:
    """Multiplications and additions per token of one forward over a document, the head on every token.

    A matrix of n entries takes 2 n; attention 4 * heads * head_dim for each key that a query may see, so a causal
    layer is counted by its half, a window by what lies in it, and a mixture by the experts that are chosen.

    Raises:
        ValueError: cross-attention, a convolution, or attention with scores of its own (DeBERTa's), whose operations
            are not counted here.
    """
    if not is_counted(spec):
        raise ValueError(
            "operations of cross-attention, convolutions and attention with scores of its own are not counted"
        )
    before_head = spec.output_width or spec.width
    transform = spec.head.transform
    matrices = 0 if spec.projection is None else spec.projection.width * spec.width
    matrices += 0 if spec.output_width is None else spec.width * spec.output_width
    if transform is None:
        matrices += before_head * spec.vocabulary
    else:
        matrices += (before_head + spec.vocabulary) * transform.width
    return 2 * matrices + sum(block_operations(block, spec.width, tokens) for block in spec.layers)


def is_counted(spec: TransformerSpec) -> bool:
    """True where `forward_operations` counts every layer of this architecture."""
    return all(
        isinstance(block.attention, AttentionSpec) and block.cross is None and block.convolution is None
        for block in spec.layers
    )


def block_operations(spec: BlockSpec, width: int, tokens: int) -> float:
    """Floating-point operations of one layer."""
    attention = spec.attention
    assert isinstance(attention, AttentionSpec)
    inner, shared = (heads * attention.head_dim for heads in (attention.heads, attention.key_value_heads))
    return (
        2 * width * (2 * inner + 2 * shared)  # the projections
        + 4 * inner * keys_seen(attention, tokens)
        + _feedforward_operations(spec.feedforward, width)
    )


def _feedforward_operations(spec: FeedForwardSpec, width: int) -> int:
    match spec:
        case PlainFeedForwardSpec(width=inner):
            return 4 * width * inner
        case GatedFeedForwardSpec(width=inner):
            return 6 * width * inner
        case ExpertsSpec():
            return 2 * width * spec.count + spec.experts_per_token * _feedforward_operations(spec.expert, width)


def keys_seen(spec: AttentionSpec, tokens: int) -> float:
    """Keys that a query sees, the mean over a document of `tokens`."""
    reach = tokens if spec.window is None else min(spec.window, tokens)
    left = reach * (reach + 1) / 2 + (tokens - reach) * reach  # the token itself and those before it
    return (left if spec.causal else 2 * left - tokens) / tokens

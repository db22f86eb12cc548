"""Operations counted from a specification: against torch's counter, and by hand where it counts what no query sees."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from alignment.analysis import forward_operations
from alignment.models.init_weights import InitSpec, initialize
from alignment.models.language_model import LanguageModel
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    ConvolutionSpec,
    DisentangledSpec,
    ExpertsSpec,
    GatedFeedForwardSpec,
    LayerNormSpec,
    PlainFeedForwardSpec,
)
from alignment.models.operations import keys_seen
from alignment.models.transformer import ProjectionSpec, TransformerSpec

TOKENS = 24
# Both sides are seen, so that every product torch's counter counts is one that counts for us too.
ATTENTION = AttentionSpec(4, 4, 8, 8**-0.5, bias=True, output_bias=True, causal=False)
PLAIN = PlainFeedForwardSpec(96, "relu", bias=True)
BLOCK = BlockSpec(ATTENTION, PLAIN, LayerNormSpec(1e-5))
SPEC = TransformerSpec(61, 32, 64, (BLOCK,) * 3, LayerNormSpec(1e-5), InitSpec(0.02, 0.02), tied_head=False)


def with_block(**changes) -> TransformerSpec:
    return replace(SPEC, blocks=(replace(BLOCK, **changes),) * 3)


SPECS = {
    "plain": SPEC,
    "gated": with_block(feedforward=GatedFeedForwardSpec(64, "silu", bias=True)),
    "experts": with_block(feedforward=ExpertsSpec(PLAIN, count=4, experts_per_token=2)),
    "grouped": with_block(attention=replace(ATTENTION, key_value_heads=2)),
    "wide heads": with_block(attention=replace(ATTENTION, head_dim=16)),
    "shared": replace(SPEC, blocks=(BLOCK,), order=(0, 0, 0)),
    "narrow table": replace(SPEC, projection=ProjectionSpec(16, bias=False, before_positions=True), output_width=16),
}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_matrix_products_and_attention_are_torchs_count(name):
    """To the last operation: the count is exact, so the tolerance is none."""
    spec = SPECS[name]
    head = torch.nn.Linear(spec.output_width or spec.width, spec.vocabulary, bias=False)
    model = initialize(LanguageModel(spec.build(), head, {}))
    # In plain steps: the counter has no formula for the CPU's fused kernel, and counts it as nothing.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, TOKENS, dtype=torch.long))
    assert TOKENS * forward_operations(spec, TOKENS) == counter.get_total_flops()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 5, 24, 99])
def test_keys_seen_is_the_mean_over_the_mask(causal, window):
    apart = torch.arange(TOKENS) - torch.arange(TOKENS)[:, None]
    seen = apart.abs() < (window or TOKENS)
    seen &= (apart <= 0) | (not causal)
    assert keys_seen(replace(ATTENTION, causal=causal, window=window), TOKENS) == pytest.approx(
        seen.sum().item() / TOKENS, rel=1e-12
    )


def test_one_layer_by_hand():
    # D = 2, one head of 2, feed-forward of 3, vocabulary 5, 3 tokens, causal.
    attention = AttentionSpec(1, 1, 2, 1.0, bias=False, output_bias=False)
    block = BlockSpec(attention, PlainFeedForwardSpec(3, "relu", bias=False), LayerNormSpec(1e-5))
    spec = TransformerSpec(5, 2, 8, (block,), LayerNormSpec(1e-5), InitSpec(0.02, 0.02), tied_head=True)
    # Four 2 x 2 matrices: 32. Two 2 x 3: 24. Head 2 x 5: 20. Keys seen: (1 + 2 + 3) / 3 = 2, each 4 * 2: 16.
    assert forward_operations(spec, 3) == 32 + 24 + 20 + 16


@pytest.mark.parametrize(
    "changes",
    [
        {"attention": DisentangledSpec(4, 8, 0, 8, True, True, False)},
        {"cross": ATTENTION},
        {"convolution": ConvolutionSpec(3, "gelu")},
    ],
    ids=["disentangled", "cross", "convolution"],
)
def test_what_is_not_counted_is_refused(changes):
    with pytest.raises(ValueError, match="are not counted"):
        forward_operations(with_block(**changes), TOKENS)

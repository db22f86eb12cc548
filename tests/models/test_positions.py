"""Rotary angles: the reference's numbers, fp32 whatever the model's type, a rotation and its inverse."""

import pytest
import torch
from torch.testing import assert_close

from alignment.models.layers import LinearScaling, Llama3Scaling, RotarySpec
from alignment.models.layers.positions import LearnedPositions, SinusoidalPositions
from alignment.models.layers.rotary import Rotary, rotary_frequencies, rotate

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)


def no_sizes():
    raise AssertionError("only scalings that depend on a document's size may ask for it")


def test_learned_positions_start_at_the_row_they_are_told():
    module = LearnedPositions(4, 3, first=2)
    assert module.weight.shape == (6, 3)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0)[:, None].expand(6, 3))
    assert module(torch.tensor([0, 3]))[:, 0].tolist() == [2.0, 5.0]


def test_sinusoids_are_those_of_the_paper():
    # D = 4: sin(p), cos(p), sin(p / 100), cos(p / 100)
    place = torch.tensor(7.0)
    expected = torch.stack([place.sin(), place.cos(), (place / 100).sin(), (place / 100).cos()])
    assert_close(SinusoidalPositions(4)(torch.tensor([7]))[0], expected)


def test_partial_rotation_leaves_the_rest_of_a_head_alone():
    rotation = Rotary(RotarySpec(100.0, 4))(torch.tensor([5]), 6, no_sizes)
    x = torch.randn(1, 2, 10, requires_grad=True)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert_close(turned[..., :4], rotate(x[..., :4], rotation))
    (grad,) = torch.autograd.grad(turned.sum(), x)
    assert torch.equal(grad[..., 4:], torch.ones(1, 2, 6))


def test_default_frequencies_are_powers_of_theta():
    # K = 4, theta = 10000: 1 and 10000^(-1/2)
    assert_close(rotary_frequencies(RotarySpec(10000.0, 4)), torch.tensor([1.0, 0.01]))


def test_linear_scaling_divides_every_frequency():
    assert_close(rotary_frequencies(RotarySpec(10000.0, 4, LinearScaling(4.0))), torch.tensor([0.25, 0.0025]))


def test_llama3_scaling_keeps_short_waves_and_divides_long_ones():
    plain = rotary_frequencies(RotarySpec(5e5, 128))
    scaled = rotary_frequencies(RotarySpec(5e5, 128, LLAMA3))
    turns = 8192 * plain / (2 * torch.pi)
    assert_close(scaled[turns > 4], plain[turns > 4])
    assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any() and (scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all()


def test_rotation_matches_the_formula_and_its_gradient():
    module = Rotary(RotarySpec(100.0, 6))
    rotation = tuple(part.double() for part in module(torch.tensor([0, 3, 7, 50]), 51, no_sizes))
    x = torch.randn(4, 2, 6, dtype=torch.double, requires_grad=True)
    turned = rotate(x, rotation)
    angle = 7 * 100 ** (-2 / 6)  # pair 1 of position 7
    a, b = x[2, 0, 1], x[2, 0, 4]
    expected = torch.stack([a * torch.tensor(angle).cos() - b * torch.tensor(angle).sin()])
    assert_close(turned[2, 0, 1:2], expected, atol=1e-6, rtol=1e-6)
    assert torch.autograd.gradcheck(lambda x: rotate(x, rotation), x)
    with torch.no_grad():
        assert_close(rotate(x, rotation), turned.detach(), atol=0, rtol=0)


def test_the_table_keeps_fp32_in_a_bfloat16_model_and_grows():
    module = Rotary(RotarySpec(10000.0, 8))
    before = module(torch.tensor([5]), 6, no_sizes)[0].clone()
    module.to(torch.bfloat16)
    cosines, sines = module(torch.tensor([5, 1000]), 1001, no_sizes)
    assert cosines.dtype == sines.dtype == torch.float32
    assert torch.equal(cosines[:1], before)
    assert rotate(torch.ones(2, 1, 8, dtype=torch.bfloat16), (cosines, sines)).dtype == torch.bfloat16


def test_a_table_made_in_inference_mode_serves_training():
    module = Rotary(RotarySpec(10000.0, 8))
    with torch.inference_mode():
        module(torch.tensor([3]), 4, no_sizes)
    x = torch.randn(1, 1, 8, requires_grad=True)
    rotate(x, module(torch.tensor([3]), 4, no_sizes)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("scaling", [None, LinearScaling(2.0), LLAMA3])
def test_frequencies_equal_transformers(scaling):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {
        None: {"rope_type": "default"},
        LinearScaling(2.0): {"rope_type": "linear", "factor": 2.0},
        LLAMA3: {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }[scaling]
    config = LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters={**rope, "rope_theta": 5e5})
    theirs = LlamaRotaryEmbedding(config).inv_freq
    assert_close(rotary_frequencies(RotarySpec(5e5, 128, scaling)), theirs, rtol=1e-6, atol=0)

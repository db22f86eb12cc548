"""Rotary angles: hand numbers, transformers' own functions, fp32 whatever the model's type, a rotation and its inverse."""

import copy
import math

import pytest
import torch
from torch.testing import assert_close

from alignment.errors import UserError
from alignment.models.families import family_of
from alignment.models.families.rope import longest_document, read_rotary
from alignment.models.huggingface.checkpoint import load_language_model
from alignment.models.layers import DynamicScaling, LinearScaling, Llama3Scaling, LongScaling, RotarySpec, YarnScaling
from alignment.models.layers.rotary import Rotary, rotary_frequencies, rotate, scaled_frequencies
from alignment.ragged import Ragged

LLAMA3 = Llama3Scaling(8.0, 1.0, 4.0, 8192)
HEAD_WIDTH, LONGEST = 32, 256
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(16)], "long_factor": [2.0 + 0.7 * i for i in range(16)]}
ROPES = {
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn in full": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0,
                     "beta_slow": 2.0, "attention_factor": 1.3},
    "yarn, two scales": {"rope_type": "yarn", "factor": 40.0, "mscale": 0.8, "mscale_all_dim": 0.3},
    "yarn, not rounded": {"rope_type": "yarn", "factor": 4.0, "truncate": False},
    "yarn, ramp of no width": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e6, "beta_slow": 9e5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG},
    "longrope with factor": {"rope_type": "longrope", "original_max_position_embeddings": 64, "factor": 9.0, **LONG},
    "longrope with attention factor": {"rope_type": "longrope", "original_max_position_embeddings": 64,
                                       "attention_factor": 1.7, **LONG},
}  # fmt: skip


def llama_config(rope, longest=LONGEST):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=61, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=longest, rope_parameters=dict(rope),
    )  # fmt: skip


@pytest.mark.parametrize("size", [40, 64, 65, 256, 700])
@pytest.mark.parametrize("partial", [1.0, 0.75])
@pytest.mark.parametrize("name", ROPES)
def test_angles_equal_transformers_functions(name, partial, size):
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**ROPES[name], "rope_theta": 2e4, "partial_rotary_factor": partial}
    pairs = int(HEAD_WIDTH * partial) // 2
    rope |= {key: rope[key][:pairs] for key in LONG if key in rope}
    config = llama_config(rope)
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"), seq_len=size)
    spec = read_rotary(config.to_dict(), HEAD_WIDTH)
    places = torch.arange(size)
    cosines, sines = Rotary(spec)(places, size, lambda: torch.full((size,), size))
    angles = places[:, None] * frequencies
    assert spec.width == 2 * pairs
    assert_close(cosines[:, 0], torch.cat([angles.cos(), angles.cos()], -1) * factor, atol=2e-4, rtol=0)
    assert_close(sines[:, 0], angles.sin() * factor, atol=2e-4, rtol=0)
    own = scaled_frequencies(spec, torch.tensor([size]))[0] if name.startswith(("dyn", "long")) else None
    assert_close(rotary_frequencies(spec) if own is None else own, frequencies, rtol=2e-6, atol=0)


def test_yarn_by_hand():
    # theta 10^4, W 8: 1, 0.1, 0.01, 0.001. Over 6284 places (2 pi * 1000.1) pair 2 turns 10 times, pair 3 once.
    def frequencies(truncate):
        return rotary_frequencies(RotarySpec(1e4, 8, YarnScaling(4.0, 6284, 1.0, 10.0, 1.0, truncate)))

    # the ramp from 2.0001 to 3.0001: all kept but the last, all but divided by 4
    assert_close(frequencies(False), torch.tensor([1, 0.1, 0.01, 0.00025]), rtol=1e-3, atol=0)
    # its ends rounded outwards, from 2 to 4: the last is halfway, (0.001 + 0.00025) / 2
    assert_close(frequencies(True), torch.tensor([1, 0.1, 0.01, 0.000625]))


def test_dynamic_by_hand():
    # theta 100, W 4, twice as far as 10: at 15 the base is 100 * (2 * 1.5 - 1)^(4 / 2) = 400
    spec = RotarySpec(100.0, 4, DynamicScaling(2.0, 10))
    expected = torch.tensor([[1, 0.1], [1, 0.1], [1, 0.05]])
    assert_close(scaled_frequencies(spec, torch.tensor([3, 10, 15])), expected)
    assert_close(rotary_frequencies(spec), expected[0])


def test_longrope_by_hand():
    spec = RotarySpec(100.0, 4, LongScaling((1.0, 2.0), (4.0, 5.0), 10, 1.0))
    expected = torch.tensor([[1, 0.05], [0.25, 0.02]])
    assert_close(scaled_frequencies(spec, torch.tensor([10, 11])), expected)
    assert_close(rotary_frequencies(spec), expected[0])


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, 0.1 * math.log(4) + 1),
        ({"rope_type": "yarn", "factor": 0.5}, 1.0),
        ({"rope_type": "yarn", "factor": 4.0, "mscale": 2.0, "mscale_all_dim": 2.0}, 1.0),
        ({**ROPES["longrope"], "original_max_position_embeddings": 16}, math.sqrt(1 + math.log(16) / math.log(16))),
        ({**ROPES["longrope"], "original_max_position_embeddings": 256}, 1.0),
    ],
)
def test_how_much_larger_scores_become(rope, factor):
    spec = read_rotary({"rope_parameters": rope, "max_position_embeddings": LONGEST}, HEAD_WIDTH)
    assert spec.scaling.attention_factor == pytest.approx(factor)
    x = rotate(torch.ones(1, 1, HEAD_WIDTH), Rotary(spec)(torch.tensor([9]), 10, lambda: torch.tensor([10])))
    assert (x * x).sum().item() == pytest.approx(HEAD_WIDTH * factor**2, rel=1e-5)


def test_the_original_context_beside_the_mapping_goes_first():
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config = {"rope_scaling": rope, "original_max_position_embeddings": 32, "max_position_embeddings": LONGEST}
    assert read_rotary(config, HEAD_WIDTH).scaling.original_positions == 32
    with pytest.raises(UserError, match="original_max_position_embeddings must be a number above 0, got '4k'"):
        read_rotary({**config, "original_max_position_embeddings": "4k"}, HEAD_WIDTH)


def test_only_a_dynamic_scaling_goes_beyond_the_longest_position():
    assert longest_document(RotarySpec(1e4, 8, DynamicScaling(4.0, 256)), 256) == 1024
    assert longest_document(RotarySpec(1e4, 8, YarnScaling(4.0, 64, 1.0)), 256) == 256


def pair_of_models(name, directory, longest):
    """transformers' random Llama with one of the scalings and ours, equal weights."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    reference = LlamaForCausalLM(llama_config({**ROPES[name], "rope_theta": 1e4}, longest)).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    reference.save_pretrained(directory)
    return reference, load_language_model(directory)


# Lengths on both sides of 64. transformers has one set of angles per batch, so it reads each document by itself, and a
# fresh copy does, for angles once stretched stay so.
@torch.no_grad()
@pytest.mark.parametrize("name", ["dynamic", "longrope", "longrope with factor"])
def test_each_document_has_the_angles_of_its_own_length(name, tmp_path):
    reference, model = pair_of_models(name, tmp_path, longest=64 if name == "dynamic" else 256)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(61, (length,), generator=generator).tolist() for length in (150, 64, 10, 65, 200)]
    width = max(map(len, documents))
    ids = torch.tensor([document + [0] * (width - len(document)) for document in documents])
    mask = torch.tensor([[1] * len(document) + [0] * (width - len(document)) for document in documents])
    ours = model(ids, mask).logits
    for row, document in zip(ours, documents, strict=True):
        theirs = copy.deepcopy(reference)(torch.tensor([document])).logits[0]
        assert_close(row[: len(document)], theirs, atol=1e-4, rtol=0)


@torch.no_grad()
def test_decoding_beyond_the_original_context_equals_transformers(tmp_path):
    reference, model = pair_of_models("dynamic", tmp_path, longest=64)
    document = torch.randint(61, (90,), generator=torch.Generator().manual_seed(1)).tolist()
    cache = model.new_cache(1, 90)
    ours = [model.prefill(Ragged.build([document[:55]]), cache)[0]]
    read = reference(torch.tensor([document[:55]]), use_cache=True)
    theirs = [read.logits[0, -1]]
    for token in document[55:]:
        ours.append(model.decode(torch.tensor([token]), cache)[0])
        read = reference(torch.tensor([[token]]), past_key_values=read.past_key_values, use_cache=True)
        theirs.append(read.logits[0, -1])
    assert_close(torch.stack(ours), torch.stack(theirs), atol=1e-4, rtol=0)


def no_sizes():
    raise AssertionError("only scalings that depend on a document's size may ask for it")


def test_partial_rotation_leaves_the_rest_of_a_head_alone():
    rotation = Rotary(RotarySpec(100.0, 4))(torch.tensor([5]), 6, no_sizes)
    x = torch.randn(1, 2, 10, requires_grad=True)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert_close(turned[..., :4], rotate(x[..., :4], rotation))
    (grad,) = torch.autograd.grad(turned.sum(), x)
    assert torch.equal(grad[..., 4:], torch.ones(1, 2, 6))


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


LLAMA_3 = {**ROPES["llama3"], "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, RotarySpec(10000.0, 128)),
        ({"rope_theta": 5e5}, RotarySpec(5e5, 128)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RotarySpec(5e5, 128)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, RotarySpec(7e4, 128)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RotarySpec(10000.0, 128, LinearScaling(2))),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA_3}, RotarySpec(5e5, 128, LLAMA3)),
        ({"rope_parameters": {**LLAMA_3, "rope_theta": 5e5}}, RotarySpec(5e5, 128, LLAMA3)),
    ],
)
def test_old_and_new_rope_keys(keys, expected):
    spec = family_of({"model_type": "llama"}).spec_from_config({"model_type": "llama", **keys})
    assert spec.blocks[0].attention.rotary == expected


def test_h19_angles_stay_in_fp32_in_a_model_of_lower_precision():
    # In bf16 positions 256 and 257 are one number, and an angle of 200 radians is off by up to half a radian.
    spec, positions = RotarySpec(1e4, 32), torch.arange(512)
    exact = positions.double()[:, None] * 1e4 ** (-torch.arange(0, 32, 2).double() / 32)
    cast = Rotary(spec)
    cast(positions, len(positions), lambda: positions)  # a table that is there when the model is cast
    for rotary in (Rotary(spec), Rotary(spec).to(torch.bfloat16), cast.to(torch.bfloat16)):
        cosines, sines = rotary(positions, len(positions), lambda: positions)
        assert_close(cosines[:, 0, :16], exact.cos().float(), atol=1e-4, rtol=0)
        assert_close(sines[:, 0], exact.sin().float(), atol=1e-4, rtol=0)

"""Families near Llama: what configs mean layer by layer; files and fresh weights."""

import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

from alignment.models.build import build_model
from alignment.models.families import family_of
from alignment.models.huggingface.checkpoint import load_pretrained, save_model
from alignment.models.layers import LinearScaling, RotarySpec
from alignment.ragged import Ragged

TINY = {
    "vocab_size": 61, "max_position_embeddings": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
NAMES = ("gemma", "gemma2", "gemma3_text", "llama", "mistral", "olmo2", "qwen2", "qwen3", "smollm3")
FULL, SLIDING = "full_attention", "sliding_attention"


def spec_of(name, **keys):
    config = {"model_type": name, **keys}
    return family_of(config).spec_from_config(config)


def attentions(name, **keys):
    return [block.attention for block in spec_of(name, **{**TINY, **keys}).blocks]


def windows(name, **keys):
    return [attention.window for attention in attentions(name, **keys)]


@pytest.mark.parametrize(
    ("name", "keys", "expected"),
    [
        ("mistral", {}, [4096] * 4),
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("qwen2", {}, [None] * 4),
        ("qwen2", {"sliding_window": 8, "max_window_layers": 0}, [None] * 4),  # not in use
        ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, [None, None, None, 8]),
        ("qwen2", {"use_sliding_window": True, "sliding_window": None}, [None] * 4),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 8, "layer_types": [SLIDING, FULL, FULL, SLIDING]},
         [8, None, None, 8]),
        ("gemma", {}, [None] * 4),
        ("gemma2", {"sliding_window": 8}, [8, None, 8, None]),
        ("gemma2", {"sliding_window": 8, "layer_types": [FULL, FULL, SLIDING, FULL]}, [None, None, 8, None]),
        ("gemma3_text", {"sliding_window": 8, "num_hidden_layers": 7}, [8, 8, 8, 8, 8, None, 8]),
        ("gemma3_text", {"sliding_window": 8, "sliding_window_pattern": 2}, [8, None, 8, None]),
        ("smollm3", {"sliding_window": 8}, [None] * 4),  # not in use
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8}, [None, None, None, 8]),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [0, 1, 1, 0]},
         [8, None, None, 8]),
    ],
)  # fmt: skip
def test_which_layers_look_through_a_window(name, keys, expected):
    assert windows(name, **keys) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [True, True, True, False]),
        ({"no_rope_layer_interval": 2}, [True, False, True, False]),
        ({"no_rope_layers": [0, 1, 1, 0, 1, 1]}, [False, True, True, False]),  # a longer list is cut
    ],
)
def test_smollm3_turns_all_but_the_listed_layers(keys, expected):
    assert [attention.rotary is not None for attention in attentions("smollm3", **keys)] == expected
    assert attentions("smollm3")[0].rotary == RotarySpec(2e6, 8)


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        {"rope_parameters": {FULL: {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0},
                             SLIDING: {"rope_type": "default", "rope_theta": 2e4}}},
        {"rope_parameters": {FULL: {"rope_type": "linear", "factor": 8.0}}, "rope_theta": 5e5,
         "rope_local_base_freq": 2e4},
    ],
)  # fmt: skip
def test_gemma3_has_angles_of_two_kinds_in_old_and_new_spelling(keys):
    rotaries = [attention.rotary for attention in attentions("gemma3_text", sliding_window_pattern=2, **keys)]
    near, wide = RotarySpec(2e4, 256), RotarySpec(5e5, 256, LinearScaling(8.0))
    assert rotaries == [near, wide, near, wide]


def test_gemma_scales_token_vectors_and_its_first_files_mean_the_tanh_gelu():
    spec = spec_of("gemma", **TINY, hidden_act="gelu")
    assert spec.embedding_scale == math.sqrt(32) and spec.tied_head
    assert spec.blocks[0].feedforward.activation == "gelu_pytorch_tanh"


def test_gemmas_scale_is_rounded_to_the_type_of_the_weights():
    # sqrt(3072) = 55.4256, in bfloat16 55.5
    config = {"model_type": "gemma", **TINY, "hidden_size": 3072, "num_hidden_layers": 1, "intermediate_size": 8}
    trunk = build_model({**config, "head_dim": 4}).trunk.bfloat16()
    tokens = torch.tensor([3])
    assert_close(trunk.embedded(tokens, tokens, None), trunk.embed(tokens) * 55.5, atol=0, rtol=0)


def test_gemma2_scales_by_its_own_number_and_caps_scores_and_logits():
    spec = spec_of("gemma2", **TINY, query_pre_attn_scalar=144)
    assert {(block.attention.scale, block.attention.softcap) for block in spec.blocks} == {(1 / 12, 50.0)}
    assert spec.head.softcap == 30.0
    model = build_model({"model_type": "gemma2", **TINY, "final_logit_softcapping": 2.0})
    with torch.no_grad():
        model.trunk.embed.weight *= 50
    logits = model(torch.arange(20)[None]).logits
    assert 1.9 < logits.abs().max() <= 2.0


def test_gemma3_caps_no_scores_whatever_its_config_says():
    assert {a.softcap for a in attentions("gemma3_text", attn_logit_softcapping=2.0)} == {None}


@pytest.mark.parametrize("name", NAMES)
def test_transformers_config_means_the_same_as_ours(name):
    from transformers import AutoConfig

    ours = {**TINY, "head_dim": 8} if name not in ("olmo2", "smollm3") else dict(TINY)
    ours |= {"sliding_window": 8, "use_sliding_window": True} if name in ("qwen2", "qwen3", "smollm3") else {}
    theirs = AutoConfig.for_model(name, pad_token_id=0, **ours).to_dict()
    assert family_of(theirs).spec_from_config(theirs) == spec_of(name, **ours)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3"])
def test_the_trunk_of_a_span_head_serves_another_head(name, tmp_path):
    config = {"model_type": name, **TINY}
    span, batch = build_model(config, "span"), Ragged.build([[5, 6, 7], [8]])
    save_model(span, tmp_path)
    assert "transformer.embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    sequence = load_pretrained(tmp_path, "sequence", new_head=True)
    assert torch.equal(sequence.trunk(batch), span.trunk(batch))
    save_model(sequence, tmp_path / "sequence")
    assert "model.embed_tokens.weight" in load_file(tmp_path / "sequence" / "model.safetensors")


@pytest.mark.parametrize("name", NAMES)
def test_a_bare_trunk_and_old_buffers_are_read(name, tmp_path):
    model = build_model({"model_type": name, **TINY})
    save_model(model, tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(tensors, path, metadata={"format": "pt"})
    batch = Ragged.build([[5, 6, 7], [8]])
    assert torch.equal(load_pretrained(tmp_path, "language").trunk(batch), model.trunk(batch))
    bare = {tensor.removeprefix("model."): x for tensor, x in tensors.items() if tensor.startswith("model.")}
    save_file(bare, path, metadata={"format": "pt"})
    scalar = load_pretrained(tmp_path, "scalar", new_head=True)
    assert torch.equal(scalar.trunk(batch), model.trunk(batch))


@pytest.mark.parametrize("name", NAMES)
def test_fresh_models_start_near_uniform_and_all_parameters_learn(name):
    torch.manual_seed(0)
    model = build_model({"model_type": name, **TINY}).train()
    loss = -model(batch=Ragged.build([list(range(40)), [3, 4, 5]])).log_probs.mean()
    assert loss.item() == pytest.approx(math.log(61), abs=0.6)
    loss.backward()
    still = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert not still

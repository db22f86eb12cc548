"""Configs: every key understood or known to be harmless, everything else refused by name (H19, H20)."""

import pytest

from alignment.errors import UserError
from alignment.models.families import FAMILIES, family_of
from alignment.models.layers import LinearScaling, Llama3Scaling, RotarySpec

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def spec_of(model_type, **keys):
    return FAMILIES[model_type].spec_from_config({"model_type": model_type, **keys})


def llama(**keys):
    return spec_of("llama", **keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, RotarySpec(10000.0, 128)),
        ({"rope_theta": 5e5}, RotarySpec(5e5, 128)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RotarySpec(5e5, 128)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}}, RotarySpec(7e4, 128)),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RotarySpec(10000.0, 128, LinearScaling(2))),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
            RotarySpec(5e5, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
        (
            {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
            RotarySpec(5e5, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        ),
    ],
)
def test_old_and_new_rope_keys(keys, expected):
    assert llama(**keys).blocks[0].attention.rotary == expected


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"rms_norm_epss": 1e-5}, "unknown key 'rms_norm_epss'; did you mean 'rms_norm_eps'"),
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "rope_type 'spiral' is not one of"),
        ({"rope_scaling": {"type": "lineer", "factor": 2.0}}, "rope_type 'lineer'.*did you mean 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope key factor must be a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope key factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "unknown rope key 'beta'"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a mapping"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {**LLAMA3, "factor": 2.0}}, "both set"),
        ({"num_key_value_heads": 5}, "num_key_value_heads = 5 does not divide"),
        ({"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
        ({"hidden_size": 100}, "num_attention_heads = 32 does not divide hidden_size"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"hidden_size": "64"}, "hidden_size must be int, got '64'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be bool"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be int"),
        ({"hidden_act": "swoosh"}, "hidden_act 'swoosh'"),
    ],
)
def test_llama_configs_that_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        llama(**keys)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"n_heads": 12}, "unknown key 'n_heads'; did you mean 'n_head'"),
        ({"n_head": 5}, "n_head = 5 does not divide n_embd = 768"),
        ({"add_cross_attention": True}, "add_cross_attention = True is not supported"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon must be float"),
        ({"resid_pdrop": -0.1}, "resid_pdrop must be at least 0"),
        ({"activation_function": "gelu_old"}, "activation_function 'gelu_old'"),
    ],
)
def test_gpt2_configs_that_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        spec_of("gpt2", **keys)


def test_all_problems_come_at_once():
    with pytest.raises(UserError) as error:
        llama(first_wrong=1, second_wrong=2, hidden_size="x")
    assert all(word in str(error.value) for word in ("first_wrong", "second_wrong", "hidden_size"))


def test_what_transformers_writes_is_understood():
    from transformers import AutoConfig

    for name in FAMILIES:
        config = AutoConfig.for_model(name, num_labels=1, pad_token_id=0).to_dict()
        assert family_of(config).spec_from_config(config).vocabulary == config["vocab_size"]


def test_published_configs_are_understood():
    # openai-community/gpt2 as published
    gpt2 = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    }  # fmt: skip
    assert len(spec_of(**gpt2).blocks) == 12
    # Llama 3.2 1B as published
    llama32 = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {**LLAMA3, "factor": 32.0}, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    assert spec_of(**llama32).blocks[0].attention.rotary.scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt3"}, "model_type 'gpt3' is not one of .*gpt2.*; did you mean 'gpt2'"),
        ({}, "model_type None"),
        ({"model_type": "llama", "auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
    ],
)
def test_foreign_architectures_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        family_of(config)

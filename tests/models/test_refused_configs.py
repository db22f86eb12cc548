"""Configs: every key understood or known to be harmless, everything else refused by name (H19, H20)."""

import warnings

import pytest
from transformers import AutoConfig

from alignment.errors import UserError, warn_once
from alignment.models.families import FAMILIES, family_of
from alignment.models.families.config_keys import FIXED, HARMLESS, KEYS

from .tiny import TINY as ENCODERS

LINEAR = {"rope_type": "linear", "factor": 8.0}
FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 16, "short_factor": [1.0], "long_factor": [1.0],
}  # fmt: skip
TINY = {
    "max_position_embeddings": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
LLAMA_LIKE = ("gemma", "gemma2", "gemma3_text", "mistral", "qwen2", "qwen3", "smollm3")
REFUSED = [  # model_type, keys, message
    ("llama", {"attention_chunk_size": 8}, "unknown key 'attention_chunk_size'.*transformers acts on it"),
    ("qwen2", {"is_causal": False}, "unknown key 'is_causal'"),  # gte-Qwen2: attention in both directions
    ("gpt2", {"hidden_size": 64}, "unknown key 'hidden_size'.*transformers acts on it"),  # its other name for n_embd
    ("llama", {"quantization_config": {}}, "quantization_config"),
    ("llama", {"pretraining_tp": 2}, "pretraining_tp = 2 is not supported"),
    ("llama", {"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "rope_type 'spiral' is not one of"),
    ("llama", {"rope_scaling": {"type": "lineer", "factor": 2.0}}, "rope_type 'lineer'.*did you mean 'linear'"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "rope key factor must be a number"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}, "unknown rope key 'beta_fast'"),
    ("llama", {"rope_scaling": "linear"}, "rope_scaling must be a mapping"),
    ("llama", {"rope_scaling": LINEAR, "rope_parameters": {**LINEAR, "factor": 2.0}}, "both set"),
    ("llama", {"num_key_value_heads": 5}, "num_key_value_heads = 5 does not divide"),
    ("llama", {"num_attention_heads": 0}, "num_attention_heads must be at least 1"),
    ("llama", {"hidden_size": 100}, "num_attention_heads = 32 does not divide hidden_size"),
    ("llama", {"head_dim": 7}, "head_dim must be even"),
    ("llama", {"hidden_size": "64"}, "hidden_size must be int, got '64'"),
    ("llama", {"tie_word_embeddings": 1}, "tie_word_embeddings must be bool"),
    ("llama", {"num_hidden_layers": True}, "num_hidden_layers must be int"),
    ("llama", {"hidden_act": "swoosh"}, "hidden_act 'swoosh'"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
    ("gpt2", {"layer_norm_epsilon": "small"}, "layer_norm_epsilon must be float"),
    ("gpt2", {"resid_pdrop": -0.1}, "resid_pdrop must be at least 0"),
    ("bert", {"is_decoder": True}, "is_decoder = True"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings must be above pad_token_id"),
    ("distilbert", {"n_heads": 3}, "n_heads = 3 does not divide dim"),
    ("albert", {"num_hidden_groups": 9}, "num_hidden_groups = 9 is more than"),
    ("deberta-v2", {"pos_att_type": "c2p|p2p"}, r"pos_att_type 'c2p\|p2p'"),
    ("deberta-v2", {"norm_rel_ebd": "rms_norm"}, "norm_rel_ebd 'rms_norm'"),
    ("deberta-v2", {"conv_kernel_size": 4}, "conv_kernel_size = 4"),
    ("deberta-v2", {"embedding_size": 16}, "embedding_size = 16 is not supported"),
    ("deberta-v2", {"conv_groups": 5}, "conv_groups = 5 does not divide"),
    ("longformer", {"attention_window": 7}, "attention_window must be an even number"),
    ("longformer", {"attention_window": [8]}, r"or one for each of 2 layers, got \[8\]"),
    ("big_bird", {"attention_type": "full"}, "attention_type 'full' is not one of"),
    ("mistral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor is not supported"),
    ("qwen2", {"layer_types": [FULL, SLIDING, FULL, FULL]}, "no sliding_window is set and in use"),
    ("qwen2", {"layer_types": [FULL] * 3}, "layer_types names 3 layers, num_hidden_layers is 4"),
    ("qwen3", {"layer_types": [FULL, FULL, FULL, "chunked_attention"]}, "'chunked_attention', which is not one of"),
    ("qwen3", {"layer_types": 4}, "layer_types must be list, got 4"),
    ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "must be a mapping of full_attention"),
    ("gemma3_text", {"rope_parameters": {"global": {}}}, "rope_parameters has 'global'"),
    ("gemma3_text", {"rope_scaling": 8.0}, "rope_scaling must be a mapping"),
    ("gemma3_text", {"rope_scaling": LINEAR, "rope_parameters": {FULL: {"rope_type": "default"}}}, "both set"),
    ("gemma3_text", {"_sliding_window_pattern": 3}, "name sliding_window_pattern instead"),
    ("smollm3", {"no_rope_layers": [1, 1]}, "no_rope_layers must be 0 or 1 for each of 4 layers"),
    ("openai-gpt", {"afn": "gelu_new"}, "afn 'gelu_new' is not one of gelu, relu, silu, swish"),
    ("bloom", {"n_embed": 64, "hidden_size": 32}, "n_embed = 64 and hidden_size = 32 are the same thing"),
    ("bloom", {"num_attention_heads": 7}, "n_head = 7 does not divide hidden_size = 64"),
    ("falcon", {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn = 2 is not supported"),
    ("falcon", {"new_decoder_architecture": True, "parallel_attn": False}, "needs parallel_attn = True"),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 8}, "num_key_value_heads = 8 does not divide"),
    ("phi3", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type of a phi3 model"),
    ("phi3", {"rope_scaling": {**LONGROPE, "long_factor": [1.0]}}, "long_factor must have one number per pair, 48"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok = 9 is more than num_local_experts = 8"),
    ("t5", {"feed_forward_proj": "gated-sine"}, "feed_forward_proj 'gated-sine' is not one of"),
    ("t5", {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"}, "dense_act_fn = 'gelu' contradicts"),
    ("t5", {"is_gated_act": True}, "is_gated_act = True contradicts feed_forward_proj = 'relu'"),
    ("t5", {"relative_attention_max_distance": 16}, "relative_attention_max_distance = 16 more than"),
    ("t5", {"relative_attention_num_buckets": 9}, "relative_attention_num_buckets = 9 must be even"),
    ("bart", {"decoder_attention_heads": 7}, "decoder_attention_heads = 7 does not divide d_model"),
]  # fmt: skip


def read(model_type, **keys):
    base = TINY if model_type in LLAMA_LIKE else ENCODERS.get(model_type, {})
    return FAMILIES[model_type].spec_from_config({"model_type": model_type, **base, **keys})


@pytest.mark.parametrize(("model_type", "keys", "message"), REFUSED)
def test_configs_that_are_refused(model_type, keys, message):
    with pytest.raises(UserError, match=message):
        read(model_type, **keys)


def test_all_problems_come_at_once():
    with pytest.raises(UserError) as error:
        read("llama", attention_chunk_size=1, gguf_file=2, hidden_size="x")
    assert all(word in str(error.value) for word in ("attention_chunk_size", "gguf_file", "hidden_size"))
    with pytest.raises(UserError) as error:
        read("llama", gguf_file=1, pretraining_tp=2, num_key_value_heads=5)
    assert all(word in str(error.value) for word in ("gguf_file", "pretraining_tp", "num_key_value_heads"))


@pytest.mark.parametrize(
    ("model_type", "keys", "message"),
    [
        ("llama", {"unsloth_version": "2024.9"}, "'unsloth_version' is no key of transformers' llama"),
        ("llama", {"rms_norm_epss": 1e-5}, "changes nothing; did you mean 'rms_norm_eps'"),
        ("llama", {"_model_name_or_path": "x"}, "'_model_name_or_path'"),
        ("mt5", {"scale_decoder_outputs": True}, "'scale_decoder_outputs'"),
        ("llama", {"rope_scaling": {**LINEAR, "attn_factor": 2.0}}, "rope key 'attn_factor'"),
    ],
)
def test_keys_that_transformers_lacks_are_noted_once(model_type, keys, message):
    warn_once.cache_clear()
    with pytest.warns(UserWarning, match=message):
        spec = read(model_type, **keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = {key: value for key, value in keys.items() if key == "rope_scaling"}
        assert read(model_type, **keys) == spec == read(model_type, **({"rope_scaling": LINEAR} if plain else {}))


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_classes_know_is_known_or_refused(name):
    """A key that a newer transformers adds to a family fails here: it has to be understood, or named as harmless."""
    family, settings = FAMILIES[name], AutoConfig.for_model(name)
    known = {*family.keys, *family.by_hand, *family.harmless, *family.fixed, *family.old_keys, *FIXED, *HARMLESS}
    hidden = {key for key in vars(settings) if key.startswith("_")} | {"chunk_size_feed_forward"}
    assert set(vars(settings)) - known - hidden == set()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_has_a_kind_and_a_default(name):
    assert set(FAMILIES[name].keys) <= set(KEYS)
    assert FAMILIES[name].spec_from_config({"model_type": name})
    config = AutoConfig.for_model(name, num_labels=1, pad_token_id=0).to_dict()
    assert family_of(config).spec_from_config(config).vocabulary == config["vocab_size"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "gpt3"}, "model_type 'gpt3' is not one of .*gpt2.*; did you mean 'gpt2'"),
        ({}, "model_type None"),
    ],
)
def test_foreign_architectures_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        family_of(config)

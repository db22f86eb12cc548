"""Configs of families near Llama as they are published: understood, and of the published size. Weights are not here."""

import pytest
import torch

from alignment.models.build import empty_model

FULL = "full_attention"
COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip
GEMMA = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "attention_bias": False, "head_dim": 256, "pad_token_id": 0, "rms_norm_eps": 1e-06,
}  # fmt: skip
PUBLISHED = {
    "Mistral 7B v0.1": {
        **COMMON, "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Mistral Nemo": {
        **COMMON, "architectures": ["MistralForCausalLM"], "head_dim": 128, "hidden_size": 5120,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 131072,
    },
    "Qwen 2.5 0.5B": {
        **COMMON, "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen 3 0.6B": {
        **COMMON, "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "head_dim": 128,
        "hidden_size": 1024, "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
        "tie_word_embeddings": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "Gemma 2B": {
        **GEMMA, "architectures": ["GemmaForCausalLM"], "hidden_act": "gelu", "hidden_activation": None,
        "hidden_size": 2048, "intermediate_size": 16384, "max_position_embeddings": 8192, "model_type": "gemma",
        "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1, "rope_scaling": None,
        "rope_theta": 10000.0, "vocab_size": 256000,
    },
    "Gemma 2 9B": {
        **GEMMA, "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 3584, "intermediate_size": 14336,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "query_pre_attn_scalar": 256, "rope_theta": 10000.0, "sliding_window": 4096,
        "sliding_window_size": 4096, "vocab_size": 256000,
    },
    "Gemma 3 1B": {
        **GEMMA, "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None,
        "cache_implementation": "hybrid", "final_logit_softcapping": None, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "OLMo 2 7B": {
        **COMMON, "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "hidden_size": 4096,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "SmolLM 3 3B": {
        **COMMON, "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": [FULL] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 5000000.0, "sliding_window": None, "use_sliding_window": False, "vocab_size": 128256,
    },
}  # fmt: skip
# Parameters as the models' own pages count them, embeddings included.
BILLIONS = {
    "Mistral 7B v0.1": 7.24, "Mistral Nemo": 12.25, "Qwen 2.5 0.5B": 0.49, "Qwen 3 0.6B": 0.60, "Gemma 2B": 2.51,
    "Gemma 2 9B": 9.24, "Gemma 3 1B": 1.00, "OLMo 2 7B": 7.30, "SmolLM 3 3B": 3.08,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood_and_have_the_published_size(name):
    with torch.device("meta"):
        model = empty_model(PUBLISHED[name], "language")
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert size == pytest.approx(BILLIONS[name], abs=0.006)

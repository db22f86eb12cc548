"""Configs as their authors published them are understood, and give models of the size their authors count."""

from typing import Any

import pytest
import torch

from alignment.models.build import empty_model

OLD_HUB = {"architectures": ["AnyLM"], "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True}
# Keys as the files on the hub have them, and how many parameters their authors count.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "openai-gpt": ({
        "model_type": "openai-gpt", "afn": "gelu", "attn_pdrop": 0.1, "embd_pdrop": 0.1, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "n_ctx": 512, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 512,
        "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1, "summary_activation": None,
        "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
        "summary_use_proj": True, "vocab_size": 40478,
    }, 116_534_784),
    "pythia-70m": ({
        "model_type": "gpt_neox", "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu", "hidden_size": 512,
        "initializer_range": 0.02, "intermediate_size": 2048, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048, "num_attention_heads": 8, "num_hidden_layers": 6, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True, "vocab_size": 50304,
    }, 70_426_624),
    "gpt-neox-20b": ({
        "model_type": "gpt_neox", "attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast",
        "hidden_dropout_prob": 0, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 64,
        "num_hidden_layers": 44, "rotary_emb_base": 10000, "rotary_pct": 0.25, "vocab_size": 50432,
    }, 20_554_567_680),
    "opt-125m": ({
        "model_type": "opt", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
        "activation_function": "relu", "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
        "dropout": 0.1, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 768,
    }, 125_239_296),
    "opt-350m": ({
        "model_type": "opt", "do_layer_norm_before": False, "ffn_dim": 4096, "hidden_size": 1024,
        "num_attention_heads": 16, "num_hidden_layers": 24, "vocab_size": 50272, "word_embed_proj_dim": 512,
    }, 331_196_416),
    "bloom-560m": ({
        "model_type": "bloom", "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "hidden_dropout": 0.0, "hidden_size": 1024,
        "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "masked_softmax_fusion": True, "n_embed": 1024,
        "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1,
        "seq_length": 2048, "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0,
        "vocab_size": 250880,
    }, 559_214_592),
    "falcon-7b": ({
        "model_type": "falcon", "alibi": False, "apply_residual_connection_post_layernorm": False, "bias": False,
        "hidden_size": 4544, "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71,
        "num_hidden_layers": 32, "parallel_attn": True, "vocab_size": 65024,
    }, 6_921_720_704),
    "falcon-40b": ({
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 8192, "new_decoder_architecture": True,
        "num_attention_heads": 128, "num_hidden_layers": 60, "num_kv_heads": 8, "parallel_attn": True,
        "vocab_size": 65024,
    }, 41_303_293_952),
    "falcon-rw-1b": ({
        "model_type": "falcon", "alibi": True, "bias": True, "hidden_size": 2048, "multi_query": False,
        "num_attention_heads": 32, "num_hidden_layers": 24, "parallel_attn": False, "vocab_size": 50304,
    }, 1_311_625_216),
    "phi-3-mini-128k": ({
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [2.5] * 48},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
    }, 3_821_079_552),
    "phi-4-mini": ({
        "model_type": "phi3", "attention_bias": False, "full_attn_mod": 1, "hidden_size": 3072,
        "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False, "max_position_embeddings": 131072,
        "mlp_bias": False, "num_attention_heads": 24, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.5] * 48},
        "sliding_window": 262144, "tie_word_embeddings": True, "vocab_size": 200064,
    }, 3_836_021_760),
    "mixtral-8x7b": ({
        "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }, 46_702_792_704),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_configs_have_their_published_size(name):
    config, count = PUBLISHED[name]
    with torch.device("meta"):
        model = empty_model({**OLD_HUB, **config}, "language")
    assert sum(parameter.numel() for parameter in model.parameters()) == count

"""Configs as their authors published them are understood, and give models of the size their authors count. No weights here."""

from typing import Any

import pytest
import torch

from alignment.models.build import empty_model
from alignment.models.families import family_of
from alignment.models.layers import Llama3Scaling

OLD_HUB = {"architectures": ["AnyLM"], "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True}
# Keys as the files on the hub have them, and how many parameters their authors count.
DECODERS: dict[str, tuple[dict[str, Any], int]] = {
    "gpt2": ({
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    }, 124_439_808),
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
    "opt-125m": ({
        "model_type": "opt", "_remove_final_layer_norm": False, "activation_dropout": 0.0,
        "activation_function": "relu", "attention_dropout": 0.0, "bos_token_id": 2, "do_layer_norm_before": True,
        "dropout": 0.1, "ffn_dim": 3072, "hidden_size": 768, "init_std": 0.02, "layerdrop": 0.0,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 1,
        "prefix": "</s>", "vocab_size": 50272, "word_embed_proj_dim": 768,
    }, 125_239_296),
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
    "phi-3-mini-128k": ({
        "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 131072, "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "original_max_position_embeddings": 4096,
        "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope", "short_factor": [1.05] * 48, "long_factor": [2.5] * 48},
        "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": False, "vocab_size": 32064,
    }, 3_821_079_552),
    "mixtral-8x7b": ({
        "model_type": "mixtral", "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    }, 46_702_792_704),
}  # fmt: skip

FULL = "full_attention"
COMMON = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "initializer_range": 0.02,
    "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
}  # fmt: skip
GEMMA = {
    **{key: value for key, value in COMMON.items() if key != "hidden_act"},
    "attention_bias": False, "head_dim": 256, "pad_token_id": 0, "rms_norm_eps": 1e-06,
}  # fmt: skip
LLAMA_LIKE = {
    "Mistral 7B v0.1": {
        **COMMON, "architectures": ["MistralForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": False, "vocab_size": 32000,
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
    "Mistral 7B v0.1": 7.24, "Qwen 2.5 0.5B": 0.49, "Qwen 3 0.6B": 0.60, "Gemma 2B": 2.51,
    "Gemma 2 9B": 9.24, "Gemma 3 1B": 1.00, "OLMo 2 7B": 7.30, "SmolLM 3 3B": 3.08,
}  # fmt: skip

BERT_BASE = {
    "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072,
    "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "num_attention_heads": 12, "num_hidden_layers": 12,
    "pad_token_id": 0, "position_embedding_type": "absolute", "type_vocab_size": 2, "use_cache": True,
    "vocab_size": 30522,
}  # fmt: skip
ENCODERS: dict[str, tuple[dict[str, Any], int]] = {
    "bert": (BERT_BASE, 109_514_298),
    "roberta": (
        {**BERT_BASE, "vocab_size": 50265, "max_position_embeddings": 514, "pad_token_id": 1, "type_vocab_size": 1,
         "layer_norm_eps": 1e-5},
        124_697_433,
    ),
    "distilbert": (
        {"activation": "gelu", "attention_dropout": 0.1, "dim": 768, "dropout": 0.1, "hidden_dim": 3072,
         "initializer_range": 0.02, "max_position_embeddings": 512, "n_heads": 12, "n_layers": 6, "pad_token_id": 0,
         "qa_dropout": 0.1, "seq_classif_dropout": 0.2, "sinusoidal_pos_embds": False, "tie_weights_": True,
         "vocab_size": 30522},
        66_985_530,
    ),
    "albert": (
        {**BERT_BASE, "attention_probs_dropout_prob": 0, "classifier_dropout_prob": 0.1, "down_scale_factor": 1,
         "embedding_size": 128, "gap_size": 0, "hidden_act": "gelu_new", "hidden_dropout_prob": 0,
         "inner_group_num": 1, "net_structure_type": 0, "num_hidden_groups": 1, "num_memory_blocks": 0,
         "vocab_size": 30000},
        11_221_680,
    ),
    "electra": (
        {**BERT_BASE, "embedding_size": 128, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
         "summary_activation": "gelu", "summary_last_dropout": 0.1, "summary_type": "first", "summary_use_proj": True},
        13_546_682,
    ),
    "deberta-v2": (
        {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768,
         "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 512,
         "relative_attention": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm", "share_att_key": True,
         "pos_att_type": "p2c|c2p", "layer_norm_eps": 1e-7, "max_relative_positions": -1,
         "position_biased_input": False, "num_attention_heads": 12, "num_hidden_layers": 12, "type_vocab_size": 0,
         "vocab_size": 128100},
        184_551_780,
    ),
    "modernbert": (
        {"attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 50281, "classifier_activation": "gelu",
         "classifier_bias": False, "classifier_dropout": 0.0, "classifier_pooling": "mean", "cls_token_id": 50281,
         "decoder_bias": True, "deterministic_flash_attn": False, "embedding_dropout": 0.0, "eos_token_id": 50282,
         "global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "gradient_checkpointing": False,
         "hidden_activation": "gelu", "hidden_size": 768, "initializer_cutoff_factor": 2.0, "initializer_range": 0.02,
         "intermediate_size": 1152, "layer_norm_eps": 1e-5, "local_attention": 128, "local_rope_theta": 10000.0,
         "max_position_embeddings": 8192, "mlp_bias": False, "mlp_dropout": 0.0, "norm_bias": False,
         "norm_eps": 1e-5, "num_attention_heads": 12, "num_hidden_layers": 22, "pad_token_id": 50283,
         "position_embedding_type": "absolute", "sep_token_id": 50282, "tie_word_embeddings": True,
         "torch_dtype": "float32", "vocab_size": 50368},
        149_655_232,
    ),
}  # fmt: skip

T5_SMALL = {
    "architectures": ["T5ForConditionalGeneration"], "d_ff": 2048, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "initializer_factor": 1.0,
    "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "t5", "n_positions": 512, "num_heads": 8,
    "num_layers": 6, "output_past": True, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "task_specific_params": {"summarization": {"num_beams": 4}}, "vocab_size": 32128,
}  # fmt: skip
FLAN = {
    **T5_SMALL, "d_model": 768, "num_heads": 12, "num_layers": 12, "num_decoder_layers": 12,
    "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "use_cache": True,
}  # fmt: skip
MT5_SMALL = {
    "architectures": ["MT5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512,
    "decoder_start_token_id": 0, "dropout_rate": 0.1, "eos_token_id": 1, "feed_forward_proj": "gated-gelu",
    "initializer_factor": 1.0, "is_encoder_decoder": True, "layer_norm_epsilon": 1e-06, "model_type": "mt5",
    "num_decoder_layers": 8, "num_heads": 6, "num_layers": 8, "pad_token_id": 0, "relative_attention_num_buckets": 32,
    "tie_word_embeddings": False, "tokenizer_class": "T5Tokenizer", "use_cache": True, "vocab_size": 250112,
}  # fmt: skip
BART_BASE = {
    "activation_dropout": 0.1, "activation_function": "gelu", "add_bias_logits": False, "add_final_layer_norm": False,
    "architectures": ["BartModel"], "attention_dropout": 0.1, "bos_token_id": 0, "classif_dropout": 0.1,
    "classifier_dropout": 0.0, "d_model": 768, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072,
    "decoder_layerdrop": 0.0, "decoder_layers": 6, "decoder_start_token_id": 2, "dropout": 0.1,
    "early_stopping": True, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072, "encoder_layerdrop": 0.0,
    "encoder_layers": 6, "eos_token_id": 2, "forced_eos_token_id": 2, "forced_bos_token_id": 0,
    "gradient_checkpointing": False, "id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, "init_std": 0.02,
    "is_encoder_decoder": True, "label2id": {"LABEL_0": 0, "LABEL_1": 1, "LABEL_2": 2},
    "max_position_embeddings": 1024, "model_type": "bart", "no_repeat_ngram_size": 3, "normalize_before": False,
    "normalize_embedding": True, "num_beams": 4, "num_hidden_layers": 6, "pad_token_id": 1, "scale_embedding": False,
    "task_specific_params": {}, "use_cache": True, "vocab_size": 50265,
}  # fmt: skip
SEQ2SEQ = {  # as their model cards and papers count them
    "t5-small": (T5_SMALL, 60_506_624),
    "flan-t5-base": (FLAN, 247_577_856),
    "mt5-small": (MT5_SMALL, 300_176_768),
    "bart-base": (BART_BASE, 139_420_416),
}
EXACT = {
    **{name: ({**OLD_HUB, **config}, count) for name, (config, count) in DECODERS.items()},
    **{name: ({"model_type": name, **config}, count) for name, (config, count) in ENCODERS.items()},
    **SEQ2SEQ,
}


def size(config):
    with torch.device("meta"):
        model = empty_model(config, "language")
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", EXACT)
def test_published_configs_have_their_published_size(name):
    config, count = EXACT[name]
    assert size(config) == count


@pytest.mark.parametrize("name", LLAMA_LIKE)
def test_published_configs_near_llama_have_their_published_size(name):
    assert size(LLAMA_LIKE[name]) / 1e9 == pytest.approx(BILLIONS[name], abs=0.006)


def test_llama_3_2_stretches_its_positions():
    llama32 = {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "factor": 32.0}, "rope_theta": 500000.0, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    }  # fmt: skip
    scaling = family_of(llama32).spec_from_config(llama32).blocks[0].attention.rotary.scaling
    assert scaling == Llama3Scaling(32.0, 1.0, 4.0, 8192)

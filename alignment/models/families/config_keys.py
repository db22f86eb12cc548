"""Keys of config.json: the type and limits of each, and transformers' defaults for those that a file leaves out."""

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from alignment.errors import spelling_hint, warn_once
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.safetensors_files import HFConfig

# Keys of any family that do not change the forward pass. Sampling defaults are among them on purpose: a run has its own
# sampling settings.
HARMLESS = frozenset(
    {
        "_attn_implementation_autoset", "_commit_hash", "_name_or_path", "_num_labels", "architectures",
        "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "bos_token_id", "decoder_start_token_id",
        "diversity_penalty", "do_sample", "dtype", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
        "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
        "id2label", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length", "max_new_tokens",
        "min_length", "model_type", "name_or_path", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
        "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
        "pad_token_id", "prefix", "problem_type", "remove_invalid_values", "repetition_penalty", "return_dict",
        "return_dict_in_generate", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
        "tokenizer_class", "top_k", "top_p", "torch_dtype", "torchscript", "transformers.js_config",
        "transformers_version", "typical_p", "unk_token_id", "use_bfloat16", "use_cache",
    }
)  # fmt: skip

# Keys that change the forward pass, with the values that are supported.
FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "chunk_size_feed_forward": (0,),
    "cross_attention_hidden_size": (None,),
    "is_decoder": (False, True),  # a decoder-only model is one either way
    "is_encoder_decoder": (False,),
    "pruned_heads": ({}, None),
    "tie_encoder_decoder": (False,),
}


# Keys that transformers' code reads although its config classes have no attribute of the name.
ACTING = frozenset(
    (
        "attention_chunk_size",
        "auto_map",
        "embedding_size",
        "gguf_file",
        "is_causal",
        "quantization_config",
        "token_classification_bias",
        "transformers_weights",
        "trust_remote_code",
        "unpadded_vocab_size",
        "use_bidirectional_attention",
    )
)


@dataclass(frozen=True)
class Key:
    """The values that a config key may have."""

    type: type  # of the value; an integer also passes for float
    least: float | None = None  # smallest value allowed
    nullable: bool = False  # null is allowed; it also is where the default is null
    options: tuple[str, ...] = ()  # all texts allowed; none listed: any

    def problem(self, name: str, value: object) -> str | None:
        """The message that `value` is not allowed, or None."""
        int_as_float = self.type is float and isinstance(value, int) and not isinstance(value, bool)
        if not int_as_float and (not isinstance(value, self.type) or (self.type is int and isinstance(value, bool))):
            return f"config.json: {name} must be {self.type.__name__}, got {value!r}"
        if self.options and value not in self.options:
            return f"config.json: {name} {value!r} is not one of {', '.join(self.options)}"
        if self.least is not None and isinstance(value, int | float) and value < self.least:
            return f"config.json: {name} must be at least {self.least:g}, got {value!r}"
        return None


# Every key that a specification depends on; its name means the same in all families that have it.
KEYS: dict[str, Key] = {
    name: key
    for key, names in {
        Key(int, 1): (
            "attention_head_size block_size conv_groups d_ff d_kv d_model decoder_attention_heads decoder_ffn_dim "
            "decoder_layers dim embedding_size encoder_attention_heads encoder_ffn_dim encoder_layers ffn_dim "
            "ffn_hidden_size global_attn_every_n_layers hidden_dim hidden_size intermediate_size "
            "max_position_embeddings n_embd n_head n_heads n_inner n_layer n_layers n_positions no_rope_layer_interval "
            "num_attention_heads num_decoder_layers num_experts_per_tok num_heads num_hidden_groups num_hidden_layers "
            "num_kv_heads num_layers num_ln_in_parallel_attn num_local_experts pooler_hidden_size "
            "relative_attention_max_distance sliding_window_pattern type_vocab_size vocab_size word_embed_proj_dim"
        ),
        Key(int, 1, nullable=True): "num_key_value_heads sliding_window",
        Key(int, 0): (
            "conv_kernel_size decoder_start_token_id max_window_layers num_random_blocks pad_token_id sep_token_id"
        ),
        Key(int, 2): "head_dim local_attention",
        Key(int, 4): "relative_attention_num_buckets",
        Key(int): "max_relative_positions position_buckets",
        Key(float, 0): (
            "activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop classifier_dropout "
            "classifier_dropout_prob cls_dropout dropout dropout_rate embd_pdrop embedding_dropout hidden_dropout "
            "hidden_dropout_prob init_std initializer_factor initializer_range layer_norm_eps layer_norm_epsilon "
            "mlp_dropout norm_eps pooler_dropout qa_dropout resid_pdrop rms_norm_eps rotary_emb_base rotary_pct "
            "router_aux_loss_coef seq_classif_dropout"
        ),
        Key(float, 1): "global_rope_theta local_rope_theta query_pre_attn_scalar rope_local_base_freq",
        Key(float, 1e-6, nullable=True): "attn_logit_softcapping final_logit_softcapping",
        Key(bool): (
            "_remove_final_layer_norm alibi apply_residual_connection_post_layernorm attention_bias bias "
            "classifier_bias decoder_bias do_layer_norm_before enable_bias layer_norm_elementwise_affine legacy "
            "mlp_bias multi_query new_decoder_architecture norm_bias output_router_logits parallel_attn "
            "position_biased_input relative_attention rescale_embeddings scale_attn_by_inverse_layer_idx "
            "scale_attn_weights scale_decoder_outputs scale_embedding share_att_key tie_word_embeddings use_bias "
            "use_parallel_residual use_sliding_window"
        ),
        Key(str): "afn feed_forward_proj norm_rel_ebd",
        Key(str, options=tuple(ACTIVATIONS)): (
            "activation activation_function classifier_activation conv_act hidden_act hidden_activation "
            "pooler_hidden_act"
        ),
        Key(str, options=("cls", "mean")): "classifier_pooling",
        Key(str, options=("block_sparse", "original_full")): "attention_type",
        Key(list): "layer_types no_rope_layers",
    }.items()
    for name in names.split()
}


@cache
def transformers_defaults() -> dict[str, dict[str, Any]]:
    """Family -> default of each key, as in transformers' own config class; importing those takes over a second."""
    return json.loads(Path(__file__).with_name("defaults.json").read_text(encoding="utf-8"))


@cache
def transformers_attributes(model_type: str) -> frozenset[str]:
    """Keys of transformers' config class of a family; to import it takes a second, and few configs ask for it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    settings = CONFIG_MAPPING[model_type]()
    return frozenset((*vars(settings), *settings.attribute_map))


def keys_without_effect(config: HFConfig, known: Collection[str]) -> set[str]:
    """Keys that act nowhere, each named by one note: neither `known` to a family nor read by transformers.

    A key that transformers' config class of this `model_type` has no attribute for cannot act there.
    """
    known = {*known, *FIXED, *HARMLESS, *ACTING}
    unread = set()
    for name in config:
        if name not in known and name not in transformers_attributes(config["model_type"]):
            unread.add(name)
            model_type = config["model_type"]
            warn_once(
                f"config.json: {name!r} is no key of transformers' {model_type} and changes nothing{hint(name, known)}"
            )
    return unread


def refused_keys(
    config: Mapping[str, Any], known: Collection[str], fixed: Mapping[str, tuple[Any, ...]]
) -> Iterable[str]:
    """A message for each key that is not `known` to a family, or has none of the values that are supported.

    Args:
        fixed: further keys of the family -> the values that are supported.
    """
    fixed = {**FIXED, **fixed}
    known = {*known, *fixed, *HARMLESS}
    for name in config:
        if name not in known:
            yield (
                f"config.json: unknown key {name!r}{hint(name, known)}; transformers acts on it, so it cannot be left "
                "out here"
            )
    for name, allowed in fixed.items():
        if name in config and config[name] not in allowed:
            yield f"config.json: {name} = {config[name]!r} is not supported, only {' or '.join(map(repr, allowed))}"


def hint(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` with the closest known names, or an empty text."""
    suggestion = spelling_hint(name, known)
    return f"; {suggestion}" if suggestion else ""

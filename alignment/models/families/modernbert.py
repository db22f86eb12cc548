"""ModernBERT: local and global layers, each with its own rotary base, GeGLU, pre-norm without biases.

Source: Warner et al. 2024, arXiv:2412.13663; transformers, `models/modernbert`.
"""

import math
from dataclasses import replace

from alignment.models.families.bert import encoder_tasks
from alignment.models.families.decoders import LAYER_TYPES, attention_spec, layer_ropes, transformer_spec, windows
from alignment.models.families.family import (
    BLOCK,
    CLASSIFIER,
    GATE_UP,
    QUERY_KEY_VALUE,
    Family,
    Task,
    names_under,
    num_labels,
)
from alignment.models.families.rope import read_rotary
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.init_weights import InitSpec
from alignment.models.layers import GatedFeedForwardSpec, LayerNormSpec, NoNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

NAMES = (
    *names_under("model.embeddings.", "trunk.", embed="tok_embeddings", embedding_norm="norm"),
    ("model.layers.{}.attn.Wqkv", QUERY_KEY_VALUE),
    ("model.layers.{}.mlp.Wi", GATE_UP),
    *names_under("model.layers.{}.", BLOCK, attention_norm="attn_norm", feedforward_norm="mlp_norm"),
    *names_under("model.layers.{}.", BLOCK, **{"attention.output": "attn.Wo", "feedforward.down": "mlp.Wo"}),
    ("model.final_norm", "trunk.norm"),
)
TRANSFORM = (("head.dense", "head.transform.dense"), ("head.norm", "head.transform.norm"))


def _spec(value: HFConfig) -> TransformerSpec:
    every = value["global_attn_every_n_layers"]
    norm = LayerNormSpec(value["norm_eps"], value["norm_bias"])
    # `local_attention` is the whole width of a window, half of it on either side, ends included.
    spans = windows(value, value["local_attention"] // 2 + 1, lambda layer: layer % every > 0)
    attention = attention_spec(value, bias=value["attention_bias"], causal=False)
    ropes = layer_ropes(value)
    thetas = (value["global_rope_theta"], value["local_rope_theta"])
    rotaries = [  # of global and of local layers
        read_rotary({**value, "rope_theta": theta, "rope_parameters": ropes.get(kind)}, attention.head_dim)
        for kind, theta in zip(LAYER_TYPES, thetas, strict=True)
    ]
    spec = transformer_spec(
        value,
        [replace(attention, window=span, rotary=rotaries[span is not None]) for span in spans],
        norm=norm,
        feedforward=GatedFeedForwardSpec(
            value["intermediate_size"], value["hidden_activation"], value["mlp_bias"], value["mlp_dropout"]
        ),
        max_positions=value["max_position_embeddings"],
        init=InitSpec(value["initializer_range"], value["initializer_range"] / math.sqrt(2 * len(spans))),
        embedding_dropout=value["embedding_dropout"],
        embedding_norm=norm,
        head=LanguageHeadSpec(_transform(value), bias=value["decoder_bias"]),
    )
    # The embedding has just been normed: the first layer's attention has no norm of its own.
    return replace(spec, blocks=(replace(spec.blocks[0], attention_norm=NoNormSpec()), *spec.blocks[1:]))


def _transform(value: HFConfig) -> TransformSpec:
    norm = LayerNormSpec(value["norm_eps"], value["norm_bias"])
    return TransformSpec(value["hidden_size"], value["classifier_activation"], value["classifier_bias"], norm)


def _token_head(value: HFConfig) -> ClassificationHeadSpec:
    """Classes of every token, through the language head's dense layer and norm."""
    return ClassificationHeadSpec(num_labels(value), _transform(value), dropout=value["classifier_dropout"])


def _sequence_head(value: HFConfig) -> ClassificationHeadSpec:
    """The same, of the first token or of the mean of all."""
    return replace(_token_head(value), pooling="first" if value["classifier_pooling"] == "cls" else "mean")


MODERNBERT = Family(
    name="modernbert",
    spec=_spec,
    keys=(
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "hidden_activation",
        "max_position_embeddings",
        "initializer_range",
        "norm_eps",
        "norm_bias",
        "attention_bias",
        "global_attn_every_n_layers",
        "layer_types",
        "local_attention",
        "embedding_dropout",
        "mlp_bias",
        "mlp_dropout",
        "decoder_bias",
        "classifier_pooling",
        "classifier_dropout",
        "classifier_bias",
        "classifier_activation",
        "tie_word_embeddings",
        "global_rope_theta",
        "local_rope_theta",
    ),
    names=NAMES,
    trunk_prefix="model.",
    tasks={
        **encoder_tasks("ModernBert", (*TRANSFORM, ("decoder", "head")), (*TRANSFORM, *CLASSIFIER), _sequence_head),
        "tokens": Task("ModernBertForTokenClassification", (*TRANSFORM, *CLASSIFIER), _token_head),
        "span": Task(
            "ModernBertForQuestionAnswering",
            (*TRANSFORM, *CLASSIFIER),
            lambda value: replace(_token_head(value), outputs=2),
        ),
    },
    defaults={"global_attn_every_n_layers": 3, "global_rope_theta": 160_000.0, "local_rope_theta": 10_000.0},
    by_hand=("rope_parameters",),
    # How transformers runs and starts it; the norm's eps is norm_eps, and positions are rotary whatever
    # position_embedding_type says.
    harmless=(
        "cls_token_id",
        "deterministic_flash_attn",
        "gradient_checkpointing",
        "initializer_cutoff_factor",
        "layer_norm_eps",
        "position_embedding_type",
        "reference_compile",
        "repad_logits_with_grad",
        "sparse_pred_ignore_index",
        "sparse_prediction",
    ),
    # Its attention dropout falls on what attention gives as well; no published model has any.
    fixed={"is_decoder": (False,), "attention_dropout": (0.0,), "rope_scaling": (None,)},
)

"""ModernBERT: local and global layers, each with its own rotary base, GeGLU, pre-norm without biases.

Source: Warner et al. 2024, arXiv:2412.13663; transformers, `models/modernbert`.
"""

import math
from collections.abc import Mapping

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, windows
from alignment.models.families.encoders import CLASSIFIER, with_scalar
from alignment.models.families.family import Family, Key, Task, divides, num_labels, read_keys
from alignment.models.families.rope import read_rotary
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, Pooling, TransformSpec
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    GatedFeedForwardSpec,
    LayerNormSpec,
    NoNormSpec,
    RotarySpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 50368, 1),
    "hidden_size": Key(int, 768, 1),
    "intermediate_size": Key(int, 1152, 1),
    "num_hidden_layers": Key(int, 22, 1),
    "num_attention_heads": Key(int, 12, 1),
    "hidden_activation": Key(str, "gelu"),
    "max_position_embeddings": Key(int, 8192, 1),
    "initializer_range": Key(float, 0.02, 0),
    "norm_eps": Key(float, 1e-5, 0),
    "norm_bias": Key(bool, False),
    "attention_bias": Key(bool, False),
    "global_attn_every_n_layers": Key(int, 3, 1),
    "layer_types": Key(list, None),
    "local_attention": Key(int, 128, 2),
    "embedding_dropout": Key(float, 0.0, 0),
    "mlp_bias": Key(bool, False),
    "mlp_dropout": Key(float, 0.0, 0),
    "decoder_bias": Key(bool, True),
    "classifier_pooling": Key(str, "cls"),
    "classifier_dropout": Key(float, 0.0, 0),
    "classifier_bias": Key(bool, False),
    "classifier_activation": Key(str, "gelu"),
    "tie_word_embeddings": Key(bool, True),
    "global_rope_theta": Key(float, 160_000.0, 1),
    "local_rope_theta": Key(float, 10_000.0, 1),
}
# How transformers runs and starts it; the norm's eps is norm_eps, and positions are rotary whatever position_embedding_type says.
HARMLESS = (
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
)
# Its attention dropout falls on what attention gives as well; no published model has any.
FIXED = {"is_decoder": (False,), "attention_dropout": (0.0,), "rope_scaling": (None,)}
POOLINGS: dict[str, Pooling] = {"cls": "first", "mean": "mean"}

NAMES = (  # Hugging Face name              ours
    ("model.embeddings.tok_embeddings.weight", "trunk.embed.weight"),
    ("model.embeddings.norm.weight",        "trunk.embedding_norm.weight"),
    ("model.embeddings.norm.bias",          "trunk.embedding_norm.bias"),
    ("model.layers.{}.attn_norm.weight",    "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.attn_norm.bias",      "trunk.blocks.{}.attention_norm.bias"),
    ("model.layers.{}.attn.Wqkv.weight",   ("trunk.blocks.{}.attention.query.weight",
                                            "trunk.blocks.{}.attention.key.weight",
                                            "trunk.blocks.{}.attention.value.weight")),
    ("model.layers.{}.attn.Wqkv.bias",     ("trunk.blocks.{}.attention.query.bias",
                                            "trunk.blocks.{}.attention.key.bias",
                                            "trunk.blocks.{}.attention.value.bias")),
    ("model.layers.{}.attn.Wo.weight",      "trunk.blocks.{}.attention.output.weight"),
    ("model.layers.{}.attn.Wo.bias",        "trunk.blocks.{}.attention.output.bias"),
    ("model.layers.{}.mlp_norm.weight",     "trunk.blocks.{}.feedforward_norm.weight"),
    ("model.layers.{}.mlp_norm.bias",       "trunk.blocks.{}.feedforward_norm.bias"),
    ("model.layers.{}.mlp.Wi.weight",      ("trunk.blocks.{}.feedforward.gate.weight",
                                            "trunk.blocks.{}.feedforward.up.weight")),
    ("model.layers.{}.mlp.Wi.bias",        ("trunk.blocks.{}.feedforward.gate.bias",
                                            "trunk.blocks.{}.feedforward.up.bias")),
    ("model.layers.{}.mlp.Wo.weight",       "trunk.blocks.{}.feedforward.down.weight"),
    ("model.layers.{}.mlp.Wo.bias",         "trunk.blocks.{}.feedforward.down.bias"),
    ("model.final_norm.weight",             "trunk.norm.weight"),
    ("model.final_norm.bias",               "trunk.norm.bias"),
)  # fmt: skip

TRANSFORM = (
    ("head.dense.weight",  "head.transform.dense.weight"),
    ("head.dense.bias",    "head.transform.dense.bias"),
    ("head.norm.weight",   "head.transform.norm.weight"),
    ("head.norm.bias",     "head.transform.norm.bias"),
)  # fmt: skip
PREDICTIONS = (*TRANSFORM, ("decoder.weight", "head.weight"), ("decoder.bias", "head.bias"))
TRANSFORM_CLASSIFIER = (*TRANSFORM, *CLASSIFIER)


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of the first token, or of the mean of all, through the head's dense layer and norm."""
    value, _ = read_keys(dict(config), KEYS)
    pooling = POOLINGS[value["classifier_pooling"]]
    return ClassificationHeadSpec(
        num_labels(config), _transform(value), dropout=value["classifier_dropout"], pooling=pooling
    )


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of every token, through the same."""
    value, _ = read_keys(dict(config), KEYS)
    return ClassificationHeadSpec(num_labels(config), _transform(value), dropout=value["classifier_dropout"])


def span_head(config: HFConfig) -> ClassificationHeadSpec:
    """Does an answer start here, does it end here; through the same."""
    value, _ = read_keys(dict(config), KEYS)
    return ClassificationHeadSpec(2, _transform(value), dropout=value["classifier_dropout"])


def _transform(value: HFConfig) -> TransformSpec:
    norm = LayerNormSpec(value["norm_eps"], value["norm_bias"])
    return TransformSpec(value["hidden_size"], value["classifier_activation"], value["classifier_bias"], norm)


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a ModernBERT config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED, by_hand=("rope_parameters",))
    reach, type_problems = _windows(value)
    problems += type_problems + _value_problems(value)
    raise_all(problems)
    width = value["hidden_size"]
    rotaries, problems = _rotaries(config, value)
    raise_all(problems)
    norm = LayerNormSpec(value["norm_eps"], value["norm_bias"])
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=value["max_position_embeddings"],
        blocks=tuple(_block(value, layer, window, rotaries) for layer, window in enumerate(reach)),
        norm=norm,
        init=InitSpec(value["initializer_range"], value["initializer_range"] / math.sqrt(2 * len(reach))),
        tied_head=value["tie_word_embeddings"],
        embedding_dropout=value["embedding_dropout"],
        embedding_norm=norm,
        head=LanguageHeadSpec(_transform(value), bias=value["decoder_bias"]),
    )


def _windows(value: HFConfig) -> tuple[list[int | None], list[str]]:
    """The window of each layer: `local_attention` is its whole width, half of it on either side, ends included."""
    every, wide = value["global_attn_every_n_layers"], value["local_attention"]
    if not isinstance(every, int) or not isinstance(wide, int) or every < 1:
        return [], []  # reported already
    return windows(value, wide // 2 + 1, lambda layer: layer % every > 0)


def _value_problems(value: HFConfig) -> list[str]:
    heads, pooling = value["num_attention_heads"], value["classifier_pooling"]
    problems = activation_problems(value["hidden_activation"], "hidden_activation")
    problems += activation_problems(value["classifier_activation"], "classifier_activation")
    if not divides(heads, value["hidden_size"]):
        problems.append(f"config.json: num_attention_heads = {heads!r} does not divide hidden_size")
    if pooling not in POOLINGS:
        problems.append(f"config.json: classifier_pooling {pooling!r} is not one of {', '.join(POOLINGS)}")
    return problems


def _rotaries(config: HFConfig, value: HFConfig) -> tuple[dict[bool, RotarySpec], list[str]]:
    """The rotary positions of local (True) and of global layers (False), and the problems found."""
    found = config.get("rope_parameters") or {}
    kinds = {"sliding_attention": (True, "local_rope_theta"), "full_attention": (False, "global_rope_theta")}
    problems = [
        f"config.json: rope_parameters has {kind!r}, which is not one of {', '.join(kinds)}"
        for kind in found
        if kind not in kinds
    ]
    rotaries = {}
    for kind, (local, theta) in kinds.items():
        rotary, more = read_rotary(
            {}, value["hidden_size"] // value["num_attention_heads"], value["max_position_embeddings"],
            theta=value[theta], parameters=found.get(kind) or {},
        )  # fmt: skip
        rotaries[local] = rotary
        problems += more
    return rotaries, problems


def _block(value: HFConfig, layer: int, window: int | None, rotaries: Mapping[bool, RotarySpec]) -> BlockSpec:
    heads = value["num_attention_heads"]
    head_dim, bias = value["hidden_size"] // heads, value["attention_bias"]
    attention = AttentionSpec(
        heads, heads, head_dim, head_dim**-0.5, bias, bias,
        causal=False, window=window, rotary=rotaries[window is not None],
    )  # fmt: skip
    feedforward = GatedFeedForwardSpec(
        value["intermediate_size"], value["hidden_activation"], value["mlp_bias"], value["mlp_dropout"]
    )
    # The embedding has just been normed: the first layer's attention has no norm of its own.
    first = None if layer else NoNormSpec()
    return BlockSpec(attention, feedforward, LayerNormSpec(value["norm_eps"], value["norm_bias"]), attention_norm=first)


MODERNBERT = Family(
    name="modernbert",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=with_scalar(
        {
            "language": Task("ModernBertForMaskedLM", PREDICTIONS),
            "sequence": Task("ModernBertForSequenceClassification", TRANSFORM_CLASSIFIER, sequence_head),
            "tokens": Task("ModernBertForTokenClassification", TRANSFORM_CLASSIFIER, token_head),
            "span": Task("ModernBertForQuestionAnswering", TRANSFORM_CLASSIFIER, span_head),
        }
    ),
)

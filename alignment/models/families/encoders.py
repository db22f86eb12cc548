"""Parts that the configs and files of many encoders share: BERT's layers and classification heads."""

from collections.abc import Callable, Mapping
from typing import Any

from alignment.models.families.decoders import activation_problems
from alignment.models.families.family import Key, Name, Task, divides, num_labels
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

# Keys with BERT's defaults; other families override the defaults.
BERT_KEYS = {
    "vocab_size": Key(int, 30522, 1),
    "hidden_size": Key(int, 768, 1),
    "num_hidden_layers": Key(int, 12, 1),
    "num_attention_heads": Key(int, 12, 1),
    "intermediate_size": Key(int, 3072, 1),
    "hidden_act": Key(str, "gelu"),
    "hidden_dropout_prob": Key(float, 0.1, 0),
    "attention_probs_dropout_prob": Key(float, 0.1, 0),
    "max_position_embeddings": Key(int, 512, 1),
    "type_vocab_size": Key(int, 2, 1),
    "initializer_range": Key(float, 0.02, 0),
    "layer_norm_eps": Key(float, 1e-12, 0),
    "tie_word_embeddings": Key(bool, True),
}

# Keys of older converters, and of transformers' own training loop.
BERT_HARMLESS = ("gradient_checkpointing", "output_past")
# Other values would mean causal attention or relative positions.
ENCODER_FIXED = {"is_decoder": (False,), "position_embedding_type": ("absolute", None)}
# A new model has no dropout unless the run's config sets it.
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
# Buffers in older files.
POSITION_IDS = r"(\w+\.)?embeddings\.(position_ids|token_type_ids)"

CLASSIFIER: tuple[Name, ...] = (
    ("classifier.weight",  "head.output.weight"),
    ("classifier.bias",    "head.output.bias"),
)  # fmt: skip
DENSE_CLASSIFIER: tuple[Name, ...] = (
    ("classifier.dense.weight",     "head.transform.dense.weight"),
    ("classifier.dense.bias",       "head.transform.dense.bias"),
    ("classifier.out_proj.weight",  "head.output.weight"),
    ("classifier.out_proj.bias",    "head.output.bias"),
)  # fmt: skip
SPAN: tuple[Name, ...] = (
    ("qa_outputs.weight",  "head.output.weight"),
    ("qa_outputs.bias",    "head.output.bias"),
)  # fmt: skip


def bert_blocks(stem: str) -> tuple[Name, ...]:
    """The weight table of layers with BERT's names."""
    return (
        (stem + "attention.self.query.weight",        "trunk.blocks.{}.attention.query.weight"),
        (stem + "attention.self.query.bias",          "trunk.blocks.{}.attention.query.bias"),
        (stem + "attention.self.key.weight",          "trunk.blocks.{}.attention.key.weight"),
        (stem + "attention.self.key.bias",            "trunk.blocks.{}.attention.key.bias"),
        (stem + "attention.self.value.weight",        "trunk.blocks.{}.attention.value.weight"),
        (stem + "attention.self.value.bias",          "trunk.blocks.{}.attention.value.bias"),
        (stem + "attention.output.dense.weight",      "trunk.blocks.{}.attention.output.weight"),
        (stem + "attention.output.dense.bias",        "trunk.blocks.{}.attention.output.bias"),
        (stem + "attention.output.LayerNorm.weight",  "trunk.blocks.{}.attention_norm.weight"),
        (stem + "attention.output.LayerNorm.bias",    "trunk.blocks.{}.attention_norm.bias"),
        (stem + "intermediate.dense.weight",          "trunk.blocks.{}.feedforward.up.weight"),
        (stem + "intermediate.dense.bias",            "trunk.blocks.{}.feedforward.up.bias"),
        (stem + "output.dense.weight",                "trunk.blocks.{}.feedforward.down.weight"),
        (stem + "output.dense.bias",                  "trunk.blocks.{}.feedforward.down.bias"),
        (stem + "output.LayerNorm.weight",            "trunk.blocks.{}.feedforward_norm.weight"),
        (stem + "output.LayerNorm.bias",              "trunk.blocks.{}.feedforward_norm.bias"),
    )  # fmt: skip


def bert_embeddings(prefix: str) -> tuple[Name, ...]:
    """The weight table of embeddings with BERT's names."""
    return (
        (prefix + "embeddings.word_embeddings.weight",        "trunk.embed.weight"),
        (prefix + "embeddings.position_embeddings.weight",    "trunk.positions.weight"),
        (prefix + "embeddings.token_type_embeddings.weight",  "trunk.segments.weight"),
        (prefix + "embeddings.LayerNorm.weight",              "trunk.embedding_norm.weight"),
        (prefix + "embeddings.LayerNorm.bias",                "trunk.embedding_norm.bias"),
    )  # fmt: skip


def head_bias(prefix: str) -> Callable[[HFConfig], tuple[Name, ...]]:
    """The name of the language head's bias, which depends on whether the head is tied."""

    def lines(config: HFConfig) -> tuple[Name, ...]:
        tied = config.get("tie_word_embeddings", True)
        return ((prefix + ("bias" if tied else "decoder.bias"), "head.bias"),)

    return lines


def pooled_head(config: HFConfig, activation: str, width: int = 768, **more: Any) -> ClassificationHeadSpec:
    """Reads the first token through a dense layer as wide as the hidden states.

    Args:
        width: the family's default of `hidden_size`.
        more: other fields; dropout is `classifier_dropout`, or that of hidden states.
    """
    transform = TransformSpec(config.get("hidden_size", width), activation, bias=True)
    fields = {"transform": transform, "dropout": classifier_dropout(config), "pooling": "first", **more}
    return ClassificationHeadSpec(num_labels(config), **fields)


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """One linear layer on every token, after dropout."""
    return ClassificationHeadSpec(num_labels(config), dropout=classifier_dropout(config))


def classifier_dropout(config: HFConfig, key: str = "classifier_dropout") -> float:
    """The dropout of a read-out: its own, or that of hidden states."""
    own = config.get(key)
    return config.get("hidden_dropout_prob", 0.1) if own is None else own


def with_scalar(tasks: Mapping[str, Task]) -> dict[str, Task]:
    """The tasks with "scalar" added, which is the sequence classifier with one class."""
    return {**tasks, "scalar": tasks["sequence"]}


def bert_problems(value: HFConfig) -> list[str]:
    """Problems between BERT's keys."""
    heads, width = value["num_attention_heads"], value["hidden_size"]
    problems = activation_problems(value["hidden_act"])
    if not divides(heads, width):
        problems.append(f"config.json: num_attention_heads = {heads!r} does not divide hidden_size = {width!r}")
    return problems


def bert_block(value: HFConfig) -> BlockSpec:
    """The specification of one layer from BERT's keys."""
    heads = value["num_attention_heads"]
    head_dim = value["hidden_size"] // heads
    attention = AttentionSpec(
        heads, heads, head_dim, head_dim**-0.5, True, True, value["attention_probs_dropout_prob"], causal=False
    )
    feedforward = PlainFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=True)
    norm = LayerNormSpec(value["layer_norm_eps"])
    return BlockSpec(attention, feedforward, norm, value["hidden_dropout_prob"], wiring="post")


def bert_like(value: HFConfig, **more: Any) -> TransformerSpec:
    """The specification of an encoder from BERT's keys; `more` are further or overriding fields."""
    norm, width, longest = (
        LayerNormSpec(value["layer_norm_eps"]),
        value["hidden_size"],
        value["max_position_embeddings"],
    )
    fields = {
        "vocabulary": value["vocab_size"],
        "width": width,
        "max_positions": longest,
        "blocks": (bert_block(value),) * value["num_hidden_layers"],
        "norm": NoNormSpec(),
        "init": InitSpec(value["initializer_range"], value["initializer_range"]),
        "tied_head": value["tie_word_embeddings"],
        "positions": LearnedPositionsSpec(longest),
        "embedding_dropout": value["hidden_dropout_prob"],
        "embedding_norm": norm,
        "segments": value["type_vocab_size"],
        "head": LanguageHeadSpec(TransformSpec(width, value["hidden_act"], bias=True, norm=norm), bias=True),
    }
    return TransformerSpec(**{**fields, **more})

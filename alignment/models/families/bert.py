"""BERT: learned positions, segments, post-norm layers; a masked language head and one that joins sentences.

Source: Devlin et al. 2018, arXiv:1810.04805; transformers, `models/bert`.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import (
    BLOCK,
    CLASSIFIER,
    SPAN,
    Family,
    Head,
    Name,
    Task,
    dropout_of,
    names_under,
    num_labels,
    span_head,
    token_head,
)
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.init_weights import InitSpec
from alignment.models.layers import BlockSpec, LayerNormSpec, LearnedPositionsSpec, NoNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
    "hidden_dropout_prob", "attention_probs_dropout_prob", "max_position_embeddings", "type_vocab_size",
    "initializer_range", "layer_norm_eps", "tie_word_embeddings",
)  # fmt: skip
HARMLESS = ("gradient_checkpointing", "output_past")  # of older converters, and of transformers' own training loop
# Other values would mean causal attention or relative positions.
ENCODER_FIXED = {"is_decoder": (False,), "position_embedding_type": ("absolute", None)}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # unless the run's config sets it
POSITION_IDS = r"(\w+\.)?embeddings\.(position_ids|token_type_ids)"  # buffers in older files
DROPOUTS = ("classifier_dropout", "hidden_dropout_prob")  # of a read-out: its own, or that of hidden states


def embedding_names(prefix: str) -> tuple[Name, ...]:
    """The weight table of embeddings with BERT's names."""
    return names_under(
        f"{prefix}embeddings.", "trunk.", embed="word_embeddings", positions="position_embeddings",
        segments="token_type_embeddings", embedding_norm="LayerNorm",
    )  # fmt: skip


def layer_names(
    layer: str, block: str = BLOCK, attention: tuple[str, str, str] = ("query", "key", "value")
) -> tuple[Name, ...]:
    """The weight table of a layer with BERT's names, apart from those of the projections in `attention`."""
    query, key, value = attention
    return (
        *names_under(layer + "attention.self.", block + "attention.", query=query, key=key, value=value),
        (layer + "attention.output.dense", block + "attention.output"),
        *names_under(layer, block + "feedforward.", up="intermediate.dense", down="output.dense"),
        *names_under(layer, block, attention_norm="attention.output.LayerNorm", feedforward_norm="output.LayerNorm"),
    )


def bert_names(prefix: str) -> tuple[Name, ...]:
    """The weight table of a trunk with BERT's names."""
    return (*embedding_names(prefix), *layer_names(prefix + "encoder.layer.{}."))


def bias_names(prefix: str, value: HFConfig) -> tuple[Name, ...]:
    """The name of the language head's bias, which depends on whether the head is tied."""
    return ((prefix + ("bias" if value["tie_word_embeddings"] else "decoder.bias"), "head.bias"),)


def encoder_tasks(
    stem: str,
    language: tuple[Name, ...],
    classifier: tuple[Name, ...],
    head: Head,
    *,
    dropouts: tuple[str, ...] = DROPOUTS,
    kept: tuple[str, ...] = (),
) -> dict[str, Task]:
    """The tasks of an encoder with transformers' usual class names; a scalar is a class of the whole text.

    Args:
        stem: class names begin with it, such as Bert in BertForMaskedLM.
        language: weight table of the language head.
        classifier, head: weight table and specification of the head for whole texts.
        dropouts: keys of the dropout before the head for tokens.
        kept: `kept_by_new_head` of the head for whole texts.
    """
    sequence = Task(f"{stem}ForSequenceClassification", classifier, head, kept_by_new_head=kept)
    return {
        "language": Task(f"{stem}ForMaskedLM", language),
        "sequence": sequence,
        "scalar": sequence,
        "tokens": Task(f"{stem}ForTokenClassification", CLASSIFIER, token_head(*dropouts)),
        "span": Task(f"{stem}ForQuestionAnswering", SPAN, span_head()),
    }


def pooled_head(
    value: HFConfig, activation: str = "tanh", dropouts: tuple[str, ...] = DROPOUTS, *, both_sides: bool = False
) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer as wide as the hidden states, dropout after it or on `both_sides`."""
    transform = TransformSpec(value["hidden_size"], activation, bias=True)
    dropout = dropout_of(value, *dropouts)
    before = dropout if both_sides else 0.0
    return ClassificationHeadSpec(num_labels(value), transform, dropout=dropout, pooling="first", input_dropout=before)


def bert_block(value: HFConfig) -> BlockSpec:
    """One post-norm layer."""
    attention = attention_spec(value, dropout=value["attention_probs_dropout_prob"], causal=False)
    feedforward = PlainFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=True)
    norm = LayerNormSpec(value["layer_norm_eps"])
    return BlockSpec(attention, feedforward, norm, value["hidden_dropout_prob"], wiring="post")


def bert_spec(value: HFConfig, **more: Any) -> TransformerSpec:
    """An encoder from BERT's keys; `more` are further fields of the specification, or others in place of these."""
    width, longest = value["hidden_size"], value["max_position_embeddings"]
    fields = {
        "max_positions": longest,
        "positions": LearnedPositionsSpec(longest),
        "blocks": (bert_block(value),) * value["num_hidden_layers"],
        "head": language_head(value, value["hidden_act"], width),
        **more,
    }
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        norm=NoNormSpec(),
        init=InitSpec(value["initializer_range"], value["initializer_range"]),
        tied_head=value["tie_word_embeddings"],
        embedding_dropout=value["hidden_dropout_prob"],
        embedding_norm=LayerNormSpec(value["layer_norm_eps"]),
        segments=value["type_vocab_size"],
        **fields,
    )


def language_head(value: HFConfig, activation: str, width: int) -> LanguageHeadSpec:
    """A dense layer of `width` with a norm, then the logits with a bias."""
    norm = LayerNormSpec(value["layer_norm_eps"])
    return LanguageHeadSpec(TransformSpec(width, activation, bias=True, norm=norm), bias=True)


def bert_family(
    name: str,
    spec: Callable[[HFConfig], TransformerSpec],
    keys: tuple[str, ...],
    tasks: Mapping[str, Task],
    *,
    trunk_prefix: str = "",
    names: tuple[Name, ...] = (),
    harmless: tuple[str, ...] = (),
    fixed: Mapping[str, tuple[Any, ...]] | None = None,
    ignored_tensors: tuple[str, ...] = (),
    language_bias: str = "",
    **more: Any,
) -> Family:
    """A family with BERT's keys and `keys`; what is given adds to what BERT has, `more` is as in `Family`.

    Args:
        trunk_prefix: "": the family's name.
        names: the trunk's weight table; none: `bert_names`.
        language_bias: prefix of the names of the language head's bias, which depend on whether the head is tied.
    """
    prefix = trunk_prefix or f"{name}."
    if language_bias:
        more = {
            "tied_copies": ((f"{language_bias}decoder.bias", f"{language_bias}bias"),),
            "names_from_config": lambda value: bias_names(language_bias, value),
            **more,
        }
        # it does not act where the decoder, untied, has its own
        ignored_tensors = (*ignored_tensors, re.escape(f"{language_bias}bias"))
    return Family(
        name=name,
        spec=spec,
        keys=(*KEYS, *keys),
        names=names or bert_names(prefix),
        trunk_prefix=prefix,
        tasks=tasks,
        harmless=(*HARMLESS, *harmless),
        fixed={**ENCODER_FIXED, **(fixed or {})},
        ignored_tensors=(POSITION_IDS, *ignored_tensors),
        **{"new_model_config": NO_DROPOUT, **more},
    )


KEPT = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")
POOLED_CLASSIFIER = (("bert.pooler.dense", "head.transform.dense"), *CLASSIFIER)
PREDICTIONS = (
    ("cls.predictions.transform.dense",     "head.transform.dense"),
    ("cls.predictions.transform.LayerNorm", "head.transform.norm"),
    ("cls.predictions.decoder.weight",      "head.weight"),
)  # fmt: skip
NEXT_SENTENCE = (
    *PREDICTIONS,
    ("bert.pooler.dense",                   "next_sentence.transform.dense"),
    ("cls.seq_relationship",                "next_sentence.output"),
)  # fmt: skip


def _follows(value: HFConfig) -> ClassificationHeadSpec:
    """Two classes of the pooled first token: sentence B follows A (0), or it does not (1)."""
    return replace(pooled_head(value), outputs=2, dropout=0.0)


BERT = bert_family(
    "bert",
    bert_spec,
    ("classifier_dropout",),
    {
        **encoder_tasks("Bert", PREDICTIONS, POOLED_CLASSIFIER, pooled_head, kept=KEPT),
        "next_sentence": Task("BertForPreTraining", NEXT_SENTENCE, _follows, kept_by_new_head=KEPT),
    },
    # Google's first configs describe a pooler that every one of them has.
    harmless=(
        "directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers",
        "pooler_size_per_head", "pooler_type",
    ),
    # Most encoders are published as they were pretrained, with the pooler and both heads.
    ignored_tensors=(r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"),
    language_bias="cls.predictions.",
    legacy_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)  # fmt: skip

"""BERT, and families that are BERT but for a difference or two: RoBERTa, ELECTRA, ALBERT, DistilBERT.

BERT itself has learned positions, segments, post-norm layers; a masked language head and one that joins sentences. The
head of ELECTRA's discriminator, which detects replaced tokens, is not loaded.

Source: Devlin et al. 2018, arXiv:1810.04805; transformers, `models/FAMILY`, and the papers named at each family.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from alignment.errors import UserError
from alignment.models.families.decoders import attention_spec, transformer_spec
from alignment.models.families.family import (
    BLOCK,
    CLASSIFIER,
    Family,
    Head,
    Name,
    Task,
    dropout_of,
    names_under,
    num_labels,
    span_task,
    token_head,
)
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.layers import (
    AttentionSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    OwnScoresSpec,
    PlainFeedForwardSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "hidden_act",
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "max_position_embeddings",
    "type_vocab_size",
    "initializer_range",
    "layer_norm_eps",
    "tie_word_embeddings",
)
HARMLESS = ("gradient_checkpointing", "output_past")  # of older converters, and of transformers' own training loop
# Other values would mean causal attention or relative positions.
ENCODER_FIXED = {"is_decoder": (False,), "position_embedding_type": ("absolute", None)}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # unless the run's config sets it
POSITION_IDS = r"(\w+\.)?embeddings\.(position_ids|token_type_ids)"  # buffers in older files
DROPOUTS = ("classifier_dropout", "hidden_dropout_prob")  # of a read-out: its own, or that of hidden states


def embedding_names(prefix: str) -> tuple[Name, ...]:
    """The weight table of embeddings with BERT's names."""
    return names_under(
        f"{prefix}embeddings.",
        "trunk.",
        embed="word_embeddings",
        positions="position_embeddings",
        segments="token_type_embeddings",
        embedding_norm="LayerNorm",
    )


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
        "span": span_task(stem),
    }


def pooled_head(
    value: HFConfig, activation: str = "tanh", dropouts: tuple[str, ...] = DROPOUTS, *, both_sides: bool = False
) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer of the hidden width, dropout after it or on `both_sides`."""
    dropout = dropout_of(value, *dropouts)
    return ClassificationHeadSpec(
        num_labels(value),
        TransformSpec(value["hidden_size"], activation, bias=True),
        dropout=dropout,
        pooling="first",
        input_dropout=dropout if both_sides else 0.0,
    )


def bert_spec(
    value: HFConfig,
    attention: AttentionSpec | OwnScoresSpec | Sequence[AttentionSpec | OwnScoresSpec] | None = None,
    **more: Any,
) -> TransformerSpec:
    """An encoder of post-norm layers from BERT's keys; `more` are further fields, or others in place of these."""
    norm = LayerNormSpec(value["layer_norm_eps"])
    fields = {
        "positions": LearnedPositionsSpec(value["max_position_embeddings"]),
        "head": language_head(value, value["hidden_act"], value["hidden_size"]),
        "embedding_dropout": value["hidden_dropout_prob"],
        "embedding_norm": norm,
        "segments": value["type_vocab_size"],
    }
    spec = transformer_spec(
        value,
        attention or attention_spec(value, dropout=value["attention_probs_dropout_prob"], causal=False),
        norm=norm,
        feedforward=PlainFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=True),
        block={"dropout": value["hidden_dropout_prob"], "wiring": "post"},
        **{**fields, **more},
    )
    return replace(spec, norm=NoNormSpec())


def language_head(value: HFConfig, activation: str, width: int) -> LanguageHeadSpec:
    """A dense layer of `width` with a norm, then the logits with a bias."""
    return LanguageHeadSpec(
        TransformSpec(width, activation, bias=True, norm=LayerNormSpec(value["layer_norm_eps"])), bias=True
    )


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
    ("cls.predictions.transform.dense", "head.transform.dense"),
    ("cls.predictions.transform.LayerNorm", "head.transform.norm"),
    ("cls.predictions.decoder.weight", "head.weight"),
)
NEXT_SENTENCE = (
    *PREDICTIONS,
    ("bert.pooler.dense", "next_sentence.transform.dense"),
    ("cls.seq_relationship", "next_sentence.output"),
)


def follows_head(value: HFConfig) -> ClassificationHeadSpec:
    """Two classes of the pooled first token: sentence B follows A (0), or it does not (1)."""
    return replace(pooled_head(value), outputs=2, dropout=0.0)


BERT = bert_family(
    "bert",
    bert_spec,
    ("classifier_dropout",),
    {
        **encoder_tasks("Bert", PREDICTIONS, POOLED_CLASSIFIER, pooled_head, kept=KEPT),
        "next_sentence": Task("BertForPreTraining", NEXT_SENTENCE, follows_head, kept_by_new_head=KEPT),
    },
    # Google's first configs describe a pooler that every one of them has.
    harmless=(
        "directionality",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ),
    # Most encoders are published as they were pretrained, with the pooler and both heads.
    ignored_tensors=(r"bert\.pooler\.dense\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"),
    language_bias="cls.predictions.",
    legacy_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)


def roberta_spec(value: HFConfig, attention: Sequence[OwnScoresSpec] | None = None) -> TransformerSpec:
    """BERT without segments and pooler; its first rows of positions belong to padding.

    Source: Liu et al. 2019, arXiv:1907.11692.
    """
    first = value["pad_token_id"] + 1
    count = value["max_position_embeddings"] - first
    if count < 1:
        raise UserError(f"config.json: max_position_embeddings must be above pad_token_id + 1 = {first}")
    return bert_spec(
        value,
        attention,
        max_positions=count,
        positions=LearnedPositionsSpec(count, first),
        head=language_head(value, "gelu", value["hidden_size"]),  # this GELU whatever hidden_act says
    )


ROBERTA_PREDICTIONS = (
    *names_under("lm_head.", "head.transform.", dense="dense", norm="layer_norm"),
    ("lm_head.decoder.weight", "head.weight"),
)
DENSE_CLASSIFIER = (("classifier.dense", "head.transform.dense"), ("classifier.out_proj", "head.output"))


ROBERTA = bert_family(
    "roberta",
    roberta_spec,
    ("pad_token_id", "classifier_dropout"),
    encoder_tasks("Roberta", ROBERTA_PREDICTIONS, DENSE_CLASSIFIER, partial(pooled_head, both_sides=True)),
    ignored_tensors=(r"roberta\.pooler\.dense\.(weight|bias)",),  # transformers' own; it was never trained
    language_bias="lm_head.",
)


def _electra(value: HFConfig) -> TransformerSpec:
    """BERT's layers with token vectors of their own width. The generator fills in masks; heads as RoBERTa's.

    Source: Clark et al. 2020, arXiv:2003.10555.
    """
    narrow = value["embedding_size"]
    width = value["hidden_size"]
    return bert_spec(
        value,
        projection=None if narrow == width else ProjectionSpec(narrow, bias=True, before_positions=False),
        head=language_head(value, "gelu", narrow),  # this GELU whatever hidden_act says
    )


ELECTRA_PREDICTIONS = (
    *names_under("generator_predictions.", "head.transform.", dense="dense", norm="LayerNorm"),
    ("generator_lm_head", "head"),
)
ELECTRA = bert_family(
    "electra",
    _electra,
    ("embedding_size", "classifier_dropout"),
    encoder_tasks(
        "Electra", ELECTRA_PREDICTIONS, DENSE_CLASSIFIER, partial(pooled_head, activation="gelu", both_sides=True)
    ),
    names=(*bert_names("electra."), ("electra.embeddings_project", "trunk.project_in")),
    # The summary is the head for multiple choice; the generator's size says how the discriminator was trained.
    harmless=("generator_size", "summary_activation", "summary_last_dropout", "summary_type", "summary_use_proj"),
    ignored_tensors=(r"discriminator_predictions\.(dense|dense_prediction)\.(weight|bias)",),
)


def _albert(value: HFConfig) -> TransformerSpec:
    """One layer's weights used again and again, token vectors narrower than the layers, sentence order.

    Source: Lan et al. 2019, arXiv:1909.11942.
    """
    layers = value["num_hidden_layers"]
    groups = value["num_hidden_groups"]
    width = value["embedding_size"]
    if groups > layers:
        raise UserError(f"config.json: num_hidden_groups = {groups} is more than num_hidden_layers = {layers}")
    spec = bert_spec(
        value,
        projection=ProjectionSpec(width, bias=True, before_positions=False),
        head=language_head(value, value["hidden_act"], width),
    )
    return replace(
        spec, blocks=spec.blocks[:groups], order=tuple(int(layer / (layers / groups)) for layer in range(layers))
    )


ALBERT_LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0."
ALBERT_NAMES = (
    *embedding_names("albert."),
    ("albert.encoder.embedding_hidden_mapping_in", "trunk.project_in"),
    *names_under(
        ALBERT_LAYER + "attention.", BLOCK + "attention.", query="query", key="key", value="value", output="dense"
    ),
    *names_under(ALBERT_LAYER, BLOCK + "feedforward.", up="ffn", down="ffn_output"),
    *names_under(ALBERT_LAYER, BLOCK, attention_norm="attention.LayerNorm", feedforward_norm="full_layer_layer_norm"),
)
ALBERT_PREDICTIONS = (
    *names_under("predictions.", "head.transform.", dense="dense", norm="LayerNorm"),
    ("predictions.decoder.weight", "head.weight"),
)
SENTENCE_ORDER = (
    *ALBERT_PREDICTIONS,
    ("albert.pooler", "next_sentence.transform.dense"),
    ("sop_classifier.classifier", "next_sentence.output"),
)
ALBERT_CLASSIFIER = (("albert.pooler", "head.transform.dense"), *CLASSIFIER)
ALBERT_DROPOUTS = ("classifier_dropout_prob", "hidden_dropout_prob")
# Classes of the pooled first token; sentence-order prediction has the same shape.
ALBERT_HEAD = partial(pooled_head, dropouts=ALBERT_DROPOUTS)
ALBERT_KEPT = ("albert.pooler.weight", "albert.pooler.bias")

ALBERT = bert_family(
    "albert",
    _albert,
    ("embedding_size", "num_hidden_groups", "classifier_dropout_prob"),
    {
        **encoder_tasks(
            "Albert", ALBERT_PREDICTIONS, ALBERT_CLASSIFIER, ALBERT_HEAD, dropouts=ALBERT_DROPOUTS, kept=ALBERT_KEPT
        ),
        "next_sentence": Task("AlbertForPreTraining", SENTENCE_ORDER, ALBERT_HEAD, kept_by_new_head=ALBERT_KEPT),
    },
    names=ALBERT_NAMES,
    # Left over from the authors' own configs; zero or one everywhere.
    harmless=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    fixed={"inner_group_num": (1,)},  # no published model has groups of several layers
    ignored_tensors=(r"albert\.pooler\.(weight|bias)", r"sop_classifier\.classifier\.(weight|bias)"),
    language_bias="predictions.",
    new_model_config={"classifier_dropout_prob": 0.0},
)


def _distilbert(value: HFConfig) -> TransformerSpec:
    """Half of BERT's layers, no segments, no pooler (Sanh et al. 2019, arXiv:1910.01108)."""
    attention_spec(value, "n_heads", "dim")  # refuses heads that do not divide the width, by the names of these keys
    renamed = {key: value[name] for key, name in DISTILBERT_KEYS.items()}
    return bert_spec({**value, **renamed, "type_vocab_size": 0, "layer_norm_eps": 1e-12})


def _distilbert_head(value: HFConfig) -> ClassificationHeadSpec:
    return pooled_head({**value, "hidden_size": value["dim"]}, "relu", ("seq_classif_dropout",))


DISTILBERT_KEYS = {  # BERT's name -> DistilBERT's
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}
DISTILBERT_STEM = "distilbert.embeddings."
DISTILBERT_LAYER = "distilbert.transformer.layer.{}."
DISTILBERT_NAMES = (
    *names_under(
        DISTILBERT_STEM, "trunk.", embed="word_embeddings", positions="position_embeddings", embedding_norm="LayerNorm"
    ),
    *names_under(
        DISTILBERT_LAYER + "attention.",
        BLOCK + "attention.",
        query="q_lin",
        key="k_lin",
        value="v_lin",
        output="out_lin",
    ),
    *names_under(DISTILBERT_LAYER + "ffn.", BLOCK + "feedforward.", up="lin1", down="lin2"),
    *names_under(DISTILBERT_LAYER, BLOCK, attention_norm="sa_layer_norm", feedforward_norm="output_layer_norm"),
)
DISTILBERT_PREDICTIONS = (
    *names_under("vocab_", "head.transform.", dense="transform", norm="layer_norm"),
    ("vocab_projector", "head"),
)
PRE_CLASSIFIER = (("pre_classifier", "head.transform.dense"), *CLASSIFIER)

DISTILBERT = Family(
    name="distilbert",
    spec=_distilbert,
    keys=(
        *DISTILBERT_KEYS.values(),
        "vocab_size",
        "max_position_embeddings",
        "initializer_range",
        "qa_dropout",
        "seq_classif_dropout",
        "tie_word_embeddings",
    ),
    names=DISTILBERT_NAMES,
    trunk_prefix="distilbert.",
    tasks={
        **encoder_tasks("DistilBert", DISTILBERT_PREDICTIONS, PRE_CLASSIFIER, _distilbert_head, dropouts=("dropout",)),
        "span": span_task("DistilBert", "qa_dropout"),
    },
    # sinusoidal_pos_embds says what a table of positions once started as; it is trained and saved like any other.
    harmless=(*HARMLESS, "sinusoidal_pos_embds"),
    fixed={**ENCODER_FIXED, "tie_weights_": (True,)},
    ignored_tensors=(POSITION_IDS,),
    new_model_config={"dropout": 0.0, "attention_dropout": 0.0},
)

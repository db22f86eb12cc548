"""Encoders of long documents, whose cost grows with the length and not with its square: Longformer and BigBird.

Their layers are BERT's but for the attention (layers/sparse.py). Documents do not depend on the batch around them:
where transformers' BigBird counts the padding of a row among its blocks, a document here ends with its last token.

Source: Beltagy et al. 2020, arXiv:2004.05150; Zaheer et al. 2020, arXiv:2007.14062; transformers, `models/longformer`
and `models/big_bird`.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from alignment.errors import UserError
from alignment.models.families.bert import (
    DENSE_CLASSIFIER,
    PREDICTIONS,
    ROBERTA_PREDICTIONS,
    bert_family,
    bert_names,
    bert_spec,
    encoder_tasks,
    follows_head,
    pooled_head,
    roberta_spec,
)
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import BLOCK, Task, names_under
from alignment.models.heads import ClassificationHeadSpec, FeedForwardTransformSpec
from alignment.models.layers import AttentionSpec, LayerNormSpec, OwnScoresSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec


def _windows(value: HFConfig) -> list[int]:
    """Width of each layer's window, without its middle."""
    given = value.get("attention_window", 512)
    layers = value["num_hidden_layers"]
    windows = given if isinstance(given, list) else [given] * layers
    if len(windows) != layers or any(type(window) is not int or window < 2 or window % 2 for window in windows):
        raise UserError(
            f"config.json: attention_window must be an even number, or one for each of {layers} layers, got {given!r}"
        )
    return windows


def _longformer(value: HFConfig) -> TransformerSpec:
    """RoBERTa with windows; a few global tokens see everything and are seen from everywhere."""
    from alignment.models.layers.sparse import GlobalWindowSpec  # loaded for these encoders alone

    attention = attention_spec(value, dropout=value["attention_probs_dropout_prob"], causal=False)
    attentions = [GlobalWindowSpec(attention, window // 2) for window in _windows(value)]
    return replace(roberta_spec(value, attentions), global_tokens="marked")


LONGFORMER_LAYER = "longformer.encoder.layer.{}.attention.self."
DROPOUT = ("hidden_dropout_prob",)
LONGFORMER_TASKS = encoder_tasks(
    "Longformer",
    ROBERTA_PREDICTIONS,
    DENSE_CLASSIFIER,
    partial(pooled_head, dropouts=DROPOUT, both_sides=True),
    dropouts=DROPOUT,
)
FIRST = replace(LONGFORMER_TASKS["sequence"], trunk=lambda value: {"global_tokens": "first"})
LONGFORMER = bert_family(
    "longformer",
    _longformer,
    ("pad_token_id", "sep_token_id"),
    LONGFORMER_TASKS
    | {
        "sequence": FIRST,
        "scalar": FIRST,
        "span": replace(LONGFORMER_TASKS["span"], trunk=lambda value: {"global_tokens": value["sep_token_id"]}),
    },
    names=(
        *bert_names("longformer."),
        *names_under(
            LONGFORMER_LAYER,
            BLOCK + "attention.",
            query_global="query_global",
            key_global="key_global",
            value_global="value_global",
        ),
    ),
    by_hand=("attention_window",),
    # Of the authors' own configs and of an export; transformers computes the same whatever they say.
    harmless=("attention_mode", "ignore_attention_mask", "onnx_export"),
    ignored_tensors=(r"longformer\.pooler\.dense\.(weight|bias)",),
    language_bias="lm_head.",
)


def _big_bird(value: HFConfig) -> TransformerSpec:
    """BERT whose blocks of tokens see their neighbors, the first and the last block, and a few random ones."""
    from alignment.models.layers.sparse import BlockSparseSpec  # loaded for these encoders alone

    attention = attention_spec(
        value, bias=value["use_bias"], output_bias=True, dropout=value["attention_probs_dropout_prob"], causal=False
    )
    attentions: AttentionSpec | Sequence[OwnScoresSpec] = attention
    if value["attention_type"] == "block_sparse":
        shape = value["block_size"], value["num_random_blocks"], value["max_position_embeddings"]
        attentions = [BlockSparseSpec(attention, *shape, seed=layer) for layer in range(value["num_hidden_layers"])]
    return bert_spec(
        value,
        attentions,
        embedding_scale=value["hidden_size"] ** 0.5 if value["rescale_embeddings"] else 1.0,
        dropout_before_norm=True,
    )


def _sequence_head(value: HFConfig) -> ClassificationHeadSpec:
    return pooled_head(value, value["hidden_act"], both_sides=True)


def _answer_head(value: HFConfig) -> ClassificationHeadSpec:
    """Start and end of an answer, which is never in the question, through one more feed-forward layer."""
    feedforward = PlainFeedForwardSpec(value["intermediate_size"], value["hidden_act"], bias=True)
    norm = LayerNormSpec(value["layer_norm_eps"])
    dropout = value["hidden_dropout_prob"]
    return ClassificationHeadSpec(
        2,
        FeedForwardTransformSpec(value["hidden_size"], feedforward, norm, dropout),
        separator=value["sep_token_id"],
    )


POOLER = ("bert.pooler.weight", "bert.pooler.bias")
NEXT_SENTENCE = (
    *PREDICTIONS,
    ("bert.pooler", "next_sentence.transform.dense"),
    ("cls.seq_relationship", "next_sentence.output"),
)
ANSWER = (
    *names_under(
        "qa_classifier.",
        "head.transform.",
        **{"feedforward.up": "intermediate.dense", "feedforward.down": "output.dense", "norm": "output.LayerNorm"},
    ),
    ("qa_classifier.qa_outputs", "head.output"),
)
BIG_BIRD = bert_family(
    "big_bird",
    _big_bird,
    (
        "classifier_dropout",
        "sep_token_id",
        "attention_type",
        "block_size",
        "num_random_blocks",
        "use_bias",
        "rescale_embeddings",
    ),
    {
        **encoder_tasks("BigBird", PREDICTIONS, DENSE_CLASSIFIER, _sequence_head),
        "next_sentence": Task("BigBirdForPreTraining", NEXT_SENTENCE, follows_head, kept_by_new_head=POOLER),
        "span": Task("BigBirdForQuestionAnswering", ANSWER, _answer_head),
    },
    trunk_prefix="bert.",
    # transformers' classes have a pooler that most of them do not read.
    ignored_tensors=(r"bert\.pooler\.(weight|bias)", r"cls\.seq_relationship\.(weight|bias)"),
    language_bias="cls.predictions.",
)

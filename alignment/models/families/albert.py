"""ALBERT: one layer's weights used again and again, token vectors narrower than the layers, sentence order.

Source: Lan et al. 2019, arXiv:1909.11942; transformers, `models/albert`.
"""

from alignment.errors import raise_all
from alignment.models.families.encoders import (
    BERT_HARMLESS,
    BERT_KEYS,
    CLASSIFIER,
    ENCODER_FIXED,
    POSITION_IDS,
    SPAN,
    bert_block,
    bert_embeddings,
    bert_like,
    bert_problems,
    classifier_dropout,
    head_bias,
    pooled_head,
    with_scalar,
)
from alignment.models.families.family import Family, Key, Task, num_labels, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.layers import LayerNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

WIDTH = 4096
KEYS = {
    **BERT_KEYS,
    "vocab_size": Key(int, 30000, 1),
    "embedding_size": Key(int, 128, 1),
    "hidden_size": Key(int, WIDTH, 1),
    "num_hidden_groups": Key(int, 1, 1),
    "num_attention_heads": Key(int, 64, 1),
    "intermediate_size": Key(int, 16384, 1),
    "hidden_act": Key(str, "gelu_new"),
    "hidden_dropout_prob": Key(float, 0.0, 0),
    "attention_probs_dropout_prob": Key(float, 0.0, 0),
    "classifier_dropout_prob": Key(float, 0.1, 0),
}
# Left over from the authors' own configs; zero or one everywhere.
HARMLESS = (*BERT_HARMLESS, "down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks")
FIXED = {**ENCODER_FIXED, "inner_group_num": (1,)}  # no published model has groups of several layers

LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0."
NAMES = (
    *bert_embeddings("albert."),
    # Hugging Face name                                     ours
    ("albert.encoder.embedding_hidden_mapping_in.weight",   "trunk.project_in.weight"),
    ("albert.encoder.embedding_hidden_mapping_in.bias",     "trunk.project_in.bias"),
    (LAYER + "attention.query.weight",                      "trunk.blocks.{}.attention.query.weight"),
    (LAYER + "attention.query.bias",                        "trunk.blocks.{}.attention.query.bias"),
    (LAYER + "attention.key.weight",                        "trunk.blocks.{}.attention.key.weight"),
    (LAYER + "attention.key.bias",                          "trunk.blocks.{}.attention.key.bias"),
    (LAYER + "attention.value.weight",                      "trunk.blocks.{}.attention.value.weight"),
    (LAYER + "attention.value.bias",                        "trunk.blocks.{}.attention.value.bias"),
    (LAYER + "attention.dense.weight",                      "trunk.blocks.{}.attention.output.weight"),
    (LAYER + "attention.dense.bias",                        "trunk.blocks.{}.attention.output.bias"),
    (LAYER + "attention.LayerNorm.weight",                  "trunk.blocks.{}.attention_norm.weight"),
    (LAYER + "attention.LayerNorm.bias",                    "trunk.blocks.{}.attention_norm.bias"),
    (LAYER + "ffn.weight",                                  "trunk.blocks.{}.feedforward.up.weight"),
    (LAYER + "ffn.bias",                                    "trunk.blocks.{}.feedforward.up.bias"),
    (LAYER + "ffn_output.weight",                           "trunk.blocks.{}.feedforward.down.weight"),
    (LAYER + "ffn_output.bias",                             "trunk.blocks.{}.feedforward.down.bias"),
    (LAYER + "full_layer_layer_norm.weight",                "trunk.blocks.{}.feedforward_norm.weight"),
    (LAYER + "full_layer_layer_norm.bias",                  "trunk.blocks.{}.feedforward_norm.bias"),
)  # fmt: skip

PREDICTIONS = (
    ("predictions.dense.weight",      "head.transform.dense.weight"),
    ("predictions.dense.bias",        "head.transform.dense.bias"),
    ("predictions.LayerNorm.weight",  "head.transform.norm.weight"),
    ("predictions.LayerNorm.bias",    "head.transform.norm.bias"),
    ("predictions.decoder.weight",    "head.weight"),
)  # fmt: skip
SENTENCE_ORDER = (
    ("albert.pooler.weight",              "next_sentence.transform.dense.weight"),
    ("albert.pooler.bias",                "next_sentence.transform.dense.bias"),
    ("sop_classifier.classifier.weight",  "next_sentence.output.weight"),
    ("sop_classifier.classifier.bias",    "next_sentence.output.bias"),
)  # fmt: skip
POOLED_CLASSIFIER = (
    ("albert.pooler.weight",  "head.transform.dense.weight"),
    ("albert.pooler.bias",    "head.transform.dense.bias"),
    *CLASSIFIER,
)  # fmt: skip
POOLER = ("albert.pooler.weight", "albert.pooler.bias")

UNUSED_POOLER = (r"albert\.pooler\.(weight|bias)",)
UNUSED_SENTENCE_ORDER = (r"sop_classifier\.classifier\.(weight|bias)",)
UNUSED_BIAS = (r"predictions\.bias",)  # it does not act where the decoder, untied, has its own


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classification head over the pooled first token; sentence-order prediction has the same shape."""
    return pooled_head(config, "tanh", WIDTH, dropout=_dropout(config))


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of every token."""
    return ClassificationHeadSpec(num_labels(config), dropout=_dropout(config))


def _dropout(config: HFConfig) -> float:
    return classifier_dropout({"classifier_dropout_prob": 0.1, **config}, "classifier_dropout_prob")


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of an ALBERT config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED)
    problems += bert_problems(value)
    layers, groups, width = value["num_hidden_layers"], value["num_hidden_groups"], value["embedding_size"]
    if isinstance(layers, int) and isinstance(groups, int) and groups > layers:
        problems.append(f"config.json: num_hidden_groups = {groups} is more than num_hidden_layers = {layers}")
    raise_all(problems)
    transform = TransformSpec(width, value["hidden_act"], bias=True, norm=LayerNormSpec(value["layer_norm_eps"]))
    return bert_like(
        value,
        blocks=(bert_block(value),) * groups,
        order=tuple(int(layer / (layers / groups)) for layer in range(layers)),
        projection=ProjectionSpec(width, bias=True, before_positions=False),
        head=LanguageHeadSpec(transform, bias=True),
    )


ALBERT = Family(
    name="albert",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="albert.",
    tasks=with_scalar(
        {
            "language": Task(
                "AlbertForMaskedLM", PREDICTIONS, other_heads=(*UNUSED_POOLER, *UNUSED_SENTENCE_ORDER, *UNUSED_BIAS)
            ),
            "next_sentence": Task(
                "AlbertForPreTraining",
                (*PREDICTIONS, *SENTENCE_ORDER),
                sequence_head,
                other_heads=UNUSED_BIAS,
                kept_by_new_head=POOLER,
            ),
            "sequence": Task(
                "AlbertForSequenceClassification", POOLED_CLASSIFIER, sequence_head, kept_by_new_head=POOLER
            ),
            "tokens": Task("AlbertForTokenClassification", CLASSIFIER, token_head, other_heads=UNUSED_POOLER),
            "span": Task("AlbertForQuestionAnswering", SPAN, span_head, other_heads=UNUSED_POOLER),
        }
    ),
    ignored_tensors=(POSITION_IDS,),
    tied_copies=(("predictions.decoder.bias", "predictions.bias"),),
    names_from_config=head_bias("predictions."),
    new_model_config={"classifier_dropout_prob": 0.0},
)

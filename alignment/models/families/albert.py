"""ALBERT: one layer's weights used again and again, token vectors narrower than the layers, sentence order.

Source: Lan et al. 2019, arXiv:1909.11942; transformers, `models/albert`.
"""

from alignment.errors import UserError
from alignment.models.families.bert import (
    bert_block,
    bert_family,
    bert_spec,
    embedding_names,
    encoder_tasks,
    language_head,
    pooled_head,
)
from alignment.models.families.family import CLASSIFIER, Task
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

LAYER = "albert.encoder.albert_layer_groups.{}.albert_layers.0."
NAMES = (
    *embedding_names("albert."),
    # Hugging Face name                             ours
    ("albert.encoder.embedding_hidden_mapping_in",  "trunk.project_in"),
    (LAYER + "attention.query",                     "trunk.blocks.{}.attention.query"),
    (LAYER + "attention.key",                       "trunk.blocks.{}.attention.key"),
    (LAYER + "attention.value",                     "trunk.blocks.{}.attention.value"),
    (LAYER + "attention.dense",                     "trunk.blocks.{}.attention.output"),
    (LAYER + "attention.LayerNorm",                 "trunk.blocks.{}.attention_norm"),
    (LAYER + "ffn",                                 "trunk.blocks.{}.feedforward.up"),
    (LAYER + "ffn_output",                          "trunk.blocks.{}.feedforward.down"),
    (LAYER + "full_layer_layer_norm",               "trunk.blocks.{}.feedforward_norm"),
)  # fmt: skip
PREDICTIONS = (
    ("predictions.dense",                           "head.transform.dense"),
    ("predictions.LayerNorm",                       "head.transform.norm"),
    ("predictions.decoder.weight",                  "head.weight"),
)  # fmt: skip
SENTENCE_ORDER = (
    ("albert.pooler",                               "next_sentence.transform.dense"),
    ("sop_classifier.classifier",                   "next_sentence.output"),
)  # fmt: skip
POOLED_CLASSIFIER = (("albert.pooler", "head.transform.dense"), *CLASSIFIER)
POOLER = ("albert.pooler.weight", "albert.pooler.bias")
DROPOUTS = ("classifier_dropout_prob", "hidden_dropout_prob")


def _spec(value: HFConfig) -> TransformerSpec:
    layers, groups, width = value["num_hidden_layers"], value["num_hidden_groups"], value["embedding_size"]
    if groups > layers:
        raise UserError(f"config.json: num_hidden_groups = {groups} is more than num_hidden_layers = {layers}")
    return bert_spec(
        value,
        blocks=(bert_block(value),) * groups,
        order=tuple(int(layer / (layers / groups)) for layer in range(layers)),
        projection=ProjectionSpec(width, bias=True, before_positions=False),
        head=language_head(value, value["hidden_act"], width),
    )


def _sequence_head(value: HFConfig) -> ClassificationHeadSpec:
    """Classification head over the pooled first token; sentence-order prediction has the same shape."""
    return pooled_head(value, "tanh", *DROPOUTS)


ALBERT = bert_family(
    "albert",
    _spec,
    ("embedding_size", "num_hidden_groups", "classifier_dropout_prob"),
    {
        **encoder_tasks(
            "Albert", PREDICTIONS, POOLED_CLASSIFIER, _sequence_head, dropouts=DROPOUTS, kept_by_new_head=POOLER
        ),
        "next_sentence": Task(
            "AlbertForPreTraining", (*PREDICTIONS, *SENTENCE_ORDER), _sequence_head, kept_by_new_head=POOLER
        ),
    },
    names=NAMES,
    # Left over from the authors' own configs; zero or one everywhere.
    harmless=("down_scale_factor", "gap_size", "net_structure_type", "num_memory_blocks"),
    fixed={"inner_group_num": (1,)},  # no published model has groups of several layers
    ignored_tensors=(r"albert\.pooler\.(weight|bias)", r"sop_classifier\.classifier\.(weight|bias)"),
    language_bias="predictions.",
    new_model_config={"classifier_dropout_prob": 0.0},
)

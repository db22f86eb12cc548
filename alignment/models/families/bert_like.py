"""Families that are BERT but for a difference or two: RoBERTa, ELECTRA, ALBERT, DistilBERT.

The head of ELECTRA's discriminator, which detects replaced tokens, is not loaded.

Source: transformers, `models/FAMILY`, and the papers named at each family.
"""

from functools import partial

from alignment.errors import UserError
from alignment.models.families.bert import (
    ENCODER_FIXED,
    HARMLESS,
    POSITION_IDS,
    bert_block,
    bert_family,
    bert_names,
    bert_spec,
    embedding_names,
    encoder_tasks,
    language_head,
    pooled_head,
)
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import BLOCK, CLASSIFIER, SPAN, Family, Task, names_under, num_labels, span_head
from alignment.models.heads import ClassificationHeadSpec, TransformSpec
from alignment.models.layers import LearnedPositionsSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec


def _roberta(value: HFConfig) -> TransformerSpec:
    """BERT without segments and pooler; its first rows of positions belong to padding.

    Source: Liu et al. 2019, arXiv:1907.11692.
    """
    first = value["pad_token_id"] + 1
    count = value["max_position_embeddings"] - first
    if count < 1:
        raise UserError(f"config.json: max_position_embeddings must be above pad_token_id + 1 = {first}")
    head = language_head(value, "gelu", value["hidden_size"])  # this GELU whatever hidden_act says
    return bert_spec(value, max_positions=count, positions=LearnedPositionsSpec(count, first), head=head)


ROBERTA_PREDICTIONS = (
    *names_under("lm_head.", "head.transform.", dense="dense", norm="layer_norm"),
    ("lm_head.decoder.weight", "head.weight"),
)
DENSE_CLASSIFIER = (("classifier.dense", "head.transform.dense"), ("classifier.out_proj", "head.output"))


ROBERTA = bert_family(
    "roberta",
    _roberta,
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
    projection = ProjectionSpec(narrow, bias=True, before_positions=False)
    return bert_spec(
        value,
        projection=None if narrow == value["hidden_size"] else projection,
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
KEPT = ("albert.pooler.weight", "albert.pooler.bias")

ALBERT = bert_family(
    "albert",
    _albert,
    ("embedding_size", "num_hidden_groups", "classifier_dropout_prob"),
    {
        **encoder_tasks(
            "Albert", ALBERT_PREDICTIONS, ALBERT_CLASSIFIER, ALBERT_HEAD, dropouts=ALBERT_DROPOUTS, kept=KEPT
        ),
        "next_sentence": Task("AlbertForPreTraining", SENTENCE_ORDER, ALBERT_HEAD, kept_by_new_head=KEPT),
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
    """Half of BERT's layers, no segments, no pooler.

    Source: Sanh et al. 2019, arXiv:1910.01108.
    """
    attention_spec(value, "n_heads", "dim")  # refuses heads that do not divide the width, by the names of these keys
    renamed = {key: value[name] for key, name in DISTILBERT_KEYS.items()}
    return bert_spec({**value, **renamed, "type_vocab_size": 0, "layer_norm_eps": 1e-12})


def _distilbert_head(value: HFConfig) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer."""
    transform = TransformSpec(value["dim"], "relu", bias=True)
    return ClassificationHeadSpec(num_labels(value), transform, dropout=value["seq_classif_dropout"], pooling="first")


DISTILBERT_KEYS = {  # BERT's name -> DistilBERT's
    "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads", "hidden_size": "dim",
    "intermediate_size": "hidden_dim", "hidden_act": "activation", "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}  # fmt: skip
DISTILBERT_STEM, DISTILBERT_LAYER = "distilbert.embeddings.", "distilbert.transformer.layer.{}."
DISTILBERT_NAMES = (
    *names_under(
        DISTILBERT_STEM, "trunk.", embed="word_embeddings", positions="position_embeddings", embedding_norm="LayerNorm"
    ),
    *names_under(
        DISTILBERT_LAYER + "attention.", BLOCK + "attention.",
        query="q_lin", key="k_lin", value="v_lin", output="out_lin",
    ),
    *names_under(DISTILBERT_LAYER + "ffn.", BLOCK + "feedforward.", up="lin1", down="lin2"),
    *names_under(DISTILBERT_LAYER, BLOCK, attention_norm="sa_layer_norm", feedforward_norm="output_layer_norm"),
)  # fmt: skip
DISTILBERT_PREDICTIONS = (
    *names_under("vocab_", "head.transform.", dense="transform", norm="layer_norm"),
    ("vocab_projector", "head"),
)
PRE_CLASSIFIER = (("pre_classifier", "head.transform.dense"), *CLASSIFIER)

DISTILBERT = Family(
    name="distilbert",
    spec=_distilbert,
    keys=(
        *DISTILBERT_KEYS.values(), "vocab_size", "max_position_embeddings", "initializer_range", "qa_dropout",
        "seq_classif_dropout", "tie_word_embeddings",
    ),
    names=DISTILBERT_NAMES,
    trunk_prefix="distilbert.",
    tasks={
        **encoder_tasks("DistilBert", DISTILBERT_PREDICTIONS, PRE_CLASSIFIER, _distilbert_head, dropouts=("dropout",)),
        "span": Task("DistilBertForQuestionAnswering", SPAN, span_head("qa_dropout")),
    },
    # sinusoidal_pos_embds says what a table of positions once started as; it is trained and saved like any other.
    harmless=(*HARMLESS, "sinusoidal_pos_embds"),
    fixed={**ENCODER_FIXED, "tie_weights_": (True,)},
    ignored_tensors=(POSITION_IDS,),
    new_model_config={"dropout": 0.0, "attention_dropout": 0.0},
)  # fmt: skip

"""DistilBERT: half of BERT's layers, no segments, no pooler.

Source: Sanh et al. 2019, arXiv:1910.01108; transformers, `models/distilbert`.
"""

from alignment.models.families.bert import (
    ENCODER_FIXED,
    HARMLESS,
    POSITION_IDS,
    bert_spec,
    encoder_tasks,
)
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import CLASSIFIER, SPAN, Family, Task, num_labels, span_head
from alignment.models.heads import ClassificationHeadSpec, TransformSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

# The keys of these that BERT has under other names.
AS_BERT = {
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "hidden_act": "activation",
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
}

LAYER = "distilbert.transformer.layer.{}."
NAMES = (  # Hugging Face name                     ours
    ("distilbert.embeddings.word_embeddings",      "trunk.embed"),
    ("distilbert.embeddings.position_embeddings",  "trunk.positions"),
    ("distilbert.embeddings.LayerNorm",            "trunk.embedding_norm"),
    (LAYER + "attention.q_lin",                    "trunk.blocks.{}.attention.query"),
    (LAYER + "attention.k_lin",                    "trunk.blocks.{}.attention.key"),
    (LAYER + "attention.v_lin",                    "trunk.blocks.{}.attention.value"),
    (LAYER + "attention.out_lin",                  "trunk.blocks.{}.attention.output"),
    (LAYER + "sa_layer_norm",                      "trunk.blocks.{}.attention_norm"),
    (LAYER + "ffn.lin1",                           "trunk.blocks.{}.feedforward.up"),
    (LAYER + "ffn.lin2",                           "trunk.blocks.{}.feedforward.down"),
    (LAYER + "output_layer_norm",                  "trunk.blocks.{}.feedforward_norm"),
)  # fmt: skip
PREDICTIONS = (
    ("vocab_transform",                            "head.transform.dense"),
    ("vocab_layer_norm",                           "head.transform.norm"),
    ("vocab_projector",                            "head"),
)  # fmt: skip
POOLED_CLASSIFIER = (("pre_classifier", "head.transform.dense"), *CLASSIFIER)


def _spec(value: HFConfig) -> TransformerSpec:
    attention_spec(value, "n_heads", "dim")  # refuses heads that do not divide the width, by the names of these keys
    renamed = {bert: value[ours] for bert, ours in AS_BERT.items()}
    return bert_spec({**value, **renamed, "type_vocab_size": 0, "layer_norm_eps": 1e-12})


def _sequence_head(value: HFConfig) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer."""
    transform = TransformSpec(value["dim"], "relu", bias=True)
    return ClassificationHeadSpec(num_labels(value), transform, dropout=value["seq_classif_dropout"], pooling="first")


DISTILBERT = Family(
    name="distilbert",
    spec=_spec,
    keys=(
        *AS_BERT.values(), "vocab_size", "max_position_embeddings", "initializer_range", "qa_dropout",
        "seq_classif_dropout", "tie_word_embeddings",
    ),
    names=NAMES,
    trunk_prefix="distilbert.",
    tasks={
        **encoder_tasks("DistilBert", PREDICTIONS, POOLED_CLASSIFIER, _sequence_head, dropouts=("dropout",)),
        "span": Task("DistilBertForQuestionAnswering", SPAN, span_head("qa_dropout")),
    },
    # sinusoidal_pos_embds says what a table of positions once started as; it is trained and saved like any other.
    harmless=(*HARMLESS, "sinusoidal_pos_embds"),
    fixed={**ENCODER_FIXED, "tie_weights_": (True,)},
    ignored_tensors=(POSITION_IDS,),
    new_model_config={"dropout": 0.0, "attention_dropout": 0.0},
)  # fmt: skip

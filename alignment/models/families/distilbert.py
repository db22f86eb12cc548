"""DistilBERT: half of BERT's layers, no segments, no pooler.

Source: Sanh et al. 2019, arXiv:1910.01108; transformers, `models/distilbert`.
"""

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems
from alignment.models.families.encoders import CLASSIFIER, ENCODER_FIXED, POSITION_IDS, SPAN, bert_like, with_scalar
from alignment.models.families.family import Family, Key, Task, divides, num_labels, read_keys
from alignment.models.heads import ClassificationHeadSpec, TransformSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    "vocab_size": Key(int, 30522, 1),
    "max_position_embeddings": Key(int, 512, 1),
    "n_layers": Key(int, 6, 1),
    "n_heads": Key(int, 12, 1),
    "dim": Key(int, 768, 1),
    "hidden_dim": Key(int, 3072, 1),
    "dropout": Key(float, 0.1, 0),
    "attention_dropout": Key(float, 0.1, 0),
    "activation": Key(str, "gelu"),
    "initializer_range": Key(float, 0.02, 0),
    "qa_dropout": Key(float, 0.1, 0),
    "seq_classif_dropout": Key(float, 0.2, 0),
    "tie_word_embeddings": Key(bool, True),
}
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
# sinusoidal_pos_embds says what a table of positions once started as; it is trained and saved like any other.
HARMLESS = ("gradient_checkpointing", "output_past", "sinusoidal_pos_embds")
FIXED = {**ENCODER_FIXED, "tie_weights_": (True,)}

LAYER = "distilbert.transformer.layer.{}."
NAMES = (  # Hugging Face name                            ours
    ("distilbert.embeddings.word_embeddings.weight",      "trunk.embed.weight"),
    ("distilbert.embeddings.position_embeddings.weight",  "trunk.positions.weight"),
    ("distilbert.embeddings.LayerNorm.weight",            "trunk.embedding_norm.weight"),
    ("distilbert.embeddings.LayerNorm.bias",              "trunk.embedding_norm.bias"),
    (LAYER + "attention.q_lin.weight",                    "trunk.blocks.{}.attention.query.weight"),
    (LAYER + "attention.q_lin.bias",                      "trunk.blocks.{}.attention.query.bias"),
    (LAYER + "attention.k_lin.weight",                    "trunk.blocks.{}.attention.key.weight"),
    (LAYER + "attention.k_lin.bias",                      "trunk.blocks.{}.attention.key.bias"),
    (LAYER + "attention.v_lin.weight",                    "trunk.blocks.{}.attention.value.weight"),
    (LAYER + "attention.v_lin.bias",                      "trunk.blocks.{}.attention.value.bias"),
    (LAYER + "attention.out_lin.weight",                  "trunk.blocks.{}.attention.output.weight"),
    (LAYER + "attention.out_lin.bias",                    "trunk.blocks.{}.attention.output.bias"),
    (LAYER + "sa_layer_norm.weight",                      "trunk.blocks.{}.attention_norm.weight"),
    (LAYER + "sa_layer_norm.bias",                        "trunk.blocks.{}.attention_norm.bias"),
    (LAYER + "ffn.lin1.weight",                           "trunk.blocks.{}.feedforward.up.weight"),
    (LAYER + "ffn.lin1.bias",                             "trunk.blocks.{}.feedforward.up.bias"),
    (LAYER + "ffn.lin2.weight",                           "trunk.blocks.{}.feedforward.down.weight"),
    (LAYER + "ffn.lin2.bias",                             "trunk.blocks.{}.feedforward.down.bias"),
    (LAYER + "output_layer_norm.weight",                  "trunk.blocks.{}.feedforward_norm.weight"),
    (LAYER + "output_layer_norm.bias",                    "trunk.blocks.{}.feedforward_norm.bias"),
)  # fmt: skip

PREDICTIONS = (
    ("vocab_transform.weight",   "head.transform.dense.weight"),
    ("vocab_transform.bias",     "head.transform.dense.bias"),
    ("vocab_layer_norm.weight",  "head.transform.norm.weight"),
    ("vocab_layer_norm.bias",    "head.transform.norm.bias"),
    ("vocab_projector.weight",   "head.weight"),
    ("vocab_projector.bias",     "head.bias"),
)  # fmt: skip
POOLED_CLASSIFIER = (
    ("pre_classifier.weight",  "head.transform.dense.weight"),
    ("pre_classifier.bias",    "head.transform.dense.bias"),
    *CLASSIFIER,
)  # fmt: skip


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer."""
    transform = TransformSpec(config.get("dim", 768), "relu", bias=True)
    return ClassificationHeadSpec(
        num_labels(config), transform, dropout=config.get("seq_classif_dropout", 0.2), pooling="first"
    )


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of every token."""
    return ClassificationHeadSpec(num_labels(config), dropout=config.get("dropout", 0.1))


def span_head(config: HFConfig) -> ClassificationHeadSpec:
    """Does an answer start here, does it end here."""
    return ClassificationHeadSpec(2, dropout=config.get("qa_dropout", 0.1))


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a DistilBERT config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED)
    problems += activation_problems(value["activation"], "activation")
    if not divides(value["n_heads"], value["dim"]):
        problems.append(f"config.json: n_heads = {value['n_heads']!r} does not divide dim = {value['dim']!r}")
    raise_all(problems)
    renamed = {bert: value[ours] for bert, ours in AS_BERT.items()}
    return bert_like({**value, **renamed, "type_vocab_size": 0, "layer_norm_eps": 1e-12})


DISTILBERT = Family(
    name="distilbert",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="distilbert.",
    tasks=with_scalar(
        {
            "language": Task("DistilBertForMaskedLM", PREDICTIONS),
            "sequence": Task("DistilBertForSequenceClassification", POOLED_CLASSIFIER, sequence_head),
            "tokens": Task("DistilBertForTokenClassification", CLASSIFIER, token_head),
            "span": Task("DistilBertForQuestionAnswering", SPAN, span_head),
        }
    ),
    ignored_tensors=(POSITION_IDS,),
    new_model_config={"dropout": 0.0, "attention_dropout": 0.0},
)

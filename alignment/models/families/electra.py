"""ELECTRA: BERT's layers with token vectors of their own width. The generator fills in masks; heads as RoBERTa's.

The discriminator's own head, which detects replaced tokens, is not loaded.

Source: Clark et al. 2020, arXiv:2003.10555; transformers, `models/electra`.
"""

from alignment.errors import raise_all
from alignment.models.families.encoders import (
    BERT_HARMLESS,
    BERT_KEYS,
    CLASSIFIER,
    DENSE_CLASSIFIER,
    ENCODER_FIXED,
    NO_DROPOUT,
    POSITION_IDS,
    SPAN,
    bert_blocks,
    bert_embeddings,
    bert_like,
    bert_problems,
    classifier_dropout,
    pooled_head,
    token_head,
    with_scalar,
)
from alignment.models.families.family import Family, Key, Task, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.layers import LayerNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import ProjectionSpec, TransformerSpec

WIDTH = 256
KEYS = {
    **BERT_KEYS,
    "embedding_size": Key(int, 128, 1),
    "hidden_size": Key(int, WIDTH, 1),
    "num_attention_heads": Key(int, 4, 1),
    "intermediate_size": Key(int, 1024, 1),
    "classifier_dropout": Key(float, None, 0),
}
# The summary is the head for multiple choice; the generator's size says how the discriminator was trained.
HARMLESS = (
    *BERT_HARMLESS,
    "generator_size",
    "summary_activation",
    "summary_last_dropout",
    "summary_type",
    "summary_use_proj",
)

NAMES = (
    *bert_embeddings("electra."),
    *bert_blocks("electra.encoder.layer.{}."),
    ("electra.embeddings_project.weight", "trunk.project_in.weight"),
    ("electra.embeddings_project.bias", "trunk.project_in.bias"),
)

PREDICTIONS = (  # Hugging Face name           ours
    ("generator_predictions.dense.weight",      "head.transform.dense.weight"),
    ("generator_predictions.dense.bias",        "head.transform.dense.bias"),
    ("generator_predictions.LayerNorm.weight",  "head.transform.norm.weight"),
    ("generator_predictions.LayerNorm.bias",    "head.transform.norm.bias"),
    ("generator_lm_head.weight",                "head.weight"),
    ("generator_lm_head.bias",                  "head.bias"),
)  # fmt: skip

UNUSED_DISCRIMINATOR = (r"discriminator_predictions\.(dense|dense_prediction)\.(weight|bias)",)


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer, dropout on both sides of it."""
    return pooled_head(config, "gelu", WIDTH, input_dropout=classifier_dropout(config))


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of an ELECTRA config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=ENCODER_FIXED)
    raise_all(problems + bert_problems(value))
    narrow, width = value["embedding_size"], value["hidden_size"]
    # Its head has this GELU whatever hidden_act says.
    transform = TransformSpec(narrow, "gelu", bias=True, norm=LayerNormSpec(value["layer_norm_eps"]))
    projection = None if narrow == width else ProjectionSpec(narrow, bias=True, before_positions=False)
    return bert_like(value, projection=projection, head=LanguageHeadSpec(transform, bias=True))


ELECTRA = Family(
    name="electra",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="electra.",
    tasks=with_scalar(
        {
            "language": Task("ElectraForMaskedLM", PREDICTIONS),
            "sequence": Task(
                "ElectraForSequenceClassification", DENSE_CLASSIFIER, sequence_head, other_heads=UNUSED_DISCRIMINATOR
            ),
            "tokens": Task("ElectraForTokenClassification", CLASSIFIER, token_head, other_heads=UNUSED_DISCRIMINATOR),
            "span": Task("ElectraForQuestionAnswering", SPAN, span_head, other_heads=UNUSED_DISCRIMINATOR),
        }
    ),
    ignored_tensors=(POSITION_IDS,),
    new_model_config=NO_DROPOUT,
)

"""BERT: learned positions, segments, post-norm layers; a masked language head and one that joins sentences.

Source: Devlin et al. 2018, arXiv:1810.04805; transformers, `models/bert`.
"""

from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.encoders import (
    BERT_HARMLESS,
    BERT_KEYS,
    CLASSIFIER,
    ENCODER_FIXED,
    NO_DROPOUT,
    POSITION_IDS,
    SPAN,
    bert_blocks,
    bert_embeddings,
    bert_like,
    bert_problems,
    head_bias,
    pooled_head,
    token_head,
    with_scalar,
)
from alignment.models.families.family import Family, Key, Task, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {**BERT_KEYS, "classifier_dropout": Key(float, None, 0)}

# Google's first configs describe a pooler that every one of them has.
HARMLESS = (
    *BERT_HARMLESS,
    "directionality",
    "pooler_fc_size",
    "pooler_num_attention_heads",
    "pooler_num_fc_layers",
    "pooler_size_per_head",
    "pooler_type",
)

NAMES = (*bert_embeddings("bert."), *bert_blocks("bert.encoder.layer.{}."))

PREDICTIONS = (  # Hugging Face name                ours
    ("cls.predictions.transform.dense.weight",      "head.transform.dense.weight"),
    ("cls.predictions.transform.dense.bias",        "head.transform.dense.bias"),
    ("cls.predictions.transform.LayerNorm.weight",  "head.transform.norm.weight"),
    ("cls.predictions.transform.LayerNorm.bias",    "head.transform.norm.bias"),
    ("cls.predictions.decoder.weight",              "head.weight"),
)  # fmt: skip
NEXT_SENTENCE = (
    ("bert.pooler.dense.weight",     "next_sentence.transform.dense.weight"),
    ("bert.pooler.dense.bias",       "next_sentence.transform.dense.bias"),
    ("cls.seq_relationship.weight",  "next_sentence.output.weight"),
    ("cls.seq_relationship.bias",    "next_sentence.output.bias"),
)  # fmt: skip
POOLED_CLASSIFIER = (
    ("bert.pooler.dense.weight",  "head.transform.dense.weight"),
    ("bert.pooler.dense.bias",    "head.transform.dense.bias"),
    *CLASSIFIER,
)  # fmt: skip
POOLER = ("bert.pooler.dense.weight", "bert.pooler.dense.bias")

# Most encoders are published as they were pretrained, with the pooler and both heads.
UNUSED_POOLER = (r"bert\.pooler\.dense\.(weight|bias)",)
UNUSED_NEXT_SENTENCE = (r"cls\.seq_relationship\.(weight|bias)",)
UNUSED_BIAS = (r"cls\.predictions\.bias",)  # it does not act where the decoder, untied, has its own


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of the pooled first token."""
    return pooled_head(config, "tanh")


def next_sentence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Does B follow A (0), or does it not (1): from the pooled first token."""
    return replace(pooled_head(config, "tanh", dropout=0.0), outputs=2)


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a BERT config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=ENCODER_FIXED)
    raise_all(problems + bert_problems(value))
    return bert_like(value)


BERT = Family(
    name="bert",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="bert.",
    tasks=with_scalar(
        {
            "language": Task(
                "BertForMaskedLM", PREDICTIONS, other_heads=(*UNUSED_POOLER, *UNUSED_NEXT_SENTENCE, *UNUSED_BIAS)
            ),
            "next_sentence": Task(
                "BertForPreTraining",
                (*PREDICTIONS, *NEXT_SENTENCE),
                next_sentence_head,
                other_heads=UNUSED_BIAS,
                kept_by_new_head=POOLER,
            ),
            "sequence": Task(
                "BertForSequenceClassification", POOLED_CLASSIFIER, sequence_head, kept_by_new_head=POOLER
            ),
            "tokens": Task("BertForTokenClassification", CLASSIFIER, token_head, other_heads=UNUSED_POOLER),
            "span": Task("BertForQuestionAnswering", SPAN, span_head, other_heads=UNUSED_POOLER),
        }
    ),
    ignored_tensors=(POSITION_IDS,),
    legacy_names={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    tied_copies=(("cls.predictions.decoder.bias", "cls.predictions.bias"),),
    names_from_config=head_bias("cls.predictions."),
    new_model_config=NO_DROPOUT,
)

"""RoBERTa: BERT without segments and pooler; its first rows of positions belong to padding.

Source: Liu et al. 2019, arXiv:1907.11692; transformers, `models/roberta`.
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
    head_bias,
    pooled_head,
    token_head,
    with_scalar,
)
from alignment.models.families.family import Family, Key, Task, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.layers import LayerNormSpec, LearnedPositionsSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **BERT_KEYS,
    "vocab_size": Key(int, 50265, 1),
    "pad_token_id": Key(int, 1, 0),
    "classifier_dropout": Key(float, None, 0),
}

NAMES = (*bert_embeddings("roberta."), *bert_blocks("roberta.encoder.layer.{}."))

PREDICTIONS = (  # Hugging Face name   ours
    ("lm_head.dense.weight",           "head.transform.dense.weight"),
    ("lm_head.dense.bias",             "head.transform.dense.bias"),
    ("lm_head.layer_norm.weight",      "head.transform.norm.weight"),
    ("lm_head.layer_norm.bias",        "head.transform.norm.bias"),
    ("lm_head.decoder.weight",         "head.weight"),
)  # fmt: skip

UNUSED_POOLER = (r"roberta\.pooler\.dense\.(weight|bias)",)  # transformers' own; it was never trained
UNUSED_BIAS = (r"lm_head\.bias",)  # it does not act where the decoder, untied, has its own


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of the first token through a dense layer, dropout on both sides of it."""
    return pooled_head(config, "tanh", input_dropout=classifier_dropout(config))


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a RoBERTa config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=BERT_HARMLESS, fixed=ENCODER_FIXED)
    problems += bert_problems(value)
    raise_all(problems)
    first = value["pad_token_id"] + 1
    count = value["max_position_embeddings"] - first
    if count < 1:
        problems.append(f"config.json: max_position_embeddings must be above pad_token_id + 1 = {first}")
    raise_all(problems)
    # Its head has this GELU whatever hidden_act says.
    transform = TransformSpec(value["hidden_size"], "gelu", bias=True, norm=LayerNormSpec(value["layer_norm_eps"]))
    return bert_like(
        value,
        max_positions=count,
        positions=LearnedPositionsSpec(count, first),
        head=LanguageHeadSpec(transform, bias=True),
    )


ROBERTA = Family(
    name="roberta",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="roberta.",
    tasks=with_scalar(
        {
            "language": Task("RobertaForMaskedLM", PREDICTIONS, other_heads=(*UNUSED_POOLER, *UNUSED_BIAS)),
            "sequence": Task(
                "RobertaForSequenceClassification", DENSE_CLASSIFIER, sequence_head, other_heads=UNUSED_POOLER
            ),
            "tokens": Task("RobertaForTokenClassification", CLASSIFIER, token_head, other_heads=UNUSED_POOLER),
            "span": Task("RobertaForQuestionAnswering", SPAN, span_head, other_heads=UNUSED_POOLER),
        }
    ),
    ignored_tensors=(POSITION_IDS,),
    tied_copies=(("lm_head.decoder.bias", "lm_head.bias"),),
    names_from_config=head_bias("lm_head."),
    new_model_config=NO_DROPOUT,
)

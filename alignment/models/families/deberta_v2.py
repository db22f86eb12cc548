"""DeBERTa v2 and v3: content and relative position attend apart; the larger v2 models have a convolution beside layer 1.

Source: He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543; transformers, `models/deberta_v2`.
"""

from dataclasses import replace
from typing import Any

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems
from alignment.models.families.encoders import (
    BERT_HARMLESS,
    BERT_KEYS,
    CLASSIFIER,
    ENCODER_FIXED,
    NO_DROPOUT,
    POSITION_IDS,
    SPAN,
    bert_block,
    bert_embeddings,
    bert_like,
    classifier_dropout,
    head_bias,
    pooled_head,
    with_scalar,
)
from alignment.models.families.family import Family, Key, Name, Task, divides, num_labels, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec
from alignment.models.layers import (
    AttentionSpec,
    ConvolutionSpec,
    DisentangledSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, TransformerSpec

WIDTH = 1536
KEYS = {
    **BERT_KEYS,
    "vocab_size": Key(int, 128100, 1),
    "hidden_size": Key(int, WIDTH, 1),
    "num_hidden_layers": Key(int, 24, 1),
    "num_attention_heads": Key(int, 24, 1),
    "attention_head_size": Key(int, None, 1),
    "intermediate_size": Key(int, 6144, 1),
    "type_vocab_size": Key(int, 0, 0),
    "layer_norm_eps": Key(float, 1e-7, 0),
    "relative_attention": Key(bool, False),
    "max_relative_positions": Key(int, -1),
    "position_buckets": Key(int, -1),
    "share_att_key": Key(bool, False),
    "norm_rel_ebd": Key(str, "none"),
    "position_biased_input": Key(bool, True),
    "conv_kernel_size": Key(int, 0, 0),
    "conv_act": Key(str, "tanh"),
    "conv_groups": Key(int, 1, 1),
    "embedding_size": Key(int, None, 1),
    "pooler_hidden_size": Key(int, None, 1),
    "pooler_hidden_act": Key(str, "gelu"),
    "pooler_dropout": Key(float, 0.0, 0),
    "cls_dropout": Key(float, None, 0),
    "legacy": Key(bool, True),
}
TERMS = ("c2p", "p2c")

LAYER = "deberta.encoder.layer.{}."
NAMES = (
    *bert_embeddings("deberta."),
    # Hugging Face name                               ours
    ("deberta.encoder.rel_embeddings.weight",         "trunk.relative.weight"),
    ("deberta.encoder.LayerNorm.weight",              "trunk.relative.norm.weight"),
    ("deberta.encoder.LayerNorm.bias",                "trunk.relative.norm.bias"),
    (LAYER + "attention.self.query_proj.weight",      "trunk.blocks.{}.attention.query.weight"),
    (LAYER + "attention.self.query_proj.bias",        "trunk.blocks.{}.attention.query.bias"),
    (LAYER + "attention.self.key_proj.weight",        "trunk.blocks.{}.attention.key.weight"),
    (LAYER + "attention.self.key_proj.bias",          "trunk.blocks.{}.attention.key.bias"),
    (LAYER + "attention.self.value_proj.weight",      "trunk.blocks.{}.attention.value.weight"),
    (LAYER + "attention.self.value_proj.bias",        "trunk.blocks.{}.attention.value.bias"),
    (LAYER + "attention.self.pos_query_proj.weight",  "trunk.blocks.{}.attention.position_query.weight"),
    (LAYER + "attention.self.pos_query_proj.bias",    "trunk.blocks.{}.attention.position_query.bias"),
    (LAYER + "attention.self.pos_key_proj.weight",    "trunk.blocks.{}.attention.position_key.weight"),
    (LAYER + "attention.self.pos_key_proj.bias",      "trunk.blocks.{}.attention.position_key.bias"),
    (LAYER + "attention.output.dense.weight",         "trunk.blocks.{}.attention.output.weight"),
    (LAYER + "attention.output.dense.bias",           "trunk.blocks.{}.attention.output.bias"),
    (LAYER + "attention.output.LayerNorm.weight",     "trunk.blocks.{}.attention_norm.weight"),
    (LAYER + "attention.output.LayerNorm.bias",       "trunk.blocks.{}.attention_norm.bias"),
    (LAYER + "intermediate.dense.weight",             "trunk.blocks.{}.feedforward.up.weight"),
    (LAYER + "intermediate.dense.bias",               "trunk.blocks.{}.feedforward.up.bias"),
    (LAYER + "output.dense.weight",                   "trunk.blocks.{}.feedforward.down.weight"),
    (LAYER + "output.dense.bias",                     "trunk.blocks.{}.feedforward.down.bias"),
    (LAYER + "output.LayerNorm.weight",               "trunk.blocks.{}.feedforward_norm.weight"),
    (LAYER + "output.LayerNorm.bias",                 "trunk.blocks.{}.feedforward_norm.bias"),
)  # fmt: skip
# A layer with a convolution beside it holds the ordinary one.
CONVOLVED = (
    *(
        (hf.replace(".{}.", ".0."), ours.replace("blocks.{}.", "blocks.{}.block."))
        for hf, ours in NAMES
        if LAYER in hf and isinstance(ours, str)
    ),
    ("deberta.encoder.conv.conv.weight", "trunk.blocks.{}.convolution.layer.weight"),
    ("deberta.encoder.conv.conv.bias", "trunk.blocks.{}.convolution.layer.bias"),
    ("deberta.encoder.conv.LayerNorm.weight", "trunk.blocks.{}.norm.weight"),
    ("deberta.encoder.conv.LayerNorm.bias", "trunk.blocks.{}.norm.bias"),
)

POOLED_CLASSIFIER = (
    ("pooler.dense.weight",  "head.transform.dense.weight"),
    ("pooler.dense.bias",    "head.transform.dense.bias"),
    *CLASSIFIER,
)  # fmt: skip
# The head has two spellings, of which the config's `legacy` chooses one; only the first may be untied.
LEGACY, NEW = "cls.predictions.", "lm_predictions.lm_head."
UNUSED_LEGACY_HEAD = (r"cls\.predictions\.(transform\.(dense|LayerNorm)\.(weight|bias)|decoder\.(weight|bias)|bias)",)
UNUSED_NEW_HEAD = (r"lm_predictions\.lm_head\.((dense|LayerNorm)\.(weight|bias)|bias)",)


def head_lines(config: HFConfig) -> tuple[Name, ...]:
    """The weight table of the language head."""
    legacy = config.get("legacy", True)
    transform = LEGACY + "transform." if legacy else NEW
    return (
        (transform + "dense.weight", "head.transform.dense.weight"),
        (transform + "dense.bias", "head.transform.dense.bias"),
        (transform + "LayerNorm.weight", "head.transform.norm.weight"),
        (transform + "LayerNorm.bias", "head.transform.norm.bias"),
        (LEGACY + "decoder.weight", "head.weight"),
        *(head_bias(LEGACY)(config) if legacy else ((NEW + "bias", "head.bias"),)),
    )


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of the pooled first token."""
    read = pooled_head(config, config.get("pooler_hidden_act", "gelu"), WIDTH)
    dropout = classifier_dropout(config, "cls_dropout")
    return replace(read, dropout=dropout, input_dropout=config.get("pooler_dropout", 0.0))


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """Classes of every token."""
    return ClassificationHeadSpec(num_labels(config), dropout=config.get("hidden_dropout_prob", 0.1))


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a DeBERTa v2 or v3 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    by_hand = ("pos_att_type",)
    value, problems = read_keys(config, KEYS, harmless=BERT_HARMLESS, fixed=ENCODER_FIXED, by_hand=by_hand)
    terms, term_problems = _terms(config.get("pos_att_type"))
    raise_all(problems + term_problems + _value_problems(value))
    longest = (
        value["max_relative_positions"] if value["max_relative_positions"] > 0 else value["max_position_embeddings"]
    )
    span = max(value["position_buckets"], 0) or longest
    relative = value["relative_attention"] and bool(terms)
    block = replace(bert_block(value), attention=_attention(value, terms, longest))
    kernel = value["conv_kernel_size"]
    convolution = ConvolutionSpec(kernel, value["conv_act"], value["conv_groups"]) if kernel else None
    absolute = value["position_biased_input"]
    return bert_like(
        value,
        max_positions=value["max_position_embeddings"] if absolute else UNLIMITED,
        blocks=(replace(block, convolution=convolution), *(block,) * (value["num_hidden_layers"] - 1)),
        positions=LearnedPositionsSpec(value["max_position_embeddings"]) if absolute else None,
        relative=span if relative else 0,
        relative_norm=LayerNormSpec(value["layer_norm_eps"]) if "layer_norm" in _norms(value) else NoNormSpec(),
    )


def _attention(value: HFConfig, terms: list[str], longest: int) -> AttentionSpec | DisentangledSpec:
    heads, dropout = value["num_attention_heads"], value["attention_probs_dropout_prob"]
    head_dim = value["attention_head_size"] or value["hidden_size"] // heads
    if not value["relative_attention"] or not terms:
        scale = (head_dim * (1 + len(terms))) ** -0.5  # the terms count even where they do not act
        return AttentionSpec(heads, heads, head_dim, scale, True, True, dropout, causal=False)
    return DisentangledSpec(
        heads,
        head_dim,
        buckets=max(value["position_buckets"], 0),
        max_distance=longest,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        shared_projection=value["share_att_key"],
        dropout=dropout,
        relative_dropout=value["hidden_dropout_prob"],
    )


def _terms(given: Any) -> tuple[list[str], list[str]]:
    """Which mixed terms the attention has, written as a list or with bars between, and the problems found."""
    words = [word.strip() for word in given.lower().split("|")] if isinstance(given, str) else given or []
    if not isinstance(words, list) or any(word not in TERMS for word in words):
        return [], [f"config.json: pos_att_type {given!r} is not made of {' and '.join(TERMS)}"]
    return [term for term in TERMS if term in words], []


def _norms(value: HFConfig) -> list[str]:
    return [word.strip() for word in str(value["norm_rel_ebd"]).lower().split("|")]


def _value_problems(value: HFConfig) -> list[str]:
    heads, width, kernel = value["num_attention_heads"], value["hidden_size"], value["conv_kernel_size"]
    problems = []
    for key in ("hidden_act", "pooler_hidden_act", "conv_act"):
        problems += activation_problems(value[key], key)
    if not divides(heads, width):
        problems.append(f"config.json: num_attention_heads = {heads!r} does not divide hidden_size = {width!r}")
    if value["attention_head_size"] not in (None, width // heads if divides(heads, width) else None):
        problems.append("config.json: attention_head_size must be hidden_size / num_attention_heads")
    problems += [
        f"config.json: {key} = {value[key]!r} is not supported, only hidden_size = {width!r}"
        for key in ("embedding_size", "pooler_hidden_size")
        if value[key] not in (None, width)
    ]
    problems += [
        f"config.json: norm_rel_ebd {word!r} is not one of none, layer_norm"
        for word in _norms(value)
        if word not in ("none", "layer_norm")
    ]
    if kernel and (kernel % 2 == 0 or not value["relative_attention"]):
        problems.append(f"config.json: conv_kernel_size = {kernel} needs relative_attention and an odd width")
    if not divides(value["conv_groups"], width):
        problems.append(f"config.json: conv_groups = {value['conv_groups']!r} does not divide hidden_size = {width!r}")
    if not value["legacy"] and not value["tie_word_embeddings"]:
        problems.append("config.json: legacy = False predicts with the token table; tie_word_embeddings must be true")
    return problems


DEBERTA_V2 = Family(
    name="deberta-v2",
    spec_from_config=spec_from_config,
    names=(*NAMES, *CONVOLVED),
    trunk_prefix="deberta.",
    tasks=with_scalar(
        {
            "language": Task("DebertaV2ForMaskedLM", (), other_heads=(*UNUSED_LEGACY_HEAD, *UNUSED_NEW_HEAD)),
            "sequence": Task(
                "DebertaV2ForSequenceClassification", POOLED_CLASSIFIER, sequence_head, kept_by_new_head=()
            ),
            "tokens": Task("DebertaV2ForTokenClassification", CLASSIFIER, token_head),
            "span": Task("DebertaV2ForQuestionAnswering", SPAN, span_head),
        }
    ),
    # The third line is a table that v3's files carry and do not use, and a norm of a table that is not there.
    ignored_tensors=(
        POSITION_IDS,
        r"mask_predictions\..*",  # the pretraining head that detects replaced tokens
        r"(deberta\.)?(embeddings\.position_embeddings|encoder\.LayerNorm|encoder\.rel_embeddings)\.(weight|bias)",
    ),
    tied_copies=((LEGACY + "decoder.bias", LEGACY + "bias"),),
    names_from_config=head_lines,
    new_model_config=NO_DROPOUT,
)

"""DeBERTa v2 and v3: content and relative position attend apart; large v2 models have a convolution beside layer 1.

Source: He et al. 2020, arXiv:2006.03654; He et al. 2021, arXiv:2111.09543; transformers, `models/deberta_v2`.
"""

from collections.abc import Iterator
from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.bert import (
    bert_family,
    bert_spec,
    bias_names,
    embedding_names,
    encoder_tasks,
    layer_names,
    pooled_head,
)
from alignment.models.families.config_keys import Key
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import BLOCK, CLASSIFIER, Name, names_under
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

TERMS = ("c2p", "p2c")

LAYER = "deberta.encoder.layer."
PROJECTIONS = ("query_proj", "key_proj", "value_proj")
POSITIONS = {"position_query": "pos_query_proj", "position_key": "pos_key_proj"}
NAMES = (
    *embedding_names("deberta."),
    ("deberta.encoder.rel_embeddings.weight", "trunk.relative.weight"),
    ("deberta.encoder.LayerNorm", "trunk.relative.norm"),
    # A layer with a convolution beside it, the first, holds the ordinary one.
    *(
        line
        for layer, block in (("{}.", BLOCK), ("0.", BLOCK + "block."))
        for line in (
            *layer_names(LAYER + layer, block, PROJECTIONS),
            *names_under(LAYER + layer + "attention.self.", block + "attention.", **POSITIONS),
        )
    ),
    ("deberta.encoder.conv.conv", BLOCK + "convolution.layer"),
    ("deberta.encoder.conv.LayerNorm", BLOCK + "norm"),
)
# The head has two spellings, of which the config's `legacy` chooses one; only the first may be untied.
LEGACY = "cls.predictions."
NEW = "lm_predictions.lm_head."


def _head_names(value: HFConfig) -> tuple[Name, ...]:
    transform = LEGACY + "transform." if value["legacy"] else NEW
    return (
        (transform + "dense", "head.transform.dense"),
        (transform + "LayerNorm", "head.transform.norm"),
        (LEGACY + "decoder.weight", "head.weight"),
        *(bias_names(LEGACY, value) if value["legacy"] else ((NEW + "bias", "head.bias"),)),
    )


def _spec(value: HFConfig) -> TransformerSpec:
    raise_all(_problems(value))
    absolute = value["position_biased_input"]
    kernel = value["conv_kernel_size"]
    longest = max(value["max_relative_positions"], 0) or value["max_position_embeddings"]
    attention = _attention(value, longest)
    spec = bert_spec(
        value,
        attention,
        max_positions=value["max_position_embeddings"] if absolute else UNLIMITED,
        positions=LearnedPositionsSpec(value["max_position_embeddings"]) if absolute else None,
        relative=(max(value["position_buckets"], 0) or longest) if isinstance(attention, DisentangledSpec) else 0,
        relative_norm=LayerNormSpec(value["layer_norm_eps"]) if "layer_norm" in _norms(value) else NoNormSpec(),
    )
    convolution = ConvolutionSpec(kernel, value["conv_act"], value["conv_groups"]) if kernel else None
    return replace(spec, blocks=(replace(spec.blocks[0], convolution=convolution), *spec.blocks[1:]))


def _attention(value: HFConfig, longest: int) -> AttentionSpec | DisentangledSpec:
    """Attention of content and, where they act, of relative positions up to `longest`."""
    terms = set(_terms(value))
    dropout = value["attention_probs_dropout_prob"]
    attention = attention_spec(value, dropout=dropout, causal=False)
    if not value["relative_attention"] or not terms:
        # the terms count even where they do not act
        return replace(attention, scale=(attention.head_dim * (1 + len(terms))) ** -0.5)
    return DisentangledSpec(
        attention.heads,
        attention.head_dim,
        buckets=max(value["position_buckets"], 0),
        max_distance=longest,
        content_to_position="c2p" in terms,
        position_to_content="p2c" in terms,
        shared_projection=value["share_att_key"],
        dropout=dropout,
        relative_dropout=value["hidden_dropout_prob"],
    )


def _terms(value: HFConfig) -> list[str]:
    """The mixed terms of the attention, written as a list or with bars between."""
    given = value.get("pos_att_type") or []
    return [word.strip() for word in given.lower().split("|")] if isinstance(given, str) else given


def _norms(value: HFConfig) -> list[str]:
    return [word.strip() for word in value["norm_rel_ebd"].lower().split("|")]


def _problems(value: HFConfig) -> Iterator[str]:
    heads = value["num_attention_heads"]
    width = value["hidden_size"]
    kernel = value["conv_kernel_size"]
    terms = _terms(value)
    if not isinstance(terms, list) or any(word not in TERMS for word in terms):
        yield f"config.json: pos_att_type {value['pos_att_type']!r} is not made of {' and '.join(TERMS)}"
    if value["attention_head_size"] not in (None, width / heads):
        yield "config.json: attention_head_size must be hidden_size / num_attention_heads"
    for key in ("embedding_size", "pooler_hidden_size"):
        if value[key] not in (None, width):
            yield f"config.json: {key} = {value[key]!r} is not supported, only hidden_size = {width!r}"
    for word in _norms(value):
        if word not in ("none", "layer_norm"):
            yield f"config.json: norm_rel_ebd {word!r} is not one of none, layer_norm"
    if kernel and (kernel % 2 == 0 or not value["relative_attention"]):
        yield f"config.json: conv_kernel_size = {kernel} needs relative_attention and an odd width"
    if width % value["conv_groups"]:
        yield f"config.json: conv_groups = {value['conv_groups']} does not divide hidden_size = {width}"
    if not value["legacy"] and not value["tie_word_embeddings"]:
        yield "config.json: legacy = False predicts with the token table; tie_word_embeddings must be true"


def _sequence_head(value: HFConfig) -> ClassificationHeadSpec:
    """Classes of the pooled first token."""
    head = pooled_head(value, value["pooler_hidden_act"], ("cls_dropout", "hidden_dropout_prob"))
    return replace(head, input_dropout=value["pooler_dropout"])


POOLED_CLASSIFIER = (("pooler.dense", "head.transform.dense"), *CLASSIFIER)
DEBERTA_V2 = bert_family(
    "deberta-v2",
    _spec,
    (
        "attention_head_size",
        "relative_attention",
        "max_relative_positions",
        "position_buckets",
        "share_att_key",
        "norm_rel_ebd",
        "position_biased_input",
        "conv_kernel_size",
        "conv_act",
        "conv_groups",
        "embedding_size",
        "pooler_hidden_size",
        "pooler_hidden_act",
        "pooler_dropout",
        "cls_dropout",
        "legacy",
    ),
    encoder_tasks("DebertaV2", (), POOLED_CLASSIFIER, _sequence_head, dropouts=("hidden_dropout_prob",)),
    trunk_prefix="deberta.",
    names=NAMES,
    defaults={
        "attention_head_size": None,
        "position_buckets": -1,
        "share_att_key": False,
        "norm_rel_ebd": "none",
        "conv_kernel_size": 0,
        "conv_act": "tanh",
        "conv_groups": 1,
        "embedding_size": None,
        "pooler_hidden_size": None,
        "cls_dropout": None,
    },
    limits={"type_vocab_size": Key(int, 0)},
    by_hand=("pos_att_type",),
    ignored_tensors=(
        r"cls\.predictions\.(transform\.(dense|LayerNorm)\.(weight|bias)|decoder\.(weight|bias))",
        r"lm_predictions\.lm_head\.((dense|LayerNorm)\.(weight|bias)|bias)",
        r"mask_predictions\..*",  # the pretraining head that detects replaced tokens
        # a table that v3's files carry and do not use, and a norm of a table that is not there
        r"(deberta\.)?(embeddings\.position_embeddings|encoder\.LayerNorm|encoder\.rel_embeddings)\.(weight|bias)",
    ),
    language_bias=LEGACY,
    names_from_config=_head_names,
)

"""Encoder-decoders: T5, version 1.1, Flan-T5, ByT5, mT5; BART.

T5 has biases for distances instead of positions, no scale on scores, no biases. One table serves files with and without
a classifier's head. mT5 is T5 1.1 in many languages; its logits are never scaled, and its files may have a head of
their own. BART has learned positions on both sides, norms after each sum and after the embedding, biases everywhere.

Source: Raffel et al. 2020, arXiv:1910.10683; Xue et al. 2022, arXiv:2105.13626 (ByT5); Xue et al. 2021,
arXiv:2010.11934 (mT5); Lewis et al. 2019, arXiv:1910.13461 (BART); transformers, `models/FAMILY`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from alignment.errors import raise_all
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.decoders import attention_spec
from alignment.models.families.family import (
    CLASSIFIER,
    Family,
    Name,
    Task,
    names_under,
    num_labels,
    span_task,
    token_head,
)
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.init_weights import FanInInitSpec, InitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    GatedFeedForwardSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NoNormSpec,
    PlainFeedForwardSpec,
    RelativeBiasSpec,
    RMSNormSpec,
)
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.safetensors_files import HFConfig, StoredTensor
from alignment.models.transformer import UNLIMITED, TransformerSpec

KEYS = (
    "vocab_size",
    "d_model",
    "d_kv",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "num_heads",
    "relative_attention_num_buckets",
    "relative_attention_max_distance",
    "dropout_rate",
    "classifier_dropout",
    "layer_norm_epsilon",
    "initializer_factor",
    "feed_forward_proj",
    "tie_word_embeddings",
    "pad_token_id",
    "decoder_start_token_id",
)
SCALE = "scale_decoder_outputs"  # T5's alone
DERIVED = ("dense_act_fn", "is_gated_act")  # feed_forward_proj said again


def _stack_names(side: str, feedforward: int) -> tuple[tuple[str, str], ...]:
    """The weight table of the encoder or the decoder, whose feed-forward is the `feedforward`-th part of a layer."""
    layer = f"{side}.block.{{}}.layer."
    block = f"{side}.blocks.{{}}."
    return (
        *names_under(layer + "0.SelfAttention.", block + "attention.", **PROJECTIONS),
        *names_under(layer, block, attention_norm="0.layer_norm", feedforward_norm=f"{feedforward}.layer_norm"),
        *names_under(f"{layer}{feedforward}.DenseReluDense.", block + "feedforward.", up="wi", gate="wi_0", down="wo"),
        (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias", f"{side}.distance"),
        (f"{side}.final_layer_norm", f"{side}.norm"),
    )


PROJECTIONS = {"query": "q", "key": "k", "value": "v", "output": "o"}
LINES = (
    *_stack_names("encoder", 1),
    *_stack_names("decoder", 2),
    ("shared", "encoder.embed"),
    ("decoder.embed_tokens", "decoder.embed"),
    ("decoder.block.{}.layer.1.layer_norm", "decoder.blocks.{}.cross_norm"),
    *names_under("decoder.block.{}.layer.1.EncDecAttention.", "decoder.blocks.{}.cross.", **PROJECTIONS),
)
GATED = (  # takes the place of wi where there is a gate
    ("encoder.block.{}.layer.1.DenseReluDense.wi_1", "encoder.blocks.{}.feedforward.up"),
    ("decoder.block.{}.layer.2.DenseReluDense.wi_1", "decoder.blocks.{}.feedforward.up"),
)


def _table(lines: tuple[tuple[str, str], ...]) -> tuple[Name, ...]:
    """The lines as files of heads name them; the encoder of a token classifier, without a decoder, is our `trunk`."""
    alone = tuple((hf, ours.replace("encoder.", "trunk.", 1)) for hf, ours in lines if ours.startswith("encoder."))
    return tuple((f"transformer.{hf}", ours) for hf, ours in (*lines, *alone))


def _spec(value: HFConfig) -> EncoderDecoderSpec:
    raise_all(_problems(value))
    scaled = value.get(SCALE, False)  # logits are multiplied by D ** -0.5; never mT5's
    if scaled is None:  # before there was a key for it, files of version 1.1 were known by their untied head
        scaled = value["tie_word_embeddings"]
    start = value["decoder_start_token_id"]
    end = value.get("eos_token_id", 1)
    layers = value["num_decoder_layers"]
    return EncoderDecoderSpec(
        encoder=_stack(value, value["num_layers"], decodes=False, scaled=scaled),
        decoder=_stack(value, value["num_layers"] if layers is None else layers, decodes=True, scaled=scaled),
        start_token=value["pad_token_id"] if start is None else start,  # as all T5s were trained
        end_token=end if isinstance(end, int) else None,
    )


def _problems(value: HFConfig) -> Iterator[str]:
    named = value["feed_forward_proj"]
    activation, gated = _feed_forward(value)
    if activation not in ACTIVATIONS:
        yield (
            f"config.json: feed_forward_proj {named!r} is not one of {', '.join(ACTIVATIONS)}, perhaps with 'gated-' "
            "before it"
        )
    for key, said in zip(DERIVED, (activation, gated), strict=True):
        if value.get(key, said) != said:
            yield f"config.json: {key} = {value[key]!r} contradicts feed_forward_proj = {named!r}"
    buckets = value["relative_attention_num_buckets"]
    far = value["relative_attention_max_distance"]
    if far <= buckets // 2 or buckets % 2:
        yield (
            f"config.json: relative_attention_num_buckets = {buckets} must be even, and "
            f"relative_attention_max_distance = {far} more than half of it"
        )


def _feed_forward(value: HFConfig) -> tuple[str, bool]:
    """Name of the activation, and True where there is a gate."""
    name = value["feed_forward_proj"]
    if name == "gated-gelu":
        return "gelu_new", True  # the one name that means another function
    return name.removeprefix("gated-"), name.startswith("gated-")


def _stack(value: HFConfig, layers: int, *, decodes: bool, scaled: bool) -> TransformerSpec:
    norm = RMSNormSpec(value["layer_norm_epsilon"])
    width = value["d_model"]
    dropout = value["dropout_rate"]
    heads = value["num_heads"]
    factor = value["initializer_factor"]
    cross = AttentionSpec(heads, heads, value["d_kv"], 1.0, False, False, dropout, causal=False)
    buckets = RelativeBiasSpec(value["relative_attention_num_buckets"], value["relative_attention_max_distance"])
    activation, gated = _feed_forward(value)
    part = GatedFeedForwardSpec if gated else PlainFeedForwardSpec
    block = BlockSpec(
        attention=replace(cross, causal=decodes, position_bias=buckets),
        feedforward=part(value["d_ff"], activation, bias=False, dropout=dropout),
        norm=norm,
        dropout=dropout,
        cross=cross if decodes else None,
    )
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=UNLIMITED,
        blocks=(block,) * layers,
        norm=norm,
        init=FanInInitSpec(position_bias_std=factor * width**-0.5, factor=factor),
        tied_head=value["tie_word_embeddings"],
        embedding_dropout=dropout,
        output_dropout=dropout,
        head=LanguageHeadSpec(scale=width**-0.5 if scaled else 1.0),
    )


def sequence_head(value: HFConfig, default_labels: int = 2) -> ClassificationHeadSpec:
    """A hidden layer and a linear one on what the decoder says at the end token; BART has the same."""
    transform = TransformSpec(value["d_model"], "tanh", True)
    dropout = value["classifier_dropout"]
    return ClassificationHeadSpec(
        num_labels(value, default_labels), transform, dropout=dropout, input_dropout=dropout, pooling="last"
    )


SEQUENCE = (("classification_head.dense", "head.transform.dense"), ("classification_head.out_proj", "head.output"))


def _own_head(config: HFConfig, tensors: Mapping[str, StoredTensor]) -> HFConfig:
    """The config of a file, untied where its head differs from the token table: transformers 5 does not say so.

    It names the scale of the logits, which must not change when an adapter gives a tied head a weight of its own.
    """
    if config["model_type"] != "mt5":
        config = {SCALE: config.get("tie_word_embeddings", True)} | config
    head = tensors.get("lm_head.weight")
    table = tensors.get("shared.weight")
    if head is None or table is None or torch.equal(head.read(), table.read()):
        return config
    return config | {"tie_word_embeddings": False}


def _family(name: str, stem: str, **more: Any) -> Family:
    """T5 or mT5, whose classes of transformers begin with `stem`; `more` as in `Family`."""
    return Family(
        name=name,
        names=_table((*GATED, *LINES)),
        trunk_prefix="transformer.",
        tasks={
            "language": Task(f"{stem}ForConditionalGeneration", (("lm_head.weight", "head.weight"),), trunk_prefix=""),
            **dict.fromkeys(("sequence", "scalar"), Task(f"{stem}ForSequenceClassification", SEQUENCE, sequence_head)),
            "tokens": Task(
                f"{stem}ForTokenClassification",
                CLASSIFIER,
                token_head("classifier_dropout"),
                unused=(r"transformer\.decoder\..*",),
            ),
            "span": span_task(stem, trunk_prefix=""),
        },
        by_hand=DERIVED,
        # Documents may be longer than the `n_positions` of pretraining.
        harmless=("gradient_checkpointing", "n_positions", "output_past"),
        # A classifier of tokens has the encoder alone, and its files say so.
        fixed={"is_encoder_decoder": (True, False), "is_decoder": (False,)},
        # a bias in older files that never acted
        ignored_tensors=(
            r"(transformer\.)?decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",
        ),
        # Each stack's file name for the shared table, in older files.
        tied_copies=tuple(
            (f"{prefix}encoder.embed_tokens.weight", f"{prefix}shared.weight") for prefix in ("", "transformer.")
        ),
        names_from_config=lambda value: _table(GATED) if _feed_forward(value)[1] else (),
        config_from_tensors=_own_head,
        new_model_config={"dropout_rate": 0.0, "is_encoder_decoder": True, "decoder_start_token_id": 0},
        **more,
    )


DEFAULTS = {"tie_word_embeddings": True, "decoder_start_token_id": None}
T5 = _family("t5", "T5", spec=_spec, keys=(*KEYS, SCALE), defaults={**DEFAULTS, SCALE: None})
MT5 = _family("mt5", "MT5", spec=_spec, keys=KEYS, defaults=DEFAULTS)


EPS = 1e-5  # no key sets it


def _bart_names(side: str) -> tuple[Name, ...]:
    """The weight table of the encoder or the decoder."""
    stack = f"model.{side}."
    layer = f"model.{side}.layers.{{}}."
    block = f"{side}.blocks.{{}}."
    return (
        *names_under(stack, f"{side}.", positions="embed_positions", embedding_norm="layernorm_embedding"),
        *names_under(layer + "self_attn.", block + "attention.", **BART_PROJECTIONS),
        *names_under(layer, block, attention_norm="self_attn_layer_norm", feedforward_norm="final_layer_norm"),
        *names_under(layer, block + "feedforward.", up="fc1", down="fc2"),
    )


BART_PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
BART_NAMES: tuple[Name, ...] = (
    *_bart_names("encoder"),
    *_bart_names("decoder"),
    ("model.shared", "encoder.embed"),
    ("model.decoder.embed_tokens", "decoder.embed"),
    *names_under("model.decoder.layers.{}.encoder_attn.", "decoder.blocks.{}.cross.", **BART_PROJECTIONS),
    ("model.decoder.layers.{}.encoder_attn_layer_norm", "decoder.blocks.{}.cross_norm"),
)


def _bart(value: HFConfig) -> EncoderDecoderSpec:
    end = value.get("eos_token_id", 2)
    return EncoderDecoderSpec(
        encoder=_bart_stack(value, "encoder"),
        decoder=_bart_stack(value, "decoder"),
        start_token=value["decoder_start_token_id"],
        end_token=end if isinstance(end, int) else None,
    )


def _bart_stack(value: HFConfig, side: str) -> TransformerSpec:
    width = value["d_model"]
    longest = value["max_position_embeddings"]
    decodes = side == "decoder"
    heads = f"{side}_attention_heads"
    dropout = value["attention_dropout"]
    attention = attention_spec(value, heads, "d_model", dropout=dropout, causal=decodes)
    block = BlockSpec(
        attention=attention,
        feedforward=PlainFeedForwardSpec(
            value[f"{side}_ffn_dim"], value["activation_function"], bias=True, dropout=value["activation_dropout"]
        ),
        norm=LayerNormSpec(EPS),
        dropout=value["dropout"],
        wiring="post",
        cross=replace(attention, causal=False) if decodes else None,
    )
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=longest,
        blocks=(block,) * value[f"{side}_layers"],
        norm=NoNormSpec(),
        init=InitSpec(value["init_std"], value["init_std"]),
        tied_head=True,
        positions=LearnedPositionsSpec(longest, first=2),  # the table has two rows more, one of them for padding
        embedding_dropout=value["dropout"],
        embedding_scale=width**0.5 if value["scale_embedding"] else 1.0,
        embedding_norm=LayerNormSpec(EPS),
        head=LanguageHeadSpec(offset=True),
    )


BART = Family(
    name="bart",
    spec=_bart,
    keys=(
        "vocab_size",
        "max_position_embeddings",
        "d_model",
        "encoder_layers",
        "encoder_ffn_dim",
        "encoder_attention_heads",
        "decoder_layers",
        "decoder_ffn_dim",
        "decoder_attention_heads",
        "activation_function",
        "dropout",
        "attention_dropout",
        "activation_dropout",
        "classifier_dropout",
        "init_std",
        "scale_embedding",
        "decoder_start_token_id",
    ),
    names=BART_NAMES,
    trunk_prefix="model.",
    tasks={
        "language": Task(
            "BartForConditionalGeneration", (("lm_head.weight", "head.weight"), ("final_logits_bias", "head.offset"))
        ),
        **dict.fromkeys(
            ("sequence", "scalar"),
            Task("BartForSequenceClassification", SEQUENCE, partial(sequence_head, default_labels=3)),
        ),
        "span": span_task("Bart"),
    },
    # Of training and generation, or older names of keys that are there as well.
    harmless=(
        "classif_dropout",
        "extra_pos_embeddings",
        "force_bos_token_to_be_generated",
        "gradient_checkpointing",
        "num_hidden_layers",
        "output_past",
        "save_step",
        "student_decoder_layers",
        "student_encoder_layers",
    ),
    fixed={
        "add_bias_logits": (False,),
        "add_final_layer_norm": (False,),
        "decoder_layerdrop": (0.0, None),
        "do_blenderbot_90_layernorm": (False,),
        "encoder_layerdrop": (0.0, None),
        "is_decoder": (False,),
        "is_encoder_decoder": (True,),
        "normalize_before": (False,),
        "normalize_embedding": (True,),
        "static_position_embeddings": (False,),
        "tie_word_embeddings": (True,),
    },
    ignored_tensors=(r"(model\.)?(encoder|decoder)\.version",),
    tied_copies=(("model.encoder.embed_tokens.weight", "model.shared.weight"),),
    zeros_if_missing=("final_logits_bias",),
    new_model_config={"dropout": 0.0, "is_encoder_decoder": True, "decoder_start_token_id": 2},
)

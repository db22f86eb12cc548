"""T5, its version 1.1, Flan-T5 and ByT5: biases for distances instead of positions, no scale on the scores, no biases.

One table serves files with and without a classifier's head; mT5 shares all of it, see mt5.py.

Source: Raffel et al. 2020, arXiv:1910.10683; Xue et al. 2022, arXiv:2105.13626 (ByT5); transformers, `models/t5`.
"""

from collections.abc import Mapping

import torch

from alignment.errors import raise_all
from alignment.models.encoder_decoder import EncoderDecoderSpec
from alignment.models.families.family import Family, Key, Name, Task, num_labels, read_keys, span_head
from alignment.models.heads import ClassificationHeadSpec, LanguageHeadSpec, TransformSpec
from alignment.models.init_weights import FanInInitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    GatedFeedForwardSpec,
    PlainFeedForwardSpec,
    RelativeBiasSpec,
    RMSNormSpec,
)
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.safetensors_files import HFConfig, StoredTensor
from alignment.models.transformer import UNLIMITED, TransformerSpec

KEYS = {
    "vocab_size": Key(int, 32128, 1),
    "d_model": Key(int, 512, 1),
    "d_kv": Key(int, 64, 1),
    "d_ff": Key(int, 2048, 1),
    "num_layers": Key(int, 6, 1),
    "num_decoder_layers": Key(int, None, 1),
    "num_heads": Key(int, 8, 1),
    "relative_attention_num_buckets": Key(int, 32, 4),
    "relative_attention_max_distance": Key(int, 128, 1),
    "dropout_rate": Key(float, 0.1, 0),
    "classifier_dropout": Key(float, 0.0, 0),
    "layer_norm_epsilon": Key(float, 1e-6, 0),
    "initializer_factor": Key(float, 1.0, 0),
    "feed_forward_proj": Key(str, "relu"),
    "tie_word_embeddings": Key(bool, True),
    "pad_token_id": Key(int, 0, 0),
    "decoder_start_token_id": Key(int, None, 0),
}
OWN_KEYS = {"scale_decoder_outputs": Key(bool, None)}

# Documents may be longer than the `n_positions` of pretraining.
HARMLESS = ("gradient_checkpointing", "n_positions", "output_past")
# A classifier of tokens has the encoder alone, and its files say so.
FIXED = {"is_encoder_decoder": (True, False), "is_decoder": (False,)}
DERIVED = ("dense_act_fn", "is_gated_act")  # feed_forward_proj said again

# All tensors are called `.weight`. In a classifier's file `transformer.` precedes all of the names below.
ENCODER = (  # Hugging Face name                                 ours
    ("encoder.block.{}.layer.0.layer_norm",                      "encoder.blocks.{}.attention_norm"),
    ("encoder.block.{}.layer.0.SelfAttention.q",                 "encoder.blocks.{}.attention.query"),
    ("encoder.block.{}.layer.0.SelfAttention.k",                 "encoder.blocks.{}.attention.key"),
    ("encoder.block.{}.layer.0.SelfAttention.v",                 "encoder.blocks.{}.attention.value"),
    ("encoder.block.{}.layer.0.SelfAttention.o",                 "encoder.blocks.{}.attention.output"),
    ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "encoder.distance"),
    ("encoder.block.{}.layer.1.layer_norm",                      "encoder.blocks.{}.feedforward_norm"),
    ("encoder.block.{}.layer.1.DenseReluDense.wi",               "encoder.blocks.{}.feedforward.up"),
    ("encoder.block.{}.layer.1.DenseReluDense.wi_0",             "encoder.blocks.{}.feedforward.gate"),
    ("encoder.block.{}.layer.1.DenseReluDense.wo",               "encoder.blocks.{}.feedforward.down"),
    ("encoder.final_layer_norm",                                 "encoder.norm"),
    ("shared",                                                   "encoder.embed"),
)  # fmt: skip
DECODER = (
    ("decoder.block.{}.layer.0.layer_norm",                      "decoder.blocks.{}.attention_norm"),
    ("decoder.block.{}.layer.0.SelfAttention.q",                 "decoder.blocks.{}.attention.query"),
    ("decoder.block.{}.layer.0.SelfAttention.k",                 "decoder.blocks.{}.attention.key"),
    ("decoder.block.{}.layer.0.SelfAttention.v",                 "decoder.blocks.{}.attention.value"),
    ("decoder.block.{}.layer.0.SelfAttention.o",                 "decoder.blocks.{}.attention.output"),
    ("decoder.block.0.layer.0.SelfAttention.relative_attention_bias", "decoder.distance"),
    ("decoder.block.{}.layer.1.layer_norm",                      "decoder.blocks.{}.cross_norm"),
    ("decoder.block.{}.layer.1.EncDecAttention.q",               "decoder.blocks.{}.cross.query"),
    ("decoder.block.{}.layer.1.EncDecAttention.k",               "decoder.blocks.{}.cross.key"),
    ("decoder.block.{}.layer.1.EncDecAttention.v",               "decoder.blocks.{}.cross.value"),
    ("decoder.block.{}.layer.1.EncDecAttention.o",               "decoder.blocks.{}.cross.output"),
    ("decoder.block.{}.layer.2.layer_norm",                      "decoder.blocks.{}.feedforward_norm"),
    ("decoder.block.{}.layer.2.DenseReluDense.wi",               "decoder.blocks.{}.feedforward.up"),
    ("decoder.block.{}.layer.2.DenseReluDense.wi_0",             "decoder.blocks.{}.feedforward.gate"),
    ("decoder.block.{}.layer.2.DenseReluDense.wo",               "decoder.blocks.{}.feedforward.down"),
    ("decoder.final_layer_norm",                                 "decoder.norm"),
    ("decoder.embed_tokens",                                     "decoder.embed"),
)  # fmt: skip
GATED = (  # takes the place of wi where there is a gate
    ("encoder.block.{}.layer.1.DenseReluDense.wi_1",             "encoder.blocks.{}.feedforward.up"),
    ("decoder.block.{}.layer.2.DenseReluDense.wi_1",             "decoder.blocks.{}.feedforward.up"),
)  # fmt: skip


def _weights(table: tuple[tuple[str, str], ...]) -> tuple[Name, ...]:
    """The full lines of a table; the encoder of a token classifier, which has no decoder, is our `trunk`."""
    alone = tuple((hf, ours.replace("encoder.", "trunk.", 1)) for hf, ours in table if ours.startswith("encoder."))
    return tuple((f"transformer.{hf}.weight", f"{ours}.weight") for hf, ours in (*table, *alone))


CLASSIFIER: tuple[Name, ...] = (
    ("classification_head.dense.weight",                         "head.transform.dense.weight"),
    ("classification_head.dense.bias",                           "head.transform.dense.bias"),
    ("classification_head.out_proj.weight",                      "head.output.weight"),
    ("classification_head.out_proj.bias",                        "head.output.bias"),
)  # fmt: skip


def gated_names(config: HFConfig) -> tuple[Name, ...]:
    """The lines that replace others if the feed-forward is gated."""
    return _weights(GATED) if str(config.get("feed_forward_proj", "relu")).startswith("gated-") else ()


def spec_from_config(config: HFConfig) -> EncoderDecoderSpec:
    """The specification of a T5 config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_t5(config, {**KEYS, **OWN_KEYS})
    raise_all(problems)
    scaled = value["scale_decoder_outputs"]
    # Before there was a key for it, files of version 1.1 were known by their untied head.
    return t5_spec(value, config, value["tie_word_embeddings"] if scaled is None else scaled)


def read_t5(config: HFConfig, keys: Mapping[str, Key]) -> tuple[HFConfig, list[str]]:
    """The values of `keys` and all problems, also those between keys."""
    value, problems = read_keys(config, keys, harmless=HARMLESS, fixed=FIXED, by_hand=DERIVED)
    if problems:
        return value, problems
    activation, gated = feed_forward(value)
    if activation not in ACTIVATIONS:
        problems.append(
            f"config.json: feed_forward_proj {value['feed_forward_proj']!r} is not one of {', '.join(ACTIVATIONS)}, "
            "perhaps with 'gated-' before it"
        )
    problems += [
        f"config.json: {key} = {config[key]!r} contradicts feed_forward_proj = {value['feed_forward_proj']!r}"
        for key, said in zip(DERIVED, (activation, gated), strict=True)
        if config.get(key, said) != said
    ]
    buckets, far = value["relative_attention_num_buckets"], value["relative_attention_max_distance"]
    if far <= buckets // 2 or buckets % 2:
        problems.append(
            f"config.json: relative_attention_num_buckets = {buckets} must be even, and "
            f"relative_attention_max_distance = {far} more than half of it"
        )
    return value, problems


def feed_forward(value: HFConfig) -> tuple[str, bool]:
    """Name of the activation, and whether there is a gate."""
    name = value["feed_forward_proj"]
    if name == "gated-gelu":
        return "gelu_new", True  # the one name that means another function
    return name.removeprefix("gated-"), name.startswith("gated-")


def t5_spec(value: HFConfig, config: HFConfig, scaled: bool) -> EncoderDecoderSpec:
    """The specification; `scaled`: logits are multiplied by D ** -0.5."""
    start, end = value["decoder_start_token_id"], config.get("eos_token_id", 1)
    decoder_layers = value["num_decoder_layers"]
    return EncoderDecoderSpec(
        encoder=_stack(value, value["num_layers"], decodes=False, scaled=scaled),
        decoder=_stack(
            value, value["num_layers"] if decoder_layers is None else decoder_layers, decodes=True, scaled=scaled
        ),
        start_token=value["pad_token_id"] if start is None else start,  # as all T5s were trained
        end_token=end if isinstance(end, int) else None,
    )


def _stack(value: HFConfig, layers: int, *, decodes: bool, scaled: bool) -> TransformerSpec:
    norm, width, dropout = RMSNormSpec(value["layer_norm_epsilon"]), value["d_model"], value["dropout_rate"]
    factor = value["initializer_factor"]
    block = BlockSpec(
        attention=_attention(value, causal=decodes, position_bias=_position_bias(value)),
        feedforward=_feedforward(value),
        norm=norm,
        dropout=dropout,
        cross=_attention(value, causal=False) if decodes else None,
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


def _position_bias(value: HFConfig) -> RelativeBiasSpec:
    return RelativeBiasSpec(value["relative_attention_num_buckets"], value["relative_attention_max_distance"])


def _attention(value: HFConfig, *, causal: bool, position_bias: RelativeBiasSpec | None = None) -> AttentionSpec:
    heads = value["num_heads"]
    return AttentionSpec(
        heads,
        heads,
        value["d_kv"],
        1.0,
        False,
        False,
        value["dropout_rate"],
        causal=causal,
        position_bias=position_bias,
    )


def _feedforward(value: HFConfig) -> PlainFeedForwardSpec | GatedFeedForwardSpec:
    activation, gated = feed_forward(value)
    part = GatedFeedForwardSpec if gated else PlainFeedForwardSpec
    return part(value["d_ff"], activation, bias=False, dropout=value["dropout_rate"])


def _own_head(config: HFConfig, tensors: Mapping[str, StoredTensor]) -> HFConfig:
    """The config of a file, with an untied head if the file has one."""
    if not head_differs(tensors):
        return config
    scaled = config.get("scale_decoder_outputs", config.get("tie_word_embeddings", True))
    return config | {"tie_word_embeddings": False, "scale_decoder_outputs": scaled}


def head_differs(tensors: Mapping[str, StoredTensor]) -> bool:
    """Whether a file has a head that differs from its token table; configs saved by transformers 5 do not tell."""
    head, table = tensors.get("lm_head.weight"), tensors.get("shared.weight")
    return head is not None and table is not None and not torch.equal(head.read(), table.read())


def sequence_head(config: HFConfig) -> ClassificationHeadSpec:
    """A hidden layer and a linear one on what the decoder says at the end token."""
    transform, dropout = TransformSpec(config.get("d_model", 512), "tanh", True), config.get("classifier_dropout", 0.0)
    return ClassificationHeadSpec(num_labels(config), transform, dropout=dropout, input_dropout=dropout, pooling="last")


def token_head(config: HFConfig) -> ClassificationHeadSpec:
    """A linear layer on every token of the encoder."""
    return ClassificationHeadSpec(num_labels(config), dropout=config.get("classifier_dropout", 0.0))


def t5_tasks(stem: str) -> dict[str, Task]:
    """The tasks of a family whose classes are named `stem`ForConditionalGeneration and so on."""
    tokens = (("classifier.weight", "head.output.weight"), ("classifier.bias", "head.output.bias"))
    span = (("qa_outputs.weight", "head.output.weight"), ("qa_outputs.bias", "head.output.bias"))
    return {
        "language": Task(f"{stem}ForConditionalGeneration", (("lm_head.weight", "head.weight"),), trunk_prefix=""),
        "sequence": Task(f"{stem}ForSequenceClassification", CLASSIFIER, sequence_head),
        "tokens": Task(f"{stem}ForTokenClassification", tokens, token_head, other_heads=(r"transformer\.decoder\..*",)),
        "span": Task(f"{stem}ForQuestionAnswering", span, span_head, trunk_prefix=""),
    }


T5_NAMES = (*_weights(GATED), *_weights((*ENCODER, *DECODER)))
# Each stack's file name for the shared table, in older files; and a bias that never acted.
T5_TIED_COPIES = tuple(
    (f"{prefix}encoder.embed_tokens.weight", f"{prefix}shared.weight") for prefix in ("", "transformer.")
)
T5_IGNORED_TENSORS = (r"(transformer\.)?decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
T5_NEW_MODEL_CONFIG = {"dropout_rate": 0.0, "is_encoder_decoder": True, "decoder_start_token_id": 0}

T5 = Family(
    name="t5",
    spec_from_config=spec_from_config,
    names=T5_NAMES,
    trunk_prefix="transformer.",
    tasks=t5_tasks("T5"),
    ignored_tensors=T5_IGNORED_TENSORS,
    tied_copies=T5_TIED_COPIES,
    names_from_config=gated_names,
    new_model_config=T5_NEW_MODEL_CONFIG,
    config_from_tensors=_own_head,
)

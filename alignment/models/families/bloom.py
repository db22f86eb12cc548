"""BLOOM: ALiBi instead of positions, a norm right after the embedding, query, key and value fused head by head.

Source: BigScience 2022, arXiv:2211.05100; transformers, `models/bloom`.
"""

from alignment.errors import raise_all
from alignment.models.families.family import Family, Key, decoder_tasks, divides, read_keys
from alignment.models.families.fused import (
    classifier_dropout,
    dropped_token_task,
    fused_by_key_head,
    with_present_names,
)
from alignment.models.init_weights import InitSpec
from alignment.models.layers import AlibiSpec, AttentionSpec, BlockSpec, LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, TransformerSpec

KEYS = {
    "vocab_size": Key(int, 250880, 1),
    "hidden_size": Key(int, 64, 1),
    "n_layer": Key(int, 2, 1),
    "n_head": Key(int, 8, 1),
    "layer_norm_epsilon": Key(float, 1e-5, 0),
    "initializer_range": Key(float, 0.02, 0),
    "apply_residual_connection_post_layernorm": Key(bool, False),
    "hidden_dropout": Key(float, 0.0, 0),
    "attention_dropout": Key(float, 0.0, 0),
    "classifier_dropout": Key(float, None, 0),
    "tie_word_embeddings": Key(bool, True),
}
OLD_NAMES = {"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
# How the training library split and fused its work; softmax runs in fp32 here whatever they say. A longest document
# is no part of ALiBi.
HARMLESS = (
    "attention_softmax_in_fp32",
    "bias_dropout_fusion",
    "masked_softmax_fusion",
    "offset_alibi",
    "pretraining_tp",
    "seq_length",
    "skip_bias_add",
    "skip_bias_add_qkv",
    "slow_but_exact",
)
FIXED = {"n_inner": (None,)}

NAMES = (  # Hugging Face name                                      ours
    ("transformer.word_embeddings.weight",                          "trunk.embed.weight"),
    ("transformer.word_embeddings_layernorm.weight",                "trunk.embedding_norm.weight"),
    ("transformer.word_embeddings_layernorm.bias",                  "trunk.embedding_norm.bias"),
    ("transformer.h.{}.input_layernorm.weight",                     "trunk.blocks.{}.attention_norm.weight"),
    ("transformer.h.{}.input_layernorm.bias",                       "trunk.blocks.{}.attention_norm.bias"),
    ("transformer.h.{}.self_attention.query_key_value.weight",     ("trunk.blocks.{}.attention.query.weight",
                                                                    "trunk.blocks.{}.attention.key.weight",
                                                                    "trunk.blocks.{}.attention.value.weight")),
    ("transformer.h.{}.self_attention.query_key_value.bias",       ("trunk.blocks.{}.attention.query.bias",
                                                                    "trunk.blocks.{}.attention.key.bias",
                                                                    "trunk.blocks.{}.attention.value.bias")),
    ("transformer.h.{}.self_attention.dense.weight",                "trunk.blocks.{}.attention.output.weight"),
    ("transformer.h.{}.self_attention.dense.bias",                  "trunk.blocks.{}.attention.output.bias"),
    ("transformer.h.{}.post_attention_layernorm.weight",            "trunk.blocks.{}.feedforward_norm.weight"),
    ("transformer.h.{}.post_attention_layernorm.bias",              "trunk.blocks.{}.feedforward_norm.bias"),
    ("transformer.h.{}.mlp.dense_h_to_4h.weight",                   "trunk.blocks.{}.feedforward.up.weight"),
    ("transformer.h.{}.mlp.dense_h_to_4h.bias",                     "trunk.blocks.{}.feedforward.up.bias"),
    ("transformer.h.{}.mlp.dense_4h_to_h.weight",                   "trunk.blocks.{}.feedforward.down.weight"),
    ("transformer.h.{}.mlp.dense_4h_to_h.bias",                     "trunk.blocks.{}.feedforward.down.bias"),
    ("transformer.ln_f.weight",                                     "trunk.norm.weight"),
    ("transformer.ln_f.bias",                                       "trunk.norm.bias"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a BLOOM config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    config, old_problems = with_present_names(config, OLD_NAMES)
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED)
    width, heads = value["hidden_size"], value["n_head"]
    if not divides(heads, width):
        problems.append(f"config.json: n_head = {heads!r} does not divide hidden_size = {width!r}")
    raise_all([*old_problems, *problems])
    attention = AttentionSpec(
        heads, heads, width // heads, (width // heads) ** -0.5, bias=True, output_bias=True,
        dropout=value["attention_dropout"], position_bias=AlibiSpec(),
    )  # fmt: skip
    norm = LayerNormSpec(value["layer_norm_epsilon"])
    feedforward = PlainFeedForwardSpec(4 * width, "gelu_new", bias=True)
    wiring = "residual" if value["apply_residual_connection_post_layernorm"] else "pre"
    block = BlockSpec(attention, feedforward, norm, value["hidden_dropout"], wiring)
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=width,
        max_positions=UNLIMITED,
        blocks=(block,) * value["n_layer"],
        norm=norm,
        init=InitSpec(value["initializer_range"], value["initializer_range"]),
        tied_head=value["tie_word_embeddings"],
        embedding_norm=norm,
    )


BLOOM = Family(
    name="bloom",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="transformer.",
    tasks=decoder_tasks("Bloom", ("sequence", "span"))
    | {"tokens": dropped_token_task("BloomForTokenClassification", classifier_dropout)},
    interleaved=fused_by_key_head("query_key_value"),
)

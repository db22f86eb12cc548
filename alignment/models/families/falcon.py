"""Falcon: one key head for all queries (7b), one per group of them (40b), or one each with ALiBi (rw).

In training dropout is drawn for attention and feed-forward apart; transformers draws it once for their sum.

Source: Almazrouei et al. 2023, arXiv:2311.16867; transformers, `models/falcon`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from alignment.errors import raise_all
from alignment.models.families.decoders import rotary_attention, rotary_decoder
from alignment.models.families.family import CLASSIFIER, QUERY_KEY_VALUE, Family, Name, Task, decoder_tasks, token_head
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BFloat16AlibiSpec, LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, TransformerSpec

NAMES: tuple[Name, ...] = (
    # Hugging Face name                                  ours
    ("transformer.word_embeddings",                      "trunk.embed"),
    ("transformer.h.{}.input_layernorm",                 "trunk.blocks.{}.attention_norm"),
    ("transformer.h.{}.self_attention.query_key_value",  QUERY_KEY_VALUE),
    ("transformer.h.{}.self_attention.dense",            "trunk.blocks.{}.attention.output"),
    ("transformer.h.{}.post_attention_layernorm",        "trunk.blocks.{}.feedforward_norm"),
    ("transformer.h.{}.mlp.dense_h_to_4h",               "trunk.blocks.{}.feedforward.up"),
    ("transformer.h.{}.mlp.dense_4h_to_h",               "trunk.blocks.{}.feedforward.down"),
    ("transformer.ln_f",                                 "trunk.norm"),
)  # fmt: skip
# Files with two norms side by side name them otherwise than files with norms one after the other.
SIDE_BY_SIDE: tuple[Name, ...] = (
    ("transformer.h.{}.ln_attn",                         "trunk.blocks.{}.attention_norm"),
    ("transformer.h.{}.ln_mlp",                          "trunk.blocks.{}.feedforward_norm"),
)  # fmt: skip


def _spec(value: HFConfig) -> TransformerSpec:
    raise_all(_norm_problems(value))
    attention = rotary_attention({**value, "num_key_value_heads": _key_heads(value)}, bias=value["bias"])
    if value["alibi"]:
        attention = replace(attention, rotary=None, position_bias=BFloat16AlibiSpec(attention.scale))
    inner = value["ffn_hidden_size"] or 4 * value["hidden_size"]
    return rotary_decoder(
        {**value, "max_position_embeddings": UNLIMITED} if value["alibi"] else value,
        attention,
        norm=LayerNormSpec(value["layer_norm_epsilon"]),
        feedforward=PlainFeedForwardSpec(inner, value["activation"], value["bias"]),
        block={"wiring": _wiring(value), "dropout": value["hidden_dropout"]},
    )


def _key_heads(value: HFConfig) -> int | None:
    """Number of key heads; None: one for each query head."""
    if value["new_decoder_architecture"]:
        return value["num_kv_heads"]
    return 1 if value["multi_query"] else None


def _wiring(value: HFConfig) -> Literal["pre", "parallel", "parallel_shared"]:
    if not value["parallel_attn"]:
        return "pre"
    own_norms = value["new_decoder_architecture"] and value["num_ln_in_parallel_attn"] in (None, 2)
    return "parallel" if own_norms else "parallel_shared"


def _norm_problems(value: HFConfig) -> Iterator[str]:
    norms, new = value["num_ln_in_parallel_attn"], value["new_decoder_architecture"]
    if new and not value["parallel_attn"]:
        yield "config.json: new_decoder_architecture = True needs parallel_attn = True"
    if norms not in ((None, 1, 2) if new else (None, 1)):
        yield (
            f"config.json: num_ln_in_parallel_attn = {norms!r} is not supported, only 1, or 2 with "
            "new_decoder_architecture"
        )


FALCON = Family(
    name="falcon",
    spec=_spec,
    keys=(
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_kv_heads",
        "num_ln_in_parallel_attn", "ffn_hidden_size", "activation", "alibi", "bias", "multi_query",
        "new_decoder_architecture", "parallel_attn", "hidden_dropout", "attention_dropout", "classifier_dropout",
        "max_position_embeddings", "layer_norm_epsilon", "initializer_range", "tie_word_embeddings",
    ),
    names=(*SIDE_BY_SIDE, *NAMES),
    trunk_prefix="transformer.",
    tasks={
        **decoder_tasks("Falcon", ("sequence", "span")),
        "tokens": Task("FalconForTokenClassification", CLASSIFIER, token_head("classifier_dropout", "hidden_dropout")),
    },
    defaults={"classifier_dropout": None},
    by_hand=ROPE_KEYS,
    fixed={"apply_residual_connection_post_layernorm": (False,), "ff_factor": (4,)},
    old_keys={"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"},
    interleaved=("query_key_value.weight", "query_key_value.bias"),
    names_from_config=lambda value: SIDE_BY_SIDE if _wiring(value) == "parallel" else (),
)  # fmt: skip

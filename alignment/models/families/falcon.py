"""Falcon: one key head for all queries (7b), one per group of them (40b), or one each with ALiBi (rw).

In training dropout is drawn for attention and feed-forward apart; transformers draws it once for their sum.

Source: Almazrouei et al. 2023, arXiv:2311.16867; transformers, `models/falcon`.
"""

from typing import Any, Literal

from alignment.errors import raise_all
from alignment.models.families.decoders import activation_problems, grouped_attention, llama_like
from alignment.models.families.family import Family, Key, Name, decoder_tasks, read_keys
from alignment.models.families.fused import (
    classifier_dropout,
    dropped_token_task,
    fused_by_key_head,
    with_present_names,
)
from alignment.models.families.rope import ROPE_KEYS
from alignment.models.layers import BFloat16AlibiSpec, BlockSpec, LayerNormSpec, PlainFeedForwardSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import UNLIMITED, TransformerSpec

KEYS = {
    "vocab_size": Key(int, 65024, 1),
    "hidden_size": Key(int, 4544, 1),
    "num_hidden_layers": Key(int, 32, 1),
    "num_attention_heads": Key(int, 71, 1),
    "num_kv_heads": Key(int, None, 1),
    "num_ln_in_parallel_attn": Key(int, None, 1),
    "ffn_hidden_size": Key(int, None, 1),
    "activation": Key(str, "gelu"),
    "alibi": Key(bool, False),
    "bias": Key(bool, False),
    "multi_query": Key(bool, True),
    "new_decoder_architecture": Key(bool, False),
    "parallel_attn": Key(bool, True),
    "hidden_dropout": Key(float, 0.0, 0),
    "attention_dropout": Key(float, 0.0, 0),
    "classifier_dropout": Key(float, None, 0),
    "max_position_embeddings": Key(int, 2048, 1),
    "layer_norm_epsilon": Key(float, 1e-5, 0),
    "initializer_range": Key(float, 0.02, 0),
    "tie_word_embeddings": Key(bool, True),
}
OLD_NAMES = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
FIXED = {"apply_residual_connection_post_layernorm": (False,), "ff_factor": (4,)}

# Files with two norms side by side name them otherwise than files with norms one after the other.
SIDE_BY_SIDE = (  # Hugging Face name                                ours
    ("transformer.h.{}.ln_attn.weight",                             "trunk.blocks.{}.attention_norm.weight"),
    ("transformer.h.{}.ln_attn.bias",                               "trunk.blocks.{}.attention_norm.bias"),
    ("transformer.h.{}.ln_mlp.weight",                              "trunk.blocks.{}.feedforward_norm.weight"),
    ("transformer.h.{}.ln_mlp.bias",                                "trunk.blocks.{}.feedforward_norm.bias"),
)  # fmt: skip
NAMES = (
    *SIDE_BY_SIDE,
    ("transformer.word_embeddings.weight",                          "trunk.embed.weight"),
    ("transformer.h.{}.input_layernorm.weight",                     "trunk.blocks.{}.attention_norm.weight"),
    ("transformer.h.{}.input_layernorm.bias",                       "trunk.blocks.{}.attention_norm.bias"),
    ("transformer.h.{}.post_attention_layernorm.weight",            "trunk.blocks.{}.feedforward_norm.weight"),
    ("transformer.h.{}.post_attention_layernorm.bias",              "trunk.blocks.{}.feedforward_norm.bias"),
    ("transformer.h.{}.self_attention.query_key_value.weight",     ("trunk.blocks.{}.attention.query.weight",
                                                                    "trunk.blocks.{}.attention.key.weight",
                                                                    "trunk.blocks.{}.attention.value.weight")),
    ("transformer.h.{}.self_attention.dense.weight",                "trunk.blocks.{}.attention.output.weight"),
    ("transformer.h.{}.mlp.dense_h_to_4h.weight",                   "trunk.blocks.{}.feedforward.up.weight"),
    ("transformer.h.{}.mlp.dense_4h_to_h.weight",                   "trunk.blocks.{}.feedforward.down.weight"),
    ("transformer.ln_f.weight",                                     "trunk.norm.weight"),
    ("transformer.ln_f.bias",                                       "trunk.norm.bias"),
    # with bias
    ("transformer.h.{}.self_attention.query_key_value.bias",       ("trunk.blocks.{}.attention.query.bias",
                                                                    "trunk.blocks.{}.attention.key.bias",
                                                                    "trunk.blocks.{}.attention.value.bias")),
    ("transformer.h.{}.self_attention.dense.bias",                  "trunk.blocks.{}.attention.output.bias"),
    ("transformer.h.{}.mlp.dense_h_to_4h.bias",                     "trunk.blocks.{}.feedforward.up.bias"),
    ("transformer.h.{}.mlp.dense_4h_to_h.bias",                     "trunk.blocks.{}.feedforward.down.bias"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Falcon config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    config, old_problems = with_present_names(config, OLD_NAMES)
    value, problems = read_keys(config, KEYS, fixed=FIXED, by_hand=ROPE_KEYS)
    value["num_key_value_heads"] = _key_heads(value)
    more: dict[str, Any] = {}
    if value["alibi"] and not problems:
        head_dim = value["hidden_size"] // value["num_attention_heads"]
        more = {"rotary": None, "position_bias": BFloat16AlibiSpec(head_dim**-0.5)}
    attention, attention_problems = grouped_attention(config, value, value["bias"], value["bias"], **more)
    problems += attention_problems + activation_problems(value["activation"], "activation") + _norm_problems(value)
    raise_all([*old_problems, *problems])
    norm = LayerNormSpec(value["layer_norm_epsilon"])
    inner = value["ffn_hidden_size"] or 4 * value["hidden_size"]
    feedforward = PlainFeedForwardSpec(inner, value["activation"], value["bias"])
    block = BlockSpec(attention, feedforward, norm, value["hidden_dropout"], _wiring(value))
    if value["alibi"]:
        value["max_position_embeddings"] = UNLIMITED
    return llama_like(value, attention, (block,) * value["num_hidden_layers"], norm)


def _key_heads(value: HFConfig) -> int | None:
    """None: one for each query head."""
    if value["new_decoder_architecture"]:
        return value["num_kv_heads"]
    return 1 if value["multi_query"] else None


def _wiring(value: HFConfig) -> Literal["pre", "parallel", "parallel_shared"]:
    if not value["parallel_attn"]:
        return "pre"
    own_norms = value["new_decoder_architecture"] and value["num_ln_in_parallel_attn"] in (None, 2)
    return "parallel" if own_norms else "parallel_shared"


def _norm_problems(value: HFConfig) -> list[str]:
    norms, new = value["num_ln_in_parallel_attn"], value["new_decoder_architecture"]
    problems = []
    if new and not value["parallel_attn"]:
        problems.append("config.json: new_decoder_architecture = True needs parallel_attn = True")
    if norms not in ((None, 1, 2) if new else (None, 1)):
        problems.append(
            f"config.json: num_ln_in_parallel_attn = {norms!r} is not supported, only 1, or 2 with "
            "new_decoder_architecture"
        )
    return problems


def _names_from_config(config: HFConfig) -> tuple[Name, ...]:
    value, _ = read_keys(dict(config), KEYS)
    return SIDE_BY_SIDE if _wiring(value) == "parallel" else ()


FALCON = Family(
    name="falcon",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="transformer.",
    tasks=decoder_tasks("Falcon", ("sequence", "span"))
    | {"tokens": dropped_token_task("FalconForTokenClassification", classifier_dropout)},
    interleaved=fused_by_key_head("query_key_value"),
    names_from_config=_names_from_config,
)

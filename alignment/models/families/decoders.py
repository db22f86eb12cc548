"""Parts of specifications that many families share: attention, layers with windows, decoders with rotary positions."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from alignment.errors import UserError, raise_all
from alignment.models.families.rope import longest_document, read_rotary
from alignment.models.init_weights import InitSpec
from alignment.models.layers import (
    AttentionSpec,
    BlockSpec,
    FeedForwardSpec,
    GatedFeedForwardSpec,
    NormSpec,
    OwnScoresSpec,
    RMSNormSpec,
)
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

LAYER_TYPES = ("full_attention", "sliding_attention")


def attention_spec(
    value: HFConfig, heads: str = "num_attention_heads", width: str = "hidden_size", *, bias: bool = True, **more: Any
) -> AttentionSpec:
    """Attention whose scores are scaled by head_dim ** -0.5; raises UserError where a number of heads does not divide.

    Args:
        value: a config's values; its `head_dim` and `num_key_value_heads` count where they are set.
        heads, width: keys of the number of heads and of the width that they share.
        bias: of all four layers.
        more: other fields.
    """
    count = value[heads]
    shared = value.get("num_key_value_heads")
    head_dim = value.get("head_dim")
    problems = []
    if head_dim is None and value[width] % count:
        problems.append(f"config.json: {heads} = {count} does not divide {width} = {value[width]}")
    if shared is not None and count % shared:
        problems.append(f"config.json: num_key_value_heads = {shared} does not divide {heads} = {count}")
    raise_all(problems)
    head_dim = head_dim or value[width] // count
    return AttentionSpec(
        count, shared or count, head_dim, **{"scale": head_dim**-0.5, "bias": bias, "output_bias": bias, **more}
    )


def rotary_attention(value: HFConfig, *, whole: bool = True, **more: Any) -> AttentionSpec:
    """Causal attention with rotary positions, from Llama's keys; `more` are other fields.

    Raises UserError as `attention_spec` and `read_rotary`; or, if `whole`, where only a part of each head is turned.
    """
    bias = value.get("attention_bias", False)
    dropout = value["attention_dropout"]
    attention = attention_spec(value, **{"bias": bias, "dropout": dropout, **more})
    rotary = read_rotary(value, attention.head_dim)
    if whole and rotary.width != attention.head_dim:
        raise UserError("config.json: partial_rotary_factor is not supported: this family turns whole heads")
    return replace(attention, rotary=rotary)


def transformer_spec(
    value: HFConfig,
    attention: AttentionSpec | OwnScoresSpec | Sequence[AttentionSpec | OwnScoresSpec],
    *,
    norm: NormSpec | None = None,
    feedforward: FeedForwardSpec | None = None,
    block: HFConfig | None = None,
    **more: Any,
) -> TransformerSpec:
    """A decoder or encoder from Llama's keys; `more` are other fields, or others in place of these.

    Args:
        attention: of every layer, or of each.
        norm: of every layer and after the last; None: RMSNorm.
        feedforward: of every layer; None: gated, with biases as `mlp_bias` says.
        block: other fields of every layer.
    """
    attentions = attention if isinstance(attention, Sequence) else [attention] * value["num_hidden_layers"]
    norm = norm or RMSNormSpec(value["rms_norm_eps"])
    feedforward = feedforward or GatedFeedForwardSpec(
        value["intermediate_size"], value["hidden_act"], value.get("mlp_bias", False)
    )
    # A dynamic scaling lengthens what the layers that see everything can place; those with a window have no say.
    turning = [spec for spec in attentions if isinstance(spec, AttentionSpec) and spec.rotary]
    turning.sort(key=lambda each: each.window is not None)
    fields = {
        "vocabulary": value["vocab_size"],
        "width": value["hidden_size"],
        "max_positions": longest_document(turning[0].rotary if turning else None, value["max_position_embeddings"]),
        "blocks": tuple(BlockSpec(spec, feedforward, norm, **(block or {})) for spec in attentions),
        "norm": norm,
        "init": InitSpec(value["initializer_range"], value["initializer_range"]),
        "tied_head": value["tie_word_embeddings"],
    }
    return TransformerSpec(**(fields | more))


def windows(value: HFConfig, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
    """The sliding window of each layer, None for full attention.

    Args:
        value: `num_hidden_layers` and `layer_types`; the latter has precedence over `slides`.
        window: number of positions that a sliding layer attends to.
        slides: the family's default, layer index -> whether it has the window.

    Raises:
        UserError: `layer_types` is not one of LAYER_TYPES for each layer, or names windows and there is none.
    """
    count = value["num_hidden_layers"]
    types = value["layer_types"]
    if types is None:
        types = [LAYER_TYPES[slides(layer)] for layer in range(count)]
    wrong = [kind for kind in dict.fromkeys(map(str, types)) if kind not in LAYER_TYPES]
    known = ", ".join(LAYER_TYPES)
    problems = [f"config.json: layer_types has {kind!r}, which is not one of {known}" for kind in wrong]
    if len(types) != count:
        problems.append(f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {count}")
    if "sliding_attention" in types and window is None:
        problems.append("config.json: layer_types has sliding_attention, but no sliding_window is set and in use")
    raise_all(problems)
    return [window if kind == "sliding_attention" else None for kind in types]


def layer_ropes(value: HFConfig) -> HFConfig:
    """`rope_parameters` of a config that has a mapping for each of LAYER_TYPES; raises UserError for anything else."""
    given = value.get("rope_parameters") or {}
    known = ", ".join(LAYER_TYPES)
    ropes = given if isinstance(given, dict) else {}
    problems = [
        f"config.json: rope_parameters has {kind!r}, which is not one of {known}"
        for kind in ropes
        if kind not in LAYER_TYPES
    ]
    if ropes is not given or not all(isinstance(rope, dict | None) for rope in ropes.values()):
        problems.append(f"config.json: rope_parameters must be a mapping of {known}, got {given!r}")
    raise_all(problems)
    return ropes

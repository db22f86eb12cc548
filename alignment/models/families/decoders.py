"""Functions that read the configs of many decoders: grouped-query attention, rotary positions, layers with windows."""

from collections.abc import Callable
from typing import Any

from alignment.models.families.family import divides
from alignment.models.families.rope import longest_document, read_rotary
from alignment.models.init_weights import InitSpec
from alignment.models.layers import AttentionSpec, BlockSpec, NormSpec, RotarySpec
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

LAYER_TYPES = ("full_attention", "sliding_attention")


def activation_problems(name: object, key: str = "hidden_act") -> list[str]:
    """One message if there is no activation of this name."""
    return [] if name in ACTIVATIONS else [f"config.json: {key} {name!r} is not one of {', '.join(ACTIVATIONS)}"]


def grouped_attention(
    config: HFConfig, value: HFConfig, bias: bool, output_bias: bool, **more: Any
) -> tuple[AttentionSpec, list[str]]:
    """Causal attention with rotary positions from a config with Llama's keys, and the problems found.

    Args:
        config: as read, for the rotary keys.
        value: `hidden_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `max_position_embeddings` and,
            where the family has it, `attention_dropout`.
        more: further fields of the specification, and arguments of `read_rotary`. Without `partial`, a config that
            rotates only a part of each head is a problem.
    """
    heads, shared, width = value["num_attention_heads"], value["num_key_value_heads"], value["hidden_size"]
    shared = heads if shared is None else shared
    problems = []
    if value.get("head_dim") is None and not divides(heads, width):
        problems.append(f"config.json: num_attention_heads = {heads!r} does not divide hidden_size")
    if not divides(shared, heads):
        problems.append(f"config.json: num_key_value_heads = {shared!r} does not divide num_attention_heads")
    if problems:
        return AttentionSpec(1, 1, 2, 1.0, bias, output_bias), problems
    head_dim = value.get("head_dim") or width // heads
    given = {key: more.pop(key) for key in ("theta", "partial", "parameters") if key in more}
    rotary, problems = read_rotary(config, head_dim, value["max_position_embeddings"], **given)
    if not problems and "partial" not in given and rotary.width != head_dim:
        problems = ["config.json: partial_rotary_factor is not supported: this family turns whole heads"]
    settings = {"scale": head_dim**-0.5, "dropout": value.get("attention_dropout", 0.0), "rotary": rotary, **more}
    return AttentionSpec(heads, shared, head_dim, bias=bias, output_bias=output_bias, **settings), problems


def llama_like(
    value: HFConfig, attention: AttentionSpec, blocks: tuple[BlockSpec, ...], norm: NormSpec, **more: Any
) -> TransformerSpec:
    """A decoder without position embeddings from Llama's keys; `more` are further fields of the specification."""
    longest = value["max_position_embeddings"]
    rotary = attention.rotary
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=value["hidden_size"],
        max_positions=longest_document(rotary, longest) if isinstance(rotary, RotarySpec) else longest,
        blocks=blocks,
        norm=norm,
        init=InitSpec(value["initializer_range"], value["initializer_range"]),
        tied_head=value["tie_word_embeddings"],
        **more,
    )


def windows(value: HFConfig, window: int | None, slides: Callable[[int], bool]) -> tuple[list[int | None], list[str]]:
    """The sliding window of each layer, None for full attention, and the problems found.

    Args:
        value: `num_hidden_layers` and `layer_types`; the latter has precedence over `slides`.
        window: number of positions that a sliding layer attends to.
        slides: the family's default, layer index -> whether it has the window.
    """
    count, types = value["num_hidden_layers"], value["layer_types"]
    if not isinstance(count, int) or not isinstance(types, list | None):
        return [], []  # reported already
    if types is None:
        types = [LAYER_TYPES[slides(layer)] for layer in range(count)]
    problems = [
        f"config.json: layer_types has {kind!r}, which is not one of {', '.join(LAYER_TYPES)}"
        for kind in dict.fromkeys(map(str, types))
        if kind not in LAYER_TYPES
    ]
    if len(types) != count:
        problems.append(f"config.json: layer_types names {len(types)} layers, num_hidden_layers is {count}")
    if "sliding_attention" in types and window is None:
        problems.append("config.json: layer_types has sliding_attention, but no sliding_window is set and in use")
    return [window if kind == "sliding_attention" else None for kind in types], problems

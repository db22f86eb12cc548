"""What the configs of many decoders share: grouped-query attention with rotary positions, the shape of a Llama."""

from collections.abc import Mapping
from typing import Any

from alignment.models.families.family import divides
from alignment.models.families.rope import longest_document, read_rotary
from alignment.models.feedforward import ACTIVATIONS
from alignment.models.spec import AttentionSpec, BlockSpec, InitSpec, NormSpec, TransformerSpec
from alignment.models.spec_positions import RotarySpec


def activation_problems(name: Any, key: str = "hidden_act") -> list[str]:
    """A problem where there is no such activation."""
    return [] if name in ACTIVATIONS else [f"config.json: {key} {name!r} is not one of {', '.join(ACTIVATIONS)}"]


def grouped_attention(
    config: Mapping[str, Any], value: Mapping[str, Any], bias: bool, output_bias: bool, **more: Any
) -> tuple[AttentionSpec, list[str]]:
    """Causal attention with rotary positions from Llama's keys, and the problems found.

    Args:
        config: as read, for the rotary keys.
        value: `hidden_size`, `num_attention_heads`, `num_key_value_heads`, `head_dim`, `max_position_embeddings` and,
            where the family has it, `attention_dropout`.
        more: further fields of the specification; `theta` and `partial` are the family's rotary defaults.
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
    head_width = value.get("head_dim") or width // heads
    defaults = {key: more.pop(key) for key in ("theta", "partial") if key in more}
    rotary, problems = read_rotary(config, head_width, value["max_position_embeddings"], **defaults)
    settings = {"scale": head_width**-0.5, "dropout": value.get("attention_dropout", 0.0), "rotary": rotary, **more}
    return AttentionSpec(heads, shared, head_width, bias=bias, output_bias=output_bias, **settings), problems


def llama_like(
    value: Mapping[str, Any], attention: AttentionSpec, blocks: tuple[BlockSpec, ...], norm: NormSpec, **more: Any
) -> TransformerSpec:
    """A decoder with nothing added to its embeddings, from Llama's keys; `more` are further fields."""
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

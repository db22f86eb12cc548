"""What the configs of many decoders share: grouped-query attention with rotary positions, the shape of a Llama."""

from collections.abc import Callable, Mapping
from typing import Any

from alignment.models.families.family import Key, Name, divides
from alignment.models.families.rope import longest_document, read_rotary
from alignment.models.layers.feedforward import ACTIVATIONS
from alignment.models.spec import AttentionSpec, BlockSpec, InitSpec, NormSpec, TransformerSpec
from alignment.models.spec_positions import RotarySpec

# Llama's keys and defaults; a family writes its own defaults over them.
GROUPED_KEYS = {
    "vocab_size": Key(int, 32000, 1),
    "hidden_size": Key(int, 4096, 1),
    "intermediate_size": Key(int, 11008, 1),
    "num_hidden_layers": Key(int, 32, 1),
    "num_attention_heads": Key(int, 32, 1),
    "num_key_value_heads": Key(int, None, 1),
    "head_dim": Key(int, None, 2),
    "hidden_act": Key(str, "silu"),
    "max_position_embeddings": Key(int, 2048, 1),
    "initializer_range": Key(float, 0.02, 0),
    "rms_norm_eps": Key(float, 1e-6, 0),
    "tie_word_embeddings": Key(bool, False),
    "attention_dropout": Key(float, 0.0, 0),
}

# All but the layers' norms, which stand in different places.
PROJECTIONS: tuple[Name, ...] = (
    # Hugging Face name                          ours
    ("model.embed_tokens.weight",                "trunk.embed.weight"),
    ("model.layers.{}.self_attn.q_proj.weight",  "trunk.blocks.{}.attention.query.weight"),
    ("model.layers.{}.self_attn.q_proj.bias",    "trunk.blocks.{}.attention.query.bias"),
    ("model.layers.{}.self_attn.k_proj.weight",  "trunk.blocks.{}.attention.key.weight"),
    ("model.layers.{}.self_attn.k_proj.bias",    "trunk.blocks.{}.attention.key.bias"),
    ("model.layers.{}.self_attn.v_proj.weight",  "trunk.blocks.{}.attention.value.weight"),
    ("model.layers.{}.self_attn.v_proj.bias",    "trunk.blocks.{}.attention.value.bias"),
    ("model.layers.{}.self_attn.o_proj.weight",  "trunk.blocks.{}.attention.output.weight"),
    ("model.layers.{}.self_attn.o_proj.bias",    "trunk.blocks.{}.attention.output.bias"),
    ("model.layers.{}.mlp.gate_proj.weight",     "trunk.blocks.{}.feedforward.gate.weight"),
    ("model.layers.{}.mlp.gate_proj.bias",       "trunk.blocks.{}.feedforward.gate.bias"),
    ("model.layers.{}.mlp.up_proj.weight",       "trunk.blocks.{}.feedforward.up.weight"),
    ("model.layers.{}.mlp.up_proj.bias",         "trunk.blocks.{}.feedforward.up.bias"),
    ("model.layers.{}.mlp.down_proj.weight",     "trunk.blocks.{}.feedforward.down.weight"),
    ("model.layers.{}.mlp.down_proj.bias",       "trunk.blocks.{}.feedforward.down.bias"),
    ("model.norm.weight",                        "trunk.norm.weight"),
)  # fmt: skip
INPUT_NORMS: tuple[Name, ...] = (
    ("model.layers.{}.input_layernorm.weight",           "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",  "trunk.blocks.{}.feedforward_norm.weight"),
)  # fmt: skip
SANDWICH_NORMS: tuple[Name, ...] = (
    ("model.layers.{}.input_layernorm.weight",             "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",    "trunk.blocks.{}.attention_output_norm.weight"),
    ("model.layers.{}.pre_feedforward_layernorm.weight",   "trunk.blocks.{}.feedforward_norm.weight"),
    ("model.layers.{}.post_feedforward_layernorm.weight",  "trunk.blocks.{}.feedforward_output_norm.weight"),
)  # fmt: skip
QUERY_KEY_NORMS: tuple[Name, ...] = (
    ("model.layers.{}.self_attn.q_norm.weight",  "trunk.blocks.{}.attention.query_norm.weight"),
    ("model.layers.{}.self_attn.k_norm.weight",  "trunk.blocks.{}.attention.key_norm.weight"),
)  # fmt: skip
# Once saved as a buffer.
INV_FREQ = r"(\w+\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
LAYER_TYPES = ("full_attention", "sliding_attention")


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
        more: further fields of the specification, and arguments of `read_rotary`. Without `partial`, turning only a
            part of a head is not something the family does.
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


def windows(
    value: Mapping[str, Any], window: int | None, slides: Callable[[int], bool]
) -> tuple[list[int | None], list[str]]:
    """The sliding window of each layer, None where it sees everything, and the problems found.

    Args:
        value: `num_hidden_layers` and `layer_types`, which wins where it is there.
        window: places a sliding layer sees.
        slides: the family's rule for a layer, counted from 0.
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

"""Llama: rotary positions and their scalings, RMSNorm, gated feed-forward, grouped-query attention.

Source: Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288; Dubey et al. 2024, arXiv:2407.21783; transformers,
`models/llama`.
"""

from typing import Any

from alignment.errors import raise_all
from alignment.models.families.family import Family, Key, divides, nearest, read_keys
from alignment.models.feedforward import ACTIVATIONS
from alignment.models.spec import (
    AttentionSpec,
    BlockSpec,
    GatedFeedForwardSpec,
    InitSpec,
    LinearScaling,
    Llama3Scaling,
    RMSNormSpec,
    RotaryPositionsSpec,
    TransformerSpec,
)

KEYS = {
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
    "attention_bias": Key(bool, False),
    "attention_dropout": Key(float, 0.0, 0),
    "mlp_bias": Key(bool, False),
}
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")
ROPE_NUMBERS = {  # rope_type -> the numbers it needs
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
FIXED = {"pretraining_tp": (1, None), "partial_rotary_factor": (1, None), "rope_interleaved": (False,)}

NAMES = (  # Hugging Face name                              ours
    ("model.embed_tokens.weight",                           "trunk.embed.weight"),
    ("model.layers.{}.input_layernorm.weight",              "trunk.blocks.{}.attention_norm.weight"),
    ("model.layers.{}.self_attn.q_proj.weight",             "trunk.blocks.{}.attention.query.weight"),
    ("model.layers.{}.self_attn.k_proj.weight",             "trunk.blocks.{}.attention.key.weight"),
    ("model.layers.{}.self_attn.v_proj.weight",             "trunk.blocks.{}.attention.value.weight"),
    ("model.layers.{}.self_attn.o_proj.weight",             "trunk.blocks.{}.attention.output.weight"),
    ("model.layers.{}.post_attention_layernorm.weight",     "trunk.blocks.{}.feedforward_norm.weight"),
    ("model.layers.{}.mlp.gate_proj.weight",                "trunk.blocks.{}.feedforward.gate.weight"),
    ("model.layers.{}.mlp.up_proj.weight",                  "trunk.blocks.{}.feedforward.up.weight"),
    ("model.layers.{}.mlp.down_proj.weight",                "trunk.blocks.{}.feedforward.down.weight"),
    ("model.norm.weight",                                   "trunk.norm.weight"),
    # with attention_bias
    ("model.layers.{}.self_attn.q_proj.bias",               "trunk.blocks.{}.attention.query.bias"),
    ("model.layers.{}.self_attn.k_proj.bias",               "trunk.blocks.{}.attention.key.bias"),
    ("model.layers.{}.self_attn.v_proj.bias",               "trunk.blocks.{}.attention.value.bias"),
    ("model.layers.{}.self_attn.o_proj.bias",               "trunk.blocks.{}.attention.output.bias"),
    # with mlp_bias
    ("model.layers.{}.mlp.gate_proj.bias",                  "trunk.blocks.{}.feedforward.gate.bias"),
    ("model.layers.{}.mlp.up_proj.bias",                    "trunk.blocks.{}.feedforward.up.bias"),
    ("model.layers.{}.mlp.down_proj.bias",                  "trunk.blocks.{}.feedforward.down.bias"),
)  # fmt: skip


def spec_from_config(config: dict[str, Any]) -> TransformerSpec:
    """The specification of a Llama config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=("is_llama_config",), fixed=FIXED, by_hand=ROPE_KEYS)
    heads = value["num_attention_heads"]
    key_value_heads = value["num_key_value_heads"] or heads
    if value["head_dim"] is None and not divides(heads, value["hidden_size"]):
        problems.append(f"config.json: num_attention_heads = {heads!r} does not divide hidden_size")
    if not divides(key_value_heads, heads):
        problems.append(f"config.json: num_key_value_heads = {key_value_heads!r} does not divide num_attention_heads")
    if value["hidden_act"] not in ACTIVATIONS:
        problems.append(f"config.json: hidden_act {value['hidden_act']!r} is not one of {', '.join(ACTIVATIONS)}")
    positions, rope_problems = _rotary(config, value["max_position_embeddings"])
    raise_all(problems + rope_problems)
    head_width = value["head_dim"] or value["hidden_size"] // heads
    if head_width % 2:
        raise_all([f"config.json: rotary positions turn pairs, so head_dim must be even, got {head_width}"])
    attention = AttentionSpec(
        heads, key_value_heads, head_width, head_width**-0.5, value["attention_bias"], value["attention_dropout"]
    )
    feedforward = GatedFeedForwardSpec(value["intermediate_size"], value["hidden_act"], value["mlp_bias"])
    norm = RMSNormSpec(value["rms_norm_eps"])
    return TransformerSpec(
        vocabulary=value["vocab_size"],
        width=value["hidden_size"],
        max_positions=value["max_position_embeddings"],
        positions=positions,
        blocks=(BlockSpec(attention, feedforward, norm),) * value["num_hidden_layers"],
        norm=norm,
        init=InitSpec(value["initializer_range"], value["initializer_range"]),
        tied_head=value["tie_word_embeddings"],
    )


def _rotary(config: dict[str, Any], max_positions: int) -> tuple[RotaryPositionsSpec, list[str]]:
    """Rotary positions from `rope_parameters`, or from the older `rope_theta` and `rope_scaling`; and the problems."""
    problems = _rope_shape_problems(config)
    if problems:
        return RotaryPositionsSpec(1.0), problems
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)  # old files carry both spellings
    theta = rope.pop("rope_theta", config.get("rope_theta", 10000.0))
    if kind not in ROPE_NUMBERS:
        return RotaryPositionsSpec(1.0), [
            f"config.json: rope_type {kind!r} is not one of {', '.join(ROPE_NUMBERS)}{nearest(str(kind), ROPE_NUMBERS)}"
        ]
    if rope.get("partial_rotary_factor") in FIXED["partial_rotary_factor"]:
        rope.pop("partial_rotary_factor", None)
    if kind == "llama3":
        rope.setdefault("original_max_position_embeddings", max_positions)
    needed = ROPE_NUMBERS[kind]
    problems += [f"config.json: unknown rope key {key!r} for rope_type {kind!r}" for key in rope if key not in needed]
    numbers = {"rope_theta": theta, **{key: rope.get(key) for key in needed}}
    problems += [
        f"config.json: rope key {key} must be a number above 0, got {number!r}"
        for key, number in numbers.items()
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0
    ]
    if problems:
        return RotaryPositionsSpec(1.0), problems
    scaling = {"default": lambda: None, "linear": LinearScaling, "llama3": Llama3Scaling}[kind]
    return RotaryPositionsSpec(float(theta), scaling(*(rope[key] for key in needed))), []


def _rope_shape_problems(config: dict[str, Any]) -> list[str]:
    problems = [
        f"config.json: {key} must be a mapping, got {config[key]!r}"
        for key in ("rope_parameters", "rope_scaling")
        if not isinstance(config.get(key), dict | None)
    ]
    if config.get("rope_parameters") and config.get("rope_scaling"):
        problems.append("config.json: rope_parameters and rope_scaling are both set; keep the one that should act")
    return problems


LLAMA = Family(
    name="llama",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    language_class="LlamaForCausalLM",
    scalar_class="LlamaForSequenceClassification",
    ignored=(r"(model\.)?layers\.\d+\.self_attn\.rotary_emb\.inv_freq",),  # once saved as a buffer
)

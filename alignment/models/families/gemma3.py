"""Gemma 3, text only: Gemma 2 with a norm on queries and keys instead of caps, and rotary angles of two kinds.

Layers that slide turn by `rope_local_base_freq`, layers that see everything by `rope_theta` and its scaling. What reads
pictures (`model_type` gemma3) is not here.

Source: Gemma team 2025, arXiv:2503.19786, section 2; transformers, `models/gemma3`.
"""

from dataclasses import replace

from alignment.errors import raise_all
from alignment.models.families.decoders import LAYER_TYPES, activation_problems, grouped_attention, windows
from alignment.models.families.family import Family, Key, decoder_tasks, read_keys
from alignment.models.families.gemma2 import FIXED, SANDWICH_NORMS, sandwich_decoder
from alignment.models.families.gemma2 import HARMLESS as GEMMA2_HARMLESS
from alignment.models.families.gemma2 import KEYS as GEMMA2_KEYS
from alignment.models.families.llama import INV_FREQ, PROJECTIONS
from alignment.models.families.rope import ORIGINAL, ROPE_KEYS
from alignment.models.layers import UnitOffsetRMSNormSpec
from alignment.models.safetensors_files import HFConfig
from alignment.models.transformer import TransformerSpec

KEYS = {
    **{name: key for name, key in GEMMA2_KEYS.items() if name != "attn_logit_softcapping"},
    "vocab_size": Key(int, 262208, 1),
    "max_position_embeddings": Key(int, 131072, 1),
    "final_logit_softcapping": Key(float, None, 1e-6),
    "sliding_window_pattern": Key(int, 6, 1),
    "rope_local_base_freq": Key(float, 10000.0, 1),
}
HARMLESS = (
    *GEMMA2_HARMLESS,
    "attn_logit_softcapping",  # no layer reads it: the norms of queries and keys took its place
    "_sliding_window_pattern",  # what `layer_types`, always beside it, was made from
)
THETA = 1e6
ROPES = tuple(key for key in ROPE_KEYS if key != ORIGINAL)  # of several mappings, none would own it

NAMES = (
    *PROJECTIONS,
    *SANDWICH_NORMS,
    ("model.layers.{}.self_attn.q_norm.weight",  "trunk.blocks.{}.attention.query_norm.weight"),
    ("model.layers.{}.self_attn.k_norm.weight",  "trunk.blocks.{}.attention.key_norm.weight"),
)  # fmt: skip


def spec_from_config(config: HFConfig) -> TransformerSpec:
    """The specification of a Gemma 3 text config; every key is understood or known to change nothing.

    Raises:
        UserError: naming every key that is unknown or has a value that cannot be.
    """
    value, problems = read_keys(config, KEYS, harmless=HARMLESS, fixed=FIXED, by_hand=ROPES)
    problems += _shape_problems(config) + activation_problems(value["hidden_activation"])
    raise_all(problems)
    spans, problems = windows(
        value, value["sliding_window"], lambda layer: (layer + 1) % value["sliding_window_pattern"] != 0
    )
    bias, norm = value["attention_bias"], UnitOffsetRMSNormSpec(value["rms_norm_eps"])
    ropes = config.get("rope_parameters") or {}
    wide = ropes.get("full_attention") or config.get("rope_scaling") or {}
    near = {"rope_theta": value["rope_local_base_freq"], **(ropes.get("sliding_attention") or {})}
    everything, wide_problems = grouped_attention(
        config, value, bias, bias, query_key_norm=norm, theta=THETA, parameters=wide
    )
    sliding, near_problems = grouped_attention(config, value, bias, bias, query_key_norm=norm, parameters=near)
    raise_all(dict.fromkeys(problems + wide_problems + near_problems))
    return sandwich_decoder(value, [everything if span is None else replace(sliding, window=span) for span in spans])


def _shape_problems(config: HFConfig) -> list[str]:
    """`rope_parameters` holds a mapping for each kind of layer; `rope_scaling` is the older way, and not for both."""
    ropes, scaling = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if not isinstance(ropes, dict) or not all(isinstance(each, dict | None) for each in ropes.values()):
        return [f"config.json: rope_parameters must be a mapping of {', '.join(LAYER_TYPES)}, got {ropes!r}"]
    problems = [
        f"config.json: rope_parameters has {kind!r}, which is not one of {', '.join(LAYER_TYPES)}"
        for kind in ropes
        if kind not in LAYER_TYPES
    ]
    if not isinstance(scaling, dict):
        problems.append(f"config.json: rope_scaling must be a mapping, got {scaling!r}")
    if ropes and scaling:
        problems.append("config.json: rope_parameters and rope_scaling are both set; keep the one that should act")
    if config.get("layer_types") is None and config.get("_sliding_window_pattern") not in (
        None,
        config.get("sliding_window_pattern", 6),
    ):
        problems.append("config.json: _sliding_window_pattern without layer_types; name sliding_window_pattern instead")
    return problems


GEMMA3 = Family(
    name="gemma3_text",
    spec_from_config=spec_from_config,
    names=NAMES,
    trunk_prefix="model.",
    tasks=decoder_tasks("Gemma3Text", ("sequence",)) | {"language": decoder_tasks("Gemma3")["language"]},
    ignored_tensors=(INV_FREQ,),
)

"""Rotary position settings of configs: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Callable

from alignment.models.families.family import hint
from alignment.models.layers import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)
from alignment.models.safetensors_files import HFConfig

ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
PARTIAL = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
# rope_type -> its required numbers, its optional numbers, its required lists
ROPE_TYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), (), ()),
    "linear": (("factor",), (), ()),
    "dynamic": (("factor",), (ORIGINAL,), ()),
    "yarn": (
        ("factor",),
        (ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
        (),
    ),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,), ()),
    "longrope": ((), (ORIGINAL, "factor", "attention_factor"), ("short_factor", "long_factor")),
}


def read_rotary(
    config: HFConfig,
    head_dim: int,
    max_positions: int,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    parameters: HFConfig | None = None,
) -> tuple[RotarySpec, list[str]]:
    """The rotary positions of a config, and the problems found.

    Args:
        config: a Hugging Face config.
        head_dim: width of one head.
        max_positions: `max_position_embeddings`, the original context length unless the config has another.
        theta, partial: the family's defaults.
        parameters: the mapping to read, of a config with one per kind of layer; None: the config's only one.
    """
    problems = _shape_problems(config) if parameters is None else []
    if problems:
        return RotarySpec(theta, head_dim), problems
    found = parameters if parameters is not None else config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = {key: value for key, value in found.items() if value is not None}
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    rope.pop("type", None)  # older files have both keys
    kind = "longrope" if kind == "su" else kind  # the first name of Phi-3's scaling
    theta = rope.pop("rope_theta", config.get("rope_theta", theta))
    partial = rope.pop(PARTIAL, config.get(PARTIAL, partial))
    if kind not in ROPE_TYPES:
        return RotarySpec(1.0, 2), [
            f"config.json: rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}{hint(str(kind), ROPE_TYPES)}"
        ]
    problems = _problems({"rope_theta": theta, PARTIAL: partial, **rope}, kind)
    width = 0 if problems else int(head_dim * partial)
    if not problems and (width < 2 or width % 2):
        problems = [f"config.json: rotary positions turn pairs, so head_dim must be even, got {width} of {head_dim}"]
    if problems:
        return RotarySpec(1.0, 2), problems
    # By transformers' rule, a key of the config itself has precedence over the same key of the mapping.
    original = int(config.get(ORIGINAL) or rope.get(ORIGINAL) or max_positions)
    problems = [
        f"config.json: rope key {key} must have one number per pair, {width // 2}, not {len(rope[key])}"
        for key in ROPE_TYPES[kind][2]
        if len(rope[key]) != width // 2
    ]
    return RotarySpec(float(theta), width, SCALINGS[kind](rope, original, max_positions, width)), problems


def _shape_problems(config: HFConfig) -> list[str]:
    problems = [
        f"config.json: {key} must be a mapping, got {config[key]!r}"
        for key in ("rope_parameters", "rope_scaling")
        if not isinstance(config.get(key), dict | None)
    ]
    if config.get(ORIGINAL) is not None and not _positive(config[ORIGINAL]):
        problems.append(f"config.json: {ORIGINAL} must be a number above 0, got {config[ORIGINAL]!r}")
    if config.get("rope_parameters") and config.get("rope_scaling"):
        problems.append("config.json: rope_parameters and rope_scaling are both set; keep the one that should act")
    return problems


def _problems(rope: HFConfig, kind: str) -> list[str]:
    needed, allowed, lists = ROPE_TYPES[kind]
    own = ("rope_theta", PARTIAL)
    problems = [
        f"config.json: unknown rope key {key!r} for rope_type {kind!r}"
        for key in rope
        if key not in (*own, *needed, *allowed, *lists)
    ]
    problems += [
        f"config.json: rope key {key} must be a number above 0, got {rope.get(key)!r}"
        for key in (*own, *needed, *(key for key in allowed if key in rope and key != "truncate"))
        if not _positive(rope.get(key))
    ]
    problems += [
        f"config.json: rope key {key} must be a list of numbers above 0, got {rope.get(key)!r}"
        for key in lists
        if not isinstance(rope.get(key), list) or not all(map(_positive, rope[key]))
    ]
    return problems


def _positive(number: object) -> bool:
    return not isinstance(number, bool) and isinstance(number, int | float) and number > 0


def _yarn(rope: HFConfig, original: int, max_positions: int, width: int) -> YarnScaling:
    def mscale(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    default = mscale(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        default = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    return YarnScaling(
        rope["factor"],
        original,
        rope.get("attention_factor", default),
        rope.get("beta_fast", 32),
        rope.get("beta_slow", 1),
        rope.get("truncate", True),
    )


def _long(rope: HFConfig, original: int, max_positions: int, width: int) -> LongScaling:
    factor = rope.get("factor", max_positions / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    short, long = tuple(rope["short_factor"]), tuple(rope["long_factor"])
    return LongScaling(short, long, original, rope.get("attention_factor", default))


SCALINGS: dict[str, Callable[[HFConfig, int, int, int], RotaryScaling | None]] = {
    "default": lambda rope, original, longest, width: None,
    "linear": lambda rope, original, longest, width: LinearScaling(rope["factor"]),
    # By transformers' rule, the context is always max_position_embeddings.
    "dynamic": lambda rope, original, longest, width: DynamicScaling(rope["factor"], longest),
    "yarn": _yarn,
    "llama3": lambda rope, original, longest, width: Llama3Scaling(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original
    ),
    "longrope": _long,
}


def longest_document(rotary: RotarySpec, max_positions: int) -> int:
    """Longest document in tokens; dynamic scaling extends `max_position_embeddings` by its factor."""
    scaling = rotary.scaling
    return int(max_positions * scaling.factor) if isinstance(scaling, DynamicScaling) else max_positions

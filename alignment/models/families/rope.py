"""Rotary position settings of configs: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

import math
from collections.abc import Callable, Iterator

from alignment.errors import UserError, raise_all, warn_once
from alignment.models.families.config_keys import hint
from alignment.models.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)
from alignment.models.safetensors_files import HFConfig

THETA = "rope_theta"
PARTIAL = "partial_rotary_factor"
ORIGINAL = "original_max_position_embeddings"
ROPE_KEYS = ("rope_parameters", "rope_scaling", THETA, PARTIAL, ORIGINAL)
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

ROPE_NUMBERS = {key for kinds in ROPE_TYPES.values() for keys in kinds for key in keys}


def read_rotary(value: HFConfig, head_dim: int) -> RotarySpec:
    """The rotary positions of a config with `max_position_embeddings`, the original context unless it has another.

    Raises:
        UserError: naming every setting that is unknown or has a value that cannot be.
    """
    raise_all(shape_problems(value))
    settings = value.get("rope_parameters") or value.get("rope_scaling") or {}
    given = {key: setting for key, setting in settings.items() if setting is not None}
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)  # older files have both keys
    kind = "longrope" if kind == "su" else kind  # the first name of Phi-3's scaling
    if kind not in ROPE_TYPES:
        raise UserError(
            f"config.json: rope_type {kind!r} is not one of {', '.join(ROPE_TYPES)}{hint(str(kind), ROPE_TYPES)}"
        )
    rope = {THETA: value.get(THETA, 10000.0), PARTIAL: value.get(PARTIAL, 1.0), **given}
    raise_all(_problems(rope, kind))
    width = int(head_dim * rope[PARTIAL])
    longest = value["max_position_embeddings"]
    if width < 2 or width % 2:
        raise UserError(f"config.json: rotary positions turn pairs: head_dim must be even, got {width} of {head_dim}")
    raise_all(
        f"config.json: rope key {key} must have one number per pair, {width // 2}, not {len(rope[key])}"
        for key in ROPE_TYPES[kind][2]
        if len(rope[key]) != width // 2
    )
    # By transformers' rule, a key of the config itself has precedence over the same key of the mapping.
    original = int(value.get(ORIGINAL) or rope.get(ORIGINAL) or longest)
    return RotarySpec(float(rope[THETA]), width, SCALINGS[kind](rope, original, longest))


def shape_problems(value: HFConfig) -> Iterator[str]:
    """A message for each rotary setting that is not of its type, and for two of them where one should act."""
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(value.get(key), dict | None):
            yield f"config.json: {key} must be a mapping, got {value[key]!r}"
    if value.get(ORIGINAL) is not None and not _positive(value[ORIGINAL]):
        yield f"config.json: {ORIGINAL} must be a number above 0, got {value[ORIGINAL]!r}"
    if value.get("rope_parameters") and value.get("rope_scaling"):
        yield "config.json: rope_parameters and rope_scaling are both set; keep the one that should act"


def _problems(rope: HFConfig, kind: str) -> Iterator[str]:
    numbers, optional, lists = ROPE_TYPES[kind]
    numbers = (THETA, PARTIAL, *numbers)
    for key in rope:
        if key in (*numbers, *optional, *lists):
            continue
        if key in ROPE_NUMBERS or key.startswith("mrope"):
            yield f"config.json: unknown rope key {key!r} for rope_type {kind!r}"
        else:
            warn_once(f"config.json: rope key {key!r} is no key of transformers and changes nothing")
    for key in (*numbers, *(key for key in optional if key in rope and key != "truncate")):
        if not _positive(rope.get(key)):
            yield f"config.json: rope key {key} must be a number above 0, got {rope.get(key)!r}"
    for key in lists:
        if not isinstance(rope.get(key), list) or not all(map(_positive, rope[key])):
            yield f"config.json: rope key {key} must be a list of numbers above 0, got {rope.get(key)!r}"


def _positive(number: object) -> bool:
    return not isinstance(number, bool) and isinstance(number, int | float) and number > 0


def _yarn(rope: HFConfig, original: int, longest: int) -> YarnScaling:
    def mscale(weight: float) -> float:
        return 1.0 if rope["factor"] <= 1 else 0.1 * weight * math.log(rope["factor"]) + 1.0

    factor = mscale(1.0)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        factor = mscale(rope["mscale"]) / mscale(rope["mscale_all_dim"])
    given = {key: rope[key] for key in ("beta_fast", "beta_slow", "truncate") if key in rope}
    return YarnScaling(rope["factor"], original, rope.get("attention_factor", factor), **given)


def _long(rope: HFConfig, original: int, longest: int) -> LongScaling:
    factor = rope.get("factor", longest / original)
    default = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        tuple(rope["short_factor"]), tuple(rope["long_factor"]), original, rope.get("attention_factor", default)
    )


SCALINGS: dict[str, Callable[[HFConfig, int, int], RotaryScaling | None]] = {
    "default": lambda rope, original, longest: None,
    "linear": lambda rope, original, longest: LinearScaling(rope["factor"]),
    # By transformers' rule, the context is always max_position_embeddings.
    "dynamic": lambda rope, original, longest: DynamicScaling(rope["factor"], longest),
    "yarn": _yarn,
    "llama3": lambda rope, original, longest: Llama3Scaling(
        rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"], original
    ),
    "longrope": _long,
}


def longest_document(rotary: RotarySpec | None, max_positions: int) -> int:
    """Longest document in tokens; dynamic scaling extends `max_position_embeddings` by its factor."""
    scaling = rotary and rotary.scaling
    return int(max_positions * scaling.factor) if isinstance(scaling, DynamicScaling) else max_positions

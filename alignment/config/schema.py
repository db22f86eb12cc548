"""The packaged JSON schemas of the stages' configs, their keys, and the help on them.

scripts/schemas.py writes the schemas from the dataclasses, so that to read them takes no torch.
"""

import json
import re
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from alignment.config.load import packaged_folder, packaged_names
from alignment.errors import UserError, suggest

if TYPE_CHECKING:
    from pydantic.json_schema import JsonSchemaValue

FIRST = {  # stage -> keys that matter first, beside the required ones
    "": (
        "data.train", "adapter", "optim.learning_rate", "training.epochs", "training.max_steps", "training.batch_size",
        "training.micro_batch_tokens", "training.precision", "data.max_length", "weights.quantize",
    ),
    "pretrain": ("model", "tokenizer", "vocabulary", "objective"),
    "sft": ("loss_on", "chat_template"),
    "reward": ("loss", "ensemble", "normalize"),
    "dpo": ("loss", "beta", "reference"),
    "online_dpo": ("reward_model", "rewards", "loss", "beta", "responses_per_prompt", "max_new_tokens"),
    "distill": ("likeliest", "responses_per_prompt", "max_new_tokens", "temperature"),
    "ppo": (
        "reward_model", "rewards", "advantages", "responses_per_prompt", "max_new_tokens", "kl_coef", "pretrain_coef",
    ),
    "finetune": ("task", "format"),
    "winrate": ("judge", "reward_model", "max_new_tokens", "temperature", "best_of"),
}  # fmt: skip


class ConfigKey(NamedTuple):
    """One key of a config.

    Attributes:
        name: dotted, `optim.learning_rate`; `adapter{lora,dora}.rank` of sections of these kinds, `data.train[].weight`
            of each section of a list.
        type: in words.
        default: as JSON; None: the key must be given.
        text: what it means, with unit.
    """

    name: str
    type: str
    default: str | None
    text: str


def packaged_schema(stage: str) -> "JsonSchemaValue":
    """The JSON schema of a stage's config as packaged, for editors too: configs/schemas/STAGE.json."""
    return json.loads((packaged_folder("configs") / "schemas" / f"{stage}.json").read_text(encoding="utf-8"))


def config_keys(schema: "JsonSchemaValue") -> list[ConfigKey]:
    """All keys of a config, with the keys of its sections, in the order of its class."""
    return list(_keys(schema, schema.get("$defs", {})))


def _keys(section: "JsonSchemaValue", definitions: "JsonSchemaValue") -> Iterator[ConfigKey]:
    for name, value in section.get("properties", {}).items():
        if "const" in value:  # kind, which is named where its section begins
            continue
        default = json.dumps(value["default"]) if "default" in value else None
        inner = list(_sections(value, definitions))
        if default is not None or name in section.get("required", ()):
            yield ConfigKey(name, type_text(value, definitions), default, value.get("description", ""))
        kinds: dict[ConfigKey, list[str]] = {}  # of the sections that have a key
        for suffix, subsection in inner:
            for key in _keys(subsection, definitions):
                kind = subsection["properties"].get("kind", {}).get("const")
                kinds.setdefault(key._replace(name=f"{suffix}.{key.name}"), []).extend([kind] if kind else [])
        for key, having in kinds.items():
            yield key._replace(name=f"{name}{{{','.join(having)}}}{key.name}" if having else name + key.name)


def _sections(value: "JsonSchemaValue", definitions: "JsonSchemaValue") -> "Iterator[tuple[str, JsonSchemaValue]]":
    """The sections that a value may be, or, with the suffix [], be a list of."""
    if reference := value.get("$ref"):
        yield "", definitions[reference.rpartition("/")[2]]
    for option in [*value.get("anyOf", ()), *value.get("oneOf", ())]:
        yield from _sections(option, definitions)
    if "items" in value:
        yield from ((f"[]{suffix}", section) for suffix, section in _sections(value["items"], definitions))


def type_text(value: "JsonSchemaValue", definitions: "JsonSchemaValue") -> str:
    """A schema's type in words: `integer | "auto"`."""
    if options := value.get("anyOf", value.get("oneOf")):
        return " | ".join(type_text(option, definitions) for option in options)
    if "$ref" in value:
        [(_, section)] = _sections(value, definitions)
        kind = section.get("properties", {}).get("kind", {}).get("const")
        return f"section of kind {kind}" if kind else "section"
    if "const" in value or "enum" in value:
        return " | ".join(map(json.dumps, value.get("enum", [value.get("const")])))
    if value.get("type") == "array" and value.get("items"):
        return f"list of {type_text(value['items'], definitions)}"
    kind = str(value.get("type", "any"))
    return {"array": "list", "object": "mapping"}.get(kind, kind)


def describe_keys(stage: str, width: int, topic: str | None = None) -> str:
    """Describe the packaged configs of a stage and the keys of its config, in lines at most `width` wide.

    `topic` None: the required keys and `FIRST`, a line each. `all`: every key. Else the key or section of that name.
    """
    keys = config_keys(packaged_schema(stage))
    if topic not in (None, "all"):
        names = {key: re.sub(r"\{.*?\}|\[\]", "", key.name) for key in keys}  # adapter{lora,dora}.rank is adapter.rank
        chosen = [key for key in keys if f".{topic}." in f".{names[key]}."]
        if not chosen:
            raise UserError(f"--help {topic}: there is no such key; {suggest(str(topic), names.values())}")
        return "\n".join(_key_help(key, width) for key in chosen)
    packaged = [name for name in packaged_names("configs") if name.startswith(f"{stage}/")]
    lines = [_wrapped(f"packaged configs: {', '.join(packaged)}", width, ""), ""] if packaged else []
    if topic == "all":
        return "\n".join(
            [*lines, "keys of the config, also as key=value:", "", *(_key_help(key, width) for key in keys)]
        )
    first = {*FIRST[""], *FIRST.get(stage, ())}
    lines += ["keys that matter first, also as key=value:", ""]
    for key in keys:
        if key.name in first or (key.default is None and key.name.isidentifier()):
            lines.append("  " + textwrap.shorten(f"{_key_head(key)}: {key.text}", width - 2, placeholder=" ..."))
    return "\n".join([*lines, "", f"`--help KEY` has a key or section whole, `--help all` all {len(keys)} keys"])


def _key_head(key: ConfigKey) -> str:
    return f"{key.name} ({'required' if key.default is None else f'default {key.default}'})"


def _key_help(key: ConfigKey, width: int) -> str:
    text = f"\n{_wrapped(key.text, width, '      ')}" if key.text else ""
    return _wrapped(f"{_key_head(key)}: {key.type}", width, "  ") + text


def _wrapped(text: str, width: int, indent: str) -> str:
    return textwrap.fill(text, width, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False)

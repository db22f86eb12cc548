"""From YAML to checked config dataclasses and back, all mistakes at once. Each config itself lives beside its stage."""

import dataclasses
import difflib
import functools
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from alignment.config.yaml_source import Key, SourcedYaml, dotted, fill, override, read_yaml, references
from alignment.errors import UserError, raise_all

T = TypeVar("T")

WANTED = {  # pydantic's error types in the user's words
    "bool_type": "must be true or false",
    "dataclass_type": "must be a section of keys",
    "dict_type": "must be a section of keys",
    "finite_number": "must be a finite number",
    "float_type": "must be a number",
    "int_type": "must be a whole number",
    "list_type": "must be a list",
    "none_required": "must be null",
    "string_type": "must be text",
    "tuple_type": "must be a list",
}

LARGEST_WHOLE = 2**63 - 1  # torch's and numpy's whole numbers end here
LARGEST, SMALLEST = 1e30, 1e-30  # what float32 still multiplies and divides without running over

NAMES_ELSEWHERE = {  # keys of trl, transformers and axolotl: ours, and what differs
    "base_model": "policy",
    "bf16": "training.precision (fp32 or bf16)",
    "cliprange": "clip_range",
    "cliprange_value": "value_clip_range",
    "dataset_name": "data.train",
    "eval_steps": "training.evaluate_every_steps",
    "fp16": "training.precision (fp32 or bf16)",
    "gradient_accumulation_steps": "training.micro_batch_tokens (tokens per forward; accumulation follows from it)",
    "init_kl_coef": "kl_coef",
    "lam": "gae_lambda",
    "lora_alpha": "adapter.alpha",
    "lora_dropout": "adapter.dropout",
    "lora_r": "adapter.rank",
    "lora_target_modules": "adapter.layers",
    "lr": "optim.learning_rate",
    "lr_scheduler": "optim.schedule",
    "lr_scheduler_type": "optim.schedule",
    "max_prompt_length": "data.max_length (tokens of prompt and response together)",
    "max_seq_length": "data.max_length",
    "micro_batch_size": "training.micro_batch_tokens (tokens per forward, not rows)",
    "model_name_or_path": "policy",
    "num_epochs": "training.epochs",
    "num_ppo_epochs": "epochs",
    "num_train_epochs": "training.epochs",
    "output_dir": "output",
    "peft_config": "adapter",
    "per_device_eval_batch_size": "training.micro_batch_tokens (tokens per forward, not rows)",
    "per_device_train_batch_size": "training.batch_size (rows per update over all devices)",
    "r": "adapter.rank",
    "ref_model": "reference",
    "report_to": "training.trackers",
    "reward_model_path": "reward_model",
    "save_steps": "training.save_every_steps",
    "save_total_limit": "training.keep_last_checkpoints",
    "sequence_len": "data.max_length",
    "sft_model_path": "policy",
    "target_modules": "adapter.layers",
}
NOT_HERE = {  # what other programs have a key for, and why there is none
    "load_in_4bit": "weights are not quantized here",
    "load_in_8bit": "weights are not quantized here",
    "quantization": "weights are not quantized here",
    "quantize": "weights are not quantized here",
}
WHY_NOT = {  # key, value: why a value that others have is not among those allowed
    ("precision", "fp16"): "fp16 loses small gradients unless the loss is scaled, which is not done here",
    ("precision", "float16"): "fp16 loses small gradients unless the loss is scaled, which is not done here",
}

# Words such as `max_new_tokens` or `eos_token` are about text; `hub_token` and `wandb_api_key` open doors.
SECRET = re.compile(
    r"^(?!(?:bos|eos|pad|unk|sep|cls|mask|end|start|stop|special|end_of_turn)_token$)"
    r"(?:.*[_-])?(?:token|secret|password|passphrase|api_?key|access_key|credentials?)$",
    re.IGNORECASE,
)


def load_config(cls: type[T], source: str, overrides: Sequence[str] = ()) -> T:
    """A config read from a file, with overrides on top; `${configs}` in it is the folder of packaged configs, `${data}`
    that of real data.

    Args:
        cls: the config's dataclass.
        source: path of a YAML file, or a packaged name such as `sft/tiny`; a path wins.
        overrides: `dotted.key=value`, each value read as YAML.

    Raises:
        UserError: every problem at once, one line each: `file:line: key: why; way out`.
    """
    document = override(read_yaml(find_packaged(source, "configs")), overrides)
    names = {"configs": str(packaged_folder("configs")), "data": str(data_folder())}
    unknown = sorted(references(document.values) - set(names))
    raise_all(f"{source}: ${{{name}}} stands for nothing outside a recipe; {nearest(name, names)}" for name in unknown)
    return build(cls, SourcedYaml(fill(document.values, names), document.places))


def packaged_writer(output: str) -> str | None:
    """The command of a packaged config that writes into a directory; None where no config does."""
    root = packaged_folder("configs")
    for path in sorted(root.glob("*/*.yaml")):
        if path.parent.name not in ("evaluate", "launch") and (read_yaml(path).values or {}).get("output") == output:
            return f"alignment {path.parent.name} {path.parent.name}/{path.stem}"
    return None


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain values for YAML or JSON, keys that hold secrets left out."""
    return {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if not SECRET.match(field.name)
    }


def _plain(value: Any) -> Any:
    """Lists, mappings and scalars only."""
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items() if not SECRET.match(str(key))}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# Packaged names


def find_packaged(name: str, kind: str) -> Path:
    """The file behind a path, or behind a packaged name; a path wins.

    Args:
        name: what the user wrote.
        kind: `configs` (a name is `stage/variant`), `launch` (Accelerate's files, `launch/zero3`) or `recipes` (a name
            is that of a folder with a recipe.yaml).

    Raises:
        UserError: neither; lists near names.
    """
    given = Path(name)
    if given.is_file():
        return given
    if kind == "recipes" and (given / "recipe.yaml").is_file():
        return given / "recipe.yaml"
    root = packaged_folder("recipes" if kind == "recipes" else "configs")
    if kind == "recipes":
        known = {path.parent.name: path for path in root.glob("*/recipe.yaml")}
    else:
        files = [path for path in root.glob("*/*.yaml") if (path.parent.name == "launch") == (kind == "launch")]
        known = {path.relative_to(root).with_suffix("").as_posix(): path for path in files}
    if name not in known:
        raise UserError(f"{name}: there is no such file, and no packaged one of that name; {nearest(name, known)}")
    return known[name]


def packaged_folder(kind: str) -> Path:
    """Folder of the packaged `configs` or `recipes`: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_packaged" / kind
    return installed if installed.is_dir() else package.parent / kind


def data_folder() -> Path:
    """Folder of real data: ALIGNMENT_DATA, or ../shared/data."""
    return Path(os.environ.get("ALIGNMENT_DATA") or "../shared/data")


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if close:
        return "did you mean " + " or ".join(map(repr, close)) + "?"
    return "known: " + (", ".join(known) or "none")


# Checking


def build(cls: type[T], document: SourcedYaml) -> T:
    """The config in a document, every key known, every type and range right.

    Raises:
        UserError: every problem at once.
    """
    from pydantic import ValidationError

    values = {} if document.values is None else document.values
    problems = {key: f"{document.place(key)}: {dotted(key)}: {why}" for key, why in _numbers_out_of_range(values)}
    try:
        # Through JSON: strict mode then still takes a list for a tuple and 1 for 1.0, but never a text for a number.
        config = cast(Any, _checker(cls).model_validate_json(json.dumps({"config": values}, default=str))).config
    except ValidationError as error:
        raise_all({**problems, **_problems(cls, document, error.errors(include_url=False))}.values())
        raise
    raise_all(problems.values())
    return config


def _numbers_out_of_range(values: Any, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Keys whose numbers cannot be computed with, whatever they are for, and why; infinite ones are pydantic's."""
    if isinstance(values, (dict, list)):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _numbers_out_of_range(value, (*key, name))
    elif values == 0 or not _is_scalar(values) or _is_secret(key):
        return
    elif isinstance(values, int) and abs(values) > LARGEST_WHOLE:
        yield key, f"must lie within 64 bits (at most {LARGEST_WHOLE}), got a number of {len(str(abs(values)))} digits"
    elif isinstance(values, float) and math.isfinite(values) and not SMALLEST <= abs(values) <= LARGEST:
        yield key, f"must be 0 or between {SMALLEST} and {LARGEST} in size, got {values}"


@functools.cache
def _checker(cls: type) -> Any:
    """A pydantic model around a dataclass; its settings reach the plain dataclasses below it."""
    from pydantic import ConfigDict, create_model

    strict = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True
    )
    return create_model("Checked", __config__=strict, config=(cls, ...))


class _Found(NamedTuple):
    """One of pydantic's errors: the keys of its location, and the union members named between them."""

    key: Key
    members: tuple[str, ...]
    error: Any


def _problems(cls: type, document: SourcedYaml, errors: Sequence[Any]) -> dict[Key, str]:
    """One line for each key that is wrong."""
    found = _of_the_meant_kind([_locate(document.values, error) for error in errors])
    wrong: dict[Key, list[_Found]] = {}
    for each in found:
        wrong.setdefault(each.key, []).append(each)
    lines = {}
    for key, group in wrong.items():
        blamed = _blamed(key, group[0].error)
        lines[blamed] = f"{document.place(blamed)}: {dotted(key)}: {_reason(cls, group)}"
    return lines


def _blamed(key: Key, error: Any) -> Key:
    """The key that is wrong; what a section says of its own values begins with the name of one of its keys."""
    if error["type"] == "value_error" and isinstance(error["input"], dict):
        first = re.match(r"\W*(?:\w+\.)*(\w+)", str(error["ctx"]["error"]))
        if first and first[1] in error["input"]:
            return (*key, first[1])
    return key


def _locate(values: Any, error: Any) -> _Found:
    """Tell keys from members: a key is one that the values have, or that they miss."""
    key: list[str | int] = []
    members: list[str] = []
    location = error["loc"][1:]
    for depth, part in enumerate(location):
        if isinstance(values, dict) and part in values:
            values = values[part]
        elif isinstance(values, list) and isinstance(part, int):
            values = values[part] if part < len(values) else None
        elif depth < len(location) - 1 or error["type"] != "missing":
            members.append(str(part))
            continue
        key.append(part)
    return _Found(tuple(key), tuple(members), error)


def _of_the_meant_kind(found: Sequence[_Found]) -> list[_Found]:
    """Errors of the union member that was meant, where that can be told.

    `adapter: {kind: lora, rnk: 8}` is tried as every kind of adapter; what the other kinds would miss is of no use.
    Likewise `[1, 2]` for `text or list of texts` fails as a list: at its items.
    """
    others = {
        (each.key[:-1], each.members)
        for each in found
        if each.members and each.key[-1:] == ("kind",) and each.error["type"] == "literal_error"
    }
    # A member that complains of its values has accepted every key and type: it was meant.
    meant = {(each.key, each.members) for each in found if each.members and each.error["type"] == "value_error"}

    def of_another(each: _Found) -> bool:
        unmeant = any(
            each.key[: len(key)] == key and len(each.members) >= len(m) and (key, each.members[: len(m)]) not in meant
            for key, m in meant
        )
        return unmeant or any(each.key[: len(key)] == key and each.members[: len(m)] == m for key, m in others)

    def kept(each: _Found) -> bool:
        if of_another(each):  # all of them: then the kind itself is wrong, and only that is worth saying
            known = any(e.members and e.key[: len(each.key) - 1] == each.key[:-1] and not of_another(e) for e in found)
            return each.key[-1:] == ("kind",) and not known
        deeper = any(
            len(e.key) > len(each.key) and e.key[: len(each.key)] == each.key and not of_another(e) for e in found
        )
        return not (each.members and deeper)

    return [each for each in found if kept(each)]


def _reason(cls: type, group: Sequence[_Found]) -> str:
    """Why one key is wrong, and the way out: what each member of a union wants, and what was there instead."""
    wants = list(dict.fromkeys(_want(cls, each) for each in group))
    text = " or ".join(want.removeprefix("must be ") if place else want for place, want in enumerate(wants))
    key, error = group[0].key, group[0].error
    if error["type"] in ("value_error", "missing", "unexpected_keyword_argument") or _is_secret(key):
        return text
    got = repr(error["input"]) if isinstance(error["input"], str) else json.dumps(_plain(error["input"]))
    shown = got if len(got) <= 80 else got[:77] + "..."
    unquoted = _is_scalar(error["input"]) and any(each.error["type"] == "string_type" for each in group)
    return f"{text}, got {shown}" + ("; put it in quotes" if unquoted else "")


def _want(cls: type, found: _Found) -> str:
    """What pydantic missed, in the user's words."""
    kind, context = found.error["type"], found.error.get("ctx", {})
    if kind == "unexpected_keyword_argument":
        sections = _sections(cls, found.key[:-1])
        meant = [section for section in sections if section.__name__ in found.members] or sections
        names = {field.name for section in meant for field in dataclasses.fields(section)}
        return f"unknown key; {_meant_key(cls, str(found.key[-1])) or nearest(str(found.key[-1]), names)}"
    if kind == "missing":
        return "is missing; add it"
    if kind == "literal_error":
        why = WHY_NOT.get((str(found.key[-1]), str(found.error["input"])))
        return f"must be {context['expected']}" + (f" ({why})" if why else "")
    if kind == "value_error":
        return str(context["error"])
    message = found.error["msg"]
    return WANTED[kind] if kind in WANTED else message[:1].lower() + message[1:]


def _meant_key(cls: type, name: str) -> str:
    """Where a key that another section or another program has stands in this config, or why it does not; '' if unknown."""
    if name in NOT_HERE:
        return NOT_HERE[name]
    ours = NAMES_ELSEWHERE.get(name, "")
    if ours and _has_key(cls, tuple(ours.partition(" ")[0].split("."))):
        return f"here it is called {ours}"
    below = [(field.name, name) for field in dataclasses.fields(cast(Any, cls)) if _has_key(cls, (field.name, name))]
    return "here it is called " + " or ".join(dotted(key) for key in below) if below else ""


def _has_key(cls: type, key: Key) -> bool:
    """Whether a config has such a key."""
    return any(key[-1] == field.name for section in _sections(cls, key[:-1]) for field in dataclasses.fields(section))


def _sections(kind: Any, key: Key) -> list[Any]:
    """The dataclasses that may stand at a key."""
    if dataclasses.is_dataclass(kind):
        if not key:
            return [kind]
        hint = get_type_hints(kind).get(str(key[0]))
        return [] if hint is None else _sections(hint, key[1:])
    is_container = get_origin(kind) in (list, tuple, dict)
    if is_container and not key:
        return []
    return [section for part in get_args(kind) for section in _sections(part, key[1:] if is_container else key)]


def _is_secret(key: Key) -> bool:
    """Whether a value may not be shown."""
    return any(isinstance(part, str) and SECRET.match(part) for part in key)


def _is_scalar(value: Any) -> bool:
    """A number or a truth value, which quotes would turn into text."""
    return isinstance(value, (bool, int, float))

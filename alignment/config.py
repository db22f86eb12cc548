"""From YAML to checked config dataclasses and back, all mistakes at once. Each config itself lives beside its stage."""

import dataclasses
import difflib
import functools
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast, get_args, get_origin, get_type_hints

from alignment.documents import Document, Key, dotted, fill, override, read_yaml, references
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
    return build(cls, Document(fill(document.values, names), document.places))


def writer_of(output: str) -> str | None:
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
        kind: `configs` (a name is `stage/variant`) or `recipes` (a name is that of a folder with a recipe.yaml).

    Raises:
        UserError: neither; lists near names.
    """
    given = Path(name)
    if given.is_file():
        return given
    if kind == "recipes" and (given / "recipe.yaml").is_file():
        return given / "recipe.yaml"
    root = packaged_folder(kind)
    if kind == "recipes":
        known = {path.parent.name: path for path in root.glob("*/recipe.yaml")}
    else:
        files = [path for path in root.glob("*/*.yaml") if path.parent.name != "launch"]  # those are Accelerate's
        known = {path.relative_to(root).with_suffix("").as_posix(): path for path in files}
    if name not in known:
        raise UserError(f"{name}: there is no such file, and no packaged one of that name; {nearest(name, known)}")
    return known[name]


def packaged_folder(kind: str) -> Path:
    """Folder of the packaged `configs` or `recipes`: inside the installed package, or beside it in a checkout."""
    package = Path(__file__).parent
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


def build(cls: type[T], document: Document) -> T:
    """The config in a document, every key known, every type and range right.

    Raises:
        UserError: every problem at once.
    """
    from pydantic import ValidationError

    values = {} if document.values is None else document.values
    try:
        # Through JSON: strict mode then still takes a list for a tuple and 1 for 1.0, but never a text for a number.
        return cast(Any, _checker(cls).model_validate_json(json.dumps({"config": values}, default=str))).config
    except ValidationError as error:
        raise_all(_problems(cls, document, error.errors(include_url=False)))
        raise


@functools.cache
def _checker(cls: type) -> Any:
    """A pydantic model around a dataclass; its settings reach the plain dataclasses below it."""
    from pydantic import ConfigDict, create_model

    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())
    return create_model("Checked", __config__=strict, config=(cls, ...))


class _Found(NamedTuple):
    """One of pydantic's errors: the keys of its location, and the union members named between them."""

    key: Key
    members: tuple[str, ...]
    error: Any


def _problems(cls: type, document: Document, errors: Sequence[Any]) -> list[str]:
    """One line for each key that is wrong."""
    found = _of_the_meant_kind([_locate(document.values, error) for error in errors])
    wrong: dict[Key, list[_Found]] = {}
    for each in found:
        wrong.setdefault(each.key, []).append(each)
    return [f"{document.place(key)}: {dotted(key)}: {_reason(cls, group)}" for key, group in wrong.items()]


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

    def of_another(each: _Found) -> bool:
        return any(each.key[: len(key)] == key and each.members[: len(m)] == m for key, m in others)

    def kept(each: _Found) -> bool:
        if of_another(each):  # all of them: then the kind itself is wrong, and only that is worth saying
            meant = any(e.members and e.key[: len(each.key) - 1] == each.key[:-1] and not of_another(e) for e in found)
            return each.key[-1:] == ("kind",) and not meant
        deeper = any(len(e.key) > len(each.key) and e.key[: len(each.key)] == each.key for e in found)
        return not (each.members and deeper)

    return [each for each in found if kept(each)]


def _reason(cls: type, group: Sequence[_Found]) -> str:
    """Why one key is wrong, and the way out: what each member of a union wants, and what was there instead."""
    wants = list(dict.fromkeys(_want(cls, each) for each in group))
    text = " or ".join(want.removeprefix("must be ") if place else want for place, want in enumerate(wants))
    key, error = group[0].key, group[0].error
    if error["type"] in ("value_error", "missing", "unexpected_keyword_argument") or _is_secret(key):
        return text
    got = repr(error["input"]) if isinstance(error["input"], str) else json.dumps(error["input"])
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
        return f"unknown key; {nearest(str(found.key[-1]), names)}"
    if kind == "missing":
        return "is missing; add it"
    if kind == "literal_error":
        return f"must be {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    message = found.error["msg"]
    return WANTED[kind] if kind in WANTED else message[:1].lower() + message[1:]


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

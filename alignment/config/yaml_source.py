"""YAML documents whose every key knows its line, and dotted overrides on top. Knows nothing of what the keys mean."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignment.errors import UserError, raise_all

Key = tuple[str | int, ...]
REFERENCE = re.compile(r"\$\{([\w-]+)\}")  # what a recipe fills in; see recipe.py
MAX_BYTES = 4 * 2**20  # of a file: a config has a few thousand
MAX_VALUES = 100_000  # of a document, every alias written out
MAX_DEPTH = 64  # sections inside sections


@dataclass(frozen=True)
class SourcedYaml:
    """Plain values, and where each came from.

    Attributes:
        values: mappings, lists, text, numbers, booleans, None.
        places: path of keys -> `file:line` or `override`; what is missing here lies where its parent lies.
    """

    values: Any
    places: Mapping[Key, str] = field(default_factory=dict)

    def place(self, key: Key) -> str:
        """Where a key stands, or the nearest thing around it."""
        while key and key not in self.places:
            key = key[:-1]
        return self.places.get(key, "config")

    def below(self, key: Key) -> "SourcedYaml":
        """The section at a key, as a document of its own."""
        values = self.values
        for part in key:
            values = values[part]
        places = {name[len(key) :]: place for name, place in self.places.items() if name[: len(key)] == key}
        return SourcedYaml(values, {(): self.place(key), **places})


class _Loader(yaml.SafeLoader):
    """YAML 1.2's plain scalars: 1e-4 is a number, `no` and 2026-01-01 are text. PyYAML alone goes by YAML 1.1."""

    yaml_implicit_resolvers = {}  # noqa: RUF012  (PyYAML keeps this table on the class)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|)$"), ["~", "n", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"^(?:true|True|false|False)$"), list("tTfF"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"^[-+]?(?:0|[1-9][0-9_]*)$"), list("-+0123456789"))
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:\.[0-9]+|[0-9][0-9_]*\.[0-9]*)(?:[eE][-+]?[0-9]+)?
             |[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+
             |[-+]?\.inf|\.nan)$""",
        re.VERBOSE,
    ),
    list("-+.0123456789"),
)


def read_yaml(path: str | Path) -> SourcedYaml:
    """A YAML file with the line of every key.

    Raises:
        UserError: not readable, no YAML, a key given twice, or more values or deeper sections than a config has.
    """
    try:
        if (size := Path(path).stat().st_size) > MAX_BYTES:
            raise UserError(f"{path}: {size} bytes; a config may have {MAX_BYTES}")
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return parse_yaml(text, str(path))


def parse_yaml(text: str, name: str) -> SourcedYaml:
    """Like `read_yaml`, from text; `name` stands in for the file in messages."""
    try:
        reader = _Reader(text, name)
        try:
            node = reader.loader.get_single_node()
            values = None if node is None else reader.convert(node, (), ())
        finally:
            reader.loader.dispose()
    except RecursionError as error:
        raise UserError(f"{name}: sections lie more than {MAX_DEPTH} deep in each other") from error
    except UserError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UserError(f"{name}:{line}: is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    raise_all(reader.problems)
    return SourcedYaml(values, reader.places)


class _Reader:
    """Turns YAML nodes into plain values and keeps the line of each."""

    def __init__(self, text: str, name: str):
        # Inside [...] and {...} YAML reads the braces of ${name} as its own: they travel as private characters.
        self.loader = _Loader(REFERENCE.sub("\ue000\\1\ue001", text))
        self.name = name
        self.places: dict[Key, str] = {(): f"{name}:1"}
        self.problems: list[str] = []
        self.count = 0

    def convert(self, node: yaml.Node, key: Key, around: tuple[yaml.Node, ...]) -> Any:
        """The plain value of a node at a key; `around` are the nodes it lies in."""
        place = self.places.setdefault(key, f"{self.name}:{node.start_mark.line + 1}")
        self.count += 1
        if self.count > MAX_VALUES:  # nine levels of nine aliases are 400 million
            raise UserError(f"{place}: more than {MAX_VALUES} values with every alias written out")
        if node in around:
            self.problems.append(f"{place}: {dotted(key)}: an alias that contains itself")
            return None
        if len(around) > MAX_DEPTH:
            raise UserError(f"{place}: sections lie more than {MAX_DEPTH} deep in each other")
        inside = (*around, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, (*key, index), inside) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key, inside)
        value = self.loader.construct_object(node)
        return _with_braces(value) if isinstance(value, str) else value

    def _mapping(self, node: yaml.MappingNode, key: Key, inside: tuple[yaml.Node, ...]) -> dict[str, Any]:
        """A section; what `<<` merges into it gives way to its own keys."""
        values: dict[str, Any] = {}
        for name_node, child in node.value:
            name, place = _with_braces(str(name_node.value)), f"{self.name}:{name_node.start_mark.line + 1}"
            if name == "<<":
                continue
            if name in values:
                self.problems.append(f"{place}: {dotted((*key, name))}: stands here twice; keep one")
            self.places[(*key, name)] = place
            values[name] = self.convert(child, (*key, name), inside)
        merged: dict[str, Any] = {}
        for name_node, child in node.value:
            if name_node.value == "<<":
                merged = {**self._merged(child, key, inside, values.keys()), **merged}
        return {**merged, **values}

    def _merged(self, node: yaml.Node, key: Key, inside: tuple[yaml.Node, ...], own: Collection[str]) -> dict[str, Any]:
        """What `<<` brings in; places of what a section's `own` keys replace are not kept."""
        places, self.places = self.places, {}
        found = self.convert(node, key, inside)
        added, self.places = self.places, places
        for where, place in added.items():
            if len(where) <= len(key) or where[len(key)] not in own:
                self.places.setdefault(where, place)
        values: dict[str, Any] = {}
        for section in found if isinstance(found, list) else [found]:
            values = {**section, **values} if isinstance(section, dict) else values
        return values


def _with_braces(text: str) -> str:
    """A reference as it was written."""
    return text.replace("\ue000", "${").replace("\ue001", "}")


def override(document: SourcedYaml, overrides: Sequence[str]) -> SourcedYaml:
    """The document with `dotted.key=value` settings on top; the last one wins.

    Raises:
        UserError: no `=`, or a key below something that is not a section.
    """
    problems = []
    for text in overrides:
        name, equals, value = text.partition("=")
        key: Key = tuple(name.strip().split("."))
        if not equals or not all(key):
            written = re.sub(r"[^\w.-].*", " ...", text, flags=re.DOTALL)  # what follows the key may be a secret
            problems.append(f"override: {written!r} is not of the form key=value, such as optim.learning_rate=1e-4")
            continue
        try:
            document = overlay(document, key, parse_yaml(value, "override").values, "override")
        except UserError as error:
            problems.append(f"override: {name}: {str(error).removeprefix('override:1: ')}")
    raise_all(problems)
    return document


def overlay(document: SourcedYaml, key: Key, value: Any, place: str) -> SourcedYaml:
    """The document with one value replaced; sections on the way to it are made where they are missing."""
    sections: list[dict[str, Any]] = []
    places: dict[Key, str] = {}
    current = document.values
    for depth, part in enumerate(key):
        if current is not None and not isinstance(current, dict):
            raise UserError(f"{dotted(key[:depth])} is not a section, so {dotted(key)} cannot be set in it")
        if depth and current is None:
            places[key[:depth]] = place
        sections.append(current or {})
        current = sections[-1].get(str(part))
    for part, section in zip(reversed(key), reversed(sections), strict=True):
        value = {**section, part: value}
    kept = {old: where for old, where in document.places.items() if old[: len(key)] != key}
    return SourcedYaml(value, {**kept, **places, key: place})


def references(value: Any) -> set[str]:
    """Names in `${...}` anywhere in a value."""
    return {name for text in strings(value) for name in REFERENCE.findall(text)}


def strings(value: Any) -> Iterator[str]:
    """Every text in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def fill(value: Any, names: Mapping[str, Any]) -> Any:
    """A value with its references filled in; a text that is one reference takes the referred value's type."""
    if isinstance(value, dict):
        return {key: fill(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, names) for item in value]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    return names[whole[1]] if whole else REFERENCE.sub(lambda match: str(names[match[1]]), value)


def dotted(key: Key) -> str:
    """`data.train[0].path`; the whole document is `config`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".") or "config"

"""YAML with the file and line of every key, dotted overrides, and `${...}` references. It knows no key's meaning."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from alignment.errors import UserError, raise_all
from alignment.settings import Key, leaves

REFERENCE = re.compile(r"\$\{([\w-]+)\}")  # ${name}, replaced by `fill`
MAX_BYTES = 2**18  # per file; a config has a few thousand, and PyYAML takes seconds for so many
MAX_VALUES = 10_000  # per document, every alias expanded
MAX_DEPTH = 64  # of nested sections


@dataclass(frozen=True)
class SourcedYaml:
    """Plain values and the source of each.

    Attributes:
        values: mappings, lists, text, numbers, booleans, None.
        locations: path of keys -> `file:line` or `override`; a key without an entry has the location of its parent.
    """

    values: Any
    locations: Mapping[Key, str] = field(default_factory=dict)

    def location(self, key: Key) -> str:
        """Location of a key, or of the nearest section around it that has one."""
        while key and key not in self.locations:
            key = key[:-1]
        return self.locations.get(key, "config")

    def section(self, key: Key) -> "SourcedYaml":
        """The values below a key as a document of their own."""
        values = self.values
        for part in key:
            values = values[part]
        locations = {name[len(key) :]: where for name, where in self.locations.items() if name[: len(key)] == key}
        return SourcedYaml(values, {(): self.location(key), **locations})


class _Loader(yaml.SafeLoader):
    """Resolves plain scalars by YAML 1.2: 1e-4 is a number, `no` and 2026-01-01 are text. PyYAML follows YAML 1.1."""

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
    """A YAML file with the line of every key, at most `MAX_BYTES`, `MAX_VALUES` and `MAX_DEPTH`."""
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
    """Like `read_yaml`, from text; `name` is shown in place of the file in messages."""
    try:
        reader = _Reader(text, name)
        node = reader.loader.get_single_node()
        values = None if node is None else reader.convert(node, (), ())
    except RecursionError as error:
        raise UserError(f"{name}: sections are nested more than {MAX_DEPTH} deep") from error
    except UserError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        raise UserError(f"{name}:{line}: is not valid YAML: {getattr(error, 'problem', None) or error}") from error
    raise_all(reader.problems)
    return SourcedYaml(values, reader.locations)


class _Reader:
    """Converts YAML nodes to plain values and records the line of each."""

    def __init__(self, text: str, name: str):
        # Inside [...] and {...} YAML parses the braces of ${name} as a mapping, so private characters replace them.
        self.loader = _Loader(REFERENCE.sub("\ue000\\1\ue001", text))
        self.loader.name = name
        self.name = name
        self.locations: dict[Key, str] = {(): f"{name}:1"}
        self.problems: list[str] = []
        self.count = 0

    def convert(self, node: yaml.Node, key: Key, ancestors: tuple[yaml.Node, ...]) -> Any:
        """The plain value of a node at a key; `ancestors` are the nodes that contain it."""
        location = self.locations.setdefault(key, f"{self.name}:{node.start_mark.line + 1}")
        self.count += 1
        if self.count > MAX_VALUES:  # nine levels of nine aliases are 400 million
            raise UserError(f"{location}: more than {MAX_VALUES} values with every alias expanded")
        if node in ancestors:
            self.problems.append(f"{location}: {dotted(key)}: an alias that contains itself")
            return None
        if len(ancestors) > MAX_DEPTH:
            raise UserError(f"{location}: sections are nested more than {MAX_DEPTH} deep")
        path = (*ancestors, node)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(child, (*key, index), path) for index, child in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, key, path)
        value = self.loader.construct_object(node)
        return _restore_braces(value) if isinstance(value, str) else value

    def _mapping(self, node: yaml.MappingNode, key: Key, path: tuple[yaml.Node, ...]) -> dict[str, Any]:
        """A section; its own keys override those that `<<` merges into it."""
        own_values: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for name_node, child in node.value:
            name = _restore_braces(str(name_node.value))
            location = f"{self.name}:{name_node.start_mark.line + 1}"
            if name in own_values:
                self.problems.append(f"{location}: {dotted((*key, name))}: is given twice; keep one")
            if name != "<<":
                self.locations.setdefault((*key, name), location)
                own_values[name] = self.convert(child, (*key, name), path)
        for child in (child for name_node, child in node.value if name_node.value == "<<"):
            value = self.convert(child, key, path)
            for section in value if isinstance(value, list) else [value]:
                merged = {**section, **merged} if isinstance(section, dict) else merged
        return {**merged, **own_values}


def _restore_braces(text: str) -> str:
    """Text with its references as they were written."""
    return text.replace("\ue000", "${").replace("\ue001", "}")


def override(document: SourcedYaml, overrides: Sequence[str]) -> SourcedYaml:
    """The document with `dotted.key=value` settings applied; the last one wins."""
    problems = []
    for text in overrides:
        name, equals, value = text.partition("=")
        key: Key = tuple(name.strip().split("."))
        if not equals or not all(key):
            written = re.sub(r"[^\w.-].*", " ...", text, flags=re.DOTALL)  # the rest may be a secret
            problems.append(f"override: {written!r} is not of the form key=value, such as optim.learning_rate=1e-4")
            continue
        try:
            document = overlay(document, key, parse_yaml(value, "override").values, "override")
        except UserError as error:
            problems.append(f"override: {name}: {str(error).removeprefix('override:1: ')}")
    raise_all(problems)
    return document


def overlay(document: SourcedYaml, key: Key, value: object, location: str) -> SourcedYaml:
    """The document with one value replaced; missing sections above it are created."""
    sections: list[dict[str, Any]] = []
    locations: dict[Key, str] = {}
    current = document.values
    for depth, part in enumerate(key):
        if current is not None and not isinstance(current, dict):
            raise UserError(f"{dotted(key[:depth])} is not a section, so {dotted(key)} cannot be set in it")
        if depth and current is None:
            locations[key[:depth]] = location
        sections.append(current or {})
        current = sections[-1].get(str(part))
    for part, section in zip(reversed(key), reversed(sections), strict=True):
        value = {**section, part: value}
    kept = {name: where for name, where in document.locations.items() if name[: len(key)] != key}
    return SourcedYaml(value, {**kept, **locations, key: location})


def references(value: object) -> set[str]:
    """Names in `${...}` anywhere in a value."""
    return {name for text in strings(value) for name in REFERENCE.findall(text)}


def strings(value: object) -> list[str]:
    """Every text in a value."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, str)]


def fill(value: object, names: Mapping[str, object]) -> Any:
    """A value with its references replaced; a text that is a single reference becomes the value of that name."""
    if isinstance(value, dict):
        return {key: fill(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [fill(item, names) for item in value]
    if not isinstance(value, str):
        return value
    whole = REFERENCE.fullmatch(value)
    return names[whole[1]] if whole else REFERENCE.sub(lambda match: str(names[match[1]]), value)


def dotted(key: Key) -> str:
    """`data.train[0].path`; `config` for the whole document."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".") or "config"

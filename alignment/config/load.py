"""From YAML, the user's or the package's own, to checked config dataclasses; all mistakes at once."""

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from alignment.config.problems import explain_errors, fill_placeholder, is_number
from alignment.config.yaml_source import Key, SourcedYaml, dotted, fill, override, read_yaml, references
from alignment.errors import UserError, is_hidden, raise_all, suggest
from alignment.settings import broken_rules, deferred_checks

T = TypeVar("T")
Check = Callable[[object], Iterable[tuple[Key, str]]]  # a config -> its keys that are wrong, and why

code_folders: list[Path] = []  # of the config or recipe read last: Python modules that it names lie beside it

LARGEST, SMALLEST = 2**63 - 1, 1e-30  # int64, and what float32 divides by without overflow


def load_config(cls: type[T], source: str, overrides: Sequence[str] = (), check: Check | None = None) -> T:
    """A config from a file, with overrides applied; every problem at once, one line each: `file:line: key: why; way out`.

    `${configs}` in it is the folder of packaged configs, `${data}` that of real data.

    Args:
        source: path of a YAML file, or a packaged name such as `sft/tiny`; a path wins.
        overrides: `dotted.key=value`, each value read as YAML.
        check: see `build`.
    """
    path = find_packaged(source, "configs")
    code_folders[:] = [path.parent]
    document = override(read_yaml(path), overrides)
    names = {"configs": str(packaged_folder("configs")), "data": str(data_folder())}
    unknown = sorted(references(document.values) - set(names))
    raise_all(f"{source}: ${{{name}}} is not defined outside a recipe; {suggest(name, names)}" for name in unknown)
    return build(cls, SourcedYaml(fill(document.values, names), document.locations), check)


# Packaged files


def find_packaged(name: str, kind: str) -> Path:
    """The file at a path, or the packaged file of that name.

    `kind` is `configs` (names are `stage/variant`), `launch` (Accelerate's launch files, `launch/zero3`) or `recipes` (names
    are those of folders with a recipe.yaml).
    """
    given = Path(name)
    if given.is_file():
        return given
    if kind == "recipes" and (given / "recipe.yaml").is_file():
        return given / "recipe.yaml"
    known = packaged_names(kind)
    if name not in known:
        raise UserError(f"{name}: there is no such file, and no packaged one of that name; {suggest(name, known)}")
    return known[name]


def packaged_names(kind: str) -> dict[str, Path]:
    """The packaged files of a kind, see `find_packaged`: name -> path."""
    if kind == "recipes":
        return {path.parent.name: path for path in sorted(packaged_folder("recipes").glob("*/recipe.yaml"))}
    root = packaged_folder("configs")
    files = [path for path in sorted(root.glob("*/*.yaml")) if (path.parent.name == "launch") == (kind == "launch")]
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in files}


def packaged_folder(kind: str) -> Path:
    """Folder of the packaged `configs` or `recipes`: inside the installed package, or next to it in a checkout."""
    package = Path(__file__).parents[1]
    installed = package / "_packaged" / kind
    return installed if installed.is_dir() else package.parent / kind


def data_folder() -> Path:
    """Folder of real data: ALIGNMENT_DATA, or ../shared/data."""
    return Path(os.environ.get("ALIGNMENT_DATA") or "../shared/data")


def packaged_writer(output: str) -> str | None:
    """The command that runs the packaged config with this `output`; None where no config has it."""
    root = packaged_folder("configs")
    for path in sorted(root.glob("*/*.yaml")):
        if path.parent.name not in ("evaluate", "launch") and (read_yaml(path).values or {}).get("output") == output:
            return f"alignment {path.parent.name.replace('_', '-')} {path.parent.name}/{path.stem}"
    return None


# Checking


def build(cls: type[T], document: SourcedYaml, check: Check | None = None) -> T:
    """Return the config in a document; every key is known, every type and limit right, no two values contradict.

    A value stands in for each wrong one, so that the sections around it can be made and asked for contradictions; those
    that read a value that stands in are not named. `check` finds what else is wrong, such as files that are not there.
    """
    values = json.loads(json.dumps({} if document.values is None else document.values, default=str))
    problems, replaced = dict(_numbers_out_of_range(values)), set[Key]()
    config, wrong = _validate(cls, values)
    while wrong:
        problems = {key: why for key, why in wrong if not _within(key, replaced)} | problems
        stood_in = {key for name, _ in wrong if (key := fill_placeholder(cls, values, name)) is not None} - replaced
        if not stood_in:
            break
        replaced |= stood_in
        config, wrong = _validate(cls, values)
    lines = [(key, why) for key, why in problems.items()]
    lines += [
        (key, why) for key, why, read in broken_rules(config) if not any(_within(each, replaced) for each in read)
    ]
    if check is not None and config is not None:
        lines += [(key, why) for key, why in check(config) if not _within(key, replaced)]
    raise_all(dict.fromkeys(f"{document.location(key)}: {dotted(key)}: {why}" for key, why in lines))
    return cast(T, config)


def _within(key: Key, sections: Iterable[Key]) -> bool:
    return any(key[: len(section)] == section for section in sections)


def _validate(cls: type[T], values: object) -> tuple[T | None, list[tuple[Key, str]]]:
    from pydantic import ValidationError

    try:
        # From JSON, strict mode accepts a list for a tuple and 1 for 1.0, but never text for a number.
        with deferred_checks():
            return _checker(cls).model_validate_json(json.dumps({"config": values}, default=str)).config, []
    except ValidationError as error:
        return None, explain_errors(cls, values, error.errors(include_url=False))


def _numbers_out_of_range(values: object, key: Key = ()) -> Iterator[tuple[Key, str]]:
    """Keys of numbers too large or too small to compute with; pydantic refuses infinite ones."""
    if isinstance(values, (dict, list)):
        for name, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _numbers_out_of_range(value, (*key, name))
    elif is_number(values) and (0 < abs(values) < SMALLEST or LARGEST < abs(values) < math.inf) and not is_hidden(key):
        yield key, f"must be 0 or between {SMALLEST} and {LARGEST} (64 bits) in size"


@functools.cache
def _checker(cls: type) -> Any:
    """A pydantic model around a dataclass; its settings reach the plain dataclasses below it."""
    from pydantic import ConfigDict, create_model

    strict = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), hide_input_in_errors=True
    )
    return create_model("Checked", __config__=strict, config=(cls, ...))

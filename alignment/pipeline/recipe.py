"""Recipes as written: stages in order, the settings of each, expected ranges. run.py runs them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.config.load import build, code_folders, find_packaged
from alignment.config.yaml_source import Key, SourcedYaml, overlay, override, read_yaml
from alignment.errors import UserError, raise_all, suggest
from alignment.pipeline.expectations import Expectation

FOLDERS = ("configs", "data", "recipe")  # names for `${...}`, in addition to stages and the seed
RESERVED = (*FOLDERS, "seed")


@dataclass(frozen=True)
class StageEntry:
    """One stage as written.

    Attributes:
        name: of its directory below the recipe's output, which `${name}` refers to.
        run: verb, a key of `STAGES`.
        config: packaged name, path, or the config itself.
        settings: replace values of `config`; keys may be dotted.
    """

    name: str
    run: str
    config: str | dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][\w-]*", self.name) or self.name in RESERVED:
            raise ValueError(
                f"name must be of letters, digits, - and _, and none of {', '.join(RESERVED)}; got {self.name!r}"
            )


@dataclass(frozen=True)
class Recipe:
    """A pipeline: stages in order, and the expected ranges of their results."""

    name: str
    stages: list[StageEntry]
    title: str = ""
    description: str = ""
    seed: int = 0
    expect: list[Expectation] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = [stage.name for stage in self.stages]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            raise ValueError(f"two stages are called {', '.join(twice)}" if twice else "stages: there are none")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        for stage in (expected.stage for expected in self.expect):
            if stage not in names:
                raise ValueError(f"expect: there is no stage {stage!r}; {suggest(stage, names)}")


@dataclass(frozen=True)
class StageSettings:
    """One stage's config before its references are replaced.

    Attributes:
        entry: the stage as written.
        document: its config with settings and overrides applied.
    """

    entry: StageEntry
    document: SourcedYaml


def read_recipe(source: str, overrides: Sequence[str] = ()) -> tuple[Recipe, Path, list[StageSettings]]:
    """A recipe, its folder, and the settings of each stage.

    Args:
        source: folder, path of a recipe.yaml, or packaged name.
        overrides: `stage.key=value`, or `seed=value`.

    Raises:
        UserError: every problem at once.
    """
    path = find_packaged(source, "recipes")
    code_folders[:] = [path.parent]
    own = [text for text in overrides if "." not in text.partition("=")[0]]
    document = override(read_yaml(path), own)
    recipe = build(Recipe, document)
    below: dict[str, list[str]] = {stage.name: [] for stage in recipe.stages}
    problems = []
    for text in (text for text in overrides if text not in own):
        name, _, rest = text.partition(".")
        if name in below:
            below[name].append(rest)
        else:
            problems.append(f"override: {text}: there is no stage {name!r}; {suggest(name, below)}")
    settings = []
    for index, stage in enumerate(recipe.stages):
        try:
            settings.append(_settings(stage, document.section(("stages", index)), path.parent, below[stage.name]))
        except UserError as error:
            problems.append(str(error))
    raise_all(problems)
    return recipe, path.parent, settings


def _settings(stage: StageEntry, written: SourcedYaml, folder: Path, overrides: Sequence[str]) -> StageSettings:
    """The stage's config, changed by its settings, then by overrides."""
    if isinstance(stage.config, str):
        own = folder / stage.config
        document = read_yaml(own if own.is_file() else find_packaged(stage.config, "configs"))
    elif stage.config is None:
        document = SourcedYaml({}, {(): written.location(())})
    else:
        document = written.section(("config",))
    if not isinstance(document.values, (dict, type(None))):
        raise UserError(f"{document.location(())}: stage {stage.name}: its config must be a section of keys")
    for name, value in stage.settings.items():
        location = written.location(("settings", name))
        for key, leaf in _leaves(value, tuple(name.split("."))):
            document = overlay(document, key, leaf, location)
    try:
        return StageSettings(stage, override(document, overrides))
    except UserError as error:
        raise UserError(f"stage {stage.name}: {error}") from error


def _leaves(value: object, key: Key) -> Iterator[tuple[Key, object]]:
    """Keys and values of a section; a list or an empty section is a value."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _leaves(item, (*key, name))

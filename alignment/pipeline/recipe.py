"""Recipes as written: stages in order, the settings of each, expected ranges. run.py runs them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from alignment.config.load import build, code_folders, find_packaged
from alignment.config.yaml_source import Key, SourcedYaml, overlay, override, read_yaml
from alignment.errors import UserError, raise_all, suggest
from alignment.pipeline.expectations import Expectation
from alignment.settings import NonNegativeInt, Rule, Settings

FOLDERS = ("configs", "data", "recipe")  # names for `${...}`, in addition to stages and the seed
RESERVED = (*FOLDERS, "seed")


@dataclass(frozen=True)
class StageEntry(Settings):
    """One stage as written.

    Attributes:
        name: of its directory below the recipe's output, which `${name}` refers to.
        run: verb, a key of `STAGES`; or `FILE.py:FUNCTION`, a stage of the recipe's own, the file named from its folder.
        config: packaged name, path, or the config itself.
        settings: replace values of `config`; keys may be dotted.
    """

    name: str
    run: str
    config: str | dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)

    RULES = (
        Rule(
            "name",
            lambda c: not re.fullmatch(r"[A-Za-z0-9][\w-]*", c.name) or c.name in RESERVED,
            f"must be of letters, digits, - and _, and none of {', '.join(RESERVED)}; got {{self.name!r}}",
        ),
    )


@dataclass(frozen=True)
class Recipe(Settings):
    """A pipeline: stages in order, and the expected ranges of their results."""

    name: str
    stages: list[StageEntry]
    title: str = ""
    description: str = ""
    seed: NonNegativeInt = 0
    expect: list[Expectation] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the stages."""
        return [stage.name for stage in self.stages]

    RULES = (
        Rule("stages", lambda c: not c.stages, "must hold at least one stage"),
        Rule(
            "stages",
            lambda c: ", ".join(sorted({name for name in c.names if c.names.count(name) > 1})),
            "must have different names; two stages are called {found}",
        ),
        Rule(
            "expect",
            lambda c: next(
                (f"{e.stage!r}; {suggest(e.stage, c.names)}" for e in c.expect if e.stage not in c.names), ""
            ),
            "names a stage that is not there: {found}",
        ),
    )


class StageSettings(NamedTuple):
    """One stage as written, and its config with settings and overrides applied, before its references are replaced."""

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
    below: dict[str, list[str]] = {name: [] for name in recipe.names}
    problems, settings = [], []
    for text in (text for text in overrides if text not in own):
        name, _, rest = text.partition(".")
        if name in below:
            below[name].append(rest)
        else:
            problems.append(f"override: {text}: there is no stage {name!r}; {suggest(name, below)}")
    for index, stage in enumerate(recipe.stages):
        try:
            settings.append(_settings(stage, document.section(("stages", index)), path.parent, below[stage.name]))
        except UserError as error:
            problems.append(f"stage {stage.name}: {error}")
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
        raise UserError(f"its config must be a section of keys ({document.location(())})")
    for name, value in stage.settings.items():
        location = written.location(("settings", name))
        for key, leaf in _leaves(value, tuple(name.split("."))):
            document = overlay(document, key, leaf, location)
    return StageSettings(stage, override(document, overrides))


def _leaves(value: object, key: Key) -> Iterator[tuple[Key, object]]:
    """Keys and values of a section; a list or an empty section is a value."""
    if not isinstance(value, dict) or not value:
        yield key, value
        return
    for name, item in value.items():
        yield from _leaves(item, (*key, name))

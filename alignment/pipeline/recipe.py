"""Recipes as written: stages in order, the settings of each, the ranges expected of results. run.py runs them."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import filter as matching
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from alignment.config.load import build, code_folders, find_packaged
from alignment.config.yaml_source import SourcedYaml, fill, overlay, override, read_yaml, references
from alignment.errors import UserError, raise_all, suggest
from alignment.settings import Key, NonNegativeInt, Rule, Settings, leaves

FOLDERS = ("configs", "data", "recipe")  # names for `${...}`, in addition to stages and the seed
RESERVED = (*FOLDERS, "seed", "matrix")

Over = Literal["first", "last", "min", "max", "mean"]


@dataclass(frozen=True)
class Expectation(Settings):
    """The range in which a measured number must lie for the recipe to have worked.

    Attributes:
        stage: name of the stage that measured it.
        metric: dotted key in the stage's results.json, or a key of its metrics.jsonl.
        low, high: bounds, both included; at least one.
        why: the reason for the bounds.
        over: the lines of metrics.jsonl that count.
    """

    stage: str
    metric: str
    low: float | None = None
    high: float | None = None
    why: str = ""
    over: Over = "last"

    RULES = (Rule("low", lambda c: c.low is None and c.high is None, "or high must be given, or both"),)


@dataclass(frozen=True)
class StageEntry(Settings):
    """One stage as written.

    Attributes:
        name: of its directory below the recipe's output, which `${name}` refers to.
        run: the name of a stage, a key of `STAGES`; or `FILE.py:FUNCTION`, a stage of the recipe's own, the file named
            from its folder.
        config: packaged name, path (the `output` of such a file does not count), or the config itself.
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
    """A pipeline: stages in order, and the expected ranges of their results.

    Attributes:
        stages: in order, those that `matrix` repeats being written out.
        matrix: axis -> its values; a stage whose name holds `${axis}` is run once for each of them, see
            `repeat_stages`.
        seed: `${seed}` in stages that no axis of that name repeats.
        expect: compared by --check.
    """

    name: str
    stages: list[StageEntry]
    title: str = ""
    description: str = ""
    matrix: dict[str, list[int | str]] = field(default_factory=dict)
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
            "matrix",
            lambda c: ", ".join(
                axis for axis, values in c.matrix.items() if not values or axis in (*FOLDERS, *c.names)
            ),
            "needs a value for each axis, and axes that are not called like a stage or a folder; got {found}",
        ),
        Rule(
            "expect",
            lambda c: next(
                (f"{e.stage!r}; {suggest(e.stage, c.names)}" for e in c.expect if e.stage not in c.names), ""
            ),
            "names a stage that is not there: {found}",
        ),
    )


def read_recipe(
    source: str, overrides: Sequence[str] = ()
) -> tuple[Recipe, Path, list[tuple[StageEntry, SourcedYaml]]]:
    """A recipe, its folder, and each stage with its config, settings and overrides applied, references not replaced."""
    path = find_packaged(source, "recipes")
    code_folders[:] = [path.parent]
    recipe_overrides = [
        text for text in overrides if "." not in (key := text.partition("=")[0]) or key.startswith("matrix.")
    ]
    document = repeat_stages(override(read_yaml(path), recipe_overrides))
    recipe = build(Recipe, document)
    below: dict[str, list[str]] = {name: [] for name in recipe.names}
    problems = []
    stages = []
    for text in (text for text in overrides if text not in recipe_overrides):
        name, _, rest = text.partition(".")
        stage_names = matching(below, name)
        for stage_name in stage_names:
            below[stage_name].append(rest)
        if not stage_names:
            problems.append(f"override: {text}: there is no stage {name!r}; {suggest(name, below)}")
    for index, stage in enumerate(recipe.stages):
        try:
            written = _stage_config(stage, document.section(("stages", index)), path.parent)
            stages.append((stage, override(written, below[stage.name])))
        except UserError as error:
            problems.append(f"stage {stage.name}: {error}")
    raise_all(problems)
    return recipe, path.parent, stages


def _stage_config(stage: StageEntry, written: SourcedYaml, folder: Path) -> SourcedYaml:
    """The stage's config, changed by its settings."""
    if isinstance(stage.config, str):
        path = folder / stage.config
        document = read_yaml(path if path.is_file() else find_packaged(stage.config, "configs"))
    else:
        document = written.section(("config",)) if stage.config else SourcedYaml({}, {(): written.location(())})
    if not isinstance(document.values, (dict, type(None))):
        raise UserError(f"its config must be a section of keys ({document.location(())})")
    if isinstance(stage.config, str) and document.values:
        document.values.pop("output", None)  # which is for a run without a recipe
    for name, value in stage.settings.items():
        for key, leaf in _leaves(value, tuple(name.split("."))):
            document = overlay(document, key, leaf, written.location(("settings", name)))
    return document


def _leaves(value: object, key: Key) -> Iterator[tuple[Key, object]]:
    """Keys and values of a section; a list or an empty section is a value."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _leaves(item, (*key, name))
    else:
        yield key, value


def repeat_stages(document: SourcedYaml) -> SourcedYaml:
    """A recipe's document with each stage written out once for every combination of the axes of `matrix` in its name.

    With `matrix: {seed: [0, 1]}` the stage `sft_${seed}` is `sft_0` and `sft_1`, and `${seed}` is 0 or 1 wherever it
    stands in that stage: `${pretrain_${seed}}/model` becomes `${pretrain_0}/model`. In a stage without the axis in its
    name an item of a list is repeated instead: `["${sft_${seed}}/model"]` becomes a list of both.
    """
    matrix = (document.values or {}).get("matrix")
    stages = (document.values or {}).get("stages")
    if not (
        isinstance(matrix, dict) and isinstance(stages, list) and all(isinstance(x, list) for x in matrix.values())
    ):
        return document  # which is refused with the reason, or has no matrix
    made: list[object] = []
    locations = {key: where for key, where in document.locations.items() if key[:1] != ("stages",)}
    for index, stage in enumerate(stages):
        stage_locations = {key[2:]: where for key, where in document.locations.items() if key[:2] == ("stages", index)}
        for names in _combinations(stage.get("name") if isinstance(stage, dict) else None, matrix):
            locations |= {("stages", len(made), *key): where for key, where in stage_locations.items()}
            made.append(_written_out(stage, names, {axis: matrix[axis] for axis in matrix if axis not in names}))
    return SourcedYaml({**document.values, "stages": made}, locations)


def _combinations(value: object, matrix: Mapping[str, list[object]]) -> Iterator[dict[str, object]]:
    """Every combination of the axes that a value refers to, as axis -> value; an empty one where it refers to none."""
    axes = [axis for axis in matrix if axis in references(value)]
    for values in product(*(matrix[axis] for axis in axes)):
        yield dict(zip(axes, values, strict=True))


def _written_out(value: object, names: Mapping[str, object], others: Mapping[str, list[object]]) -> Any:
    """A value with the axes `names` replaced, and with an item for each combination of `others` that it refers to."""
    if isinstance(value, dict):
        return {key: _written_out(item, names, others) for key, item in value.items()}
    if isinstance(value, list):
        return [_written_out(item, {**names, **more}, {}) for item in value for more in _combinations(item, others)]
    return fill(value, {name: f"${{{name}}}" for name in references(value)} | dict(names))


# Results


def check_expectations(expectations: Sequence[Expectation], output: Path) -> bool:
    """Print each measured number with its expected range; True if all lie inside."""
    rows = [("stage", "metric", "measured", "expected", "", "why")]
    inside = True
    for expected in expectations:
        value = read_metric(output / expected.stage, expected.metric, expected.over)
        low = expected.low
        high = expected.high
        good = value is not None and (low is None or value >= low) and (high is None or value <= high)
        inside &= good
        bounds = " .. ".join("" if bound is None else f"{bound:g}" for bound in (low, high))
        measured = "missing" if value is None else "not finite" if math.isnan(value) else f"{value:.6g}"
        rows.append((expected.stage, expected.metric, measured, bounds, "ok" if good else "OUTSIDE", expected.why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
    return inside


def read_metric(directory: Path, metric: str, over: Over = "last") -> float | None:
    """A number that a stage wrote: a dotted key of results.json, else of a column of metrics.jsonl the line(s) `over`.

    Not a number where one of those lines has null, as a log has for a value that is not finite.
    """
    values = flatten_numbers(read_json(directory / "results.json"))
    if metric in values:
        return values[metric]
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    column = [row[metric] for row in map(json.loads, lines) if metric in row]
    asked = {"first": column[:1], "last": column[-1:]}.get(over, column)
    if not asked or None in asked:
        return math.nan if asked else None
    column = list(map(float, asked))
    summary = {"first": column[0], "last": column[-1], "min": min(column), "max": max(column), "mean": fmean(column)}
    return summary[over]


def flatten_numbers(value: object) -> dict[str, float]:
    """Numbers in nested mappings and lists, by dotted keys."""
    return {".".join(map(str, key)): float(leaf) for key, leaf in leaves(value) if isinstance(leaf, (int, float))}


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); delete it to run the stage again") from error

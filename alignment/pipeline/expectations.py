"""The ranges that a recipe expects of its results, and their comparison with what was measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from alignment.errors import UserError
from alignment.settings import Rule, Settings

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


def check_expectations(expectations: Sequence[Expectation], output: Path) -> bool:
    """Print each measured number with its expected range; True if all lie inside."""
    rows = [("stage", "metric", "measured", "expected", "", "why")]
    inside = True
    for expected in expectations:
        value = read_metric(output / expected.stage, expected.metric, expected.over)
        low, high = expected.low, expected.high
        good = value is not None and (low is None or value >= low) and (high is None or value <= high)
        inside &= good
        bounds = " .. ".join("" if bound is None else f"{bound:g}" for bound in (low, high))
        measured = "missing" if value is None else f"{value:.6g}"
        rows.append((expected.stage, expected.metric, measured, bounds, "ok" if good else "OUTSIDE", expected.why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
    return inside


def read_metric(directory: Path, metric: str, over: Over = "last") -> float | None:
    """A number that a stage wrote: a dotted key of results.json, else of a column of metrics.jsonl the line(s) `over`."""
    values = flatten_numbers(read_json(directory / "results.json"))
    if metric in values:
        return values[metric]
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    column = [float(row[metric]) for row in map(json.loads, lines) if row.get(metric) is not None]
    if not column:
        return None
    found = {"first": column[0], "last": column[-1], "min": min(column), "max": max(column), "mean": fmean(column)}
    return found[over]


def flatten_numbers(value: object, key: str = "") -> dict[str, float]:
    """Numbers in nested mappings and lists, by dotted keys."""
    if not isinstance(value, dict | list):
        return {key: float(value)} if isinstance(value, (int, float)) else {}
    found: dict[str, float] = {}
    for name, item in value.items() if isinstance(value, dict) else enumerate(value):
        found |= flatten_numbers(item, f"{key}.{name}" if key else str(name))
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty where there is no file.

    Raises:
        UserError: it is not JSON.
    """
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); delete it to run the stage again") from error

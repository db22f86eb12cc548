"""The ranges that a recipe expects of its results, and their comparison with what was measured."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from alignment.errors import UserError

Over = Literal["first", "last", "min", "max", "mean"]


@dataclass(frozen=True)
class Expectation:
    """The range in which a measured number must lie for the recipe to have worked.

    Attributes:
        stage: name of the stage that measured it.
        metric: dotted key in the stage's results.json, or a key of its metrics.jsonl.
        low, high: bounds, both included; at least one.
        why: the reason for the bounds.
        over: which lines of metrics.jsonl.
    """

    stage: str
    metric: str
    low: float | None = None
    high: float | None = None
    why: str = ""
    over: Over = "last"

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("give low, high or both")

    def holds(self, value: float) -> bool:
        """Whether a number lies in the range."""
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


def check_expectations(expectations: Sequence[Expectation], output: Path) -> bool:
    """Print each measured number with its expected range; True if all lie inside."""
    rows = [("stage", "metric", "measured", "expected", "", "why")]
    inside = True
    for expected in expectations:
        value = read_metric(output / expected.stage, expected.metric, expected.over)
        inside &= (good := value is not None and expected.holds(value))
        low, high = ("" if bound is None else f"{bound:g}" for bound in (expected.low, expected.high))
        measured = "missing" if value is None else f"{value:.6g}"
        verdict = "ok" if good else "OUTSIDE"
        rows.append((expected.stage, expected.metric, measured, f"{low} .. {high}", verdict, expected.why))
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
    if isinstance(value, dict):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {key: float(value)} if isinstance(value, (int, float)) else {}
    return {
        name: number
        for part, item in items
        for name, number in flatten_numbers(item, f"{key}.{part}" if key else part).items()
    }


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

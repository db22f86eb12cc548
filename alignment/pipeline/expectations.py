"""Expected bands of a recipe: what was measured beside what was expected. Runs nothing."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from alignment.errors import UserError


@dataclass(frozen=True)
class Expectation:
    """Where a measured number has to lie for the recipe to have worked.

    Attributes:
        stage: whose number.
        metric: dotted key in the stage's results.json, or a key of its metrics.jsonl.
        low, high: bounds, both included; at least one.
        why: the reason for the bounds.
        over: which of the lines of metrics.jsonl.
    """

    stage: str
    metric: str
    low: float | None = None
    high: float | None = None
    why: str = ""
    over: Literal["first", "last", "min", "max", "mean"] = "last"

    def __post_init__(self) -> None:
        if self.low is None and self.high is None:
            raise ValueError("a band needs low, high or both")


def check_bands(bands: Sequence[Expectation], output: Path) -> bool:
    """Print what was measured beside what was expected; True where everything lies inside."""
    rows = [("stage", "metric", "measured", "expected", "", "why")]
    inside = True
    for band in bands:
        value = read_metric(output / band.stage, band)
        low, high = ("" if bound is None else f"{bound:g}" for bound in (band.low, band.high))
        good = (
            value is not None and (band.low is None or value >= band.low) and (band.high is None or value <= band.high)
        )
        inside &= good
        measured = "missing" if value is None else f"{value:.6g}"
        rows.append((band.stage, band.metric, measured, f"{low} .. {high}", "ok" if good else "OUTSIDE", band.why))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    for row in rows:
        print("  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[5]]).rstrip())
    return inside


def read_metric(directory: Path, band: Expectation) -> float | None:
    """A number that a stage left behind: a dotted key of results.json, else a column of metrics.jsonl."""
    values = flatten(read_json(directory / "results.json"))
    if band.metric in values:
        return values[band.metric]
    path = directory / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    column = [float(row[band.metric]) for row in map(json.loads, lines) if row.get(band.metric) is not None]
    if not column:
        return None
    found = {"first": column[0], "last": column[-1], "min": min(column), "max": max(column), "mean": fmean(column)}
    return found[band.over]


def flatten(value: Any, key: str = "") -> dict[str, float]:
    """Numbers in nested mappings and lists, by dotted keys."""
    if isinstance(value, dict):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list):
        items = [(str(place), item) for place, item in enumerate(value)]
    else:
        return {key: float(value)} if isinstance(value, (int, float)) else {}
    return {
        name: number for part, item in items for name, number in flatten(item, f"{key}.{part}" if key else part).items()
    }


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file, empty where there is none.

    Raises:
        UserError: it holds no JSON.
    """
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); delete it to run the stage again") from error

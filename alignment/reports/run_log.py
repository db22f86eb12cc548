"""A run's files: record, logs as rows, and metrics as columns with the statistics that symptoms are judged by."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from alignment.config.yaml_source import read_yaml
from alignment.data.rows.files import json_line_rows
from alignment.errors import UserError, raise_all
from alignment.files import hash_of, read_json_object

ENOUGH = 10  # lines of a metric below which a trend is not judged: two windows of three need some course between them


class Series(NamedTuple):
    """One metric over the updates that logged it; `steps` count from 1."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def width(self) -> int:
        """Lines of a window: a fifth of the run, at least 3, as single lines are noise; 1 where no trend is judged."""
        return 1 if len(self.values) < ENOUGH else max(3, len(self.values) // 5)

    @property
    def first(self) -> float:
        """Mean of the beginning: at most 10 lines, since most runs learn the most in their first updates."""
        return float(np.mean(self.values[: min(10, self.width)]))

    @property
    def last(self) -> float:
        return float(np.mean(self.values[-self.width :]))

    @property
    def noise(self) -> float:
        """Standard deviation of one line around the course of the series, from differences of neighbors."""
        return float(np.std(np.diff(self.values)) / math.sqrt(2)) if len(self.values) > 2 else 0.0

    @property
    def error(self) -> float:
        """Standard error of `last - first`."""
        return self.noise * math.sqrt(1 / min(10, self.width) + 1 / self.width)

    def increases(self, errors: float = 2.0) -> bool:
        """True where the end lies above the beginning by more than `errors` standard errors."""
        return self.last - self.first > max(errors * self.error, 1e-12)

    def decreases(self, errors: float = 2.0) -> bool:
        """True where the end lies below the beginning by more than `errors` standard errors."""
        return self.first - self.last > max(errors * self.error, 1e-12)

    @property
    def windows(self) -> np.ndarray:
        """Means of all windows, in order, [n - width + 1]."""
        return window_sums(self.values, self.width) / self.width

    def later(self, share: float) -> np.ndarray:
        """The values that follow after this share of them."""
        return np.array(self.values[int(share * len(self.values)) :])

    @property
    def changing_step(self) -> int:
        """The step at which the windows have gone half their way from the beginning to the farthest one."""
        away = np.abs(self.windows - self.first)
        return self.steps[int((away >= away.max() / 2).argmax())]

    def describe(self) -> str:
        """Beginning and end, and the range of the windows between: `0.34 -> 1.2, between 0.3 and 1.9`."""
        low = self.windows.min()
        high = self.windows.max()
        return f"{self.first:.3g} -> {self.last:.3g}, between {low:.3g} and {high:.3g}"


def window_sums(values: Sequence[float] | np.ndarray, width: int) -> np.ndarray:
    """Sums of all `width` neighbors, in order, [n - width + 1], in a time that does not depend on the width.

    In blocks of that width each window is the end of a block and the beginning of the next one. Differences of running
    sums over all values would lose what comes after a very large value.
    """
    count = len(values)
    blocks = np.zeros((count // width + 1, width))
    blocks.flat[:count] = values
    ends = blocks[:, ::-1].cumsum(1)[:, ::-1].ravel()
    beginnings = np.pad(blocks.cumsum(1)[:, :-1], ((0, 0), (1, 0))).ravel()
    return ends[: count - width + 1] + beginnings[width : count + 1]


@dataclass(frozen=True)
class RunLog:
    """A run's stage and config.yaml, each metric's finite values, the steps where one was not finite, samples.jsonl."""

    stage: str
    config: Mapping[str, Any]
    series: Mapping[str, Series]
    broken: Mapping[str, Sequence[int]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    finished: int = 0  # updates of a run that has finished

    def series_of(self, name: str) -> Series | None:
        """A metric with lines enough to judge its course; None where it has fewer."""
        series = self.series.get(name)
        return series if series is not None and len(series.values) >= ENOUGH else None

    def setting(self, key: str) -> Any:
        """The value of a dotted key; None where the config has none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def number(self, key: str, default: float) -> float:
        """The value of a dotted key as a number; `default` where it is none."""
        value = self.setting(key)
        return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else default

    def has(self, key: str) -> bool:
        """True where the run's config has a key, so that it can be set; one of an unset section has not."""
        section, _, name = key.rpartition(".")
        return name in ((self.setting(section) if section else self.config) or {})


def columns(rows: Iterable[Mapping[str, object]]) -> tuple[dict[str, Series], dict[str, list[int]]]:
    """Finite values of each metric, and the steps where it was not finite, which a log holds as null."""
    steps = defaultdict[str, list[Any]](list)
    values = defaultdict[str, list[float]](list)
    broken = defaultdict[str, list[Any]](list)
    for row in rows:
        for name, value in row.items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                broken[name].append(row["step"])
            elif isinstance(value, (int, float)) and name != "step":
                steps[name].append(row["step"])
                values[name].append(float(value))
    return {name: Series(tuple(steps[name]), tuple(known)) for name, known in values.items()}, broken


@dataclass(frozen=True)
class StageRecord:
    """Lineage of a stage's result, its settings, and how long it took."""

    name: str
    hash: str
    parents: Sequence[str] = ()
    seconds: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    lineage: Mapping[str, Any] = field(default_factory=dict)  # lineage.json as it stands


def log_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a run's JSON-lines log; none where there is no file. A last line cut short by a crash is left out.

    Raises:
        UserError: after the last row, with the lines that are no rows or have no step.
    """
    problems = []
    row = None
    for row in json_line_rows(path) if path.exists() else ():
        if row.values is None:
            problems.append(row.problem)
        elif type(row.values.get("step")) is not int:
            problems.append(f"{row.location}: the line has no step; delete it")
        else:
            yield row.values
    if row is not None and row.values is None and not path.read_bytes().endswith(b"\n"):
        problems.pop()
    raise_all(problems)


def read_log_rows(path: Path) -> list[dict[str, Any]]:
    """All of `log_rows`."""
    return list(log_rows(path))


def read_stage_record(directory: Path) -> StageRecord:
    """Settings, parents and the hash of the whole lineage of a run."""
    if not (directory / "lineage.json").is_file():
        inside = sorted(str(path.parent) for path in directory.glob("*/lineage.json"))
        more = f"; the runs in it: {', '.join(inside)}" if inside else "; give the `output` of a training stage"
        raise UserError(f"{directory} is not a run's directory: it has no lineage.json{more}")
    config = directory / "config.yaml"
    lineage = read_json_object(directory / "lineage.json")
    if not (isinstance(lineage.get("stage"), str) and isinstance(lineage.get("parents"), dict | list)):
        raise UserError(f"{directory / 'lineage.json'}: is damaged: a run writes its stage and parents there")
    settings = read_yaml(config).values or {} if config.is_file() else {}
    if not isinstance(settings, dict):
        raise UserError(f"{config}: is damaged: a run writes its settings there, as keys and values")
    return StageRecord(lineage["stage"], hash_of(lineage), list(lineage["parents"]), None, settings, lineage)


def read_run_log(directory: str | Path) -> RunLog:
    """Read metrics.jsonl, samples.jsonl, config.yaml and lineage.json of a run, finished or not."""
    directory = Path(directory)
    record = read_stage_record(directory)
    series, broken = columns(log_rows(directory / "metrics.jsonl"))
    if not series and not broken:
        raise UserError(f"{directory / 'metrics.jsonl'}: no update is logged, so there is nothing to judge yet")
    samples = read_log_rows(directory / "samples.jsonl")
    return RunLog(record.name, record.settings or {}, series, broken, samples, record.lineage.get("finished", 0))

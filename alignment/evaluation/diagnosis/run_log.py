"""The logs of a run as columns, with the few statistics that a symptom is judged by, and the finding that it gives.

No symptom here: see rollout_symptoms.py and loss_symptoms.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from alignment.errors import UserError
from alignment.evaluation.report.run_report import read_log_rows, read_stage_record

ENOUGH = 10  # lines of a metric below which a trend is not judged: two windows of three need some course between them


@dataclass(frozen=True)
class Series:
    """One metric over the updates that logged it; `steps` count from 1."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    @property
    def width(self) -> int:
        """Lines of a window: a fifth of the run, at least 3, because single lines are noise."""
        return min(len(self), max(3, len(self) // 5))

    @property
    def first(self) -> float:
        """Mean of the beginning: at most 10 lines, since most runs learn the most in their first updates."""
        return float(np.mean(self.values[: min(10, self.width)]))

    @property
    def last(self) -> float:
        """Mean of the last window."""
        return float(np.mean(self.values[-self.width :]))

    @property
    def noise(self) -> float:
        """Standard deviation of one line around the course of the series, from differences of neighbors."""
        return float(np.std(np.diff(self.values)) / math.sqrt(2)) if len(self) > 2 else 0.0

    @property
    def error(self) -> float:
        """Standard error of `last - first`."""
        return self.noise * math.sqrt(1 / min(10, self.width) + 1 / self.width)

    def rises(self, errors: float = 2.0) -> bool:
        """Whether the end lies above the beginning by more than `errors` standard errors."""
        return self.last - self.first > max(errors * self.error, 1e-12)

    def falls(self, errors: float = 2.0) -> bool:
        """Whether the end lies below the beginning by more than `errors` standard errors."""
        return self.first - self.last > max(errors * self.error, 1e-12)

    def window_means(self) -> np.ndarray:
        """Means of all windows, in order, [n - width + 1]."""
        return np.convolve(self.values, np.full(self.width, 1 / self.width), "valid")

    def steps_of(self, window: int) -> tuple[int, int]:
        """First and last step of a window."""
        return self.steps[window], self.steps[window + self.width - 1]

    def highest(self) -> tuple[float, tuple[int, int]]:
        """The highest mean of a window, and its steps."""
        means = self.window_means()
        at = int(means.argmax())
        return float(means[at]), self.steps_of(at)

    def lowest(self) -> tuple[float, tuple[int, int]]:
        """The lowest mean of a window, and its steps."""
        means = self.window_means()
        at = int(means.argmin())
        return float(means[at]), self.steps_of(at)

    def later(self, share: float) -> "Series":
        """What follows after this share of the lines."""
        start = math.floor(share * len(self))
        return Series(self.steps[start:], self.values[start:])

    @property
    def span(self) -> tuple[int, int]:
        """First and last step."""
        return self.steps[0], self.steps[-1]

    def course(self) -> str:
        """`0.34 -> 1.2`: beginning and end."""
        return f"{self.first:.3g} -> {self.last:.3g}"


@dataclass(frozen=True)
class Setting:
    """A setting to try: its key, the value that the run had, the one to try, and why."""

    key: str
    now: object
    value: object
    why: str


@dataclass(frozen=True)
class Diagnosis:
    """A symptom that was found.

    Attributes:
        symptom: its name.
        evidence: the numbers.
        cause: what usually causes them.
        steps: first and last step that show it.
        settings: what to try, the likeliest first.
    """

    symptom: str
    evidence: str
    cause: str
    steps: tuple[int, int]
    settings: tuple[Setting, ...] = ()


@dataclass(frozen=True)
class RunLog:
    """What a run wrote: stage, settings, metrics as columns, texts.

    Attributes:
        stage: as in lineage.json: ppo, sft, ...
        config: config.yaml.
        series: finite values of each metric.
        broken: steps at which a metric was not finite.
        samples: rows of samples.jsonl.
    """

    stage: str
    config: Mapping[str, Any]
    series: Mapping[str, Series]
    broken: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()

    def trend(self, name: str) -> Series | None:
        """A metric with lines enough to judge its course; None where it has fewer."""
        found = self.series.get(name)
        return found if found is not None and len(found) >= ENOUGH else None

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
        """Whether the run's config has a key, so that it can be set; one of an unset section has not."""
        *section, name = key.split(".")
        holder = self.setting(".".join(section)) if section else self.config
        return isinstance(holder, Mapping) and name in holder

    def advise(self, *settings: tuple[str, object, str]) -> tuple[Setting, ...]:
        """The settings (key, value to try, why) whose key the run's config has and whose value differs from the run's."""
        known = (Setting(key, self.setting(key), value, why) for key, value, why in settings if self.has(key))
        return tuple(each for each in known if each.now != each.value)

    def scaled(self, key: str, factor: float, default: float = 0.0) -> float:
        """The value of a key times a factor, to three digits."""
        return float(f"{self.number(key, default) * factor:.3g}")


def columns(rows: Iterable[Mapping[str, object]]) -> tuple[dict[str, Series], dict[str, tuple[int, ...]]]:
    """Finite values of each metric, and the steps where it was not finite, which a log holds as null."""
    values: dict[str, list[tuple[int, float]]] = {}
    broken: dict[str, list[int]] = {}
    for row in rows:
        step = row["step"]
        assert isinstance(step, int)
        for name, value in row.items():
            if value is None or (isinstance(value, float) and not math.isfinite(value)):
                broken.setdefault(name, []).append(step)
            elif isinstance(value, (int, float)) and name != "step":
                values.setdefault(name, []).append((step, float(value)))
    series = {name: Series(*map(tuple, zip(*pairs, strict=True))) for name, pairs in values.items()}
    return series, {name: tuple(steps) for name, steps in broken.items()}


def read_run_log(directory: str | Path) -> RunLog:
    """Read metrics.jsonl, samples.jsonl, config.yaml and lineage.json of a run, finished or not.

    Raises:
        UserError: it is no run's directory (the runs inside it are named), a log is damaged, or no update is logged yet.
    """
    directory = Path(directory)
    if not (directory / "lineage.json").is_file():
        inside = sorted(str(path.parent) for path in directory.glob("*/lineage.json"))
        more = f"; the runs in it: {', '.join(inside)}" if inside else "; give the `output` of a training stage"
        raise UserError(f"{directory} is not a run's directory: it has no lineage.json{more}")
    record = read_stage_record(directory)
    rows = read_log_rows(directory / "metrics.jsonl")
    if not rows:
        raise UserError(f"{directory / 'metrics.jsonl'}: no update is logged, so there is nothing to judge yet")
    if wrong := [number for number, row in enumerate(rows, 1) if type(row.get("step")) is not int]:
        raise UserError(f"{directory / 'metrics.jsonl'}:{wrong[0]}: the line has no step; delete it")
    series, broken = columns(rows)
    samples = read_log_rows(directory / "samples.jsonl")
    return RunLog(record.name, record.settings or {}, series, broken, samples)

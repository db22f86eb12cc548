"""The command `alignment runs`: the training runs below a folder, their state, last metrics and differing settings."""

import fcntl
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import shorten
from typing import Any

from alignment.config.yaml_source import dotted
from alignment.errors import UserError
from alignment.reports.run_log import log_rows, read_stage_record
from alignment.settings import Key

METRICS = ("held_out_accuracy", "accuracy", "score", "kl", "held_out_loss", "loss")  # the first two of a run are shown


@dataclass(frozen=True)
class RunSummary:
    """One run.

    Attributes:
        name: its directory below the folder.
        stage: that wrote it.
        state: finished; running, while a process holds its lock; failed; or stopped: the same command goes on with it.
        steps: updates that are logged.
        metrics: last value of each; None where that is not finite.
        seconds: from its last start to its last logged update.
        when: time of that update, seconds since 1970.
        base: checkpoint that it starts from; None: from nothing.
        settings: of config.yaml.
    """

    name: str
    stage: str
    state: str
    steps: int
    metrics: Mapping[str, float | None]
    seconds: float
    when: float
    base: str | None
    settings: Mapping[str, object]


def read_runs(folder: Path) -> tuple[list[RunSummary], list[str]]:
    """The training runs in a folder and below it, by name, and the problems of damaged ones; UserError without any."""
    directories = sorted(
        path.parent for path in folder.rglob("lineage.json") if (path.parent / "config.yaml").is_file()
    )
    if not directories:
        raise UserError(f"{folder}: no training run lies in it or below it, which has config.yaml and lineage.json")
    runs = list[RunSummary]()
    problems = list[str]()
    for directory in directories:
        try:
            runs.append(read_summary(directory, folder))
        except UserError as error:
            problems.append(str(error))
    return runs, problems


def read_summary(directory: Path, folder: Path) -> RunSummary:
    """The summary of one run's directory."""
    record = read_stage_record(directory)
    log = directory / "metrics.jsonl"
    config = directory / "config.yaml"
    last: dict[str, Any] = {}
    for row in log_rows(log):
        last |= row
    steps = last.pop("step", 0)
    numbers = {name: math.nan if value is None else value for name, value in last.items() if not isinstance(value, str)}
    state = next((state for state in ("finished", "failed") if state in record.lineage), "stopped")
    when = (log if steps else config).stat().st_mtime
    return RunSummary(
        name=str(directory.relative_to(folder)),
        stage=record.name,
        state="running" if is_locked(directory / ".lock") else state,
        steps=steps,
        metrics={name: float(value) if math.isfinite(value) else None for name, value in numbers.items()},
        seconds=max(0.0, when - config.stat().st_mtime),
        when=when,
        base=record.settings.get("policy"),
        settings=record.settings,
    )


def is_locked(file: Path) -> bool:
    """True while a process of this machine holds the lock of a run's directory."""
    try:
        with file.open() as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def setting_differences(runs: Sequence[RunSummary]) -> dict[str, dict[str, dict[str, object]]]:
    """Stage -> run -> the settings, `output` aside, in which the runs of that stage differ and which the run has."""
    differences = {}
    for stage in dict.fromkeys(run.stage for run in runs):
        same = {run.name: {**run.settings, "output": None} for run in runs if run.stage == stage}
        values = {dotted(key): dict(zip(same, of_runs, strict=True)) for key, of_runs in unequal(list(same.values()))}
        if values:
            differences[stage] = {
                name: {key: of_runs[name] for key, of_runs in values.items() if of_runs[name] is not None}
                for name in same
            }
    return differences


def unequal(values: Sequence[object], key: Key = ()) -> Iterator[tuple[Key, Sequence[object]]]:
    """The keys of nested mappings at which not all values are equal, with the values."""
    sections = [value for value in values if isinstance(value, Mapping)]
    if len(sections) == len(values):
        for name in dict.fromkeys(name for section in sections for name in section):
            yield from unequal([section.get(name) for section in sections], (*key, name))
    elif any(value != values[0] for value in values):
        yield key, values


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Print a table of the runs, and the settings in which those of one stage differ; 80 columns hold it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(highlight=False, markup=False)
    heads = ("stage", Column("steps", justify="right"), "last metrics", "last update", "base")
    table = Table(Column("run", overflow="fold"), *heads, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for run in runs:
        values = {name: run.metrics[name] for name in METRICS if name in run.metrics}
        last = [f"{name} {'nan' if value is None else format(value, '.3g')}" for name, value in values.items()][:2]
        update = (
            f"{time.strftime('%m-%d %H:%M', time.localtime(run.when))}\nafter {timedelta(seconds=round(run.seconds))}"
        )
        base = Path(run.base or "-")
        name = base.parent.name if base.name == "model" else base.name
        table.add_row(run.name, f"{run.stage}\n{run.state}", str(run.steps), "\n".join(last), update, name)
    console.print(table)
    for stage, of_runs in setting_differences(runs).items():
        console.print(f"{stage}: settings that differ")
        for name, settings in of_runs.items():
            words = [f"{key}={shorten(json.dumps(value), 60, placeholder=' ...')}" for key, value in settings.items()]
            console.print(f"  {name}: {' '.join(words)}")

"""Displays of a run's metrics: TensorBoard, Accelerate's trackers on request (wandb, mlflow, trackio ...), and progress
on standard error, as a bar on a terminal and elsewhere as a plain line at intervals. metrics.jsonl is in directory.py.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import UserError, raise_all

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker

# The argument of Accelerate's class for each key of `training.tracking` that a tracker has.
ARGUMENTS: dict[str, dict[str, str]] = {
    "wandb": {"project": "run_name", "name": "name", "group": "group", "tags": "tags"},
    "trackio": {"project": "run_name", "name": "name"},
    "swanlab": {"project": "run_name", "name": "experiment_name"},
    "comet_ml": {"project": "run_name"},
    "clearml": {"project": "project_name", "name": "task_name", "tags": "tags"},
    "mlflow": {"project": "experiment_name", "name": "run_name"},
    "aim": {"project": "experiment", "name": "run_name"},
    "dvclive": {},
}
# Variables that count where the key is not set; other trackers read theirs themselves.
VARIABLES = {
    ("wandb", "project"): "WANDB_PROJECT",
    ("wandb", "name"): "WANDB_NAME",
    ("comet_ml", "project"): "COMET_PROJECT_NAME",
    ("clearml", "project"): "CLEARML_PROJECT",
    ("clearml", "name"): "CLEARML_TASK",
}


class Trackers:
    """Sends each update's metrics to every tracker."""

    def __init__(self, output: Path, stage: str, names: Sequence[str], config: Mapping[str, Any]):
        """Open TensorBoard's files and start the named trackers.

        Raises:
            UserError: a tracker does not start.
        """
        from torch.utils.tensorboard import SummaryWriter

        self.others = [open_tracker(name, output, stage, config) for name in names if name != "tensorboard"]
        self.board = SummaryWriter(output / "tensorboard")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of update `step`."""
        for name, value in metrics.items():
            if name != "step" and math.isfinite(value):
                self.board.add_scalar(name, value, step)
        for tracker in self.others:
            tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and close all trackers."""
        self.board.close()
        for tracker in self.others:
            tracker.finish()


def check_trackers(names: Sequence[str], tracking: Mapping[str, object] | None = None) -> None:
    """Check that the named trackers exist and are installed, and that one of them takes each key of `training.tracking`.

    Raises:
        UserError: a name is unknown, or its package is not installed; a key has no effect.
    """
    taken = {key for name in names for key in ARGUMENTS.get(name, ())}
    raise_all(
        f"training.tracking.{key}: {f'{names[0]} takes' if len(names) == 1 else 'training.trackers names none that takes'} no "
        f"{key}; {', '.join(name for name, keys in ARGUMENTS.items() if key in keys)} do; leave it out"
        for key, value in (tracking or {}).items()
        if value and key not in taken
    )
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(str(tracker) for tracker in LOGGER_TYPE_TO_CLASS)
    installed = {str(tracker) for tracker in get_available_trackers()}
    for name in names:
        if name not in known:
            raise UserError(f"training.trackers: unknown tracker {name!r}; known are {', '.join(known)}")
        if name not in installed:
            raise UserError(f"training.trackers: {name} is not installed: pip install {name}")


def open_tracker(name: str, output: Path, stage: str, config: Mapping[str, Any]) -> "GeneralTracker":
    """One of Accelerate's trackers, started with the run's config. `init_distributed` must have been called.

    Raises:
        UserError: the tracker does not start, for want of an account or a server.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    where = {"logging_dir": str(output)} if kind.requires_logging_directory else {}
    try:
        tracker = kind(
            **tracker_arguments(name, f"{stage}-{output.name}", config["training"].get("tracking", {})), **where
        )
        tracker.start()
        tracker.store_init_configuration(dict(config))
    except Exception as error:
        raise UserError(
            f"training.trackers: {name} does not start ({type(error).__name__}: {error}); set it up as its own pages "
            "say, or leave it out"
        ) from error
    return tracker


def tracker_arguments(name: str, run_name: str, tracking: Mapping[str, object]) -> dict[str, object]:
    """Arguments of a tracker: as `training.tracking` says, else its variables; without either the project is alignment.

    Args:
        run_name: of a run that is given no name.
    """
    default = {"project": "alignment", "name": run_name}
    chosen = {
        key: tracking.get(key) or os.environ.get(VARIABLES.get((name, key), "")) or default.get(key)
        for key in ARGUMENTS[name]
    }
    return {ARGUMENTS[name][key]: value for key, value in chosen.items() if value}


OnUpdate = Callable[[dict[str, Any]], object]  # takes a line of metrics.jsonl
UPDATE_CALLBACK: ContextVar[OnUpdate | None] = ContextVar("update_callback", default=None)


@contextmanager
def update_callback(callback: OnUpdate | None) -> Iterator[None]:
    """Let the runs in this block call a function with each line of their metrics; None: none."""
    token = UPDATE_CALLBACK.set(callback)
    try:
        yield
    finally:
        UPDATE_CALLBACK.reset(token)


class Progress:
    """Shows step, loss, tokens per second and the remaining time.

    Args:
        first: steps done before this start; they are left out of the estimate.
        seconds_between: interval of plain lines, where standard error is not a terminal.
    """

    def __init__(self, first: int, total: int, seconds_between: float = 10.0):
        self.first, self.total, self.seconds_between = first, total, seconds_between
        self.began = self.shown = time.monotonic()
        self.bar = _bar(first, total) if sys.stderr.isatty() else None

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that step number `step` is done."""
        now = time.monotonic()
        left = (now - self.began) / max(1, step - self.first) * (self.total - step)
        text = describe(metrics, left)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], completed=step, description=text)
        elif now - self.shown >= self.seconds_between or step == self.total:
            print(f"step {step}/{self.total}  {text}", file=sys.stderr, flush=True)
            self.shown = now

    def close(self) -> None:
        """Restore the terminal."""
        if self.bar is not None:
            self.bar.stop()


def describe(metrics: Mapping[str, float], seconds_left: float) -> str:
    """The main metrics and the remaining time in one short line."""
    parts = [f"{name} {metrics[name]:.4g}" for name in ("loss", "score", "kl", "accuracy") if name in metrics]
    if metrics.get("tokens_per_second"):
        parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    minutes, seconds = divmod(int(seconds_left), 60)
    return "  ".join([*parts, f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"])


def _bar(first: int, total: int) -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    bar = RichProgress(*columns, console=Console(stderr=True))
    bar.add_task("", total=total, completed=first)
    bar.start()
    return bar

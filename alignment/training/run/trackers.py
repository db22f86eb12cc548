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
from typing import Any

from alignment.errors import UserError

# What Accelerate would overrule: a tracker's variable of the project, its argument for the run's name and their variable.
PROJECT = {"wandb": "WANDB_PROJECT", "comet_ml": "COMET_PROJECT_NAME", "clearml": "CLEARML_PROJECT"}
NAME = {
    "wandb": ("name", "WANDB_NAME"),
    "clearml": ("task_name", "CLEARML_TASK"),
    "trackio": ("name", ""),
    "mlflow": ("run_name", ""),
    "swanlab": ("experiment_name", ""),
}


class Trackers:
    """Sends each update's metrics to every tracker."""

    def __init__(self, output: Path, stage: str, names: Sequence[str], config: Mapping[str, Any]):
        """Open TensorBoard's files and start the named trackers."""
        from torch.utils.tensorboard import SummaryWriter

        self._others = [_open_tracker(name, output, stage, config) for name in names if name != "tensorboard"]
        self._board = SummaryWriter(output / "tensorboard")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of update `step`."""
        for name, value in metrics.items():
            if name != "step" and math.isfinite(value):
                self._board.add_scalar(name, value, step)
        for tracker in self._others:
            tracker.log(dict(metrics), step=step)

    def close(self) -> None:
        """Flush and close all trackers."""
        self._board.close()
        for tracker in self._others:
            tracker.finish()


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that do not exist or are not installed."""
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    for name in names:
        if name not in known:
            raise UserError(f"training.trackers: unknown tracker {name!r}; known are {', '.join(known)}")
        if name not in map(str, get_available_trackers()):
            raise UserError(f"training.trackers: {name} is not installed: pip install {name}")


def _open_tracker(name: str, output: Path, stage: str, config: Mapping[str, Any]) -> Any:
    """One of Accelerate's trackers, started with the run's config. `init_distributed` must have been called."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    arguments = {"logging_dir": str(output)} if kind.requires_logging_directory else {}
    if name in NAME:
        argument, variable = NAME[name]
        arguments[argument] = os.environ.get(variable) or f"{stage}-{output.name}"
    try:
        tracker = kind(os.environ.get(PROJECT.get(name, "")) or "alignment", **arguments)
        tracker.start()
        tracker.store_init_configuration(dict(config))
    except Exception as error:
        raise UserError(
            f"training.trackers: {name} does not start ({type(error).__name__}: {error}); set it up as its own pages "
            "say, or leave it out"
        ) from error
    return tracker


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
    """Shows step, loss, tokens per second and the remaining time of `total` steps, of which `first` were done before."""

    def __init__(self, first: int, total: int, seconds_between: float = 10.0):
        """Begin; plain lines, where standard error is no terminal, come every `seconds_between`."""
        self._first, self._total, self._seconds_between = first, total, seconds_between
        self._began = self._shown = time.monotonic()
        self._bar: Any = None
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as RichProgress

            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._bar.add_task("", total=total, completed=first)
            self._bar.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show that step number `step` is done."""
        now = time.monotonic()
        left = (now - self._began) / max(1, step - self._first) * (self._total - step)
        parts = [f"{name} {metrics[name]:.4g}" for name in ("loss", "score", "kl", "accuracy") if name in metrics]
        if metrics.get("tokens_per_second"):
            parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
        minutes, seconds = divmod(int(left), 60)
        text = "  ".join([*parts, f"{minutes // 60}:{minutes % 60:02d}:{seconds:02d} left"])
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step, description=text)
        elif now - self._shown >= self._seconds_between or step == self._total:
            print(f"step {step}/{self._total}  {text}", file=sys.stderr, flush=True)
            self._shown = now

    def close(self) -> None:
        """Restore the terminal."""
        if self._bar is not None:
            self._bar.stop()

"""Progress of a run on standard error: a bar on a terminal, elsewhere a plain line at intervals. Writes no file."""

import sys
import time
from collections.abc import Mapping
from typing import Any


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

"""TensorBoard, and on request Accelerate's trackers (wandb, mlflow, trackio ...). The metrics come from directory.py."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alignment.errors import UserError

if TYPE_CHECKING:
    from accelerate.tracking import GeneralTracker


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


def check_trackers(names: Sequence[str]) -> None:
    """Check that the named trackers exist and are installed.

    Raises:
        UserError: a name is unknown, or its package is not installed.
    """
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
        tracker = kind(f"{stage}-{output.name}", **where)
        tracker.start()
        tracker.store_init_configuration(dict(config))
    except Exception as error:
        raise UserError(
            f"training.trackers: {name} does not start ({type(error).__name__}: {error}); set it up as its own pages "
            "say, or leave it out"
        ) from error
    return tracker

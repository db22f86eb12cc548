"""Detection of a loss that has exploded and is still finite, from a run's log. Losses that are not finite: engine.py."""

import json
from collections.abc import Sequence
from pathlib import Path

LEAST = 5  # last updates that are compared with the first
FACTOR, MARGIN = 3.0, 0.5  # losses of single rows mostly differ by less


def read_losses(path: Path) -> list[float]:
    """The loss of each update in a metrics.jsonl; none where there is no such file."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line["loss"] for line in lines if isinstance(line.get("loss"), float)]


def divergence(losses: Sequence[float]) -> str:
    """A warning for a run whose loss has exploded, '' for any other.

    The first loss belongs to the starting model, before the first step. The loss has exploded if the last tenth of the
    updates, at least five, all have more than three times that loss, and more than 0.5 above it. A hard batch among
    easy ones does not meet this, nor does a model that has learned nothing or has become slightly worse.
    """
    last = losses[1:][-max(LEAST, len(losses) // 10) :]
    if len(last) < LEAST or min(last) <= max(FACTOR * losses[0], losses[0] + MARGIN):
        return ""
    return (
        f"the loss has exploded: {losses[0]:.4g} before the first update, {sum(last) / len(last):.4g} over the last "
        f"{len(last)}; the model is worse than the one that the run began with. Lower optim.learning_rate"
    )

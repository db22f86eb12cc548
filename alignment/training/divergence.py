"""Whether a run's loss is finite and yet has exploded, told from its log. Losses that are not finite: engine.py."""

import json
from collections.abc import Sequence
from pathlib import Path

LEAST = 5  # last updates that are looked at
FACTOR, MARGIN = 3.0, 0.5  # single rows differ by less than this from each other, as a rule


def read_losses(path: Path) -> list[float]:
    """The loss of each update in a metrics.jsonl; none where there is no such file."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8") as file:
        lines = [json.loads(line) for line in file]
    return [line["loss"] for line in lines if isinstance(line.get("loss"), float)]


def divergence(losses: Sequence[float]) -> str:
    """What to say of a run whose loss has exploded, '' of any other.

    The first loss is that of the model which the run began with: it is taken before the first step. Exploded is a run
    whose last tenth of updates, at least five, all have more than three times that loss, and 0.5 more. A hard batch
    among easy ones does not do it, nor does a model that has learnt nothing, or has been harmed a little.
    """
    last = losses[1:][-max(LEAST, len(losses) // 10) :]
    if len(last) < LEAST or min(last) <= max(FACTOR * losses[0], losses[0] + MARGIN):
        return ""
    return (
        f"the loss has exploded: {losses[0]:.4g} before the first update, {sum(last) / len(last):.4g} over the last "
        f"{len(last)}; the model is worse than the one that the run began with. Lower optim.learning_rate"
    )

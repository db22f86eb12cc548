"""The best evaluation of a run, and when to stop because none is better any more. Its weights are kept by result.py."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from alignment.settings import NonNegativeFloat, PositiveInt, Rule, Settings, refusal

# The words of metric names that say which direction is better; none is in both.
LOWER = frozenset({"loss", "nll", "perplexity", "error"})
HIGHER = frozenset({"accuracy", "score", "rate", "f1", "match", "matthews", "precision", "recall", "margin", "reward"})


@dataclass(frozen=True)
class EarlyStopping(Settings):
    """When a run ends before its last update.

    Attributes:
        metric: of the evaluation during the run, such as held_out_loss or held_out_accuracy. Losses, perplexities and
            errors are better lower; accuracies, rates, scores, rewards and margins higher.
        patience: evaluations in a row without an improvement after which the run ends.
        min_delta: an improvement is more than this.
    """

    metric: str = "held_out_loss"
    patience: PositiveInt = 3
    min_delta: NonNegativeFloat = 0.0

    RULES = (Rule("metric", lambda c: refusal(is_lower_better, c.metric)),)


def is_lower_better(metric: str) -> bool:
    """True where a smaller value of a metric is better, by the words of its name; a source may follow after a /.

    Raises:
        ValueError: its name has no word that says so, or words of both directions.
    """
    words = set(metric.split("/")[0].split("_"))
    if bool(words & LOWER) == bool(words & HIGHER):
        known = ", ".join(sorted(LOWER)), ", ".join(sorted(HIGHER))
        raise ValueError(
            f"{metric!r} does not say whether lower or higher is better; its name must have one of the words "
            f"{known[0]} (lower) or {known[1]} (higher), such as held_out_loss"
        )
    return bool(words & LOWER)


class BestEvaluation:
    """The best value of a metric over the evaluations of a run, and how long ago the last improvement was.

    Attributes:
        value: the best so far; None before the first evaluation.
        step: the update after which it was measured.
        waited: evaluations since the last improvement by more than `min_delta`.
    """

    def __init__(self, metric: str, stopping: EarlyStopping | None = None):
        """Begin without a value.

        Args:
            metric: name of the values that come.
            stopping: when `exhausted` becomes true; None: never.
        """
        self.metric, self._stopping = metric, stopping
        self._sign = -1.0 if is_lower_better(metric) else 1.0
        self.value: float | None = None
        self.step, self.waited = 0, 0
        self._level: float | None = None  # the value that an improvement is measured from

    def add(self, step: int, value: float) -> bool:
        """Note the value after update `step`; whether it is the best so far. A value that is not finite is not."""
        min_delta = 0.0 if self._stopping is None else self._stopping.min_delta
        finite = math.isfinite(value)
        best = finite and (self.value is None or self._sign * (value - self.value) > 0)
        if finite and (self._level is None or self._sign * (value - self._level) > min_delta):
            self._level, self.waited = value, 0
        else:
            self.waited += 1
        if best:
            self.value, self.step = value, step
        return best

    @property
    def exhausted(self) -> bool:
        """True where the run has waited as long as it may."""
        return self._stopping is not None and self.waited >= self._stopping.patience

    def state(self) -> dict[str, float | None]:
        """The argument of `restore`, JSON-like."""
        return {"value": self.value, "step": self.step, "waited": self.waited, "level": self._level}

    def restore(self, state: Mapping[str, float | None]) -> None:
        """Go on from what `state` returned."""
        self.value, self._level = state["value"], state["level"]
        self.step, self.waited = int(state["step"] or 0), int(state["waited"] or 0)

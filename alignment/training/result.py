"""The weights that a run writes to model/: of its last update or best evaluation, or their moving average.

The best weights are a checkpoint of their own, checkpoints/best/step-000080, which rotation does not reach. One of an
earlier best stays as long as a checkpoint that the run may resume from knows it as the best. Where the best weights are
lost, model/ holds the last ones, and the run ends with an error.
"""

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignment.errors import UserError, raise_all
from alignment.files import remove_directory
from alignment.training.engine import Engine
from alignment.training.run.checkpoints import STATE, checkpoints, save_checkpoint, step_of, verify
from alignment.training.run.directory import Run
from alignment.training.settings import EarlyStopping, TrainingConfig, is_lower_better

NO_EVALUATION = (
    "training.keep_best, training.early_stopping: nothing is evaluated, because data.evaluation names no rows; name "
    "some, or hold a share of data.train out by data.evaluation_share, or leave them out"
)
ALL = 10**9  # checkpoints in checkpoints/best that a save leaves; `Result` chooses among them


@dataclass
class BestEvaluation:
    """The best value of a metric over the evaluations of a run, and how long ago the last improvement was.

    Attributes:
        stopping: when `exhausted` becomes true; None: never.
        value, step: the best so far, None before the first evaluation, and the update after which it was measured.
        waited: evaluations since the last improvement by more than `min_delta` on `level`.
    """

    metric: str
    stopping: EarlyStopping | None = None
    value: float | None = None
    step: int = 0
    waited: int = 0
    level: float | None = None

    def add(self, step: int, value: float) -> bool:
        """Note the value after update `step`; True where it is the best so far. A value that is not finite is not."""
        sign = -1.0 if is_lower_better(self.metric) else 1.0
        min_delta = 0.0 if self.stopping is None else self.stopping.min_delta
        finite = math.isfinite(value)
        best = finite and (self.value is None or sign * (value - self.value) > 0)
        if finite and (self.level is None or sign * (value - self.level) > min_delta):
            self.level = value
            self.waited = 0
        else:
            self.waited += 1
        if best:
            self.value = value
            self.step = step
        return best

    @property
    def exhausted(self) -> bool:
        """True where the run has waited as long as it may."""
        return self.stopping is not None and self.waited >= self.stopping.patience

    def state(self) -> dict[str, Any]:
        """The fields that evaluations change, JSON-like."""
        return {name: getattr(self, name) for name in ("value", "step", "waited", "level")}


class Result:
    """Follows the evaluations of a run, keeps the weights of the best one, and writes the model at the end.

    Attributes:
        best: the best evaluation so far; None where the last weights are the result.
    """

    def __init__(
        self, run: Run, engine: Engine, training: TrainingConfig, save: Callable[[], object] | None, *, evaluated: bool
    ):
        """Begin without a best.

        Args:
            save: writes the engine's weights as the run's model.
            evaluated: there are evaluations.
        """
        metric = training.best_metric
        if metric is not None and not evaluated:
            raise UserError(NO_EVALUATION)
        self.best = None if metric is None else BestEvaluation(metric, training.early_stopping)
        self._run = run
        self._engine = engine
        self._save = save
        self._root = run.checkpoints / "best"

    @property
    def exhausted(self) -> bool:
        """True where the run ends here because its evaluation no longer improves."""
        return self.best is not None and self.best.exhausted

    @property
    def last_step(self) -> int:
        """The update after which the run ends: the last of its schedule, or the one done last where it is exhausted."""
        return self._engine.step if self.exhausted else self._engine.total_steps

    def state(self) -> dict[str, Any]:
        """The state that a resumed run needs, for its checkpoint."""
        return {} if self.best is None else {"best": self.best.state()}

    def restore(self, state: Mapping[str, Mapping[str, object]] | None) -> None:
        """Go on from the state of a checkpoint; None: there was none. The run notes damage of the best weights."""
        if self.best is None or state is None:
            return
        self.best = replace(self.best, **state["best"])
        if self._run.is_main and self.best.value is not None and (problems := self._problems(self.best)):
            self._run.note(
                f"the best weights, of step {self.best.step}, are lost, unless a later evaluation is better: "
                f"{'; '.join(problems)}"
            )
        if self.exhausted:
            self._run.note(f"{self.best.metric} no longer improved: the run has ended, and goes no further")

    def add(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        """Note the evaluation after update `step`, save the weights if it is the best, and return what to log.

        The step and value of the best evaluation are logged. A collective operation.
        """
        if self.best is None:
            return {}
        metric = self.best.metric
        # Rank 0's number decides for all ranks, whose own may differ in the last digit.
        value = self._engine.process_group.broadcast_object(metrics.get(metric))
        if value is None:
            raise UserError(
                f"training.keep_best, training.early_stopping.metric: the evaluation has no {metric}; it has "
                f"{', '.join(sorted(metrics)) or 'no metrics'}"
            )
        if self.best.add(step, value):
            save_checkpoint(self._root, step, self._engine, self.state(), self._run.identity, keep=ALL)
            self._delete_older(self.best)
        if self.best.value is None:
            return {}
        return {"best_step": float(self.best.step), f"best_{metric}": self.best.value}

    def write(self, ended: int | None = None) -> None:
        """Put the best weights into the engine, if these are the result, and write the model; a collective operation.

        Args:
            ended: step after which the run ended, where steps are not the engine's updates; None: they are.

        Raises:
            UserError: the checkpoint of the best weights is damaged or missing, or there is none. The last weights are
                written.
        """
        if self._save is None:
            return
        ended = self._engine.step if ended is None else ended
        problems = []
        which = f"step {ended}"
        if (best := self.best) is not None:
            problems = self._engine.process_group.on_main(lambda: self._problems(best))
            if not problems:
                self._engine.load(self._path(best))
                which = f"step {best.step}, the best by {best.metric} ({best.value:.6g})"
        average = "" if self._engine.average is None else "the moving average of the weights at "
        if self.best is not None or average:
            self._run.note(f"model/ holds {average}{which}; the run ended at step {ended}")
        with self._engine.averaged_weights():
            self._save()
        raise_all(f"{line}; the best weights are lost, and model/ holds those of step {ended}" for line in problems)
        if self.best is not None:
            self._delete_older(self.best)

    def _delete_older(self, best: BestEvaluation) -> None:
        """Delete the weights of earlier bests, except where a checkpoint of the run still knows them as the best."""
        if self._engine.process_group.is_main:
            known = {best.step}
            for path in checkpoints(self._run.checkpoints):
                with suppress(OSError, ValueError, LookupError, TypeError):  # a damaged one knows of none
                    known.add(json.loads((path / STATE).read_text(encoding="utf-8"))["state"]["best"]["step"])
            for path in [path for path in checkpoints(self._root) if step_of(path) not in known]:
                remove_directory(path)

    def _path(self, best: BestEvaluation) -> Path:
        return self._root / f"step-{best.step:06d}"

    def _problems(self, best: BestEvaluation) -> list[str]:
        """The reasons why the best weights cannot be loaded."""
        if best.value is None:
            return [f"no evaluation had a finite {best.metric}, so there are no best weights"]
        damage, missing = verify(self._path(best))
        return damage + [f"{self._path(best) / name} is missing" for name in missing]

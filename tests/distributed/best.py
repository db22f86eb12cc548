"""What every rank runs: a run that ends early, with a moving average, stopped in between and resumed. Started by the tests.

python -m tests.distributed.best OUTPUT [clock]     clock: a run that saves by rank 0's clock, started again when it is finished
"""

import json
import sys
import time
import warnings
from pathlib import Path

import torch
from safetensors.torch import save_file

from alignment.training import Engine, Run, TrainingConfig, fit
from alignment.training.distributed import launched_rank
from alignment.training.settings import EarlyStopping
from tests.training.toys import ToyStream, collate_by, squared_error, toy_engine, weights

VALUES = [3.0, 2.0, 1.0, 1.5, 2.5, 2.0, 0.5, 0.4]  # of the evaluations; best at the third, patience ends at the sixth


class Interrupted(Exception):
    """The run dies here."""


def train(output: Path, die_at: int = 0) -> None:
    """At most eight updates; `model.safetensors` holds what the run writes as its model."""
    settings = {"max_steps": 8, "evaluate_every_steps": 1, "save_every_steps": 2, "keep_last_checkpoints": 1}
    training = TrainingConfig(ema_decay=0.5, early_stopping=EarlyStopping(patience=3), **settings)
    engine = toy_engine(steps=8, training=training)

    def evaluate() -> dict[str, float]:
        if engine.step == die_at:
            raise Interrupted
        other = 1e-3 * engine.process_group.rank  # no rank may decide by a number of its own
        return {"held_out_loss": VALUES[engine.step - 1] - other * engine.step}

    with Run(output, {"output": str(output), "training": {"trackers": []}}, stage="toy") as run:
        try:
            fit(
                engine, ToyStream(), collate_by(3), squared_error(engine.model), training=training, run=run,
                evaluate=evaluate, save=lambda: write(engine, output),
            )  # fmt: skip
        except Interrupted:
            return
        state = weights(engine)  # the best weights themselves
        if run.is_main:
            save_file(state, output / "raw.safetensors")


def write(engine: Engine, output: Path) -> None:
    """The whole weights that the engine has now."""
    state = weights(engine)
    if engine.process_group.is_main:
        save_file(state, output / "model.safetensors")
        (output / "end.json").write_text(json.dumps({"step": engine.step, "kind": engine.process_group.kind}))


def save_by_the_clock(output: Path) -> bool:
    """Twenty updates of 10 s by rank 0's clock, and of none by that of rank 1; whether it was finished already."""
    training = TrainingConfig(max_steps=20, keep_last_checkpoints=20)
    engine = toy_engine(steps=20, training=training)
    clock = time.monotonic
    with Run(output, {"output": str(output), "training": {"trackers": []}}, stage="toy") as run:
        if not run.finished:
            time.monotonic = lambda: 10.0 * engine.step if launched_rank() == 0 else 0.0
            fit(
                engine, ToyStream(), collate_by(3), squared_error(engine.model), training=training, run=run,
                save=lambda: (output / "model" / "weights").mkdir(parents=True, exist_ok=True),
            )  # fmt: skip
    time.monotonic = clock
    return run.finished


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder = Path(sys.argv[1])
    if sys.argv[2:] == ["clock"]:
        (folder / f"rank-{launched_rank()}").write_text(str([save_by_the_clock(folder) for _ in range(2)]))
    else:
        train(folder / "whole")
        train(folder / "parts", die_at=5)
        train(folder / "parts")

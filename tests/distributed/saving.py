"""What every rank runs: a run that saves by rank 0's clock, started again when it is finished. Started by the tests.

python -m tests.distributed.saving OUTPUT
"""

import sys
import time
from pathlib import Path

from alignment.training import Run, TrainingConfig, fit
from alignment.training.distributed import launched_rank
from tests.training.toys import ToyStream, collate_by, squared_error, toy_engine


def train(output: Path) -> bool:
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
    seen = [train(Path(sys.argv[1])) for _ in range(2)]
    (Path(sys.argv[1]) / f"rank-{launched_rank()}").write_text(str(seen))

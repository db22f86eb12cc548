"""What each of two ranks runs: one update whose normalization, rate and norm can be worked out by hand. Started by the tests.

python -m tests.distributed.two_ranks OUTPUT
"""

import json
import sys
import warnings
from pathlib import Path

import torch

from alignment.training import Engine, LossSum, OptimConfig, Term, TrainingConfig
from tests.training.toys import Scale, ToyBatch, plain_batch

TOKENS = [[0.5, 1.0, 1.5], [0.1 * number for number in range(9)]]  # of each rank: 3 and 9; together 3.0 + 3.6
GRADIENT = [3.0, 4.0, 12.0]  # norm 13


def engine_of(size: int, max_grad_norm: float, steps: int = 12, **optim: float) -> Engine:
    settings = {"schedule": "constant", "momentum": 0.0, "learning_rate": 1.0, **optim}
    config = OptimConfig(name="sgd", weight_decay=0.0, max_grad_norm=max_grad_norm, **settings)
    return Engine(Scale(size), config, TrainingConfig(), total_steps=steps)


def measure() -> dict[str, object]:
    """Loss and gradient of unequal shares (H11); rates of 12 updates (H14); norm and clipped step of a gradient (H15)."""
    engine = engine_of(1, 0.0)
    group = engine.process_group
    own = [TOKENS[rank] for rank in range(2) if rank % group.size == group.rank]
    batches = [plain_batch(values) for values in own]
    shares = engine.update(Term(batches, lambda batch: LossSum(engine.model(batch.x).sum())))
    rated = engine_of(1, 0.0, learning_rate=2e-4, schedule="cosine", warmup_steps=3)
    rates = []
    for _ in range(12):
        rates.append(rated.update(Term(batches, lambda batch: LossSum(rated.model(batch.x).sum())))["learning_rate"])
    clipped = engine_of(3, 1.0)
    part = torch.tensor(GRADIENT) / group.size
    batch = ToyBatch(part, part, weight=1.0 / group.size)
    norm = clipped.update(Term([batch], lambda batch: LossSum(clipped.model(batch.x).sum())))["grad_norm"]
    weights = {name: dict(each.backend.gather(["weight"])) for name, each in (("shares", engine), ("clipped", clipped))}
    return {
        "loss": shares["loss"],
        "rates": rates,
        "norms": [row[0] for row in group.gather([norm])],
        "weights": {name: tensors["weight"].tolist() for name, tensors in weights.items() if tensors},
    }


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    measured = measure()
    if measured["weights"]:  # rank 0
        Path(sys.argv[1]).write_text(json.dumps(measured))

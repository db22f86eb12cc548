"""What every rank runs: some updates by each of the named optimizers with a resume between, and the weights on rank 0.

python -m tests.distributed.optimizer_worker OUTPUT NAME...
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from alignment.data.batches import collate
from alignment.models.build import build_language_model
from alignment.training import (
    Engine,
    OptimConfig,
    Term,
    TrainingConfig,
    restore_checkpoint,
    save_checkpoint,
    shard_rows,
)
from tests.distributed.worker import LLAMA, documents, next_token
from tests.training.toys import weights

UPDATES = 4


def engine_of(name: str, seed: int) -> Engine:
    """A tiny Llama with the optimizer; its embedding has half the learning rate."""
    torch.manual_seed(seed)
    optim = OptimConfig(1e-3, name=name, weight_decay=0.1, max_grad_norm=0.5, learning_rates={"embed": 0.5})  # pyright: ignore[reportArgumentType]
    return Engine(build_language_model(dict(LLAMA)), optim, TrainingConfig(), total_steps=UPDATES)


def advance(engine: Engine, updates: int) -> None:
    """Updates on rows that do not depend on the number of processes."""
    group = engine.process_group
    for step in range(engine.step, engine.step + updates):
        rows = shard_rows(documents(step), lambda part: collate(part, 40), group.rank, group.size)
        engine.update(Term(rows, next_token(engine)))


def run(output: Path, name: str) -> None:
    """Two updates, a checkpoint, and two more in an engine that was restored from it."""
    first = engine_of(name, seed=0)
    advance(first, 2)
    path = save_checkpoint(output / name, 2, {"policy": first}, {}, {}, keep=1)
    engine = engine_of(name, seed=7)
    restore_checkpoint(path, {"policy": engine}, {})
    advance(engine, UPDATES - 2)
    state = weights(engine)
    if engine.process_group.is_main:
        save_file(state, output / f"{name}.safetensors")


if __name__ == "__main__":
    # Muon orthogonalizes in bfloat16, where another order of sums shows in the third digit. In float32 what differs
    # between one process and several is their sharding alone.
    torch.Tensor.bfloat16 = lambda self: self  # pyright: ignore[reportAttributeAccessIssue]
    for each in sys.argv[2:]:
        run(Path(sys.argv[1]), each)

"""A small network and its batches, for tests of the training machinery alone."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.training import Engine, LossSum, OptimConfig, TrainingConfig


@dataclass(frozen=True)
class ToyBatch:
    """Inputs [n, 5] with targets [n, 1]; each row counts 1."""

    x: Tensor
    y: Tensor
    row_ids: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    weight: float = field(default=0.0)

    def to(self, device: Any) -> "ToyBatch":
        return replace(self, x=self.x.to(device), y=self.y.to(device))


class ToyModel(nn.Module):
    """Two hidden layers, one of them in a list of blocks; optional dropout on the input."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])
        self.last = nn.Linear(7, 1)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(nn.functional.dropout(x, self.dropout)))
        for block in self.blocks:
            hidden = torch.tanh(block(hidden))
        return self.last(hidden)


class Scale(nn.Module):
    """x times a weight of ones, one number per row of x's last axis."""

    def __init__(self, size: int = 1):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def plain_batch(values: list[float], weight: float | None = None) -> ToyBatch:
    """Numbers that count 1 each, or `weight` together."""
    x = torch.tensor(values)
    return ToyBatch(x, x, weight=float(len(values)) if weight is None else weight)


def toy_rows(step: int, count: int = 8) -> list[tuple[Tensor, Tensor, str]]:
    """Rows of one global batch, always the same for a step."""
    generator = torch.Generator().manual_seed(1000 + step)
    return [
        (torch.randn(5, generator=generator), torch.randn(1, generator=generator), f"row-{step}-{index}")
        for index in range(count)
    ]


def toy_batches(rows: list[Any], sizes: list[int]) -> list[ToyBatch]:
    """Rows cut into micro-batches of these sizes."""
    assert sum(sizes) == len(rows)
    rows, batches = list(rows), []
    for size in sizes:
        part, rows = rows[:size], rows[size:]
        x, y, names = zip(*part, strict=True)
        batches.append(ToyBatch(torch.stack(x), torch.stack(y), names, (5,) * size, float(size)))
    return batches


def collate_by(size: int):
    """A collate function that makes micro-batches of `size` rows."""
    return lambda rows, micro_batch_tokens=0: [
        toy_batches(rows[at : at + size], [len(rows[at : at + size])])[0] for at in range(0, len(rows), size)
    ]


class ToyStream:
    """Eight rows per step."""

    def __init__(self, count: int = 8):
        self.count = count

    def rows_at(self, step: int) -> list[Any]:
        return toy_rows(step, self.count)


def squared_error(model: Any):
    """Sum of squared errors, and how many are below 1."""

    def loss_fn(batch: ToyBatch) -> LossSum:
        error = (model(batch.x) - batch.y).pow(2)
        return LossSum(error.sum(), {"close": (error < 1).float().sum()})

    return loss_fn


def toy_engine(
    *, seed: int = 0, dropout: float = 0.0, steps: int = 5, training: TrainingConfig | None = None, **optim: Any
) -> Engine:
    """An engine around a freshly drawn toy model."""
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.1, "max_grad_norm": 0.5, **optim}
    return Engine(ToyModel(dropout), OptimConfig(**settings), training or TrainingConfig(), total_steps=steps)


def weights(engine: Engine) -> dict[str, Tensor]:
    """A copy of every weight on rank 0; empty on other ranks."""
    backend = engine.backend
    return {name: value.clone() for name, value in backend.gather(list(backend.unwrapped.state_dict()))}


def equal(one: Engine, other: Engine) -> bool:
    """True where two engines have the same weights, bit by bit."""
    theirs = weights(other)
    return all(torch.equal(value, theirs[name]) for name, value in weights(one).items())


def lines(output: Path) -> list[dict]:
    """metrics.jsonl without what the clock decides."""
    text = (output / "metrics.jsonl").read_text()
    return [{k: v for k, v in json.loads(line).items() if k != "tokens_per_second"} for line in text.splitlines()]

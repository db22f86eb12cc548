"""What an update adds up on its way: losses and metrics of each term, on the device. Means are made in engine.py."""

from typing import Any

import torch
from torch import Tensor

from alignment.training.terms import LossSum, Term


class MetricSums:
    """Sums of one term on this rank, as tensors on the device: nothing is fetched until the update's end."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.batches: list[Any] = []
        self.metrics: dict[str, Tensor] = {}

    def add(self, loss: LossSum, batch: Any, counts: bool) -> None:
        """Take in one micro-batch; one that does not count only makes its metrics' names known."""
        factor = 1.0 if counts else 0.0
        if counts:
            self.totals.append(loss.total.detach().float())
            self.batches.append(batch)
        for name, value in loss.metrics.items():
            value = value.detach().float() * factor
            self.metrics[name] = self.metrics[name] + value if name in self.metrics else value


def layout(
    terms: tuple[Term, ...], sums: list[MetricSums], device: torch.device
) -> tuple[list[tuple[int, str]], Tensor]:
    """All sums in one vector: the terms' totals, then their metrics, named by term and key."""
    zero = torch.zeros((), device=device)
    names = [(position, name) for position, part in enumerate(sums) for name in sorted(part.metrics)]
    totals = [torch.stack(part.totals).sum() if part.totals else zero for part in sums]
    return names, torch.stack([*totals, *(sums[position].metrics[name] for position, name in names)])

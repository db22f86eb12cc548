"""The parts of an update: terms, their micro-batches, and the sums of their losses and metrics."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from alignment.ragged import Batch

Row = TypeVar("Row")

LARGEST_EXPONENT = 709.0  # e^709.78 is the largest float


@dataclass(frozen=True)
class LossSum:
    """The result of a loss function for one micro-batch.

    Attributes:
        total: the SUM of the loss over everything that counts, a scalar with gradient.
        metrics: sums likewise; each is divided by its term's global weight when logged.
        means: (sum, weight) of metrics that have a weight of their own, such as the loss of one source's rows; left out
            of the log where the weight is 0 over the whole update. The same names on every rank. Of `perplexity`, and of
            `perplexity/SOURCE`, the mean is in nats, and its exponential is logged.
    """

    total: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """One part of an update's objective: coef * (sum of loss over all micro-batches) / (sum of their weights).

    Attributes:
        micro_batches: of this rank; at least one.
        loss_fn: calls the engine's model and returns sums.
        name: prefixes the term's metrics with `name_`; a named term also logs its own mean loss as `name_loss`.
    """

    micro_batches: Sequence[Batch]
    loss_fn: Callable[[Any], LossSum]
    coef: float = 1.0
    name: str = ""

    def key(self, metric: str) -> str:
        """The name under which a metric is logged."""
        return f"{self.name}_{metric}" if self.name else metric


@dataclass(frozen=True)
class ZeroWeightBatch:
    """A zero-weight copy of another rank's batch, so that a rank with an empty shard still joins the collectives."""

    batch: Batch
    weight: float = 0.0

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return self.batch.lengths

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Name of the data row behind each document."""
        return self.batch.row_ids

    def to(self, device: torch.device | str) -> "ZeroWeightBatch":
        """The copy on another device, its weight still 0."""
        return ZeroWeightBatch(self.batch.to(device))


class MetricSums:
    """Sums of one term's losses and metrics on this rank, kept on the device: nothing is fetched during the update."""

    def __init__(self) -> None:
        self.totals: list[Tensor] = []
        self.batches: list[Batch] = []
        self.metrics: dict[tuple[str, str], Tensor] = {}  # see `named_sums`

    def add(self, loss: LossSum, batch: Batch) -> None:
        """Add one micro-batch. One of weight 0 contributes the names of its metrics and no value."""
        counts = float(batch.weight) > 0
        factor = 1.0 if counts else 0.0
        if counts:
            self.totals.append(loss.total.detach().float())
            self.batches.append(batch)
        for (name, part), value in named_sums(loss).items():
            value = value.detach().float() * factor
            self.metrics[name, part] = self.metrics[name, part] + value if (name, part) in self.metrics else value


def named_sums(loss: LossSum) -> dict[tuple[str, str], Tensor]:
    """The sums of a loss's metrics by (name, ""), and of its means by (name, "sum") and (name, "weight")."""
    sums = {(name, ""): value for name, value in loss.metrics.items()}
    for name, (value, weight) in loss.means.items():
        sums[name, "sum"], sums[name, "weight"] = value, weight
    return sums


def averages(sums: Mapping[tuple[str, str], float], weight: float) -> dict[str, float]:
    """The metrics behind `named_sums`: sums over `weight`, and means over their own weights, where these are not 0."""
    metrics = {name: value / weight for (name, part), value in sums.items() if not part}
    sums_of_means = {name: (value, sums[name, "weight"]) for (name, part), value in sums.items() if part == "sum"}
    means = {name: value / own for name, (value, own) in sums_of_means.items() if own}
    return metrics | {name: _exp(mean) if name.startswith("perplexity") else mean for name, mean in means.items()}


def _exp(nats: float) -> float:
    """The exponential, of what is beyond a float's range infinite."""
    return math.exp(nats) if nats < LARGEST_EXPONENT else math.inf


def flatten_sums(sums: list[MetricSums], device: torch.device) -> tuple[list[tuple[int, tuple[str, str]]], Tensor]:
    """All sums of an update in one vector, for a single reduction over ranks.

    Returns:
        (term's position, key of `named_sums`) of each sum; and the vector: the total of each term, then these sums.
    """
    zero = torch.zeros((), device=device)
    names = [(position, name) for position, part in enumerate(sums) for name in sorted(part.metrics)]
    totals = [torch.stack(part.totals).sum() if part.totals else zero for part in sums]
    return names, torch.stack([*totals, *(sums[position].metrics[name] for position, name in names)])


def shard_rows(
    rows: Sequence[Row], collate: Callable[[list[Row]], Sequence[Batch]], rank: int = 0, world_size: int = 1
) -> list[Batch]:
    """Micro-batches of rank `rank`: every world_size-th row of the global batch.

    A rank without a row gets the first row of all at weight 0, so that it still joins the collective operations.
    """
    local_rows = list(rows[rank::world_size])
    if local_rows:
        return list(collate(local_rows))
    return [ZeroWeightBatch(batch) for batch in collate([rows[0]])]


def unwrap_batch(batch: Batch) -> Batch:
    """The batch inside a `ZeroWeightBatch`; any other batch itself."""
    return batch.batch if isinstance(batch, ZeroWeightBatch) else batch

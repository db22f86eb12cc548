"""The parts of an update: terms, their micro-batches, and sums of losses and metrics, also of each data source alone.

Which rows come from which source is known to the batch (`counted_sources`); how often a source is drawn is decided in
data/stream.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from alignment.ragged import Batch

Row = TypeVar("Row")
LossFn = Callable[[Any], "LossSum"]  # a micro-batch -> its sums

LARGEST_EXPONENT = 709.0  # e^709.78 is the largest float


class Collate(Protocol):
    """Rows -> micro-batches of at most `micro_batch_tokens` tokens each; `data.batches.collate_pairs` is one."""

    def __call__(self, rows: Sequence[Any], /, micro_batch_tokens: int) -> Sequence[Any]: ...


@dataclass(frozen=True)
class LossSum:
    """The result of a loss function for one micro-batch.

    Attributes:
        total: the SUM of the loss over everything that counts, a scalar with gradient.
        metrics: sums as well; each is divided by its term's global weight when logged.
        means: (sum, weight) of metrics with a weight of their own, the same names on every rank; left out of the log
            where the weight is 0 over the whole update. Of `perplexity` and `perplexity/SOURCE` the mean is in nats,
            and its exponential is logged.
    """

    total: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)
    means: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def named_sums(self) -> dict[tuple[str, str], Tensor]:
        """The metrics by (name, ""), the means by (name, "sum") and (name, "weight")."""
        sums = {(name, ""): value for name, value in self.metrics.items()}
        for name, (value, weight) in self.means.items():
            sums[name, "sum"] = value
            sums[name, "weight"] = weight
        return sums


@dataclass(frozen=True)
class Term:
    """One part of an update's objective: coef * (sum of loss over all micro-batches) / (sum of their weights)."""

    micro_batches: Sequence[Batch]  # of this rank; at least one
    loss_fn: LossFn  # calls the engine's model and returns sums
    coef: float = 1.0
    name: str = ""  # prefixes the term's metrics with `name_`; a named term also logs its own mean loss as `name_loss`

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
        """The copy on another device."""
        return ZeroWeightBatch(self.batch.to(device))


def unwrap_batch(batch: Batch) -> Batch:
    """The batch inside a `ZeroWeightBatch`; any other batch itself."""
    return batch.batch if isinstance(batch, ZeroWeightBatch) else batch


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


@dataclass
class MetricSums:
    """Sums of one term's losses and metrics on this rank, kept on the device: nothing is fetched during the update."""

    totals: list[Tensor] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    metrics: dict[tuple[str, str], Tensor] = field(default_factory=dict)  # as `LossSum.named_sums`

    def add(self, loss: LossSum, batch: Batch) -> None:
        """Add one micro-batch. One of weight 0 contributes the names of its metrics and no value."""
        counts = float(batch.weight) > 0
        if counts:
            self.totals.append(loss.total.detach().float())
            self.batches.append(batch)
        for key, value in loss.named_sums().items():
            value = value.detach().float() * float(counts)
            self.metrics[key] = self.metrics[key] + value if key in self.metrics else value


def averages(sums: Mapping[tuple[str, str], float], weight: float) -> dict[str, float]:
    """The metrics behind `LossSum.named_sums`: sums over `weight`, means over their own weights if these are not 0."""
    metrics = {name: value / weight for (name, part), value in sums.items() if not part}
    for (name, part), value in sums.items():
        if part == "sum" and (metric_weight := sums[name, "weight"]):
            mean = value / metric_weight
            if name.startswith("perplexity"):
                mean = math.exp(mean) if mean < LARGEST_EXPONENT else math.inf
            metrics[name] = mean
    return metrics


def flatten_sums(sums: list[MetricSums], device: torch.device) -> tuple[list[tuple[int, tuple[str, str]]], Tensor]:
    """All sums of an update in one vector, for a single reduction over ranks.

    Returns:
        (term's position, key of `LossSum.named_sums`) of each sum; and the vector: the total of each term, then these
        sums.
    """
    names = [(position, name) for position, part in enumerate(sums) for name in sorted(part.metrics)]
    zero = torch.zeros((), device=device)
    totals = [torch.stack(part.totals).sum() if part.totals else zero for part in sums]
    return names, torch.stack([*totals, *(sums[position].metrics[name] for position, name in names)])


# Data sources


class HasSources(Protocol):
    """A batch that knows the data source of each thing that it counts."""

    @property
    def counted_sources(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Sources:
    """The names of a run's data sources by number; empty where metrics do not tell sources apart."""

    names: tuple[str, ...] = ()

    def loss_sum(
        self, losses: Tensor, batch: HasSources, metrics: dict[str, Tensor] | None = None, **values: Tensor
    ) -> LossSum:
        """Return the `LossSum` of a loss function: losses [M] and metrics of what the batch counts, and of each source.

        `metrics` are sums over all sources, `values` further metrics of each source as for `means`.
        """
        return LossSum(losses.sum(), metrics or {}, self.means(batch, loss=losses, **values))

    def means(self, batch: HasSources, **values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """`LossSum.means` of each source: its share of what counts (tokens or rows) and its mean of each metric [M]."""
        if not self.names:
            return {}
        if (numbers := batch.counted_sources) is None:
            raise ValueError("a batch without the sources of its rows cannot be separated by source")
        belongs = (numbers == torch.arange(len(self.names), device=numbers.device)[:, None]).float()  # [S, M]
        counts = belongs.sum(1)
        means = {f"share/{name}": (count, counts.sum()) for name, count in zip(self.names, counts, strict=True)}
        for metric, value in values.items():
            sums = (belongs * value.detach().float()).sum(1)
            for name, total, count in zip(self.names, sums, counts, strict=True):
                means[f"{metric}/{name}"] = total, count
        return means


ONE_SOURCE = Sources()

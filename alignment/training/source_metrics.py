"""Loss and metrics of each data source by itself, and the weights by which sources count in the loss.

Which rows come from which source is known to the batch (`counted_sources`); how often a source is drawn is decided in
data/mixture.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from alignment.ragged import Ragged, RaggedBatch, Seq2Seq
from alignment.training.loop import Collate
from alignment.training.terms import LossSum

Counted = TypeVar("Counted", Ragged, RaggedBatch, Seq2Seq)


class HasSources(Protocol):
    """A batch that knows the data source of each thing that it counts."""

    @property
    def counted_sources(self) -> Tensor | None: ...


@dataclass(frozen=True)
class Sources:
    """The data sources of a run.

    With weights the loss of an update is sum(weight * loss) / sum(weight) over the tokens (or rows) that count, over all
    micro-batches and ranks; the losses of the sources by themselves, and all other metrics, are plain means.

    Attributes:
        names: by number; empty where metrics do not tell sources apart.
        loss_weights: of a token (or row) of each source, > 0; empty: all count alike.
    """

    names: tuple[str, ...] = ()
    loss_weights: tuple[float, ...] = ()

    def loss_sum(
        self, losses: Tensor, batch: HasSources, metrics: dict[str, Tensor] | None = None, **values: Tensor
    ) -> LossSum:
        """Return the `LossSum` of a loss function: losses by weight, metrics, and both of each source by itself.

        Args:
            losses: of what the batch counts, with gradient, [M].
            batch: their `counted_sources` say where each belongs.
            metrics: sums over what the batch counts, averaged without weights.
            values: further metrics of each source, as for `means`.
        """
        metrics = metrics or {}
        means = self.means(batch, loss=losses, **values)
        if not self.loss_weights:
            return LossSum(losses.sum(), metrics, means)
        count = losses.new_tensor(float(len(losses)))
        means |= {name: (value, count) for name, value in metrics.items()}  # the term's own weight is not their number
        weights = losses.new_tensor(self.loss_weights)[_numbers(batch)]
        return LossSum((losses * weights).sum(), {}, means)

    def means(self, batch: HasSources, **values: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """`LossSum.means` of each source: its share of what counts (tokens or rows), and its mean of each metric.

        Args:
            batch: whose `counted_sources` say where each value belongs.
            values: by metric; of what the batch counts, not weighted, [M].
        """
        if not self.names:
            return {}
        numbers = _numbers(batch)
        belongs = (numbers == torch.arange(len(self.names), device=numbers.device)[:, None]).float()  # [S, M]
        counts = belongs.sum(1)
        means = {f"share/{name}": (count, counts.sum()) for name, count in zip(self.names, counts, strict=True)}
        for metric, value in values.items():
            sums = (belongs * value.detach().float()).sum(1)
            for name, total, count in zip(self.names, sums, counts, strict=True):
                means[f"{metric}/{name}"] = total, count
        return means

    def weighted(self, collate: Collate) -> Collate:
        """Wrap `collate`: each batch's weight becomes the sum of the loss weights of what it counts."""
        if not self.loss_weights:
            return collate

        def collate_weighted(rows: Sequence[object], /, micro_batch_tokens: int) -> Sequence[object]:
            weights = torch.tensor(self.loss_weights)
            batches = collate(rows, micro_batch_tokens=micro_batch_tokens)
            return [with_weight(batch, float(weights[_numbers(batch)].sum())) for batch in batches]

        return collate_weighted


ONE_SOURCE = Sources()


def _numbers(batch: HasSources) -> Tensor:
    """The data source of each thing that a batch counts, [M].

    Raises:
        ValueError: the batch was made without them.
    """
    if batch.counted_sources is None:
        raise ValueError("a batch without the sources of its rows cannot be told apart by source")
    return batch.counted_sources


def with_weight(batch: Counted, weight: float) -> Counted:
    """The batch with another weight in the mean of its term."""
    if isinstance(batch, RaggedBatch):
        return replace(batch, ragged=replace(batch.ragged, weight=weight))
    if isinstance(batch, Seq2Seq):
        return replace(batch, decoder=replace(batch.decoder, weight=weight))
    return replace(batch, weight=weight)

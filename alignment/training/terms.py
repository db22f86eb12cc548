"""What one update is made of: terms, their micro-batches and their sums. How it is run is in engine.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class LossSum:
    """What a loss function returns for one micro-batch.

    Attributes:
        total: the SUM of the loss over everything that counts, a scalar with gradient.
        metrics: sums likewise; each is divided by its term's global weight when logged.
    """

    total: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Term:
    """One part of an update's objective: coef * (sum of loss over all micro-batches) / (sum of their weights).

    Attributes:
        micro_batches: of this rank; at least one, each with `.weight` and `.to(device)`.
        loss_fn: calls the engine's model and returns sums.
        name: prefixes the term's metrics with `name_`; a named term also logs its own mean loss as `name_loss`.
    """

    micro_batches: Sequence[Any]
    loss_fn: Callable[[Any], LossSum]
    coef: float = 1.0
    name: str = ""

    def key(self, metric: str) -> str:
        """The name under which a metric is logged."""
        return f"{self.name}_{metric}" if self.name else metric


@dataclass(frozen=True)
class ZeroWeightBatch:
    """A borrowed batch that counts nothing: for a rank without rows of its own, which must still keep in step."""

    batch: Any
    weight: float = 0.0

    def to(self, device: Any) -> "ZeroWeightBatch":
        """The same on another device."""
        return ZeroWeightBatch(self.batch.to(device))


def share(
    rows: Sequence[Any], collate: Callable[[list[Any]], Sequence[Any]], rank: int = 0, world_size: int = 1
) -> list[Any]:
    """Micro-batches of rank `rank`: every world_size-th row of the global batch.

    A rank without a row borrows the first one at weight 0, so that collective operations match.
    """
    mine = list(rows[rank::world_size])
    if mine:
        return list(collate(mine))
    return [ZeroWeightBatch(batch) for batch in collate([rows[0]])]


def contents(batch: Any) -> Any:
    """The batch itself, without the wrapper of a borrowed one."""
    return batch.batch if isinstance(batch, ZeroWeightBatch) else batch


def token_count(batch: Any) -> int:
    """Tokens that a batch sends through the model: the sum of its (or its `ragged`'s) `lengths`, or 0."""
    batch = contents(batch)
    return sum(getattr(getattr(batch, "ragged", batch), "lengths", ()))


def row_ids(batch: Any) -> tuple[str, ...]:
    """Names of the data rows in a batch, as far as it knows them."""
    batch = contents(batch)
    return tuple(getattr(batch, "row_ids", None) or getattr(getattr(batch, "ragged", None), "row_ids", ()))

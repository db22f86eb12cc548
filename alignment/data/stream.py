"""The order in which rows are seen: a pure function of (seed, epoch, position). Holds no cursor to lose."""

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

import numpy as np

Row = TypeVar("Row")


def order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `rows` rows in one epoch, [rows]. Epochs do not depend on each other.

    It is numpy's `permutation(rows)`, in 4 bytes for each row where these hold its number.
    """
    numbers = np.arange(rows, dtype=np.int32 if rows < 2**31 else np.int64)
    np.random.default_rng([seed, epoch]).shuffle(numbers)
    return numbers


def rows_in(epochs: float, epoch_length: int) -> int:
    """Rows in this many epochs, at least one."""
    return max(1, round(epoch_length * epochs))


class Stream(Generic[Row]):
    """Global batches of rows, epoch after epoch; a batch may run across an epoch's end.

    Attributes:
        rows: what is dealt out; each row once per epoch.
        batch_size: rows per batch, over all ranks.
        seed: >= 0.
        epochs: where the stream ends, so that its last batch may be smaller; None: it never ends.
    """

    def __init__(self, rows: Sequence[Row], batch_size: int, seed: int, epochs: float | None = None):
        if not rows:
            raise ValueError("a stream needs at least one row")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if seed < 0:
            raise ValueError(f"seed must not be negative, got {seed}")
        self.rows, self.batch_size, self.seed, self.epochs = rows, batch_size, seed, epochs
        self._orders: dict[int, np.ndarray] = {}

    def positions_at(self, step: int) -> list[int]:
        """Indices of the rows of batch `step` (from 0).

        Raises:
            IndexError: the step is negative, or at or after the stream's end.
        """
        return [self.row_of(position)[0] for position in self._positions(step)]

    def epochs_at(self, step: int) -> list[int]:
        """The epoch of its source, from 0, in which each row of batch `step` is seen."""
        return [self.row_of(position)[1] for position in self._positions(step)]

    def rows_at(self, step: int) -> list[Row]:
        """The rows of batch `step`, as `positions_at`."""
        return [self.rows[index] for index in self.positions_at(step)]

    def steps(self, epochs: float | None = None) -> int:
        """Batches in this many epochs (default: the stream's own), the last, smaller one included."""
        epochs = self.epochs if epochs is None else epochs
        if epochs is None:
            raise ValueError("an endless stream has no number of steps; say for how many epochs")
        return -(-rows_in(epochs, self.epoch_length) // self.batch_size)

    @property
    def epoch_length(self) -> int:
        """Rows of one epoch."""
        return len(self.rows)

    def row_of(self, position: int) -> tuple[int, int]:
        """Index and epoch of the row at a position, which is counted over all epochs."""
        epoch, offset = divmod(position, len(self.rows))
        if epoch not in self._orders:  # a memo of a pure function: what is in it changes speed only
            if len(self._orders) > 1:
                self._orders.clear()
            self._orders[epoch] = order(len(self.rows), self.seed, epoch)
        return int(self._orders[epoch][offset]), epoch

    def _positions(self, step: int) -> range:
        """Positions of the rows of batch `step`, counted over all epochs."""
        end = math.inf if self.epochs is None else rows_in(self.epochs, self.epoch_length)
        first = step * self.batch_size
        if step < 0 or first >= end:
            raise IndexError(f"step {step} lies outside the stream of {-(-end // self.batch_size):g} steps")
        return range(first, int(min(first + self.batch_size, end)))

"""The order in which rows are seen, of one source or of several that are drawn by given shares.

It is a pure function of (seed, position): no rank and no resumed run has to know what was drawn before.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any, Generic, TypeVar

import numpy as np

from alignment.data.config import NO_STREAMING, DataConfig
from alignment.data.table import tables_of
from alignment.errors import UserError

Row = TypeVar("Row")

BLOCK = 4096  # positions whose sources are drawn together
# generators of different things draw differently
COUNT_SALT = 715_101
ORDER_SALT = 715_102
SOURCE_SALT = 715_103


def order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The permutation of `rows` rows in one epoch, [rows]. Epochs do not depend on each other.

    It is numpy's `permutation(rows)`, in 4 bytes for each row where these hold its number.
    """
    numbers = np.arange(rows, dtype=np.int32 if rows < 2**31 else np.int64)
    np.random.default_rng([seed, epoch]).shuffle(numbers)
    return numbers


class Stream(Generic[Row]):
    """Global batches of rows, each row once per epoch; a batch may run across an epoch's end.

    Attributes:
        batch_size: rows per batch, over all ranks.
        epochs: where the stream ends, so that its last batch may be smaller; None: it never ends.
        epoch_length: rows of one epoch.
    """

    def __init__(self, rows: Sequence[Row], batch_size: int, seed: int, epochs: float | None = None):
        self.rows = rows
        self.epoch_length = len(rows)
        self.batch_size = batch_size
        self.seed = seed
        self.epochs = epochs
        self._order = lru_cache(maxsize=2)(partial(order, len(rows), seed))  # epoch -> its permutation

    def positions_at(self, step: int) -> list[int]:
        """Indices of the rows of batch `step` (from 0)."""
        return [self.row_of(position)[0] for position in self._positions(step)]

    def epochs_at(self, step: int) -> list[int]:
        """The epoch of its source, from 0, in which each row of batch `step` is seen."""
        return [self.row_of(position)[1] for position in self._positions(step)]

    def rows_at(self, step: int) -> list[Row]:
        """The rows of batch `step`, as `positions_at`."""
        return [self.rows[index] for index in self.positions_at(step)]

    def row_of(self, position: int) -> tuple[int, int]:
        """Index and epoch of the row at a position, which is counted over all epochs."""
        epoch, offset = divmod(position, len(self.rows))
        return int(self._order(epoch)[offset]), epoch

    def _positions(self, step: int) -> range:
        """Positions of the rows of batch `step`, counted over all epochs."""
        end = math.inf if self.epochs is None else max(1, round(self.epoch_length * self.epochs))
        first = step * self.batch_size
        if step < 0 or first >= end:
            raise IndexError(f"step {step} lies outside the stream of {-(-end // self.batch_size):g} steps")
        return range(first, int(min(first + self.batch_size, end)))


def mixing_shares(config: DataConfig, sizes: Sequence[int]) -> np.ndarray:
    """The probability with which each source of `config.train` is drawn, [S], by their numbers of rows.

    proportional: min(n, K) / sum; temperature: min(n, K)^(1/T) / sum, with n the rows of a source and K
    `mixing_maximum`; weights: weight / sum.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.5.2; Wei et al. 2022, arXiv:2109.01652, section 2.1.
    """
    if config.mixing == "weights":
        shares = np.array([source.weight for source in config.sources("train")], dtype=np.float64)
    else:
        shares = np.array(capped_sizes(config, sizes), dtype=np.float64) ** (1 / (config.temperature or 1.0))
    return shares / shares.sum()


def capped_sizes(config: DataConfig, sizes: Sequence[int]) -> list[int]:
    """Rows of each source, at most `mixing_maximum`."""
    return [size if config.mixing_maximum is None else min(size, config.mixing_maximum) for size in sizes]


def epoch_rows(config: DataConfig, sizes: Sequence[int]) -> int:
    """Rows of one epoch: all rows of all sources, of a mixture's each at most `mixing_maximum`.

    An epoch of a mixture is only a length: some of a source's rows are not drawn in it, and others twice.
    """
    return sum(sizes if config.mixing == "concatenate" else capped_sizes(config, sizes))


class SourceChoices:
    """The source that each position of a mixture is drawn from: a pure function of (shares [S], seed, position).

    The sources of each `BLOCK` of positions are drawn together: how many from each source, and in which order.
    """

    def __init__(self, shares: Sequence[float], seed: int):
        self.shares = shares
        self.seed = seed
        self._block = lru_cache(maxsize=2)(self._draw_block)
        self._counts = np.empty((0, len(shares)), np.int64)

    def at(self, position: int) -> tuple[int, int]:
        """Source of the draw at a position, and how many rows of this source were drawn before it."""
        source, draw = self._block(position // BLOCK)[position % BLOCK]
        return int(source), int(draw)

    def _draw_block(self, number: int) -> np.ndarray:
        """Source and number of the draw at each position of one block, [BLOCK, 2]."""
        counts = self._counts_to(number)
        sources = np.repeat(np.arange(len(self.shares)), counts[number])
        sources = np.random.default_rng([self.seed, ORDER_SALT, number]).permutation(sources)
        draws = np.empty(BLOCK, dtype=np.int64)
        for source, before in enumerate(counts[:number].sum(0)):
            draws[sources == source] = before + np.arange(counts[number, source])
        return np.stack([sources, draws], 1)

    def _counts_to(self, number: int) -> np.ndarray:
        """Rows of each source in each block, up to block `number` and beyond, [blocks, S].

        The generator gives the same first rows however many are asked for; they take 8 S bytes for 4096 positions.
        """
        if len(self._counts) <= number:
            generator = np.random.default_rng([self.seed, COUNT_SALT])
            self._counts = generator.multinomial(BLOCK, self.shares, size=2 ** int(number + 1).bit_length())
        return self._counts


class MixtureStream(Stream[Row]):
    """Global batches of rows drawn from several sources; the k-th draw of a source is row k of its own `Stream`.

    A source repeats no row before it has shown all of them, whatever its share. An epoch is a number of `draws`.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        batch_size: int,
        seed: int,
        epochs: float | None = None,
        *,
        shares: Sequence[float],
        draws: int,
    ):
        super().__init__(rows, batch_size, seed, epochs)
        self.shares = shares
        self.epoch_length = draws
        tables = tables_of(rows)
        self._sources = [Stream(table, 1, seed_of_source(seed, index)) for index, table in enumerate(tables)]
        self._choices = SourceChoices(shares, seed)

    def row_of(self, position: int) -> tuple[int, int]:
        """Index into `rows` of the row at a position, and how often its source had been seen to the end before it."""
        source, draw = self._choices.at(position)
        index, epoch = self._sources[source].row_of(draw)
        return sum(len(stream.rows) for stream in self._sources[:source]) + index, epoch


def seed_of_source(seed: int, number: int) -> int:
    """The seed of one source's order: two sources of equal size are not shuffled alike."""
    return int(np.random.default_rng([seed, SOURCE_SALT, number]).integers(2**62))


def stream_of(
    config: DataConfig, examples: Sequence[Row], *, batch_size: int, seed: int, epochs: float | None = None
) -> Stream[Row]:
    """The training examples, source after source, in the order that their data config asks for."""
    if config.streaming:
        raise UserError(NO_STREAMING)
    if config.mixing == "concatenate":
        return Stream(examples, batch_size, seed, epochs)
    sizes = [len(table) for table in tables_of(examples)]
    if 0 in sizes:
        empty = config.sources("train")[sizes.index(0)]
        raise UserError(f"{empty.source}: no row of it can be drawn; take it out")
    shares = mixing_shares(config, sizes).tolist()
    return MixtureStream(examples, batch_size, seed, epochs, shares=shares, draws=epoch_rows(config, sizes))


def source_shares(config: DataConfig, stream: Stream[Any], steps: int) -> list[dict[str, Any]]:
    """Name, source and rows of each source, its share of `steps` updates, and how often each of its rows is seen."""
    tables = tables_of(stream.rows)
    total = len(stream.rows)
    draws = steps * stream.batch_size
    shares = stream.shares if isinstance(stream, MixtureStream) else [len(table) / total for table in tables]
    return [
        {
            "name": str(source.name),
            "source": source.source,
            "rows": len(table),
            "share": share,
            "epochs": share * draws / len(table) if table else 0.0,
        }
        for source, table, share in zip(config.sources("train"), tables, shares, strict=False)
    ]


def describe_mixture(config: DataConfig, stream: Stream[Any], steps: int) -> Iterator[str]:
    """Lines that describe a mixture, one for each source: its rows, its share, and how often its rows are seen."""
    if isinstance(stream, MixtureStream):
        draws = steps * stream.batch_size
        yield f"mixture by {config.mixing}: an epoch is {stream.epoch_length} draws, the run draws {draws}"
        for source in source_shares(config, stream, steps):
            yield "  {name}: {rows} rows, share {share:.4f}, about {epochs:.2g} epochs of its own".format(**source)

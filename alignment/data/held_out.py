"""A share of the training rows that is held out: two views of each table, chosen by the hashes of prompts.

The hash depends on the prompt (or document) alone. So equal prompts stay on one side, in whatever source they are; a row
does not move when rows are added, reordered or read by other processes; and a larger share holds out the rows of a
smaller one too.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from alignment.data.config import DataConfig, Part
from alignment.data.rows.read import HasRowId, text_hash
from alignment.data.rows.records import SHOWN_IDS, Tally
from alignment.data.table import JoinedTables, Rows, Table, tables_of
from alignment.errors import UserError
from alignment.files import hash_of

HELD_OUT = "held out by data.evaluation_share"

AnyRow = TypeVar("AnyRow", bound=HasRowId)


def held_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """True for each row that is held out, by the hashes of prompts, uint64, [rows]."""
    return hashes < np.uint64(int(share * 2**64))


def rows_of_part(
    rows: Sequence[AnyRow], counts: Tally, key: Callable[[AnyRow], str], config: DataConfig, part: Part
) -> tuple[list[AnyRow], Tally]:
    """The rows in memory that belong to a part, and the part's tally.

    Args:
        counts: of all rows.
        key: a text that is equal for equal prompts.
        config: with `evaluation_share`.

    Raises:
        UserError: the part is empty.
    """
    hashes = np.array([text_hash(key(row)) for row in rows], np.uint64)
    chosen = held_out(hashes, config.evaluation_share or 0.0).tolist()
    sides = {side: [row for row, out in zip(rows, chosen, strict=True) if out == side] for side in (False, True)}
    found = sides[part == "evaluation"]
    if not found:
        raise UserError(_empty(config, part, len(rows)))
    if part == "evaluation":
        return found, Tally(len(found), len(found))
    return found, _without(counts, len(sides[True]), [row.row_id for row in sides[True][:SHOWN_IDS]])


def view_of_part(rows: Rows, config: DataConfig, part: Part) -> Rows:
    """The examples of prepared training rows that belong to a part, in their order; the tables on disk are the same.

    Args:
        config: with `evaluation_share`.

    Raises:
        UserError: the part is empty.
    """
    views = [_view(cast(Table, table), config.evaluation_share or 0.0, part) for table in tables_of(rows)]
    if not any(map(len, views)):
        raise UserError(_empty(config, part, len(rows)))
    return views[0] if len(views) == 1 else JoinedTables(views)


def _view(table: Table, share: float, part: Part) -> Table:
    out = held_out(table.column("prompt_hash"), share)
    evaluation = table.select(np.flatnonzero(out), key=hash_of([table.key, share, "evaluation"]))
    rows = evaluation.distinct_rows()
    if part == "evaluation":  # rows that were dropped and cut, and findings, are told of the training rows
        counts = Tally(len(rows), len(rows), evaluation.documents, int(evaluation.column("total").sum()))
        return evaluation.changed(tally=counts, findings=[])
    train = table.select(np.flatnonzero(~out), key=hash_of([table.key, share, "train"]))
    counts = _without(table.tally, len(rows), [evaluation.row_id(int(row)) for row in rows[:SHOWN_IDS]])
    counts.documents, counts.tokens = train.documents, int(train.column("total").sum())
    return train.changed(tally=counts)


def _without(counts: Tally, number: int, first: list[str]) -> Tally:
    """A tally without `number` rows that are held out, the first of which have these names."""
    if not number:
        return replace(counts)
    return replace(
        counts,
        rows=counts.rows - number,
        kept=counts.kept - number,
        noted={**counts.noted, HELD_OUT: number},
        first={**counts.first, HELD_OUT: first},
    )


def _empty(config: DataConfig, part: Part, rows: int) -> str:
    names = ", ".join(source.source for source in config.sources("train"))
    fewer, way = (
        ("no row is held out", "raise it") if part == "evaluation" else ("no row is left to train on", "lower it")
    )
    return (
        f"{names}: data.evaluation_share={config.evaluation_share:g} parts {rows} examples by their prompts, and {fewer}; "
        f"{way}, or name held-out rows by data.evaluation"
    )

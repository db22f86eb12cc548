"""Tables: examples in five flat files, memory-mapped and read back row by row.

    tokens     token ids of all documents, end to end                                            int32
    runs       of each document's mask, the lengths of its runs, the first of them of False      int32
    documents  where the tokens and the runs of each document begin, and where the last ones end int64, [documents + 1,
    2] rows       a line of `COLUMNS` for each row, and where the last row ends                     int64, [rows + 1, 7]
    values     the name and the values of each row                                               JSON

The bytes stay on disk: what a process has read of them is given back to the system after every few rows, so that memory
does not grow with the table.
"""

import json
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import reduce
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from alignment.data.batches import Example, RowSequence, TokenizedRow
from alignment.data.rows.records import Tally
from alignment.errors import raise_all
from alignment.files import hash_of

Row = TypeVar("Row")
Manifest = Mapping[str, Any]  # of an entry of the cache: how a table was made

FILES = {"tokens": np.int32, "runs": np.int32, "documents": np.int64, "rows": np.int64, "values": np.uint8}
# Numbers of a row: where its documents and its bytes of `values` begin; the number of its data row, which may have made
# several; tokens of its longest document, and of all of them; 1 where its prompt lost its beginning; hash of its
# prompt. The line after the last row has 0 for all but the first three.
COLUMNS = ("document", "value", "record", "longest", "total", "cut", "prompt_hash")
ROWS_KEPT = 32  # decoded before mapped pages are given back; the system maps up to 1 MiB with each row, in large pages


def runs_of(mask: Sequence[bool]) -> list[int]:
    """Lengths of the runs of equal values in a mask; the first run is of False, and may be empty."""
    runs = [len(list(run)) for _, run in groupby(mask)]
    return [0, *runs] if mask and mask[0] else runs


def mask_of(runs: Sequence[int]) -> list[bool]:
    """The mask with these runs."""
    mask: list[bool] = []
    for index, length in enumerate(runs):
        mask += [index % 2 == 1] * length
    return mask


class EncodedExamples(NamedTuple):
    """Encoded examples, in memory or mapped; the fields are the files of a table."""

    tokens: np.ndarray
    runs: np.ndarray
    documents: np.ndarray
    rows: np.ndarray
    values: np.ndarray

    def example(self, row: int, source: int = 0) -> Example:
        """One example, which is given the number of its data source."""
        (first, begin), (last, end) = self.rows[row : row + 2, :2].tolist()
        row_id, values = json.loads(self.values[begin:end].tobytes())
        tokens, runs = self.documents[first : last + 1].T.tolist()
        documents = [self.tokens[start:stop].tolist() for start, stop in pairwise(tokens)]
        masks = [mask_of(self.runs[start:stop].tolist()) for start, stop in pairwise(runs)]
        return Example(documents, masks, row_id, source, values)


def encode_examples(rows: Sequence[Example], prompt_hashes: Mapping[str, int] | None = None) -> EncodedExamples:
    """Examples as arrays; `prompt_hashes`: row id -> 64-bit hash of the prompt or text, by which rows are held out."""
    documents = [ids for row in rows for ids in row.documents]
    runs = [runs_of(mask) for row in rows for mask in row.masks]
    values = [json.dumps([row.row_id, row.values], default=str).encode() for row in rows]
    new = [row.row_id != before.row_id for before, row in pairwise(rows)]
    columns = [
        _starts([len(row.documents) for row in rows]),
        _starts([len(value) for value in values]),
        [*accumulate(new, initial=0), sum(new) + 1] if rows else [0],
        [*(max(map(len, row.documents)) for row in rows), 0],
        [*(sum(map(len, row.documents)) for row in rows), 0],
        [*(bool(row.values.get("cut")) for row in rows), 0],
        np.array([*((prompt_hashes or {}).get(row.row_id, 0) for row in rows), 0], np.uint64).view(np.int64),
    ]
    return EncodedExamples(
        np.fromiter(chain.from_iterable(documents), np.int32),
        np.fromiter(chain.from_iterable(runs), np.int32),
        np.stack([_starts(list(map(len, documents))), _starts(list(map(len, runs)))], 1),
        np.stack([np.asarray(column, np.int64) for column in columns], 1),
        np.frombuffer(b"".join(values), np.uint8) if values else np.empty(0, np.uint8),
    )


def _starts(lengths: Sequence[int]) -> np.ndarray:
    """Begins of parts of these lengths, end to end, and the end of the last one."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


class TableWriter:
    """Writes the files of one table into a directory; `close` gives the size for its manifest."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.rows = 0
        self._last = np.zeros((1, 2), np.int64), np.zeros((1, len(COLUMNS)), np.int64)  # of `documents` and `rows`

    def add(self, encoded: EncodedExamples) -> None:
        """Append rows."""
        self.rows += len(encoded.rows) - 1
        documents = encoded.documents + self._last[0]
        rows = encoded.rows + self._last[1]
        self._write(encoded._replace(documents=documents[:-1], rows=rows[:-1]))
        self._last = documents[-1:], rows[-1:]

    def close(self) -> dict[str, Any]:
        """Finish the files; their number of rows."""
        self._write(encode_examples([])._replace(documents=self._last[0], rows=self._last[1]))
        return {"rows": self.rows}

    def _write(self, encoded: EncodedExamples) -> None:
        for name, array in zip(FILES, encoded, strict=True):
            with open(self.directory / name, "ab") as file:
                array.tofile(file)


class _Joinable(RowSequence[Any]):
    def __add__(self, other: Sequence[TokenizedRow]) -> Sequence[Any]:
        return JoinedTables([self, other]) if len(other) else self

    def __radd__(self, other: Sequence[TokenizedRow]) -> Sequence[Any]:
        return JoinedTables([other, self]) if len(other) else self


class Table(_Joinable):
    """Examples of one data source, decoded when they are asked for; the same values at every call.

    Attributes:
        encoded: all rows, mapped from disk or in memory.
        manifest: that the preparation wrote, `key` (hex digest of all that the table was made of) among it.
        findings: of the data doctor while the rows were prepared, each as the fields of a `Finding`.
        source: number of the data source that its examples are given.
        cached, notes: of its entry in the cache.
    """

    def __init__(
        self,
        encoded: EncodedExamples,
        manifest: Manifest,
        *,
        source: int = 0,
        directory: Path | None = None,
        cached: bool = False,
        notes: Sequence[str] = (),
        maps: Sequence[mmap.mmap | None] = (),
    ):
        self.encoded = encoded
        self.manifest = manifest
        self.source = source
        self.directory = directory
        self.cached = cached
        self.notes = list(notes)
        self.key: str = manifest.get("key", "")
        self.name: str = manifest.get("source", "")
        self.tally = Tally(**manifest.get("tally", {}))
        self.findings: list[dict[str, Any]] = list(manifest.get("findings", ()))
        self._rows: np.ndarray | None = None  # those that `select` chose
        self._maps = maps
        self._read = [0]  # rows since pages were given back; shared by all views

    @classmethod
    def open(cls, directory: Path, manifest: Manifest, *, cached: bool = False, notes: Sequence[str] = ()) -> "Table":
        """The table in a directory, its files mapped at once so that they stay readable when the cache is cleared."""
        maps = [_mapped(directory / name) for name in FILES]
        flat = EncodedExamples(
            *(np.frombuffer(data or b"", dtype) for data, dtype in zip(maps, FILES.values(), strict=True))
        )
        encoded = flat._replace(documents=flat.documents.reshape(-1, 2), rows=flat.rows.reshape(-1, len(COLUMNS)))
        return cls(encoded, manifest, directory=directory, cached=cached, notes=notes, maps=maps)

    def __len__(self) -> int:
        return len(self.encoded.rows) - 1 if self._rows is None else len(self._rows)

    def row_at(self, index: int) -> Example:
        row = self.encoded.example(index if self._rows is None else int(self._rows[index]), self.source)
        self._read[0] += 1
        if self._read[0] >= ROWS_KEPT:
            self._release()
        return row

    def column(self, name: str) -> np.ndarray:
        """One of `COLUMNS`, or the number of `documents`, [rows]; made anew at each call."""
        rows = self.encoded.rows
        values = np.diff(rows[:, 0]) if name == "documents" else rows[:-1, COLUMNS.index(name)]
        values = values.copy() if self._rows is None else values[self._rows]
        self._release()
        return values.view(np.uint64) if name == "prompt_hash" else values

    def changed(self, **attributes: Any) -> "Table":
        """The same files with other attributes: another source, tally or findings."""
        other = copy(self)
        other.__dict__.update(attributes)
        return other

    def select(self, rows: np.ndarray, *, key: str) -> "Table":
        """A table of some of the rows, by their indices (ascending, [rows]), which reads the same files."""
        return self.changed(_rows=rows, key=key)

    def _release(self) -> None:
        """Give mapped pages back to the system; they are read again when needed."""
        self._read[0] = 0
        for mapped in self._maps:
            if mapped is not None and hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path) -> mmap.mmap | None:
    """The bytes of a file; None where it is empty, which no system maps."""
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else None


class JoinedTables(_Joinable):
    """Several sequences of examples, tables or lists, one after another."""

    def __init__(self, tables: Sequence[Sequence[TokenizedRow]]):
        self.tables: list[Any] = [part for table in tables for part in tables_of(table)]
        self._starts = list(accumulate(map(len, self.tables), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def row_at(self, index: int) -> Any:
        table = bisect_right(self._starts, index) - 1
        return self.tables[table][index - self._starts[table]]

    def column(self, name: str) -> np.ndarray:
        """`column_of` all parts."""
        return np.concatenate([column_of(table, name) for table in self.tables])

    # What follows needs tables, not lists, as parts.

    @property
    def key(self) -> str:
        """Hex digest of the keys of all tables, in order."""
        return hash_of([table.key for table in self.tables])

    @property
    def notes(self) -> list[str]:
        """Notes of the preparation of all tables."""
        return [note for table in self.tables for note in table.notes]

    @property
    def tally(self) -> Tally:
        """Rows that were read, dropped and cut to make the tables."""
        return reduce(Tally.merged_with, [table.tally for table in self.tables], Tally())


Rows = Table | JoinedTables  # examples of one kind on disk


def tables_of(examples: Sequence[Row]) -> list[Sequence[Row]]:
    """The examples of each source."""
    return list(examples.tables) if isinstance(examples, JoinedTables) else [examples]


def column_of(rows: Sequence[Any], name: str) -> np.ndarray:
    """Of each row `longest` (tokens of its longest document), `total` (of all documents) or `cut`, [rows].

    Of tables any of `COLUMNS`, without reading the rows.
    """
    if isinstance(rows, Table | JoinedTables):
        return rows.column(name)
    measure: dict[str, Callable[[Any], int]] = {
        "longest": lambda row: max(map(len, row.documents)),
        "total": lambda row: sum(map(len, row.documents)),
        "cut": lambda row: bool(row.values.get("cut")),
    }
    return np.array([measure[name](row) for row in rows], np.int64)


def describe_cache(rows: Sequence[TokenizedRow]) -> list[str]:
    """Key and place of prepared rows on disk, and what was noted of them, as lines of text; none for rows in memory."""
    if not isinstance(rows, Table | JoinedTables):
        return []
    tables = [table for table in tables_of(rows) if isinstance(table, Table)]
    lines = [f"{'read from' if table.cached else 'prepared into'} the cache: {table.directory}" for table in tables]
    return [*lines, *rows.notes]


def longest_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """The `count` rows with the longest documents, longest first, equal ones in their order."""
    order = np.argsort(-column_of(rows, "longest"), kind="stable")[:count]
    return [rows[int(index)] for index in order]


def check_findings(examples: Sequence[TokenizedRow], check: Literal["stop", "warn", "off"]) -> list[str]:
    """The data doctor's findings in prepared rows, a line each, less those in the tally; errors end a run (`stop`)."""
    findings = [
        (table.name, finding)
        for table in (getattr(examples, "tables", [examples]) if check != "off" else [])
        for finding in table.findings
        if finding["name"] not in {**table.tally.dropped, **table.tally.cut}
    ]
    errors = [f"{name}: {finding['text']}" for name, finding in findings if finding["level"] == "error"]
    if errors and check == "stop":
        raise_all([*errors, "mend the rows, or set data.check=warn to train on them as they are"])
    return [f"{finding['level']}: {finding['text']}" for _, finding in findings]

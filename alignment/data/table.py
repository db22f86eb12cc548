"""Tables: examples on disk, memory-mapped, read back row by row. How a kind of example is stored is in codecs.py.

A table is a directory of Arrow IPC files and `manifest.json`, which says what they hold. The bytes stay on disk: what a
process has read of them is given back to the system after every few rows, so that memory does not grow with the table.
"""

import mmap
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict
from functools import reduce
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import numpy as np

from alignment.data.codecs import Codec
from alignment.data.examples import RowSequence, TokenizedRow
from alignment.data.rows.records import Tally
from alignment.errors import raise_all
from alignment.files import hash_of

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row", bound=TokenizedRow)

FILE_BYTES = 2**31  # of one Arrow file; a table has as many as it takes
ROWS_KEPT = 32  # decoded before mapped pages are given back; the system maps up to 1 MiB with each row, in large pages
# FILE:LINE, and what may follow: FILE:LINE[chosen], FILE:LINE[0>2]
LAST_NUMBER = re.compile(r"(?s)(.*:)(0|[1-9]\d{0,17})(\D*|(?:\[[^\[\]:]*\])+)")
COMMON = ("name", "line", "longest", "total", "prompt_hash")  # columns of every table, beside those of its codec


class TableWriter(Generic[Row]):
    """Writes the Arrow files of one table into a directory; `close` gives what its manifest must hold of them."""

    def __init__(self, directory: Path, codec: Codec[Row]):
        import pyarrow as pa  # here, so that processes that are forked to make batches need not load it, each for itself

        self._new_file = pa.ipc.new_file
        self.directory, self.codec = directory, codec
        self.names: dict[str, int] = {}
        self.files: list[dict[str, Any]] = []
        self._writer: Any = None

    def add(self, batch: "pa.RecordBatch", names: Sequence[str]) -> None:
        """Append the rows of `encode_batch`.

        Args:
            names: the names that its column `name` counts into.
        """
        if not batch.num_rows:
            return
        if self._writer is None:
            self.files.append({"name": f"rows-{len(self.files):05}.arrow", "rows": []})
            self._writer = self._new_file(self.directory / self.files[-1]["name"], batch.schema)
        numbers = np.array([self.names.setdefault(name, len(self.names)) for name in names], np.int32)
        column = batch.schema.get_field_index("name")
        batch = batch.set_column(column, "name", _fixed(numbers[_numbers(batch.column(column))]))
        self._writer.write_batch(batch)
        self.files[-1]["rows"].append(batch.num_rows)
        if (self.directory / self.files[-1]["name"]).stat().st_size > FILE_BYTES:
            self._finish_file()

    def close(self) -> dict[str, Any]:
        """Finish the last file; kind of codec, files with their rows per batch, and names of rows, as JSON-like values."""
        self._finish_file()
        return {"codec": self.codec.kind, "files": self.files, "names": list(self.names)}

    def _finish_file(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def encode_batch(
    codec: Codec[Row], examples: Sequence[Row], names: dict[str, int], prompt_hashes: Mapping[str, int] | None = None
) -> "pa.RecordBatch":
    """Examples as one Arrow record batch.

    Args:
        names: numbers of the names of rows, by which its column `name` tells them; new ones are added.
        prompt_hashes: row id -> 64-bit hash of the row's prompt or text, by which held-out rows are looked for.
    """
    import pyarrow as pa

    hashes = prompt_hashes or {}
    rows = [codec.encode(example) for example in examples]
    lengths = [[len(document) for document in example.documents] for example in examples]
    positions = [split_row_id(example.row_id) for example in examples]
    arrays = [
        _fixed(np.fromiter((names.setdefault(name, len(names)) for name, _ in positions), np.int32, len(rows))),
        _fixed(np.fromiter((line for _, line in positions), np.int64, len(rows))),
        _fixed(np.fromiter(map(max, lengths), np.int32, len(rows))),
        _fixed(np.fromiter(map(sum, lengths), np.int64, len(rows))),
        _fixed(np.fromiter((hashes.get(example.row_id, 0) for example in examples), np.uint64, len(rows))),
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(codec.columns)
    arrays += [COLUMNS[kind][0](values) for kind, values in zip(codec.columns.values(), columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[*COMMON, *codec.columns])


def read_batch(
    batch: "pa.RecordBatch", names: Sequence[str], codec: Codec[Row], *, source: int = 0
) -> Callable[[int], Row]:
    """A function number of a row -> its example, of a batch of `encode_batch` in memory.

    Args:
        names: the names that its column `name` counts into.
        source: number of the data source that the examples are given.
    """
    name, line = (_numbers(batch.column(key)).data for key in ("name", "line"))
    values = [COLUMNS[kind][1](batch.column(key)) for key, kind in codec.columns.items()]

    def read(row: int) -> Row:
        row_id = join_row_id(names[name[row]], line[row])
        return codec.decode(row_id, source, *[value(row) for value in values])

    return read


def joined_batch(batches: Sequence["pa.RecordBatch"]) -> "pa.RecordBatch | None":
    """Batches of the same columns as one; None where they have no row."""
    import pyarrow as pa

    if not any(batch.num_rows for batch in batches):
        return None
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def split_row_id(row_id: str) -> tuple[str, int]:
    """The name of a row without its line, and the line: "a.jsonl:{}" and 7 for a.jsonl:7; -1 where it has none."""
    name, _, line = row_id.rpartition(":")
    if name and line.isascii() and line.isdigit() and line[0] != "0" and len(line) <= 18 and "{}" not in name:
        return f"{name}:{{}}", int(line)
    found = LAST_NUMBER.fullmatch(row_id)
    if found is None or "{}" in row_id:
        return row_id, -1
    return f"{found[1]}{{}}{found[3]}", int(found[2])


def join_row_id(name: str, line: int) -> str:
    """The inverse of `split_row_id`."""
    return name if line < 0 else name.replace("{}", str(line), 1)


# pyarrow's own conversions of numpy arrays load pandas, where that is installed; buffers are handed over as they are.


def _fixed(values: np.ndarray) -> "pa.Array":
    """An Arrow array of single numbers."""
    import pyarrow as pa

    type_ = getattr(pa, str(values.dtype))()
    return pa.Array.from_buffers(type_, len(values), [None, pa.py_buffer(np.ascontiguousarray(values))])


def _write_integers(values: Sequence[Sequence[int]]) -> "pa.Array":
    import pyarrow as pa

    offsets = np.fromiter(accumulate(map(len, values), initial=0), np.int32, len(values) + 1)
    flat = np.fromiter(chain.from_iterable(values), np.int32, int(offsets[-1]))
    return pa.ListArray.from_arrays(_fixed(offsets), _fixed(flat))


def _write_text(values: Sequence[str]) -> "pa.Array":
    import pyarrow as pa

    texts = [value.encode() for value in values]
    offsets = np.fromiter(accumulate(map(len, texts), initial=0), np.int32, len(texts) + 1)
    return pa.Array.from_buffers(pa.string(), len(texts), [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(texts))])


def _write_integer(values: Sequence[int]) -> "pa.Array":
    return _fixed(np.array(values, np.int64))


def _write_number(values: Sequence[float | None]) -> "pa.Array":
    return _fixed(np.array([np.nan if value is None else value for value in values], np.float64))


def _write_flag(values: Sequence[bool]) -> "pa.Array":
    return _fixed(np.array(values, np.uint8))


def _view(array: "pa.Array", number: int, dtype: type) -> np.ndarray:
    """Buffer `number` of an Arrow array, without copying it."""
    buffer = array.buffers()[number]
    return np.empty(0, dtype) if buffer is None else np.frombuffer(buffer, dtype)


def _numbers(array: "pa.Array") -> np.ndarray:
    """A column of single numbers as an array, without copying it."""
    return _view(array, 1, getattr(np, {"double": "float64"}.get(str(array.type), str(array.type))))[: len(array)]


def _read_integers(array: "pa.Array") -> Callable[[int], list[int]]:
    offsets, values = _view(array, 1, np.int32).data, _view(array.values, 1, np.int32)
    return lambda row: values[offsets[row] : offsets[row + 1]].tolist()


def _read_text(array: "pa.Array") -> Callable[[int], str]:
    offsets, values = _view(array, 1, np.int32).data, _view(array, 2, np.uint8).data
    return lambda row: str(values[offsets[row] : offsets[row + 1]], "utf-8")


def _read_number(array: "pa.Array") -> Callable[[int], float | None]:
    values = _numbers(array).data
    return lambda row: None if (value := values[row]) != value else value


def _read_integer(array: "pa.Array") -> Callable[[int], int]:
    return _numbers(array).data.__getitem__


def _read_flag(array: "pa.Array") -> Callable[[int], bool]:
    values = _numbers(array).data
    return lambda row: bool(values[row])


COLUMNS: dict[str, tuple[Callable[[Any], "pa.Array"], Callable[["pa.Array"], Callable[[int], Any]]]] = {
    "integers": (_write_integers, _read_integers),
    "integer": (_write_integer, _read_integer),
    "number": (_write_number, _read_number),
    "flag": (_write_flag, _read_flag),
    "text": (_write_text, _read_text),
}


class Table(RowSequence[Row]):
    """Examples of one kind, read from disk when they are asked for; the same values at every call.

    Attributes:
        directory: where its files are.
        key: hex digest of all that the table was made of.
        tally: what was read, dropped and cut to make it.
        notes: what the preparation noted beside the tally.
        findings: what the checks of the rows found while they were prepared, each as the fields of a `Finding`.
        cached: whether an earlier run, or another process, had prepared it.
        source: number of the data source that its examples are given.

    `select` makes a table of some of its rows.
    """

    def __init__(
        self,
        directory: Path,
        codec: Codec[Row],
        manifest: Mapping[str, Any],
        *,
        cached: bool = False,
        notes: Sequence[str] = (),
        source: int = 0,
    ):
        self.directory, self.codec, self.manifest = directory, codec, manifest
        self.cached, self.source = cached, source
        self.key: str = manifest["key"]
        self.tally = Tally(**manifest["tally"])
        self.notes: list[str] = [*notes, *manifest.get("notes", ())]
        files = [(number, batch) for number, file in enumerate(manifest["files"]) for batch in range(len(file["rows"]))]
        self.findings: list[dict[str, Any]] = list(manifest.get("findings", ()))
        self._batches = _Batches(directory, codec, [file["name"] for file in manifest["files"]], files)
        self._starts = list(accumulate(chain.from_iterable(file["rows"] for file in manifest["files"]), initial=0))
        self._names: list[str] = manifest["names"]
        self._rows: np.ndarray | None = None

    def __len__(self) -> int:
        return self._starts[-1] if self._rows is None else len(self._rows)

    def row_at(self, index: int) -> Row:
        batch, row = self._position(index)
        name, line, values = self._batches.open(batch)
        row_id = join_row_id(self._names[name[row]], line[row])
        example = self.codec.decode(row_id, self.source, *[read(row) for read in values])
        self._batches.release_after(ROWS_KEPT)
        return example

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def __add__(self, other: "Sequence[Row]") -> "Sequence[Row]":
        return JoinedTables([self, other]) if len(other) else self

    def __radd__(self, other: "Sequence[Row]") -> "Sequence[Row]":
        return JoinedTables([other, self]) if len(other) else self

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest document of each row, int32, [rows]; made anew at each call."""
        return self.column("longest")

    @property
    def totals(self) -> np.ndarray:
        """Tokens of all documents of each row, int64, [rows]; made anew at each call."""
        return self.column("total")

    @property
    def tokens(self) -> int:
        """Tokens of all documents of all rows."""
        return self.tally.tokens

    def column(self, name: str) -> np.ndarray:
        """One column of single numbers as an array, [rows]; made anew at each call."""
        values, start = np.empty(0, np.int64), 0
        for part in self.column_batches(name):
            if not start:
                values = np.empty(len(self), part.dtype)
            values[start : start + len(part)] = part
            start += len(part)
        return values

    def column_batches(self, name: str) -> Iterator[np.ndarray]:
        """One column of single numbers, one array for each batch of rows as they lie on disk."""
        for batch, chosen in self._chosen():
            yield self._batches.column(batch, name)[chosen]

    def _chosen(self) -> Iterator[tuple[int, np.ndarray | slice]]:
        """Each batch of rows on disk, whose pages are given back after it, and which of its rows belong to the table."""
        for batch, (start, stop) in enumerate(pairwise(self._starts)):
            if self._rows is None:
                yield batch, slice(None)
            else:
                edges = np.array([start, stop], self._rows.dtype)  # of another type, it would copy all rows to theirs
                first, last = np.searchsorted(self._rows, edges)
                yield batch, self._rows[first:last] - edges[0]
            self._batches.release()

    def row_id(self, index: int) -> str:
        """Name of one row."""
        batch, row = self._position(index)
        name, line, _ = self._batches.open(batch)
        return join_row_id(self._names[name[row]], line[row])

    def with_source(self, source: int) -> "Table[Row]":
        """The same table, its examples given another number of their source."""
        other = copy(self)
        other.source = source
        return other

    def select(self, rows: np.ndarray, *, key: str) -> "Table[Row]":
        """A table of some of the rows, which reads the same files.

        Args:
            rows: their indices, ascending, [rows].
            key: hex digest of all that the table was made of, and of the choice.
        """
        other = copy(self)
        other._rows = rows.astype(np.int32 if self._starts[-1] < 2**31 else np.int64, copy=False)
        other.key = key
        return other

    def described(self, tally: Tally, findings: Sequence[Mapping[str, object]]) -> "Table[Row]":
        """The same table with another tally and other findings."""
        other = copy(self)
        other.tally, other.findings = tally, [dict(finding) for finding in findings]
        return other

    def distinct_rows(self) -> np.ndarray:
        """Indices of the examples that are the first of their row, which may have made several."""
        names, lines = self.column("name"), self.column("line")
        if not len(names):
            return np.empty(0, np.int64)
        new = (names[1:] != names[:-1]) | (lines[1:] != lines[:-1])
        return np.concatenate([[0], np.flatnonzero(new) + 1])

    @property
    def documents(self) -> int:
        """Documents of all rows."""
        if "run_counts" not in self.codec.columns:  # of rows with several documents
            return len(self)
        return sum(int(self._batches.sizes(batch, "run_counts")[chosen].sum()) for batch, chosen in self._chosen())

    def _position(self, index: int) -> tuple[int, int]:
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of a table of {len(self)}")
        if self._rows is not None:
            number = int(self._rows[number])
        batch = bisect_right(self._starts, number) - 1
        return batch, number - self._starts[batch]


class _Batches(Generic[Row]):
    """The record batches of a table's files, read when first asked for. The files are mapped at once, so that they stay
    readable when the cache is cleared."""

    def __init__(self, directory: Path, codec: Codec[Row], files: Sequence[str], positions: Sequence[tuple[int, int]]):
        self.codec, self.positions = codec, positions
        self._maps = [_mapped(directory / name) for name in files]
        self._opened_files: dict[int, Any] = {}
        self._open: dict[int, tuple[Any, Any, list[Callable[[int], Any]]]] = {}
        self._read = 0

    def open(self, batch: int) -> tuple[Any, Any, list[Callable[[int], Any]]]:
        """Numbers of the rows' names, their lines, and a function for each column of the codec: row -> value."""
        if batch not in self._open:
            rows = self._batch(batch)
            values = [COLUMNS[kind][1](rows.column(name)) for name, kind in self.codec.columns.items()]
            name, line = (_numbers(rows.column(key)).data for key in ("name", "line"))
            self._open[batch] = (name, line, values)
        return self._open[batch]

    def column(self, batch: int, name: str) -> np.ndarray:
        """A column of single numbers."""
        return _numbers(self._batch(batch).column(name))

    def sizes(self, batch: int, name: str) -> np.ndarray:
        """Lengths of the lists in a column of lists."""
        column = self._batch(batch).column(name)
        return np.diff(_view(column, 1, np.int32)[: len(column) + 1])

    def _batch(self, batch: int) -> "pa.RecordBatch":
        import pyarrow as pa

        file, number = self.positions[batch]
        if file not in self._opened_files:
            self._opened_files[file] = pa.ipc.open_file(pa.py_buffer(self._maps[file]))
        return self._opened_files[file].get_batch(number)

    def release_after(self, rows: int) -> None:
        """Give mapped pages back to the system after every so many calls."""
        self._read += 1
        if self._read >= rows:
            self.release()

    def release(self) -> None:
        """Give mapped pages back to the system; they are read again when needed."""
        self._read = 0
        for mapped in self._maps:
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)


def _mapped(path: Path) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


class JoinedTables(RowSequence[Row]):
    """Several sequences of examples, tables or lists, one after another.

    Attributes:
        tables: the parts, in order.
    """

    def __init__(self, tables: Sequence[Sequence[Row]]):
        self.tables = [
            part for table in tables for part in (table.tables if isinstance(table, JoinedTables) else [table])
        ]
        self._starts = list(accumulate(map(len, self.tables), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def row_at(self, index: int) -> Row:
        number = index + len(self) if index < 0 else index
        table = self.source_of(number)
        return self.tables[table][number - self._starts[table]]

    def __iter__(self) -> Iterator[Row]:
        return chain.from_iterable(self.tables)

    def __add__(self, other: Sequence[Row]) -> "JoinedTables[Row]":
        return JoinedTables([self, other])

    def __radd__(self, other: Sequence[Row]) -> "JoinedTables[Row]":
        return JoinedTables([other, self])

    def source_of(self, index: int) -> int:
        """The number of the part that a row lies in.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of joined tables of {len(self)}")
        return bisect_right(self._starts, index) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longest document of each row, [rows]; made anew at each call."""
        return np.concatenate([lengths_of(table) for table in self.tables])

    @property
    def totals(self) -> np.ndarray:
        """Tokens of all documents of each row, [rows]; made anew at each call."""
        return np.concatenate([totals_of(table) for table in self.tables])

    @property
    def tokens(self) -> int:
        """Tokens of all documents of all rows."""
        return int(sum(totals_of(table).sum() for table in self.tables))

    @property
    def key(self) -> str:
        """Hex digest of the keys of all tables, in order."""
        return hash_of([table.key for table in self._on_disk()])

    @property
    def cached(self) -> bool:
        """Whether all tables had been prepared before."""
        return all(table.cached for table in self._on_disk())

    @property
    def notes(self) -> list[str]:
        """What was noted when the tables were prepared."""
        return [note for table in self._on_disk() for note in table.notes]

    @property
    def tally(self) -> Tally:
        """What was read, dropped and cut to make the tables."""
        return reduce(Tally.merged_with, [table.tally for table in self._on_disk()], Tally())

    def column(self, name: str) -> np.ndarray:
        """One column of single numbers as an array, [rows]; made anew at each call."""
        return np.concatenate([table.column(name) for table in self._on_disk()])

    def column_batches(self, name: str) -> Iterator[np.ndarray]:
        """One column of single numbers, batch by batch."""
        return chain.from_iterable(table.column_batches(name) for table in self._on_disk())

    def _on_disk(self) -> list[Table[Row]]:
        """The parts, which must all be tables."""
        return [cast("Table[Row]", table) for table in self.tables]

    def row_id(self, index: int) -> str:
        """Name of one row."""
        return name_of_row(self.tables[table := self.source_of(index)], index - self._starts[table])


Rows = Table[Any] | JoinedTables[Any]  # examples of one kind on disk


def lengths_of(rows: Sequence[TokenizedRow]) -> np.ndarray:
    """Tokens of the longest document of each row, [rows]: a column of a table, counted where rows are in memory."""
    if isinstance(rows, Table | JoinedTables):
        return rows.lengths
    return np.array([max(map(len, row.documents)) for row in rows], np.int32)


def totals_of(rows: Sequence[TokenizedRow]) -> np.ndarray:
    """Tokens of all documents of each row, [rows]."""
    if isinstance(rows, Table | JoinedTables):
        return rows.totals
    return np.array([sum(map(len, row.documents)) for row in rows], np.int64)


def name_of_row(rows: Sequence[TokenizedRow], index: int) -> str:
    """The row id of one row, without reading the row where it lies in a table."""
    return rows.row_id(index) if isinstance(rows, Table | JoinedTables) else rows[index].row_id


def flagged_rows(rows: Sequence[TokenizedRow], name: str) -> list[int]:
    """Indices of the rows whose attribute `name` is True; it is a column of a table."""
    if isinstance(rows, Table | JoinedTables):
        return np.flatnonzero(rows.column(name)).tolist()
    return [index for index, row in enumerate(rows) if getattr(row, name)]


def describe_cache(rows: Sequence[TokenizedRow]) -> list[str]:
    """Key and place of prepared rows on disk, and what was noted of them, as lines of text; none for rows in memory."""
    if not isinstance(rows, Table | JoinedTables):
        return []
    tables = [rows] if isinstance(rows, Table) else [table for table in rows.tables if isinstance(table, Table)]
    ways = [f"{'read from' if table.cached else 'prepared into'} the cache: {table.directory}" for table in tables]
    return [*ways, *rows.notes]


def longest_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """The `count` rows with the longest documents, longest first, equal ones in their order."""
    order = np.argsort(-lengths_of(rows).astype(np.int64), kind="stable")[:count]
    return [rows[int(index)] for index in order]


def manifest_of(written: Mapping[str, object], *, key: str, tally: Tally, notes: Sequence[str]) -> dict[str, Any]:
    """The manifest of a table: what `TableWriter.close` gave, and what the rows were made of."""
    return {**written, "key": key, "tally": asdict(tally), "notes": list(notes)}


def check_findings(examples: Sequence[TokenizedRow], check: Literal["stop", "warn", "off"]) -> list[str]:
    """What the data doctor found in prepared rows, a line each; what the tally says of them is left out.

    Args:
        examples: a table, or joined tables.
        check: data.check.

    Raises:
        UserError: it found errors, and `check` is stop; all of them at once.
    """
    lines, errors = [], []
    for table in getattr(examples, "tables", [examples]) if check != "off" else []:
        counted = {**table.manifest["tally"]["dropped"], **table.manifest["tally"]["cut"]}
        for finding in table.findings:
            if finding["name"] not in counted:
                lines.append(f"{finding['level']}: {finding['text']}")
                errors += [f"{table.manifest['source']}: {finding['text']}"] * (finding["level"] == "error")
    if errors and check == "stop":
        raise_all([*errors, "mend the rows, or set data.check=warn to train on them as they are"])
    return lines

"""Tables: examples on disk, memory-mapped, read back row by row. How a kind of example is stored is in codecs.py.

A table is a directory of Arrow IPC files and `manifest.json`, which says what they hold. The bytes stay on disk: what a
process has read of them is given back to the system after every few rows, so that memory does not grow with the table.
"""

import mmap
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

import numpy as np

from alignment.data.codecs import Codec
from alignment.data.examples import TokenizedRow
from alignment.data.rows.records import Tally

if TYPE_CHECKING:
    import pyarrow as pa

Row = TypeVar("Row", bound=TokenizedRow)

FILE_BYTES = 2**31  # of one Arrow file; a table has as many as it takes
ROWS_KEPT = 128  # decoded before mapped pages are given back; 64 KiB around each column of each row are mapped with it
LAST_NUMBER = re.compile(r"(?s)(.*:)(0|[1-9]\d{0,17})(\D*)")  # FILE:LINE, and what may follow
COMMON = ("name", "line", "longest", "total", "prompt_hash")  # columns of every table, beside those of its codec


class TableWriter:
    """Writes the Arrow files of one table into a directory; `close` gives what its manifest must hold of them."""

    def __init__(self, directory: Path, codec: Codec[Any]):
        self.directory, self.codec = directory, codec
        self.names: dict[str, int] = {}
        self.files: list[dict[str, Any]] = []
        self._writer: Any = None

    def add(self, batch: "pa.RecordBatch", names: Sequence[str]) -> None:
        """Append the rows of `encode_batch`.

        Args:
            names: the names that its column `name` counts into.
        """
        import pyarrow as pa

        if not batch.num_rows:
            return
        if self._writer is None:
            self.files.append({"name": f"rows-{len(self.files):05}.arrow", "rows": []})
            self._writer = pa.ipc.new_file(self.directory / self.files[-1]["name"], batch.schema)
        numbers = np.array([self.names.setdefault(name, len(self.names)) for name in names], np.int32)
        column = batch.schema.get_field_index("name")
        batch = batch.set_column(column, "name", pa.array(numbers[batch.column(column).to_numpy()]))
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
    codec: Codec[Row], examples: Sequence[Row], prompt_hashes: Mapping[str, int] | None = None
) -> tuple["pa.RecordBatch", list[str]]:
    """Examples as one Arrow record batch, and the names that its column `name` counts into.

    Args:
        prompt_hashes: row id -> 64-bit hash of the row's prompt or text, by which held-out rows are looked for.
    """
    import pyarrow as pa

    hashes = prompt_hashes or {}
    names: dict[str, int] = {}
    rows = [codec.encode(example) for example in examples]
    lengths = [[len(document) for document in example.documents] for example in examples]
    positions = [split_row_id(example.row_id) for example in examples]
    arrays = [
        pa.array(np.fromiter((names.setdefault(name, len(names)) for name, _ in positions), np.int32, len(rows))),
        pa.array(np.fromiter((line for _, line in positions), np.int64, len(rows))),
        pa.array(np.fromiter(map(max, lengths), np.int32, len(rows))),
        pa.array(np.fromiter(map(sum, lengths), np.int64, len(rows))),
        pa.array(np.fromiter((hashes.get(example.row_id, 0) for example in examples), np.uint64, len(rows))),
    ]
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(codec.columns)
    arrays += [COLUMNS[kind][0](values) for kind, values in zip(codec.columns.values(), columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, names=[*COMMON, *codec.columns]), list(names)


def split_row_id(row_id: str) -> tuple[str, int]:
    """The name of a row without its line, and the line: "a.jsonl:{}" and 7 for a.jsonl:7; -1 where it has none."""
    found = LAST_NUMBER.fullmatch(row_id)
    if found is None or "{}" in row_id:
        return row_id, -1
    return f"{found[1]}{{}}{found[3]}", int(found[2])


def join_row_id(name: str, line: int) -> str:
    """The inverse of `split_row_id`."""
    return name if line < 0 else name.replace("{}", str(line), 1)


def _write_integers(values: Sequence[Sequence[int]]) -> "pa.Array":
    import pyarrow as pa

    offsets = np.fromiter(accumulate(map(len, values), initial=0), np.int32, len(values) + 1)
    flat = np.fromiter(chain.from_iterable(values), np.int32, int(offsets[-1]))
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat))


def _write_numbers(values: Sequence[float | None]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(np.array([np.nan if value is None else value for value in values], np.float64))


def _write_text(values: Sequence[str]) -> "pa.Array":
    import pyarrow as pa

    return pa.array(values, pa.string())


def _write_as(dtype: type) -> Callable[[Sequence[Any]], "pa.Array"]:
    def write(values: Sequence[Any]) -> "pa.Array":
        import pyarrow as pa

        return pa.array(np.array(values, dtype))

    return write


def _view(array: "pa.Array", number: int, dtype: type) -> np.ndarray:
    """Buffer `number` of an Arrow array, without copying it."""
    buffer = array.buffers()[number]
    return np.empty(0, dtype) if buffer is None else np.frombuffer(buffer, dtype)


def _read_integers(array: "pa.Array") -> Callable[[int], list[int]]:
    offsets, values = _view(array, 1, np.int32).data, _view(array, 3, np.int32)
    return lambda row: values[offsets[row] : offsets[row + 1]].tolist()


def _read_text(array: "pa.Array") -> Callable[[int], str]:
    offsets, values = _view(array, 1, np.int32).data, _view(array, 2, np.uint8).data
    return lambda row: str(values[offsets[row] : offsets[row + 1]], "utf-8")


def _read_number(array: "pa.Array") -> Callable[[int], float | None]:
    values = _view(array, 1, np.float64).data
    return lambda row: None if (value := values[row]) != value else value


def _read_integer(array: "pa.Array") -> Callable[[int], int]:
    return array.to_numpy().data.__getitem__


def _read_flag(array: "pa.Array") -> Callable[[int], bool]:
    values = _view(array, 1, np.uint8).data
    return lambda row: bool(values[row])


COLUMNS: dict[str, tuple[Callable[[Any], "pa.Array"], Callable[["pa.Array"], Callable[[int], Any]]]] = {
    "integers": (_write_integers, _read_integers),
    "integer": (_write_as(np.int64), _read_integer),
    "number": (_write_numbers, _read_number),
    "flag": (_write_as(np.uint8), _read_flag),
    "text": (_write_text, _read_text),
}


class Table(Sequence[Row]):
    """Examples of one kind, read from disk when they are asked for; the same values at every call.

    Attributes:
        directory: where its files are.
        key: hex digest of all that the table was made of.
        tally: what was read, dropped and cut to make it.
        notes: what the preparation noted beside the tally.
        cached: whether an earlier run, or another process, had prepared it.
        source: number of the data source that its examples are given.
    """

    def __init__(
        self, directory: Path, codec: Codec[Row], manifest: Mapping[str, Any], *, cached: bool = False, source: int = 0
    ):
        self.directory, self.codec, self.manifest = directory, codec, manifest
        self.cached, self.source = cached, source
        self.key: str = manifest["key"]
        self.tally = Tally(**manifest["tally"])
        self.notes: list[str] = list(manifest.get("notes", ()))
        files = [(number, batch) for number, file in enumerate(manifest["files"]) for batch in range(len(file["rows"]))]
        self._batches = _Batches(directory, codec, [file["name"] for file in manifest["files"]], files)
        self._starts = list(accumulate(chain.from_iterable(file["rows"] for file in manifest["files"]), initial=0))
        self._names: list[str] = manifest["names"]

    def __len__(self) -> int:
        return self._starts[-1]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
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
        parts = list(self.column_batches(name))
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def column_batches(self, name: str) -> Iterator[np.ndarray]:
        """One column of single numbers, one array for each batch of rows as they lie on disk."""
        for batch in range(len(self._starts) - 1):
            yield self._batches.column(batch, name)
        self._batches.release()

    def row_id(self, index: int) -> str:
        """Name of one row."""
        batch, row = self._position(index)
        name, line, _ = self._batches.open(batch)
        return join_row_id(self._names[name[row]], line[row])

    def with_source(self, source: int) -> "Table[Row]":
        """The same table, its examples given another number of their source."""
        return Table(self.directory, self.codec, self.manifest, cached=self.cached, source=source)

    def _position(self, index: int) -> tuple[int, int]:
        number = index + len(self) if index < 0 else index
        if not 0 <= number < len(self):
            raise IndexError(f"row {index} of a table of {len(self)}")
        batch = bisect_right(self._starts, number) - 1
        return batch, number - self._starts[batch]


class _Batches(Generic[Row]):
    """The record batches of a table's files, opened when first asked for."""

    def __init__(self, directory: Path, codec: Codec[Row], files: Sequence[str], positions: Sequence[tuple[int, int]]):
        self.directory, self.codec, self.files, self.positions = directory, codec, files, positions
        self._opened_files: dict[int, Any] = {}
        self._maps: list[mmap.mmap] = []
        self._open: dict[int, tuple[Any, Any, list[Callable[[int], Any]]]] = {}
        self._read = 0

    def open(self, batch: int) -> tuple[Any, Any, list[Callable[[int], Any]]]:
        """Numbers of the rows' names, their lines, and a function for each column of the codec: row -> value."""
        if batch not in self._open:
            rows = self._batch(batch)
            values = [COLUMNS[kind][1](rows.column(name)) for name, kind in self.codec.columns.items()]
            name, line = (rows.column(key).to_numpy().data for key in ("name", "line"))
            self._open[batch] = (name, line, values)
        return self._open[batch]

    def column(self, batch: int, name: str) -> np.ndarray:
        """A column of single numbers."""
        return self._batch(batch).column(name).to_numpy()

    def _batch(self, batch: int) -> "pa.RecordBatch":
        import pyarrow as pa

        file, number = self.positions[batch]
        if file not in self._opened_files:
            with open(self.directory / self.files[file], "rb") as opened:
                self._maps.append(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
            self._opened_files[file] = pa.ipc.open_file(pa.py_buffer(self._maps[-1]))
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


class JoinedTables(Sequence[Row]):
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

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
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

    def row_id(self, index: int) -> str:
        """Name of one row."""
        return name_of_row(self.tables[table := self.source_of(index)], index - self._starts[table])


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


def longest_rows(rows: Sequence[Row], count: int) -> list[Row]:
    """The `count` rows with the longest documents, longest first, equal ones in their order."""
    order = np.argsort(-lengths_of(rows).astype(np.int64), kind="stable")[:count]
    return [rows[int(index)] for index in order]


def manifest_of(written: Mapping[str, Any], *, key: str, tally: Tally, notes: Sequence[str]) -> dict[str, Any]:
    """The manifest of a table: what `TableWriter.close` gave, and what the rows were made of."""
    return {**written, "key": key, "tally": asdict(tally), "notes": list(notes)}

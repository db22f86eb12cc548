"""Sources read row by row from any position, for streams: what is read is forgotten, and a position is a few numbers.

A file of JSON lines, CSV or running text is gone on with at a byte, a Parquet file at a row, a Hub data set at the state
that `datasets` keeps of it. Of a file compressed by gzip all before the position is decompressed once more. A .json file is
one list, which can only be read as a whole, and is refused.
"""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from alignment.data.rows.files import (
    RawRow,
    binary_lines,
    csv_row,
    find_rows,
    json_line_row,
    load_hub,
)
from alignment.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet as pq

Position = Any  # JSON-like, of the kind of reader that gave it; None is the beginning

PARQUET_ROWS = 1024  # that are in memory


class Reader(Protocol):
    """Reads a file or data set in order, once."""

    def rows(self) -> Iterator[RawRow]:
        """The rows from the position on."""
        ...

    def position(self) -> Position:
        """Where the next row begins."""
        ...


class OpenSource(Protocol):
    """A file or data set that can be read any number of times."""

    name: str

    def open(self, position: Position = None) -> Reader:
        """A reader of the rows from a position on."""
        ...

    def version(self) -> list[str | int]:
        """Name and size: what a resumed run must find again."""
        ...


class RowFile:
    """A file of rows; its name says its format."""

    def __init__(self, path: Path):
        """Find the reader of the file's format.

        Raises:
            UserError: there is none.
        """
        self.path, self.name = path, str(path)
        plain = path.name.removesuffix(".gz")
        found = [reader for suffix, reader in READERS.items() if plain.endswith(suffix)]
        if not found or (plain != path.name and plain.endswith(".parquet")):
            why = "one list, which is read as a whole" if plain.endswith(".json") else "of no known format"
            raise UserError(
                f"{path}: data.streaming reads {', '.join(READERS)}, and this file is {why}; write one row per line "
                "(.jsonl), or set data.streaming=false"
            )
        self._reader = found[0]

    def open(self, position: Position = None) -> Reader:
        """A reader of the rows from a position on."""
        return self._reader(self.path, position)

    def version(self) -> list[str | int]:
        """Name and size."""
        return [self.name, self.path.stat().st_size]


class HubSplit:
    """A split of a Hub data set."""

    def __init__(self, name: str, config: str | None, split: str):
        self.arguments = (name, config, split)
        self.name = f"{name if config is None else f'{name}:{config}'}[{split}]"

    def open(self, position: Position = None) -> Reader:
        """A reader of the rows from a position on."""
        return HubRows(self.name, load_hub(*self.arguments, streaming=True), position)

    def version(self) -> list[str | int]:
        """Its name."""
        return [self.name]


def open_sources(source: str, split: str) -> list[OpenSource]:
    """The files of a source in order of their names, or the Hub data set that it names.

    Raises:
        UserError: no such file, or one that cannot be read row by row.
    """
    found = find_rows(source, split)
    return [HubSplit(*found)] if isinstance(found, tuple) else [RowFile(path) for path in found]


class _Lines:
    """The lines of a file from a position on; keeps count of what was given out."""

    def __init__(self, path: Path, position: Position):
        self.path = path
        self.start, self.line = position or (0, 0)  # bytes and lines before the next one

    def position(self) -> Position:
        """Bytes and lines before the next row."""
        return [self.start, self.line]

    def lines(self) -> Iterator[bytes]:
        """The lines, each counted before it is given out."""
        for line in binary_lines(self.path, self.start):
            self.start, self.line = self.start + len(line), self.line + 1
            yield line

    def texts(self) -> Iterator[str]:
        """The lines as text.

        Raises:
            UserError: one is not UTF-8.
        """
        for line in self.lines():
            try:
                yield line.decode("utf-8-sig" if self.line == 1 else "utf-8")
            except UnicodeDecodeError as error:
                where = f"{self.path}:{self.line}: byte {error.start + 1}"
                raise UserError(f"{where} of the line is not UTF-8; save the file as UTF-8") from error


class JSONLines:
    """One JSON object per line."""

    def __init__(self, path: Path, position: Position = None):
        self._lines = _Lines(path, position)
        self.position = self._lines.position

    def rows(self) -> Iterator[RawRow]:
        """The rows from the position on."""
        at = self._lines
        for line in at.lines():
            if (row := json_line_row(at.path, line, at.line, at.start - len(line))) is not None:
                yield row


class CSVRows:
    """Comma-separated values; the first line has the names of the columns."""

    def __init__(self, path: Path, position: Position = None):
        self._lines = _Lines(path, position)
        self.position = self._lines.position

    def rows(self) -> Iterator[RawRow]:
        """The rows from the position on.

        Raises:
            UserError: a column stands twice, or what is read is not CSV.
        """
        at = self._lines
        try:
            head = at if not at.start else _Lines(at.path, None)
            names = next(csv.reader(head.texts(), strict=True), [])
            if len(set(names)) < len(names):
                raise UserError(f"{at.path}:1: the same column name stands twice: {', '.join(names)}")
            line = at.line
            for values in csv.reader(at.texts(), strict=True):
                location, line = f"{at.path}:{line + 1}", at.line
                if values:
                    yield csv_row(location, names, values)
        except csv.Error as error:
            raise UserError(f"{at.path}:{at.line}: not CSV: {error}") from error


class TextDocuments:
    """Running text: documents between blank lines, each located by its first line."""

    def __init__(self, path: Path, position: Position = None):
        self._lines = _Lines(path, position)
        self.position = self._lines.position

    def rows(self) -> Iterator[RawRow]:
        """The rows from the position on."""
        at, document, first = self._lines, [], 0
        for text in at.texts():
            if text.strip():
                first = first if document else at.line
                document.append(text.rstrip("\r\n"))
            elif document:
                yield RawRow(f"{at.path}:{first}", {"text": "\n".join(document)})
                document = []
        if document:
            yield RawRow(f"{at.path}:{first}", {"text": "\n".join(document)})


class ParquetRows:
    """The rows of a Parquet file; groups of rows before the position are not read."""

    def __init__(self, path: Path, position: Position = None):
        self.path, self.row = path, position or 0

    def position(self) -> Position:
        """Rows before the next one."""
        return self.row

    def rows(self) -> Iterator[RawRow]:
        """The rows from the position on.

        Raises:
            UserError: the file cannot be read.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path) as table:
                first = 0  # row of the group
                for group in range(table.num_row_groups):
                    size = table.metadata.row_group(group).num_rows
                    if self.row < first + size:
                        yield from self._of_group(table, group, self.row - first)
                    first += size
        except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path}: not a readable parquet file: {error}") from error

    def _of_group(self, table: "pq.ParquetFile", group: int, skipped: int) -> Iterator[RawRow]:
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, row_groups=[group]):
            for values in batch.slice(min(skipped, batch.num_rows)).to_pylist():
                self.row += 1
                yield RawRow(f"{self.path}:{self.row}", values)
            skipped = max(0, skipped - batch.num_rows)


class ResumableDataset(Protocol):
    """What is used of a `datasets.IterableDataset`."""

    def __iter__(self) -> Iterator[dict[str, Any]]: ...
    def state_dict(self) -> dict[str, object]: ...
    def load_state_dict(self, state_dict: dict[str, object], /) -> None: ...


class HubRows:
    """The rows of a Hub data set as they arrive."""

    def __init__(self, name: str, dataset: "ResumableDataset", position: Position = None):
        """Go on where the position says."""
        self.name, self.dataset, self.row = name, dataset, 0
        if position is not None:
            self.row, state = position
            dataset.load_state_dict(state)

    def position(self) -> Position:
        """Rows before the next one, and the state of `datasets`."""
        return [self.row, self.dataset.state_dict()]

    def rows(self) -> Iterator[RawRow]:
        """The rows from the position on."""
        for values in self.dataset:
            self.row += 1
            yield RawRow(f"{self.name}:{self.row}", dict(values))


READERS = {
    ".jsonl": JSONLines,
    ".csv": CSVRows,
    ".txt": TextDocuments,
    ".parquet": ParquetRows,
}

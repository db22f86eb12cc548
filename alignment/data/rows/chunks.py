"""A source in chunks of rows that can be read side by side, and the one parser that all of them share."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.rows.files import Position, RawRow, json_line_rows, line_spans, read_raw
from alignment.data.rows.read import RecordParser, choose_row_format, parse_rows
from alignment.data.rows.records import Kind
from alignment.data.rows.sources import source_files
from alignment.errors import UserError

FIRST_BYTES = 2**18  # of the first chunk, by which the format of the rows is chosen
NO_EFFECT = (
    "chat_template {}: the prompts of these rows are plain text, which never enters a template; set data.as_messages=true, "
    "or leave chat_template out"
)
ROWS = 4096  # most rows of a chunk that cannot be read by its position in the file


@dataclass(frozen=True)
class Chunk:
    """Successive rows of a source: a part of a file of JSON lines, which whoever parses it reads, or rows as they are."""

    path: Path | None = None
    start: Position = None
    stop: int | None = None
    rows: tuple[RawRow, ...] = ()

    def raw_rows(self) -> Iterable[RawRow]:
        """The rows, each with its location."""
        return self.rows if self.path is None else json_line_rows(self.path, self.start, self.stop)


def read_chunks(source: SourceConfig, size: int) -> Iterator[Chunk]:
    """The rows of a file or Hub data set in order, in chunks of about `size` bytes, the first one smaller.

    Raises:
        UserError: as `read_raw`.
    """
    split = str(source.split)
    files = source_files(source.source, split) or []
    if files and all(path.name.endswith(".jsonl") for path in files):
        for path in files:
            for start, stop in line_spans(path, size, first=min(size, FIRST_BYTES)):
                yield Chunk(path, start, stop)
        return
    rows: list[RawRow] = []
    weight = 0
    for row in read_raw(source.source, split):
        rows.append(row)
        weight += sum(len(value) for value in (row.values or {}).values() if isinstance(value, str))
        if len(rows) == ROWS or weight >= size:
            yield Chunk(rows=tuple(rows))
            rows, weight = [], 0
    if rows:
        yield Chunk(rows=tuple(rows))


def choose_parser(
    source: SourceConfig, kind: Kind, config: DataConfig, chunks: Iterator[Chunk]
) -> tuple[RecordParser, Iterator[Chunk]]:
    """The parser that the first rows of a source ask for, and all of its chunks, those that were read among them.

    The format is that of the first row that matches one, and the form of all prompts (text or messages) that of the
    first good row. So the parser is the same for all chunks, in whatever order they are parsed.

    Raises:
        UserError: no rows, or columns that make no record of this kind; a chat template or `as_messages` for rows that
            have no messages.
    """
    if config.as_messages and kind == "text":
        raise UserError(f"{source.source}: rows of running text have no prompt; leave data.as_messages out")
    columns, ways = source.columns or {}, (config.skip_ties, config.as_messages)
    held: list[Chunk] = []
    seen: list[RawRow] = []
    tried = 0
    for chunk in chunks:
        held.append(chunk)
        seen += chunk.raw_rows()
        if len(seen) < 2 * tried or all(row.values is None for row in seen):
            continue
        tried = len(seen)
        try:
            parser = RecordParser(choose_row_format(source.source, seen, kind, columns), *ways)
        except UserError:  # a row further down may match
            continue
        parse_rows(seen, parser, columns=columns, max_rows=1)
        if parser.form is not None:
            if source.chat_template is not None and parser.form is str:
                raise UserError(f"{source.source}: {NO_EFFECT.format(source.chat_template)}")
            return parser, chain(held, chunks)
    return RecordParser(choose_row_format(source.source, seen, kind, columns), *ways), iter(held)

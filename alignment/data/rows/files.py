"""Sources of rows by name (files, directories, globs, Hub data sets) and their raw rows, each with its location.

Records are made of them in read.py. Every reader is a generator that can begin at a position, the one behind any row
that it gave before: bytes and lines, the row of a Parquet file, or the state that `datasets` keeps. A .json file is
read as a whole.
"""

import codecs
import csv
import glob
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

from alignment.data.rows.fields import HALF_PAIR
from alignment.data.rows.hub import HubName, hub_label, hub_text, load_hub
from alignment.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet", ".txt", ".txt.gz")
SPLIT_WORDS = (  # in names of files, as `datasets` reads them; those of one line mean the same
    ("train", "training"),
    ("validation", "valid", "val", "dev"),
    ("test", "testing"),
    ("eval", "evaluation"),
)
SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}.*")
# owner/name, owner/name[split], owner/name:config[split]
HUB_SOURCE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<config>[^\[\]:/]+))?(\[(?P<split>.+)\])?")


def find_rows(source: str, split: str) -> list[Path] | HubName:
    """The files of a source, or the Hub data set that it names; nothing is read."""
    files = source_files(source, split)
    if files is None:
        if (named := hub_source(source, split)) is None:
            raise UserError(f"{source}: no such file")
        return named
    for path in files:
        if not suffix_of(path.name):
            raise UserError(f"{path}: cannot tell the format by its name; expected one of {', '.join(SUFFIXES)}")
    return files


def suffix_of(name: str) -> str:
    """The one of `SUFFIXES` that a name ends with; '' where it has none."""
    return max((suffix for suffix in SUFFIXES if name.endswith(suffix)), key=len, default="")


def source_files(source: str, split: str = "train") -> list[Path] | None:
    """The files of a source, in order of their names: a file, the files of a directory, or a glob.

    Of a directory these are all files of rows in it and below, without hidden ones. Where some are named after splits
    (train.jsonl, test/0.csv, validation-00000-of-00002.parquet), they are those of one split. None where no file has
    the name.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_split(path, _files_inside(path), split)
    if glob.has_magic(source) and hub_source(source, "") is None:
        files = [Path(name) for name in sorted(glob.glob(source, recursive=True)) if Path(name).is_file()]
        if not files:
            raise UserError(f"{source}: no file matches")
        return files
    return None


def unread_files(source: str, split: str) -> list[str]:
    """Names of the files of a directory that are not read, because they are of another split or of none."""
    path = Path(source)
    read = set(source_files(source, split) or ())
    files = _files_inside(path) if path.is_dir() else []
    return [str(file.relative_to(path)) for file in files if file not in read]


def _files_inside(directory: Path) -> list[Path]:
    inside = (path for path in directory.rglob("*") if path.is_file() and path.name.endswith(SUFFIXES))
    files = [path for path in inside if not any(part.startswith(".") for part in path.relative_to(directory).parts)]
    if not files:
        raise UserError(f"{directory}: a directory without files of rows ({', '.join(SUFFIXES)})")
    return sorted(files)


def _files_of_split(directory: Path, files: list[Path], split: str) -> list[Path]:
    """The files of one split; all files where none is named after a split."""
    splits = {path: _split_named(path.relative_to(directory)) for path in files}
    split_names = set(splits.values()) - {None}
    wanted = {split} if split in split_names else {word for words in SPLIT_WORDS if split in words for word in words}
    if split_names and not split_names & wanted:
        names = ", ".join(sorted(map(str, split_names)))
        raise UserError(f"{directory}: there is no split '{split}' among its files; it has {names}")
    return [path for path in files if splits[path] in wanted] if split_names else files


def _split_named(path: Path) -> str | None:
    """The split that a file is named after, or else a directory that it is in; None where neither is."""
    known = {word for words in SPLIT_WORDS for word in words}
    words = [word for word in re.split(r"[^a-z]+", path.name.lower()) if word in known]
    if words and (shard := SHARD.fullmatch(path.name)):
        return shard["split"]  # train_sft-00000-of-00003.parquet is of the split train_sft
    return (words or [part for part in reversed(path.parts[:-1]) if part in known] or [None])[0]


def hub_source(source: str, split: str) -> HubName | None:
    """The Hub data set that a source names; None where `source` can only be a file.

    A Hub id looks like no path of its own (`./`, `/`, `~`), has no known suffix, and at most one slash.
    """
    match = HUB_SOURCE.fullmatch(source)
    if match is None or match["name"].endswith((*SUFFIXES, ".gz", ".tsv")):
        return None
    return match["name"], match["config"], match["split"] or split


Position = Any  # JSON-like, of the reader that gave it; None is the beginning

PARQUET_ROWS = 1024  # that are in memory
FIRST_BYTES = 2**18  # of the first chunk, by which the format of the rows is chosen
CHUNK_ROWS = 1024  # of a chunk that cannot be read by its position in the file
LINE_BYTES = 64 * 2**20  # of the longest line, so that no file, compressed or not, fills the memory
WHOLE_BYTES = 2**30  # of the longest line of a file that is read as a whole


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it is in the file."""

    location: str  # FILE:LINE, or the name of a Hub data set with the row's number
    values: dict[str, Any] | None  # column -> value; None where the row cannot be read
    problem: str = ""  # why it cannot be read, with the location
    reason: str = ""  # why, without the location
    end: Position = None  # position behind the row


def read_raw(source: str, split: str = "train", copies: Path | None = None) -> Iterator[RawRow]:
    """The rows of a file, directory or glob, or of a Hub data set (`owner/name:config[split]`).

    `split`: where none is named. `copies`: a folder that may have a copy of the data set.
    """
    origin = find_rows(source, split)
    if isinstance(origin, tuple):
        return _hub_rows(*origin, copies=copies)
    return chain.from_iterable(READERS[_format_of(path)](path) for path in origin)


def read_whole(source: str, copies: Path | None = None) -> list[RawRow]:
    """Each file of a source as one row: its whole `text`, to the byte. A Hub data set of lines is one file."""
    files = source_files(source)
    named = hub_source(source, "train") if files is None else None
    if named is not None and (text := hub_text(*named, copies=copies)) is not None:
        return [RawRow(hub_label(*named), {"text": text})]
    if files is None:
        raise UserError(f"{source}: no such file")
    return [RawRow(str(path), {"text": _whole_text(path)}) for path in files]


def _whole_text(path: Path) -> str:
    return "".join(_text_lines(path, [0, 0], WHOLE_BYTES))


@dataclass(frozen=True)
class OpenSource:
    """A file or data set that can be read from any position."""

    name: str  # of the file or data set
    version: list[str | int]  # name and size, which a resumed run must find again
    read: Callable[[Position], Iterator[RawRow]]  # position -> the rows from there on


def open_sources(source: str, split: str) -> list[OpenSource]:
    """A source's files in order of their names, or the Hub data set it names, unless one cannot be read in rows."""
    origin = find_rows(source, split)
    if isinstance(origin, tuple):
        name = hub_label(*origin)
        return [OpenSource(name, [name], lambda position: _hub_rows(*origin, position, streaming=True))]
    for path in origin:
        if _format_of(path) == ".json":
            raise UserError(
                f"{path}: data.streaming reads {', '.join(sorted(set(READERS) - {'.json'}))}, and this file is "
                "read as a whole; write one row per line (.jsonl), or set data.streaming=false"
            )
    return [
        OpenSource(str(path), [str(path), path.stat().st_size], partial(READERS[_format_of(path)], path))
        for path in origin
    ]


@dataclass(frozen=True)
class Chunk:
    """Successive rows of a source: rows as they are, or a part of a file of JSON lines, read by whoever parses it."""

    path: Path | None = None
    start: Position = None
    stop: int | None = None
    rows: tuple[RawRow, ...] = ()

    def raw_rows(self) -> Iterable[RawRow]:
        """The rows, each with its location."""
        return self.rows if self.path is None else json_line_rows(self.path, self.start, self.stop)


def read_chunks(source: str, split: str, size: int) -> Iterator[Chunk]:
    """The rows of a source in order, of files of JSON lines in chunks of about `size` bytes, the first one smaller."""
    files = source_files(source, split) or []
    if files and all(path.suffix == _format_of(path) == ".jsonl" for path in files):
        for path in files:
            yield from line_chunks(path, size, first=min(size, FIRST_BYTES))
    else:
        yield from chunks_of(read_raw(source, split))


def chunks_of(rows: Iterator[RawRow]) -> Iterator[Chunk]:
    """The rows as they are, in chunks of `CHUNK_ROWS`."""
    while block := tuple(islice(rows, CHUNK_ROWS)):
        yield Chunk(rows=block)


def _format_of(path: Path) -> str:
    """The key of `READERS` for a file; a list that is named .jsonl is read as .json."""
    suffix = suffix_of(path.name).removesuffix(".gz")
    if suffix != ".jsonl":
        return suffix
    first = next((line for line in _binary_lines(path) if line.strip()), b"")
    return ".json" if first.lstrip(codecs.BOM_UTF8).startswith(b"[") else suffix


# Lines


def json_line_rows(path: Path, position: Position = None, stop: int | None = None) -> Iterator[RawRow]:
    """One JSON object per line, up to byte `stop`; decoded line by line, so that a broken byte costs one row only."""
    start, line_number = position or (0, 0)
    for line in _binary_lines(path, start, line_number) if stop is None or start < stop else ():
        before = start
        start = start + len(line)
        line_number = line_number + 1
        if (row := _json_line_row(path, line, line_number, before)) is not None:
            yield row
        if stop is not None and start >= stop:
            return


def _json_line_row(path: Path, line: bytes, number: int, start: int) -> RawRow | None:
    """The row of a line; None where the line is blank."""
    location = f"{path}:{number}"
    end = [start + len(line), number]
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip()
        return _object_row(location, DECODER.decode(text), end) if text else None
    except UnicodeDecodeError as error:
        byte = f"byte {error.start + 1} of the line (byte {start + error.start + 1} of the file)"
        return RawRow(location, None, f"{location}: {byte} is not UTF-8", "not UTF-8", end)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits too
        why = f"{location}:{getattr(error, 'colno', 1)}: not JSON: {getattr(error, 'msg', error)}"
        return RawRow(location, None, why, "not JSON", end)


def _object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"one of these keys stands twice: {', '.join(values):.200}")
    keys = "".join(values)
    if not keys.isascii() and HALF_PAIR.search(keys):
        raise ValueError("a key holds half a surrogate pair, which is no text")
    return values


DECODER = json.JSONDecoder(object_pairs_hook=_object_of)


def _object_row(location: str, values: object, end: Position = None) -> RawRow:
    if isinstance(values, dict):
        return RawRow(location, values, end=end)
    why = f"{location}: a row must be a JSON object, this is a {type(values).__name__}"
    return RawRow(location, None, why, "not a JSON object", end)


def _binary_lines(path: Path, start: int = 0, lines: int = 0, longest: int = LINE_BYTES) -> Iterator[bytes]:
    """Lines of a file, perhaps compressed by gzip, from byte `start` of its content, before which are `lines`."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            file.seek(start)
            while line := file.readline(longest + 1):
                lines += 1
                if len(line) > longest:
                    raise UserError(
                        f"{path}:{lines}: a line of more than {longest >> 20} MiB; cut it into several rows"
                    )
                if lines == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                    raise UserError(f"{path}: the text is UTF-16; save the file as UTF-8")
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken or incomplete gzip file ({error}); fetch it again") from error
    except PermissionError as error:
        raise UserError(f"{path}: may not be read: permission denied") from error


def _text_lines(path: Path, at: list[int], longest: int = LINE_BYTES) -> Iterator[str]:
    """The lines of a file as text; `at`: bytes and lines before the next one, moved on with each line given out."""
    for line in _binary_lines(path, at[0], at[1], longest):
        at[:] = at[0] + len(line), at[1] + 1
        try:
            yield line.decode("utf-8-sig" if at[1] == 1 else "utf-8")
        except UnicodeDecodeError as error:
            where = f"{path}:{at[1]}: byte {error.start + 1}"
            raise UserError(f"{where} of the line is not UTF-8; save the file as UTF-8") from error


def line_chunks(path: Path, size: int, first: int) -> Iterator[Chunk]:
    """An uncompressed file in successive chunks of whole lines, of about `size` bytes, the first of about `first`."""
    start = 0
    lines = 0
    with open(path, "rb") as file:
        while block := file.read(size if start else first):
            block += file.readline(LINE_BYTES)  # whoever reads a longer line refuses it
            yield Chunk(path, [start, lines], start + len(block))
            start = start + len(block)
            lines = lines + block.count(b"\n")


# Formats


def _text_rows(path: Path, position: Position = None) -> Iterator[RawRow]:
    """Running text: documents are separated by blank lines; a row is located by its first line."""
    at: list[int] = list(position or (0, 0))
    lines = list[str]()
    first = 0
    for line in chain(_text_lines(path, at), [""]):
        if line.strip():
            first = first if lines else at[1]
            lines.append(line.rstrip("\r\n"))
        elif lines:
            yield RawRow(f"{path}:{first}", {"text": "\n".join(lines)}, end=list(at))
            lines = []


def _csv_rows(path: Path, position: Position = None) -> Iterator[RawRow]:
    """Comma-separated, first line the column names; every value is text."""
    at: list[int] = list(position or (0, 0))
    csv.field_size_limit(LINE_BYTES)
    try:
        names = next(csv.reader(_text_lines(path, [0, 0] if at[0] else at), strict=True), [])
        if len(set(names)) < len(names):
            raise UserError(f"{path}:1: the same column name stands twice: {', '.join(names)}")
        line = at[1]
        for values in csv.reader(_text_lines(path, at), strict=True):
            location = f"{path}:{line + 1}"
            line = at[1]
            if len(values) == len(names):
                yield RawRow(location, dict(zip(names, values, strict=True)), end=list(at))
            elif values:
                why = f"{location}: {len(values)} fields where the first line names {len(names)}"
                yield RawRow(location, None, why, "wrong number of fields", list(at))
    except csv.Error as error:
        returns = (
            "; its lines end in carriage returns alone, save it with line feeds" if "new-line" in str(error) else ""
        )
        raise UserError(f"{path}:{at[1]}: not CSV: {error}{returns}") from error


def _json_rows(path: Path, position: Position = None) -> Iterator[RawRow]:
    """A JSON list of objects, also under `data`, or one object, or lines of them; a row is located by its number."""
    text = _whole_text(path)
    if not text.strip():
        return
    try:
        rows = DECODER.decode(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits too
        if "\n" not in text[: getattr(error, "pos", len(text))].strip():  # a file of lines, or of one line
            yield from json_line_rows(path)
            return
        location = f"{path}:{getattr(error, 'lineno', 1)}:{getattr(error, 'colno', 1)}"
        raise UserError(f"{location}: not JSON: {getattr(error, 'msg', error)}") from error
    if isinstance(rows, dict):
        data = rows.get("data")
        rows = data if isinstance(data, list) else [rows]
    if not isinstance(rows, list):
        raise UserError(f"{path}: a .json file must hold a list of rows, or one object per line")
    for row_number, values in enumerate(rows, start=1):
        yield _object_row(f"{path}:{row_number}", values)


def from_arrow(values: Mapping[str, object]) -> dict[str, object]:
    """A row of Arrow without what only the other rows' messages and tools have.

    All structs of a column have the same keys there, null where a row has none: arguments of another tool's call.
    """
    return {name: own_keys(value) for name, value in values.items()}


def own_keys(value: object, inside: bool = False) -> object:
    """The value without the null keys of tools, and of what is `inside` a message."""
    if isinstance(value, list):
        return [own_keys(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    bare = inside or not value.keys().isdisjoint(("function", "parameters"))
    inside = bare or not value.keys().isdisjoint(("role", "from"))
    return {key: own_keys(part, inside) for key, part in value.items() if part is not None or not bare}


def _parquet_rows(path: Path, position: Position = None) -> Iterator[RawRow]:
    """The rows of a Parquet file; groups of rows before the position are not read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    row = position or 0
    first = 0  # `first` is the number of the group's first row
    try:
        with pq.ParquetFile(path) as table:
            for group in range(table.num_row_groups):
                batch_start = first
                size = table.metadata.row_group(group).num_rows
                first += size
                for batch in table.iter_batches(PARQUET_ROWS, row_groups=[group]) if row < first else ():
                    for values in batch.slice(min(max(0, row - batch_start), batch.num_rows)).to_pylist():
                        row += 1
                        yield RawRow(f"{path}:{row}", from_arrow(values), end=row)
                    batch_start += batch.num_rows
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error


READERS: dict[str, Callable[..., Iterator[RawRow]]] = {  # path and position -> rows
    ".jsonl": json_line_rows,
    ".json": _json_rows,
    ".csv": _csv_rows,
    ".txt": _text_rows,
    ".parquet": _parquet_rows,
}


def _hub_rows(
    name: str,
    config: str | None,
    split: str,
    position: Position = None,
    *,
    streaming: bool = False,
    copies: Path | None = None,
) -> Iterator[RawRow]:
    """The rows of a Hub data set; streaming: as they arrive, with positions."""
    label = hub_label(name, config, split)
    dataset = load_hub(name, config, split, streaming=streaming, copies=copies)
    before, state = position or (0, None)
    if state is not None:
        dataset.load_state_dict(state)
    for row_number, values in enumerate(dataset, start=before + 1):
        end = [row_number, dataset.state_dict()] if streaming else None
        yield RawRow(f"{label}:{row_number}", from_arrow(values), end=end)

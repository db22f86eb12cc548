"""Raw rows of files and Hub data sets, each with its location. Records are made of them in read.py."""

import csv
import glob
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from alignment.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".csv.gz", ".parquet", ".txt", ".txt.gz")
# owner/name, owner/name[split], owner/name:config[split]
SPLIT_WORDS = (  # in names of files, as `datasets` reads them; those of one line mean the same
    ("train", "training"),
    ("validation", "valid", "val", "dev"),
    ("test", "testing"),
    ("eval", "evaluation"),
)
SHARD = re.compile(r"(?P<split>.+)-\d{5}-of-\d{5}.*")
HUB_SOURCE = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]*(/[\w.-]+)?)(:(?P<config>[^\[\]:/]+))?(\[(?P<split>.+)\])?")


@dataclass(frozen=True, slots=True)
class RawRow:
    """A row as it is in the file.

    Attributes:
        location: FILE:LINE, or the name of a Hub data set with the row's number.
        values: column -> value; None where the row cannot be read.
        problem: why it cannot be read, with the location.
        reason: why, without the location.
    """

    location: str
    values: dict[str, Any] | None
    problem: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ByteSpan:
    """Whole lines of a file: the bytes from `start` up to `stop`; the first line has number `line`."""

    start: int
    stop: int
    line: int


def read_raw(source: str, split: str = "train") -> Iterator[RawRow]:
    """The rows of a local file, or of a Hub data set where `source` cannot be a file name.

    Args:
        source: path with one of `SUFFIXES`, a directory, or a glob (`data/*.jsonl`, `data/**/*.parquet`); or
            `owner/name`, `owner/name[split]`, `owner/name:config[split]`.
        split: of a Hub data set that names none itself, or of a directory whose files are named after splits.

    Raises:
        UserError: no such file or split, an unknown suffix, a broken archive or table, no such data set.
    """
    found = find_rows(source, split)
    return _hub_rows(*found) if isinstance(found, tuple) else chain.from_iterable(_reader(path)(path) for path in found)


def find_rows(source: str, split: str) -> list[Path] | tuple[str, str | None, str]:
    """The files of a source, or name, config and split of the Hub data set that it names; nothing is read.

    Raises:
        UserError: no such file or split, or a name that does not tell the file's format.
    """
    files = source_files(source, split)
    if files is None:
        if (found := hub_source(source, split)) is None:
            raise UserError(f"{source}: no such file")
        return found
    for path in files:
        _reader(path)
    return files


def source_files(source: str, split: str = "train") -> list[Path] | None:
    """The files of a source, in order of their names: a file, the files of a directory, or a glob.

    Of a directory these are all files of rows in it and below. Where some are named after splits (train.jsonl,
    test/0.csv, validation-00000-of-00002.parquet), they are those of one split. Hidden files and directories (.git,
    .ipynb_checkpoints) are left out. None where no file has the name.

    Raises:
        UserError: a directory without a file of rows or without that split, or a glob that matches nothing.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _files_of_split(path, _files_inside(path), split)
    if glob.has_magic(source) and hub_source(source, "") is None:
        files = [Path(each) for each in sorted(glob.glob(source, recursive=True)) if Path(each).is_file()]
        if not files:
            raise UserError(f"{source}: no file matches")
        return files
    return None


def files_left_out(source: str, split: str) -> str:
    """A line that names files of a directory which are of no split, or of another one, and not read; empty without any."""
    if not Path(source).is_dir():
        return ""
    files = _files_inside(Path(source))
    read = set(_files_of_split(Path(source), files, split))
    others = [str(path.relative_to(source)) for path in files if path not in read]
    more = f" and {len(others) - 5} more" if len(others) > 5 else ""
    left_out = (
        f"{source}: {len(read)} of {len(files)} files are read, the split '{split}'; not {', '.join(others[:5])}{more}"
    )
    return left_out if others else ""


def _files_inside(directory: Path) -> list[Path]:
    inside = (each for each in directory.rglob("*") if each.is_file() and each.name.endswith(SUFFIXES))
    files = [each for each in inside if not any(part.startswith(".") for part in each.relative_to(directory).parts)]
    if not files:
        raise UserError(f"{directory}: a directory without files of rows ({', '.join(SUFFIXES)})")
    return sorted(files)


def _files_of_split(directory: Path, files: list[Path], split: str) -> list[Path]:
    """The files of one split; all files where none is named after a split."""
    splits = {path: _split_named(path.relative_to(directory)) for path in files}
    found = set(splits.values()) - {None}
    same = next((words for words in SPLIT_WORDS if split in words), ())
    wanted = {split} if split in found else set(same)
    if found and not found & wanted:
        names = ", ".join(sorted(map(str, found)))
        raise UserError(f"{directory}: there is no split '{split}' among its files; it has {names}")
    return [path for path in files if splits[path] in wanted] if found else files


def _split_named(path: Path) -> str | None:
    """The split that a file is named after, or else a directory that it is in; None where neither is."""
    known = {word for words in SPLIT_WORDS for word in words}
    words = [word for word in re.split(r"[^a-z]+", path.name.lower()) if word in known]
    if words and (shard := SHARD.fullmatch(path.name)):
        return shard["split"]  # train_sft-00000-of-00003.parquet is of the split train_sft
    return (words or [part for part in reversed(path.parts[:-1]) if part in known] or [None])[0]


def _reader(path: Path) -> Callable[[Path], Iterator[RawRow]]:
    suffix = next((suffix for suffix in sorted(SUFFIXES, key=len, reverse=True) if path.name.endswith(suffix)), None)
    if suffix is None:
        raise UserError(f"{path}: cannot tell the format by its name; expected one of {', '.join(SUFFIXES)}")
    by_suffix = {".jsonl": json_line_rows, ".json": _json_rows, ".csv": _csv_rows, ".txt": _text_rows}
    return _parquet_rows if suffix == ".parquet" else by_suffix[suffix.removesuffix(".gz")]


def _text_rows(path: Path) -> Iterator[RawRow]:
    """Running text: documents are separated by blank lines; a row is located by its first line."""
    lines, first = [], 0
    text = _whole_text(path).split("\n")
    for number, line in enumerate([*text, ""], start=1):
        if line.strip():
            first = first if lines else number
            lines.append(line.rstrip("\r"))
        elif lines:
            yield RawRow(f"{path}:{first}", {"text": "\n".join(lines)})
            lines = []


def hub_source(source: str, split: str) -> tuple[str, str | None, str] | None:
    """Name, config (None: the only one) and split of a Hub data set; None where `source` can only be a file.

    A Hub id looks like no path of its own (`./`, `/`, `~`), has no known suffix, and at most one slash.
    """
    found = HUB_SOURCE.fullmatch(source)
    if found is None or found["name"].endswith((*SUFFIXES, ".gz", ".tsv")):
        return None
    return found["name"], found["config"], found["split"] or split


def json_line_rows(path: Path, span: ByteSpan | None = None) -> Iterator[RawRow]:
    """One JSON object per line. Decoded line by line, so that a broken byte costs one row only and is located.

    Args:
        span: whole lines of an uncompressed file; None: all of them.
    """
    offset = 0 if span is None else span.start
    lines = binary_lines(path) if span is None else _lines_of_span(path, span)
    for number, line in enumerate(lines, start=1 if span is None else span.line):
        start, offset = offset, offset + len(line)
        if (row := json_line_row(path, line, number, start)) is not None:
            yield row


def json_line_row(path: Path, line: bytes, number: int, start: int) -> RawRow | None:
    """The row of one line of a file, None where the line is blank.

    Args:
        line: its bytes.
        number: of the line, from 1.
        start: bytes of the file before it.
    """
    location = f"{path}:{number}"
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        why = (
            f"{location}: byte {error.start + 1} of the line (byte {start + error.start + 1} of the file) is not UTF-8"
        )
        return RawRow(location, None, why, "not UTF-8")
    return _json_row(location, text.rstrip()) if text.strip() else None


def _json_row(location: str, text: str) -> RawRow:
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits too
        column = getattr(error, "colno", 1)
        return RawRow(location, None, f"{location}:{column}: not JSON: {getattr(error, 'msg', error)}", "not JSON")
    return _object_row(location, values)


def _object_row(location: str, values: object) -> RawRow:
    if isinstance(values, dict):
        return RawRow(location, values)
    why = f"{location}: a row must be a JSON object, this is a {type(values).__name__}"
    return RawRow(location, None, why, "not a JSON object")


def binary_lines(path: Path, start: int = 0) -> Iterator[bytes]:
    """The lines of a file, which may be compressed by gzip, from byte `start` of its content."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            file.seek(start)
            yield from file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: broken or incomplete gzip file ({error}); fetch it again") from error
    except PermissionError as error:
        raise UserError(f"{path}: may not be read: permission denied") from error


def _lines_of_span(path: Path, span: ByteSpan) -> Iterator[bytes]:
    with open(path, "rb") as file:
        file.seek(span.start)
        yield from io.BytesIO(file.read(span.stop - span.start))


def byte_spans(path: Path, size: int, first: int | None = None) -> Iterator[ByteSpan]:
    """An uncompressed file of lines in successive spans of whole lines, each of about `size` bytes or of one line.

    Args:
        first: bytes of the first span; None: as the others.
    """
    try:
        with open(path, "rb") as file:
            start, line = 0, 1
            while block := file.read(first if first and not start else size):
                block += file.readline()
                yield ByteSpan(start, start + len(block), line)
                start, line = start + len(block), line + block.count(b"\n")
    except PermissionError as error:
        raise UserError(f"{path}: may not be read: permission denied") from error


def _whole_text(path: Path) -> str:
    content = b"".join(binary_lines(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        byte = error.start - content.rfind(b"\n", 0, error.start)
        raise UserError(f"{path}:{line}: byte {byte} of the line is not UTF-8; save the file as UTF-8") from error


def _json_rows(path: Path) -> Iterator[RawRow]:
    """A JSON list of objects; a row is located by its number in the list."""
    text = _whole_text(path)
    if not text.strip():
        return
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits too
        location = f"{path}:{getattr(error, 'lineno', 1)}:{getattr(error, 'colno', 1)}"
        raise UserError(f"{location}: not JSON: {getattr(error, 'msg', error)}") from error
    if not isinstance(rows, list):
        raise UserError(f"{path}: a .json file must hold a list of rows; one object per line belongs in a .jsonl file")
    for number, values in enumerate(rows, start=1):
        yield _object_row(f"{path}:{number}", values)


def _csv_rows(path: Path) -> Iterator[RawRow]:
    """Comma-separated, first line the column names; every value is text."""
    reader = csv.reader(io.StringIO(_whole_text(path), newline=""), strict=True)
    try:
        names = next(reader, None)
        if names is not None and len(set(names)) < len(names):
            raise UserError(f"{path}:1: the same column name stands twice: {', '.join(names)}")
        line = reader.line_num
        for values in reader:
            location, line = f"{path}:{line + 1}", reader.line_num
            if not values:
                continue
            yield csv_row(location, names or (), values)
    except csv.Error as error:
        raise UserError(f"{path}:{reader.line_num}: not CSV: {error}") from error


def csv_row(location: str, names: Sequence[str], values: Sequence[str]) -> RawRow:
    """The row of one record of a CSV file, whose columns are `names`."""
    if len(values) != len(names):
        why = f"{location}: {len(values)} fields where the first line names {len(names)}"
        return RawRow(location, None, why, "wrong number of fields")
    return RawRow(location, dict(zip(names, values, strict=True)))


def _parquet_rows(path: Path) -> Iterator[RawRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as table:
            number = 0
            for batch in table.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield RawRow(f"{path}:{number}", values)
    except (pa.ArrowInvalid, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable parquet file: {error}") from error


def _hub_rows(name: str, config: str | None, split: str) -> Iterator[RawRow]:
    table = load_hub(name, config, split)
    label = name if config is None else f"{name}:{config}"
    for number, values in enumerate(table, start=1):
        yield RawRow(f"{label}[{split}]:{number}", dict(values))


@lru_cache(maxsize=2)  # once for its fingerprint, and once more to read it
def _load_hub(load_dataset: Callable[..., object], name: str, config: str | None, split: str) -> Any:
    return load_dataset(name, split=split) if config is None else load_dataset(name, config, split=split)


def load_hub(name: str, config: str | None, split: str, *, streaming: bool = False) -> Any:
    """A split of a Hub data set, as `datasets` loads it; streaming: as rows that are fetched one after another.

    Raises:
        UserError: there is none of that name, or it cannot be read.
    """
    from datasets import load_dataset

    try:
        if streaming:
            return load_dataset(*([name] if config is None else [name, config]), split=split, streaming=True)
        return _load_hub(load_dataset, name, config, split)
    except Exception as error:  # the library raises a dozen unrelated types
        raise UserError(
            f"{name}: no such file, and the Hub gave no data set of that name with split '{split}' "
            f"({type(error).__name__}: {error}); a local file needs its suffix ({', '.join(SUFFIXES)})"
        ) from error

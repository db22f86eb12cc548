"""Split rows into several files by a hash of their prompt, so that the same prompt always goes to the same file."""

import gzip
import json
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

from alignment.data.rows.files import read_raw
from alignment.data.rows.formats import ASSISTANT_TURN
from alignment.data.rows.read import prompt_key, read_rows, record_key
from alignment.data.rows.records import Kind, Record
from alignment.errors import UserError
from alignment.files import write_json, write_text

TEXT_SUFFIXES = (".txt", ".txt.gz")


@dataclass(frozen=True)
class SplitConfig:
    """Settings of a split.

    Attributes:
        source: files of rows; running text (.txt, .txt.gz) is split into documents first.
        kind: of the rows; a row of another kind is an error, or skipped and counted.
        parts: name -> share of the rows. Each part becomes `output/NAME.jsonl`, its rows as they were.
        output: directory of the parts and of `results.json`, the counts.
        by: rows that share this fall into the same part: the whole prompt, the prompt's first turn (a dialogue and its
            continuation share it), or the row itself.
        columns: our column name -> the file's.
        on_bad_row: report all bad rows and stop, or skip and count them.
        starts: how the first paragraph of a document of running text begins; none: every paragraph is a document.
        salt: another salt gives another split.
    """

    source: str | list[str]
    kind: Kind
    parts: dict[str, float]
    output: str
    by: Literal["prompt", "opening", "row"] = "prompt"
    columns: dict[str, str] = field(default_factory=dict)
    on_bad_row: Literal["error", "skip"] = "error"
    starts: list[str] = field(default_factory=list)
    salt: str = ""

    def __post_init__(self) -> None:
        if not self.parts or min(self.parts.values()) <= 0 or abs(sum(self.parts.values()) - 1) > 1e-6:
            raise ValueError(f"parts must be shares above 0 that add up to 1, got {self.parts}")
        if self.kind == "text" and self.by == "opening":
            raise ValueError("by=opening needs rows with a prompt, and text has none; take by=row")


def run_split(config: SplitConfig) -> Path:
    """Write one file per part and `results.json`, and return the directory.

    Raises:
        UserError: bad rows, all at once; a part that would be empty.
    """
    output = Path(config.output)
    sources = [config.source] if isinstance(config.source, str) else config.source
    lines: dict[str, list[str]] = {name: [] for name in config.parts}
    losses: list[str] = []
    for source in sources:
        rows, counts = _texts(source, config) if source.endswith(TEXT_SUFFIXES) else _rows(source, config)
        for key, values in rows:
            lines[part_of(key, config.parts, config.salt)].append(json.dumps(values, ensure_ascii=False) + "\n")
        losses += [f"{source}: {line}" for line in counts]
    empty = [name for name, part in lines.items() if not part]
    if empty:
        raise UserError(f"{', '.join(sources)}: nothing falls into part {', '.join(empty)}; give it a larger share")
    for name, part in lines.items():
        write_text(output / f"{name}.jsonl", "".join(part))
    write_json(output / "results.json", {"rows": {name: len(part) for name, part in lines.items()}, "counts": losses})
    return output


def part_of(key: str, parts: dict[str, float], salt: str = "") -> str:
    """The part that a key falls into; depends on the key, the shares and the salt alone."""
    remaining = int.from_bytes(sha256(f"{salt}/{key}".encode()).digest()[:8], "big") / 2**64
    for name, share in parts.items():
        remaining -= share
        if remaining < 0:
            return name
    return list(parts)[-1]  # the shares add up to 1 but for rounding


def opening(record: Record) -> str:
    """The beginning of a record's prompt: its first message, or its text up to the first assistant turn."""
    prompt = getattr(record, "prompt", "")
    return prompt.partition(ASSISTANT_TURN)[0] if isinstance(prompt, str) else repr(prompt[:1])


def read_documents(path: Path, starts: list[str]) -> list[str]:
    """Documents of running text: paragraphs are separated by blank lines, and some of them begin a document.

    Args:
        starts: beginnings of such paragraphs; none: each paragraph is a document.

    Raises:
        UserError: no file, or no UTF-8 text.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            text = file.read().decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as UTF-8 text: {error}") from error
    documents: list[str] = []
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        if not documents or not starts or paragraph.startswith(tuple(starts)):
            documents.append(paragraph)
        else:
            documents[-1] += "\n\n" + paragraph
    return documents


def _texts(source: str, config: SplitConfig) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Keys and rows of running text."""
    documents = read_documents(Path(source), config.starts)
    return [(text, {"text": text}) for text in documents], [f"{len(documents)} documents"]


def _rows(source: str, config: SplitConfig) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Keys and good rows of a file, unchanged; of a row that holds several records (a tree) the first one's key."""
    records, counts = read_rows(source, config.kind, columns=config.columns, on_bad_row=config.on_bad_row)
    keys = {"prompt": prompt_key, "opening": opening, "row": lambda record: repr(record_key(record))}
    raw = {row.location: row.values or {} for row in read_raw(source)}
    found: dict[str, str] = {}
    for record in records:
        row_id = record.row_id
        while row_id not in raw:  # ROW[0.1] is a ranking of a tree, ROW[0.1][2>0] a pair of that ranking
            row_id = row_id[: row_id.rindex("[")]
        found.setdefault(row_id, keys[config.by](record))
    return [(key, raw[row_id]) for row_id, key in found.items()], counts.lines()

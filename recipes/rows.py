"""Stages of recipes that make rows of other rows: splits, pairs of labeled texts, continuations of running text."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from random import Random
from typing import Any, Literal

from alignment.data.rows.files import read_raw, read_whole
from alignment.data.rows.formats import ASSISTANT_TURN
from alignment.data.rows.read import prompt_key, read_rows, record_key
from alignment.data.rows.records import Kind, Record
from alignment.errors import UserError, raise_all
from alignment.files import write_json, write_text
from alignment.settings import NonNegativeInt, PositiveInt, Rule, Settings

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’]))\s+")  # the quotation mark stays with its sentence
TEXT_SUFFIXES = (".txt", ".txt.gz")


@dataclass(frozen=True)
class SplitConfig(Settings):
    """Rows split into several files by a hash, so that the same prompt always goes to the same file.

    Attributes:
        source: files of rows, or data sets of the Hub, `owner/name:config[split]`; running text (.txt, .txt.gz, and with
            `starts` a data set of lines) is split into documents first.
        kind: of the rows; a row of another kind is an error, or skipped and counted.
        parts: name -> share of the rows. Each part becomes `output/NAME.jsonl`, its rows as they were.
        output: directory of the parts and of `results.json`, the counts.
        by: rows that share this fall into the same part: the whole prompt, the prompt's first turn (a dialogue and its
            continuation share it), or the row itself.
        on_bad_row: report all bad rows and stop, or skip and count them.
        starts: how the first paragraph of a document of running text begins; none: every paragraph is a document.
    """

    source: str | list[str]
    kind: Kind
    parts: dict[str, float]
    output: str
    by: Literal["prompt", "opening", "row"] = "prompt"
    on_bad_row: Literal["error", "skip"] = "error"
    starts: list[str] = field(default_factory=list)

    RULES = (
        Rule(
            "parts",
            lambda c: not c.parts or min(c.parts.values()) <= 0 or abs(sum(c.parts.values()) - 1) > 1e-6,
            "must be shares above 0 that add up to 1, got {self.parts}",
        ),
        Rule(
            "by",
            lambda c: c.kind == "text" and c.by == "opening",
            "is the opening of a prompt, and text has none; take by=row",
        ),
    )


def split(config: SplitConfig) -> Path:
    """Write one file per part and `results.json`, and return the directory; a part that would be empty is refused."""
    output, losses = Path(config.output), []
    sources = [config.source] if isinstance(config.source, str) else config.source
    parts: dict[str, list[Any]] = {name: [] for name in config.parts}
    for source in sources:
        if config.starts or source.endswith(TEXT_SUFFIXES):
            documents = read_documents(source, config.starts)
            rows, counts = [(text, {"text": text}) for text in documents], [f"{len(documents)} documents"]
        else:
            rows, counts = _rows(source, config)
        for key, values in rows:
            parts[part_of(key, config.parts)].append(values)
        losses += [f"{source}: {line}" for line in counts]
    if empty := [name for name, part in parts.items() if not part]:
        raise UserError(f"{', '.join(sources)}: nothing falls into part {', '.join(empty)}; give it a larger share")
    counts = {"rows": {name: len(part) for name, part in parts.items()}, "counts": losses}
    return _write(output, {f"{name}.jsonl": part for name, part in parts.items()}, counts)


def part_of(key: str, parts: dict[str, float]) -> str:
    """The part that a key falls into; depends on the key and the shares alone."""
    remaining = int.from_bytes(sha256(f"/{key}".encode()).digest()[:8], "big") / 2**64
    for name, share in parts.items():
        remaining -= share
        if remaining < 0:
            return name
    return list(parts)[-1]  # the shares add up to 1 but for rounding


def read_documents(source: str, starts: list[str]) -> list[str]:
    """Documents of running text: paragraphs between blank lines; one that begins as `starts` says begins a document."""
    text = "\n\n".join(file.values["text"] for file in read_whole(source) if file.values)
    documents: list[str] = []
    for paragraph in filter(None, map(str.strip, text.split("\n\n"))):
        if not documents or not starts or paragraph.startswith(tuple(starts)):
            documents.append(paragraph)
        else:
            documents[-1] += "\n\n" + paragraph
    return documents


def _rows(source: str, config: SplitConfig) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Keys and good rows of a file, unchanged; of a row that holds several records (a tree) the first one's key."""
    records, counts = read_rows(source, config.kind, on_bad_row=config.on_bad_row)
    keys = {"prompt": prompt_key, "opening": opening, "row": lambda record: repr(record_key(record))}
    raw = {row.location: row.values or {} for row in read_raw(source)}
    found: dict[str, str] = {}
    for record in records:
        row_id = record.row_id
        while row_id not in raw:  # ROW[0.1] is a ranking of a tree, ROW[0.1][2>0] a pair of that ranking
            row_id = row_id[: row_id.rindex("[")]
        found.setdefault(row_id, keys[config.by](record))
    return [(key, raw[row_id]) for row_id, key in found.items()], counts.lines()


def opening(record: Record) -> str:
    """The beginning of a record's prompt: its first message, or its text up to the first assistant turn."""
    prompt = getattr(record, "prompt", "")
    return prompt.partition(ASSISTANT_TURN)[0] if isinstance(prompt, str) else repr(prompt[:1])


@dataclass(frozen=True)
class PairsConfig(Settings):
    """Comparisons of texts with one label against texts with another.

    Attributes:
        source: a file of rows with the columns `text` and `label`.
        chosen, rejected: labels; every text of one is paired with a text of the other, each text used once.
        pairings: how often, each time with another partner (by chance now and then the same one).
        output: directory of `comparisons.jsonl` and `results.json`, the counts.
        prompt: of every comparison; a blank is put between it and each text.
        seed: of the random pairing.
    """

    source: str
    chosen: str
    rejected: str
    output: str
    prompt: str = "Review:"
    pairings: PositiveInt = 1
    seed: NonNegativeInt = 0

    RULES = (Rule("rejected", lambda c: c.chosen == c.rejected, "must be another label than chosen, {self.chosen!r}"),)


def pairs(config: PairsConfig) -> Path:
    """Write the comparisons and return the directory; rows without the columns and labels without rows are refused."""
    texts: dict[str, list[str]] = {config.chosen: [], config.rejected: []}
    problems = []
    for row in read_raw(config.source):
        text, label = (row.values or {}).get("text"), (row.values or {}).get("label")
        if not isinstance(text, str) or label is None:
            problems.append(row.problem or f"{row.location}: needs `text` (text) and `label`")
        elif str(label) in texts and text.strip():
            texts[str(label)].append(text)
    raise_all(problems)
    raise_all(f"{config.source}: no row has the label {label!r}" for label, found in texts.items() if not found)
    random, made = Random(config.seed), []
    for _ in range(config.pairings):
        for found in texts.values():
            random.shuffle(found)
        made += zip(texts[config.chosen], texts[config.rejected], strict=False)
    rows = [{"prompt": config.prompt, "chosen": f" {good}", "rejected": f" {bad}"} for good, bad in made]
    counts = {"comparisons": len(rows), "labels": {label: len(found) for label, found in texts.items()}}
    return _write(Path(config.output), {"comparisons.jsonl": rows}, counts)


@dataclass(frozen=True)
class ContinuationsConfig(Settings):
    """Demonstrations from running text: each paragraph's opening is the prompt, the rest the response.

    Attributes:
        source: rows of text.
        output: directory of `demonstrations.jsonl` (which serves as prompts too) and `results.json`, the counts.
        prompt_sentences: sentences of the opening.
        response_sentences: the most after it; None: the rest of the paragraph.
        least: characters that prompt and response must have each; paragraphs with less are left out.
    """

    source: str | list[str]
    output: str
    prompt_sentences: PositiveInt = 1
    response_sentences: PositiveInt | None = None
    least: NonNegativeInt = 20


def continuations(config: ContinuationsConfig) -> Path:
    """Write the openings of all paragraphs and their continuations, and return the directory."""
    records: list[Any] = read_rows(config.source, "text")[0]
    paragraphs = [part for record in records for part in record.text.split("\n\n") if part.strip()]
    first, rows = config.prompt_sentences, []
    last = None if config.response_sentences is None else first + config.response_sentences
    for paragraph in paragraphs:
        sentences = SENTENCE_END.split(paragraph.strip())
        prompt, response = " ".join(sentences[:first]), " ".join(sentences[first:last])
        if min(len(prompt), len(response)) >= config.least:
            rows.append({"prompt": prompt, "completion": f" {response}"})  # joined as they are, they are the text again
    if not rows:
        raise UserError(f"{config.source}: no paragraph is long enough; lower `prompt_sentences` or `least`")
    counts = {"demonstrations": len(rows), "paragraphs": len(paragraphs)}
    return _write(Path(config.output), {"demonstrations.jsonl": rows}, counts)


def _write(output: Path, files: Mapping[str, list[Any]], counts: Mapping[str, object]) -> Path:
    for name, rows in files.items():
        write_text(output / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_json(output / "results.json", counts)
    return output

"""Derive rows of one kind from another: comparisons from labeled texts, demonstrations from running text."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from alignment.data.rows.files import read_raw
from alignment.data.rows.read import read_rows
from alignment.errors import UserError, raise_all
from alignment.files import write_json, write_text

SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’]))\s+")  # the quotation mark stays with its sentence


@dataclass(frozen=True)
class PairsConfig:
    """Settings of comparisons from labeled texts.

    Attributes:
        source: a file of rows with a text and a label.
        chosen, rejected: labels; every text of one is paired with a text of the other, each text used once.
        pairings: so often, each time with another partner (by chance now and then the same one).
        output: directory of `comparisons.jsonl` and `results.json`, the counts.
        prompt: of every comparison; a blank is put between it and each text.
        text, label: names of the columns.
        seed: of the random pairing.
    """

    source: str
    chosen: str
    rejected: str
    output: str
    prompt: str = "Review:"
    text: str = "text"
    label: str = "label"
    pairings: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.chosen == self.rejected:
            raise ValueError(f"chosen and rejected must be two labels, got {self.chosen!r} twice")
        if self.pairings < 1:
            raise ValueError(f"pairings must be at least 1, got {self.pairings}")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")


def run_pairs(config: PairsConfig) -> Path:
    """Write comparisons of texts with one label against texts with another, and return the directory.

    Raises:
        UserError: rows without the columns, or a label that no row has.
    """
    texts: dict[str, list[str]] = {config.chosen: [], config.rejected: []}
    problems = []
    for row in read_raw(config.source):
        values = row.values or {}
        text, label = values.get(config.text), values.get(config.label)
        if not isinstance(text, str) or label is None:
            problems.append(row.problem or f"{row.location}: needs `{config.text}` (text) and `{config.label}`")
        elif str(label) in texts and text.strip():
            texts[str(label)].append(text)
    raise_all(problems)
    raise_all(f"{config.source}: no row has the label {label!r}" for label, found in texts.items() if not found)
    random, pairs = Random(config.seed), []
    for _ in range(config.pairings):
        for found in texts.values():
            random.shuffle(found)
        pairs += zip(texts[config.chosen], texts[config.rejected], strict=False)
    rows = [{"prompt": config.prompt, "chosen": f" {good}", "rejected": f" {bad}"} for good, bad in pairs]
    counts = {"comparisons": len(rows), "labels": {label: len(found) for label, found in texts.items()}}
    return _write(Path(config.output), "comparisons.jsonl", rows, counts)


@dataclass(frozen=True)
class ContinuationsConfig:
    """Settings of demonstrations from running text: each paragraph's opening is the prompt, the rest the response.

    Attributes:
        source: rows of text.
        output: directory of `demonstrations.jsonl` (which serves as prompts too) and `results.json`, the counts.
        prompt_sentences: sentences of the opening.
        response_sentences: at most so many after it; None: the rest of the paragraph.
        least: characters that prompt and response must have each; paragraphs with less are left out.
    """

    source: str | list[str]
    output: str
    prompt_sentences: int = 1
    response_sentences: int | None = None
    least: int = 20

    def __post_init__(self) -> None:
        for name in ("prompt_sentences", "response_sentences"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.least < 0:
            raise ValueError(f"least must not be negative, got {self.least}; 0 keeps every paragraph")


def run_continuations(config: ContinuationsConfig) -> Path:
    """Write the openings of all paragraphs and what follows them, and return the directory.

    Raises:
        UserError: bad rows; no paragraph that is long enough.
    """
    records: list[Any] = read_rows(config.source, "text")[0]
    paragraphs = [part for record in records for part in record.text.split("\n\n") if part.strip()]
    rows = list(_continuations(paragraphs, config))
    if not rows:
        raise UserError(f"{config.source}: no paragraph is long enough; lower `prompt_sentences` or `least`")
    counts = {"demonstrations": len(rows), "paragraphs": len(paragraphs)}
    return _write(Path(config.output), "demonstrations.jsonl", rows, counts)


def _continuations(paragraphs: list[str], config: ContinuationsConfig) -> Iterator[dict[str, str]]:
    for paragraph in paragraphs:
        sentences = SENTENCE_END.split(paragraph.strip())
        last = None if config.response_sentences is None else config.prompt_sentences + config.response_sentences
        prompt = " ".join(sentences[: config.prompt_sentences])
        response = " ".join(sentences[config.prompt_sentences : last])
        if min(len(prompt), len(response)) >= config.least:
            yield {"prompt": prompt, "completion": f" {response}"}  # joined as they are, they are the text again


def _write(output: Path, name: str, rows: list[dict[str, str]], counts: Mapping[str, object]) -> Path:
    write_text(output / name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    write_json(output / "results.json", counts)
    return output

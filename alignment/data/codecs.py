"""How examples of each kind lie in the columns of a table: one codec per kind. The tables are in table.py.

The responses to one prompt are stored after one copy of it, and a mask as the lengths of its runs, beginning with those
tokens that do not count.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from alignment.data.examples import (
    Example,
    LabeledExample,
    PairExample,
    PromptExample,
    RankedExample,
    StepExample,
    TokenizedRow,
)

ColumnType = Literal["integers", "integer", "number", "flag", "text"]
Row = TypeVar("Row", bound=TokenizedRow)


@dataclass(frozen=True)
class Codec(Generic[Row]):
    """The columns of one kind of example.

    Attributes:
        kind: name of the codec, kept with a table.
        columns: type of each column by name. `number` may be None, the other types may not.
        encode: example -> the values of its columns, in their order. Name and source of the row are not among them.
        decode: name and source of the row, then the values -> the example.
    """

    kind: str
    columns: dict[str, ColumnType]
    encode: Callable[[Row], tuple[Any, ...]]
    decode: Callable[..., Row]


def runs_of(mask: Sequence[bool]) -> list[int]:
    """Lengths of the runs of equal values in a mask; the first run is of False, and may be empty."""
    values, runs, start, value = bytes(mask), [], 0, 1
    while start < len(values):
        end = values.find(value, start)
        end = len(values) if end < 0 else end
        runs.append(end - start)
        start, value = end, 1 - value
    return runs


def mask_of(runs: Sequence[int]) -> list[bool]:
    """The mask with these runs."""
    mask: list[bool] = []
    for number, length in enumerate(runs):
        mask += [number % 2 == 1] * length
    return mask


def shared_prompt(documents: Sequence[Example]) -> int:
    """Number of tokens at the beginning that are the same in all documents and count in none."""
    length = min(len(mask) if (first := bytes(mask).find(1)) < 0 else first for mask in (d.mask for d in documents))
    prompt = documents[0].ids[:length]
    return length if all(document.ids[:length] == prompt for document in documents[1:]) else 0


def _encode_documents(documents: Sequence[Example]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Tokens of the prompt and of each continuation, their numbers, the runs of all masks, and their numbers."""
    prompt = shared_prompt(documents)
    tokens, parts = documents[0].ids[:prompt], [prompt]
    runs: list[int] = []
    counts: list[int] = []
    for document in documents:
        tokens += document.ids[prompt:]
        parts.append(len(document.ids) - prompt)
        mask = runs_of(document.mask)
        runs += mask
        counts.append(len(mask))
    return tokens, parts, runs, counts


def _decode_documents(row_id: str, source: int, values: Sequence[list[int]]) -> list[Example]:
    tokens, parts, runs, counts = values
    prompt, start, first = tokens[: parts[0]], parts[0], 0
    documents = []
    for part, count in zip(parts[1:], counts, strict=True):
        mask = mask_of(runs[first : first + count])
        documents.append(Example(prompt + tokens[start : start + part], mask, row_id, source))
        start, first = start + part, first + count
    return documents


DOCUMENTS: dict[str, ColumnType] = {
    "tokens": "integers", "parts": "integers", "runs": "integers", "run_counts": "integers"
}  # fmt: skip


def _example(row_id: str, source: int, tokens: list[int], runs: list[int]) -> Example:
    return Example(tokens, mask_of(runs), row_id, source)


def _pair(row_id: str, source: int, *values: Any) -> PairExample:
    *documents, margin = values
    chosen, rejected = _decode_documents(row_id, source, documents)
    return PairExample(chosen, rejected, margin, row_id, source)


def _ranked(row_id: str, source: int, *values: Any) -> RankedExample:
    *documents, ranks, margin = values
    return RankedExample(tuple(_decode_documents(row_id, source, documents)), tuple(ranks), row_id, source, margin)


def _labeled(row_id: str, source: int, tokens: list[int], runs: list[int], desirable: bool) -> LabeledExample:
    return LabeledExample(_example(row_id, source, tokens, runs), desirable, row_id, source)


def _steps(row_id: str, source: int, tokens: list[int], ends: list[int], labels: list[int]) -> StepExample:
    return StepExample(tokens, tuple(ends), tuple(map(bool, labels)), row_id, source)


def _encode_prompt(example: PromptExample) -> tuple[Any, ...]:
    prompt, extra = (json.dumps(value, default=str) for value in (example.prompt, example.extra))
    return example.ids, prompt, extra, example.cut


def _prompt(row_id: str, source: int, *values: Any) -> PromptExample:
    tokens, prompt, extra, cut = values
    return PromptExample(tokens, json.loads(prompt), json.loads(extra), row_id, cut, source)


EXAMPLES: Codec[Example] = Codec(
    "examples",
    {"tokens": "integers", "runs": "integers"},
    lambda example: (example.ids, runs_of(example.mask)),
    _example,
)
PAIRS: Codec[PairExample] = Codec(
    "pairs",
    {**DOCUMENTS, "margin": "number"},
    lambda pair: (*_encode_documents([pair.chosen, pair.rejected]), pair.margin),
    _pair,
)
PROMPTS: Codec[PromptExample] = Codec(
    "prompts",
    {"tokens": "integers", "prompt": "text", "extra": "text", "cut": "flag"},
    _encode_prompt,
    _prompt,
)
LABELED: Codec[LabeledExample] = Codec(
    "labeled",
    {"tokens": "integers", "runs": "integers", "desirable": "flag"},
    lambda row: (row.example.ids, runs_of(row.example.mask), row.desirable),
    _labeled,
)
RANKED: Codec[RankedExample] = Codec(
    "ranked",
    {**DOCUMENTS, "ranks": "integers", "margin": "number"},
    lambda row: (*_encode_documents(row.responses), row.ranks, row.margin),
    _ranked,
)
STEPS: Codec[StepExample] = Codec(
    "steps",
    {"tokens": "integers", "ends": "integers", "labels": "integers"},
    lambda row: (row.ids, row.ends, row.labels),
    _steps,
)

CODECS: dict[str, Codec[Any]] = {  # kind of rows -> codec of its examples
    "text": EXAMPLES,
    "demonstrations": EXAMPLES,
    "comparisons": PAIRS,
    "prompts": PROMPTS,
    "labels": LABELED,
    "rankings": RANKED,
    "steps": STEPS,
}

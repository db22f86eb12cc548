"""Labeled rows of the downstream tasks: how they are read, and their labels."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alignment.data.config import SourceConfig, as_sources
from alignment.data.rows.fields import BadRow, number_field, text_field, type_name
from alignment.data.rows.files import read_raw
from alignment.data.rows.read import ParsedRows, parse_rows, read_sources
from alignment.data.rows.records import Columns, Tally
from alignment.errors import UserError, raise_all

FinetuneTask = Literal[
    "classification", "pair_classification", "token_classification", "question_answering", "multiple_choice"
]


@dataclass(frozen=True, slots=True)
class LabeledRow:
    """A row of a downstream task.

    Attributes:
        inputs: text and None, or both texts of a pair; a list of words; question and context; context and list of choices.
        labels: the class; the class of each word; each answer as its text and the index of its first character in the
            context, none where the context does not answer; the index of the right choice.
        row_id: name of the data row.
    """

    inputs: tuple[Any, ...]
    labels: tuple[Any, ...]
    row_id: str

    @property
    def content(self) -> str:
        """A key that is equal for rows that differ only in their labels."""
        return repr(list(self.inputs))


def read_labeled(
    source: str | SourceConfig | Sequence[str | SourceConfig],
    task: FinetuneTask,
    *,
    split: str = "train",
    columns: dict[str, str] | None = None,
    max_rows: int | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
) -> tuple[list[LabeledRow], Tally]:
    """The labeled rows of one or several sources, in order, and the tally of dropped ones.

    Columns by task: classification `text`, `label`; pair_classification `text`, `pair`, `label`; token_classification
    `words`, `labels` (lists of equal length); question_answering `question`, `context`, `answers` (a list of
    {text, answer_start}, or SQuAD's two lists); multiple_choice `context`, `choices`, `label` (index of the right choice).

    Args:
        columns: our column name -> the source's, where they differ: {"text": "sentence1", "pair": "sentence2"}.
        max_rows: the largest number of good rows.
        on_bad_row: "error" reports all bad rows at once (up to 20); "skip" drops and counts them.

    Raises:
        UserError: no such source or task, bad rows, or no row at all.
    """
    if task not in READERS:
        raise UserError(f"unknown task {task!r}; known: {', '.join(READERS)}")

    def read(each: SourceConfig, left: int | None) -> ParsedRows[LabeledRow]:
        return parse_rows(
            read_raw(each.source, str(each.split)),
            lambda values, row_id: LabeledRow(*READERS[task](values), row_id),
            columns=each.columns or {},
            max_rows=left,
        )

    return read_sources(as_sources(source, split=split, columns=columns), read, max_rows, on_bad_row)


Values = tuple[tuple[Any, ...], tuple[Any, ...]]  # inputs and labels of a row


def _words(row: Columns) -> Values:
    words, labels = _texts(row, "words"), tuple(_label(label, "labels") for label in _list(row, "labels"))
    if len(words) != len(labels):
        raise BadRow("labels", "must be as many as words", f"{len(labels)} labels, {len(words)} words")
    return (words,), labels


def _question(row: Columns) -> Values:
    context = text_field(row, "context")
    answers = row.get("answers")
    if isinstance(answers, dict):  # {"text": [...], "answer_start": [...]}, as the datasets library has SQuAD
        texts, starts = _list(answers, "text", empty=True), _list(answers, "answer_start", empty=True)
        if len(texts) != len(starts):
            raise BadRow("answers", "must have as many starts as texts", f"{len(texts)} and {len(starts)}")
        answers = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    if not isinstance(answers, list) or not all(isinstance(answer, dict) for answer in answers):
        raise BadRow("answers", f"must be a list of text and answer_start, is {type_name(answers)}")
    return (text_field(row, "question"), context), tuple(_answer(answer, context) for answer in answers)


def _answer(answer: Columns, context: str) -> tuple[str, int]:
    text, start = text_field(answer, "text"), number_field(answer, "answer_start")
    if start is None or start < 0 or context[int(start) : int(start) + len(text)] != text:
        raise BadRow("answers", "answer_start is not where the answer stands in the context", f"{text[:30]!r}, {start}")
    return text, int(start)


def _choice(row: Columns) -> Values:
    choices, number = _texts(row, "choices"), number_field(row, "label")
    if number is None or number != int(number) or not 0 <= number < len(choices):
        raise BadRow("label", "must be the number of a choice, from 0", f"{row.get('label')!r} of {len(choices)}")
    return (text_field(row, "context"), choices), (int(number),)


def _texts(row: Columns, key: str) -> list[str]:
    return [text_field({key: text}, key) for text in _list(row, key)]


def _list(row: Columns, key: str, *, empty: bool = False) -> list[Any]:
    value = row.get(key)
    if not isinstance(value, list) or not (value or empty):
        raise BadRow(key, "must be a list that is not empty" if not empty else "must be a list", type_name(value))
    return value


def _label(value: object, key: str = "label") -> str:
    """The name of a label: text, or a whole number as text; -1, GLUE's value for unlabeled rows, is refused."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int) or value in ("", -1):
        raise BadRow(key, "must be a label: text or a whole number", f"{value!r}")
    return str(value)


READERS: dict[str, Callable[[Columns], Values]] = {
    "classification": lambda row: ((text_field(row, "text"), None), (_label(row.get("label")),)),
    "pair_classification": lambda row: (
        (text_field(row, "text"), text_field(row, "pair")),
        (_label(row.get("label")),),
    ),
    "token_classification": _words,
    "question_answering": _question,
    "multiple_choice": _choice,
}


def label_names(rows: Iterable[LabeledRow]) -> dict[int, str]:
    """`id2label` of a model's config: the labels that occur, sorted, by value if all are numbers.

    Raises:
        UserError: fewer than two labels.
    """
    names = {name for row in rows for name in row.labels}
    if len(names) < 2:
        raise UserError(f"all rows have the same label {', '.join(names)!r}; a classifier needs at least two")
    numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return dict(enumerate(sorted(names, key=int if numbers else None)))


def label_ids(rows: Iterable[LabeledRow], names: Mapping[int, str]) -> dict[str, int]:
    """The id of each label name.

    Raises:
        UserError: rows with labels that `names` lacks, as held-out rows may have.
    """
    ids = {name: number for number, name in names.items()}
    raise_all(
        f"{row.row_id}: label {', '.join(map(repr, unknown))} is unknown; known: {', '.join(ids)}"
        for row in rows
        if (unknown := sorted(set(row.labels) - ids.keys()))
    )
    return ids

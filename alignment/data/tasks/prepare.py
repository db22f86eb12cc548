"""Labeled rows as examples for a downstream task, from a data config in one call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from alignment.data.config import NO_STREAMING, DataConfig, Part
from alignment.data.held_out import rows_of_part
from alignment.data.prepare import require_enough
from alignment.data.rows.read import overlap
from alignment.data.rows.records import Tally
from alignment.data.tasks.rows import FinetuneTask, content_key, label_names, read_labeled
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError

Encode = Callable[..., tuple[list[Any], Tally]]  # rows, tokenizer, max_length [, names] -> examples


@dataclass(frozen=True)
class LabeledExamples:
    """One part of the labeled data.

    Attributes:
        examples: in the form that the task's `collate_*` takes.
        rows: the rows read; a `SpanExample` names its row by index.
        counts: tally of rows dropped and cut.
        names: id2label; empty for questions and choices.
    """

    examples: list[Any]
    rows: list[Any]
    counts: Tally
    names: dict[int, str]


def prepare_labeled(
    config: DataConfig,
    task: FinetuneTask,
    tokenizer: Tokenizer,
    encode: Encode,
    part: Part = "train",
    *,
    names: dict[int, str] | None = None,
    **options: int,
) -> LabeledExamples:
    """The examples of one part of labeled data.

    Args:
        encode: the function `encode_*` of data/tasks/ for the task and the form of the model's inputs.
        names: id2label that the rows must keep to; None: made from the rows.
        options: of `encode_questions`: `stride`, `max_question`.

    Raises:
        UserError: bad rows, unknown labels; more rows lost than `config.max_lost_share`; no data named for this part.
    """
    every, read = _read_part(config, task, part)
    rows = every
    if config.evaluation_share is not None:
        rows, read = rows_of_part(every, read, content_key, config, part)
    if task in ("question_answering", "multiple_choice"):
        names = {}
        examples, tokenized = encode(rows, tokenizer, config.max_length, **options)
    else:
        names = label_names(every) if names is None else names
        examples, tokenized = encode(rows, tokenizer, config.max_length, names)
    counts = require_enough(read.followed_by(tokenized), config, part)
    if part == "evaluation" and config.evaluation_share is None:
        counts.trained_on = overlap(_read_part(config, task, "train")[0], rows, content_key)
    return LabeledExamples(examples, rows, counts, names)


def _read_part(config: DataConfig, task: FinetuneTask, part: Part) -> tuple[list[Any], Tally]:
    if config.streaming:
        raise UserError(NO_STREAMING)
    return read_labeled(
        config.require_sources(part),
        task,
        max_rows=config.max_rows,
        on_bad_row=config.on_bad_row,
    )

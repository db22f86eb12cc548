"""Questions about a context to token sequences: windows over long contexts, answers as first and last token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alignment.data.pretraining.examples import measured
from alignment.data.rows.records import Tally
from alignment.data.tasks.classification import grouped, ragged_of, text_budget
from alignment.data.tasks.rows import Question
from alignment.data.text.special_tokens import (
    EncodedText,
    SpecialTokenTemplate,
    TokenizedText,
    frame_of,
    tokenize_with_offsets,
)
from alignment.errors import UserError
from alignment.ragged import RaggedBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

QUESTION_CUT = "question longer than max_question: its end cut off"
NO_ANSWER_HERE = "windows without the answer: labeled with the first token"
ANSWER_NOWHERE = "answer in no window as a whole: it is never seen"


@dataclass(frozen=True, slots=True)
class SpanExample:
    """A question with one window of its context.

    Attributes:
        start: the answer's first token; 0 where the window does not hold the answer.
        end: its last token, itself included.
        offsets: characters of the context behind each token, None outside the context, [N].
        question: number of the row it is a window of.
    """

    framed: EncodedText
    start: int
    end: int
    offsets: list[tuple[int, int] | None]
    question: int
    row_id: str


@dataclass(frozen=True)
class SpanBatch(RaggedBatch):
    """B windows; their answers' first and last tokens as indices into `ragged.tokens`, [B]. Its weight is B."""

    answer_starts: Tensor
    answer_ends: Tensor

    @property
    def weight(self) -> float:
        """Windows that count."""
        return float(len(self.answer_starts))


def encode_questions(
    rows: Sequence[Question],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    stride: int = 128,
    max_question: int = 64,
) -> tuple[list[SpanExample], Tally]:
    """Question and context as a pair, a long context in overlapping windows, the answer as first and last token.

    The first answer of a row is the one to learn. A window that does not hold all of it, and every window of a
    question without an answer, points at its first token.

    Args:
        stride: tokens from the start of one window to the start of the next.
        max_question: tokens that are left of a longer question.

    Raises:
        UserError: `stride` is longer than a window, so that text would be skipped, or there is no room for context.

    Source: Devlin et al. 2019, arXiv:1810.04805, sections 4.2 and 4.3; windows: google-research/bert, run_squad.py.
    """
    frame, counts, examples = frame_of(tokenizer), Tally(rows=len(rows), kept=len(rows)), []
    questions = tokenize_with_offsets(tokenizer, [row.question for row in rows])
    contexts = tokenize_with_offsets(tokenizer, [row.context for row in rows])
    for number, (row, question, context) in enumerate(zip(rows, questions, contexts, strict=True)):
        if len(question.ids) > max_question:
            counts.shorten(QUESTION_CUT, row.row_id)
        asked = question.ids[:max_question]
        room = text_budget(max_length, frame.pair_size + len(asked))
        if not 1 <= stride <= room:
            raise UserError(f"stride must be from 1 to the {room} tokens that a window has room for, got {stride}")
        answer = token_span(context, *row.answers[0]) if row.answers else None
        made = [
            _window(frame, asked, context, first, room, answer, number, row.row_id)
            for first in window_starts(len(context.ids), room, stride)
        ]
        without = sum(window.start == 0 for window in made)
        for _ in range(without):
            counts.shorten(NO_ANSWER_HERE, row.row_id)
        if row.answers and without == len(made):
            counts.shorten(ANSWER_NOWHERE, row.row_id)
        examples += made
    return examples, measured(counts, [example.framed.ids for example in examples])


def window_starts(length: int, room: int, stride: int) -> list[int]:
    """First tokens of windows of `room` tokens, `stride` apart; the last one reaches the end."""
    return list(range(0, max(1, length - room + stride), stride))


def token_span(pieces: TokenizedText, answer: str, start: int) -> tuple[int, int] | None:
    """First and last token that hold the answer's characters; None where the tokenizer has none for them."""
    stop = start + len(answer)
    held = [place for place, (first, last) in enumerate(pieces.offsets) if first < stop and last > start]
    return (held[0], held[-1]) if held else None


def _window(
    frame: SpecialTokenTemplate,
    question: list[int],
    context: TokenizedText,
    first: int,
    room: int,
    answer: tuple[int, int] | None,
    number: int,
    row_id: str,
) -> SpanExample:
    framed = frame.pair(question, context.ids[first : first + room])
    shift, own = framed.starts[1], context.offsets[first : first + room]
    offsets: list[tuple[int, int] | None] = [None] * len(framed.ids)
    offsets[shift : shift + len(own)] = own
    start, end = (0, 0)
    if answer is not None and first <= answer[0] and answer[1] < first + room:
        start, end = (place - first + shift for place in answer)
    return SpanExample(framed, start, end, offsets, number, row_id)


def collate_spans(examples: Sequence[SpanExample], micro_batch_tokens: int) -> list[SpanBatch]:
    """Windows with their answers as batches, as `collate_classes`."""
    batches = []
    for group in grouped(examples, micro_batch_tokens):
        ragged = ragged_of(group)
        starts, ends = (torch.tensor([getattr(window, side) for window in group]) for side in ("start", "end"))
        batches.append(SpanBatch(ragged, ragged.firsts + starts, ragged.firsts + ends))
    return batches

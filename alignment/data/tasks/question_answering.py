"""Examples and batches of extractive question answering: overlapping windows over the context, answers as token spans."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.data.rows.records import Tally
from alignment.data.tasks.classification import build_ragged, group_encoded
from alignment.data.tasks.rows import Question
from alignment.data.text.special_tokens import (
    EncodedText,
    SpecialTokenTemplate,
    TokenizedText,
    special_token_template,
    tokenize_with_offsets,
)
from alignment.data.text.truncation import text_budget
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.ragged import RaggedBatch

QUESTION_CUT = "question longer than max_question: its end cut off"
NO_ANSWER_HERE = "windows without the answer: labeled with the first token"
ANSWER_NOWHERE = "answer in no window as a whole: it is never seen"


@dataclass(frozen=True, slots=True)
class SpanExample:
    """A question with one window of its context.

    Attributes:
        start: the answer's first token; 0 where the window does not contain the answer.
        end: its last token, itself included.
        offsets: first character in the context of each token and the one after its last; None outside the context, [N].
        question: index of the question's row.
    """

    encoded: EncodedText
    start: int
    end: int
    offsets: list[tuple[int, int] | None]
    question: int
    row_id: str

    @property
    def documents(self) -> list[list[int]]:
        """The one token sequence."""
        return [self.encoded.ids]


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
    tokenizer: Tokenizer,
    max_length: int,
    *,
    stride: int = 128,
    max_question: int = 64,
) -> tuple[list[SpanExample], Tally]:
    """Question and context as a pair, a long context in overlapping windows, the answer as first and last token.

    The first answer of a row is the label. A window that does not contain all of it, and every window of a question
    without an answer, is labeled with its first token.

    Args:
        stride: tokens from the start of one window to the start of the next.
        max_question: tokens that a longer question is truncated to.

    Raises:
        UserError: `stride` is longer than a window, so that text would be skipped, or there is no room for context.

    Source: Devlin et al. 2019, arXiv:1810.04805, sections 4.2 and 4.3; windows: google-research/bert, run_squad.py.
    """
    template, counts, examples = special_token_template(tokenizer), Tally(rows=len(rows), kept=len(rows)), []
    questions = tokenize_with_offsets(tokenizer, [row.question for row in rows])
    contexts = tokenize_with_offsets(tokenizer, [row.context for row in rows])
    for number, (row, question, context) in enumerate(zip(rows, questions, contexts, strict=True)):
        if len(question.ids) > max_question:
            counts.note_cut(QUESTION_CUT, row.row_id)
        question_ids = question.ids[:max_question]
        budget = text_budget(max_length, template.pair_size + len(question_ids))
        if not 1 <= stride <= budget:
            raise UserError(f"stride must be from 1 to the {budget} tokens that a window has room for, got {stride}")
        answer = token_span(context, *row.answers[0]) if row.answers else None
        windows = [
            _window(template, question_ids, context, first, budget, answer=answer, question=number, row_id=row.row_id)
            for first in window_starts(len(context.ids), budget, stride)
        ]
        without = sum(window.start == 0 for window in windows)
        for _ in range(without):
            counts.note_cut(NO_ANSWER_HERE, row.row_id)
        if row.answers and without == len(windows):
            counts.note_cut(ANSWER_NOWHERE, row.row_id)
        examples += windows
    return examples, counts.with_documents(example.encoded.ids for example in examples)


def window_starts(length: int, size: int, stride: int) -> list[int]:
    """First tokens of windows of `size` tokens, `stride` apart; the last window reaches the end of the text."""
    return list(range(0, max(1, length - size + stride), stride))


def token_span(text: TokenizedText, answer: str, start: int) -> tuple[int, int] | None:
    """First and last token of an answer; None where no token covers a character of it.

    Args:
        start: the answer's first character in the text.
    """
    stop = start + len(answer)
    inside = [index for index, (first, last) in enumerate(text.offsets) if first < stop and last > start]
    return (inside[0], inside[-1]) if inside else None


def _window(
    template: SpecialTokenTemplate,
    question_ids: list[int],
    context: TokenizedText,
    first: int,
    size: int,
    *,
    answer: tuple[int, int] | None,
    question: int,
    row_id: str,
) -> SpanExample:
    """The question with tokens `first` .. `first + size` of the context."""
    encoded = template.pair(question_ids, context.ids[first : first + size])
    shift, inside = encoded.starts[1], context.offsets[first : first + size]
    offsets: list[tuple[int, int] | None] = [None] * len(encoded.ids)
    offsets[shift : shift + len(inside)] = inside
    start, end = (0, 0)
    if answer is not None and first <= answer[0] and answer[1] < first + size:
        start, end = (token - first + shift for token in answer)
    return SpanExample(encoded, start, end, offsets, question, row_id)


def collate_spans(examples: Sequence[SpanExample], micro_batch_tokens: int) -> list[SpanBatch]:
    """Windows with their answers as batches of at most `micro_batch_tokens` tokens; a longer window is one of its own."""
    batches = []
    for group in group_encoded(examples, micro_batch_tokens):
        ragged = build_ragged(group)
        starts = torch.tensor([window.start for window in group])
        ends = torch.tensor([window.end for window in group])
        batches.append(SpanBatch(ragged, ragged.firsts + starts, ragged.firsts + ends))
    return batches

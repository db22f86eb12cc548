"""Labeled rows to token sequences and batches: classes of texts, of pairs and of words.

Questions are in questions.py, GPT-1's formats in gpt_formats.py; metrics are no affair of the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

from alignment.data.pretraining.corruption import cut_pair
from alignment.data.pretraining.examples import measured
from alignment.data.rows.records import Tally
from alignment.data.tasks.rows import LabeledText, LabeledWords, require_labels
from alignment.data.text.special_tokens import EncodedText, TokenizedText, frame_of, tokenize_with_offsets
from alignment.errors import UserError
from alignment.ragged import Ragged, RaggedBatch, group_rows_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

IGNORED = -100  # label of a token that counts nothing, as torch's cross_entropy has it

TEXT_END_CUT = "text longer than max_length: its end cut off"
PAIR_CUT = "pair longer than max_length: the longer text's end cut off"
WORDS_CUT = "words beyond max_length: cut off with their labels"
WORDS_LOST = "words without a token of their own: their labels are lost"
NO_TEXT = "text of which the tokenizer makes no token"


@dataclass(frozen=True, slots=True)
class ClassExample:
    """A text or pair between its special tokens, and the id of its class."""

    framed: EncodedText
    label: int
    row_id: str


@dataclass(frozen=True, slots=True)
class TokenExample:
    """A text between its special tokens; `labels` is the class of a word at its first token, else `IGNORED`, [N]."""

    framed: EncodedText
    labels: list[int]
    row_id: str


@dataclass(frozen=True)
class LabeledBatch(RaggedBatch):
    """Texts with classes. Its weight is the number of labels that count.

    Attributes:
        labels: class of each document, [B]; or of each token, `IGNORED` where none counts, [N].
    """

    labels: Tensor


def encode_sequences(
    rows: Sequence[LabeledText], tokenizer: PreTrainedTokenizerBase, max_length: int, names: dict[int, str]
) -> tuple[list[ClassExample], Tally]:
    """Texts or pairs as the tokenizer frames them, cut to `max_length` at their ends.

    Args:
        names: id2label, from `label_names` of the training rows or from a checkpoint.

    Raises:
        UserError: labels that `names` lacks.
    """
    frame, ids, counts = frame_of(tokenizer), require_labels(rows, names), Tally(rows=len(rows))
    firsts = tokenize_with_offsets(tokenizer, [row.text for row in rows])
    seconds = tokenize_with_offsets(tokenizer, [row.pair or "" for row in rows])
    examples = []
    for row, first, second in zip(rows, firsts, seconds, strict=True):
        if not first.ids or (row.pair is not None and not second.ids):
            counts.drop(NO_TEXT, row.row_id)
            continue
        room = text_budget(max_length, frame.size if row.pair is None else frame.pair_size)
        second_ids = [] if row.pair is None else second.ids
        kept, kept_second = cut_pair(first.ids, second_ids, room)
        if len(first.ids) + len(second_ids) > room:
            counts.shorten(TEXT_END_CUT if row.pair is None else PAIR_CUT, row.row_id)
        framed = frame.single(kept) if row.pair is None else frame.pair(kept, kept_second)
        examples.append(ClassExample(framed, ids[row.label], row.row_id))
    counts.kept = len(examples)
    return examples, measured(counts, [example.framed.ids for example in examples])


def text_budget(max_length: int, special: int) -> int:
    """Tokens of text that fit beside the special ones.

    Raises:
        UserError: fewer than two.
    """
    if max_length - special < 2:
        raise UserError(f"data.max_length {max_length} leaves no room beside {special} special tokens; raise it")
    return max_length - special


def encode_words(
    rows: Sequence[LabeledWords], tokenizer: PreTrainedTokenizerBase, max_length: int, names: dict[int, str]
) -> tuple[list[TokenExample], Tally]:
    """Words joined by blanks; each word's label stands at its first token, its other tokens count nothing.

    Raises:
        UserError: labels that `names` lacks.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 5.3.
    """
    frame, ids, counts = frame_of(tokenizer), require_labels(rows, names), Tally(rows=len(rows), kept=len(rows))
    room, examples = text_budget(max_length, frame.size), []
    for row, pieces in zip(rows, tokenize_with_offsets(tokenizer, [" ".join(row.words) for row in rows]), strict=True):
        firsts = first_tokens(row.words, pieces)
        kept = {place: ids[label] for place, label in zip(firsts, row.labels, strict=True) if place is not None}
        for _ in range(firsts.count(None)):
            counts.shorten(WORDS_LOST, row.row_id)
        for _ in range(sum(place >= room for place in kept)):
            counts.shorten(WORDS_CUT, row.row_id)
        framed = frame.single(pieces.ids[:room])
        lead = framed.starts[0]
        labels = [kept.get(place - lead, IGNORED) if own else IGNORED for place, own in enumerate(framed.ordinary)]
        examples.append(TokenExample(framed, labels, row.row_id))
    return examples, measured(counts, [example.framed.ids for example in examples])


def first_tokens(words: Sequence[str], pieces: TokenizedText) -> list[int | None]:
    """The first token of each word in the text of words joined by blanks; None where a word has none to itself."""
    text = " ".join(words)
    owner: list[Any] = []
    for number, word in enumerate(words):
        owner += [number] * len(word) + [None]  # the blank after a word belongs to none
    firsts: list[int | None] = [None] * len(words)
    for place, (start, stop) in enumerate(pieces.offsets):
        inside = next((at for at in range(start, stop) if not text[at].isspace()), None)  # past a token's own blank
        if inside is not None and firsts[owner[inside]] is None:
            firsts[owner[inside]] = place
    return firsts


def collate_classes(examples: Sequence[ClassExample], micro_batch_tokens: int) -> list[LabeledBatch]:
    """Classified texts as batches of at most `micro_batch_tokens` tokens; a longer text stands alone."""
    return [
        LabeledBatch(ragged_of(group), torch.tensor([example.label for example in group]))
        for group in grouped(examples, micro_batch_tokens)
    ]


def collate_token_labels(examples: Sequence[TokenExample], micro_batch_tokens: int) -> list[LabeledBatch]:
    """Texts with classified words as batches, as `collate_classes`."""
    batches = []
    for group in grouped(examples, micro_batch_tokens):
        labels = torch.tensor([label for example in group for label in example.labels])
        ragged = replace(ragged_of(group), weight=float((labels != IGNORED).sum()))
        batches.append(LabeledBatch(ragged, labels))
    return batches


class Labeled(Protocol):
    """An example that lies between special tokens and knows its row."""

    @property
    def framed(self) -> EncodedText: ...
    @property
    def row_id(self) -> str: ...


Example = TypeVar("Example", bound=Labeled)


def grouped(examples: Sequence[Example], micro_batch_tokens: int) -> list[list[Example]]:
    """Examples in groups of like length, each of at most `micro_batch_tokens` tokens, the longest first."""
    return group_rows_by_length(examples, [len(example.framed.ids) for example in examples], micro_batch_tokens)


def ragged_of(group: Sequence[Labeled]) -> Ragged:
    """Examples end to end, weight their number; segments only where one has a second sentence marked."""
    ragged = Ragged.build(
        [example.framed.ids for example in group], weight=len(group), row_ids=[example.row_id for example in group]
    )
    segments = torch.tensor([segment for example in group for segment in example.framed.segments])
    return replace(ragged, segments=segments) if segments.any() else ragged

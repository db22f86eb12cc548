"""Examples and batches of text, pair and token classification, with the tokenizer's own special tokens.

GPT-1's inputs for the same tasks are in gpt1_inputs.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from alignment.data.rows.records import Tally
from alignment.data.tasks.rows import LabeledText, LabeledWords, require_labels
from alignment.data.text.special_tokens import EncodedText, TokenizedText, special_token_template, tokenize_with_offsets
from alignment.data.text.truncation import text_budget, truncate_pair
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.losses.classification import IGNORED
from alignment.ragged import Ragged, RaggedBatch, group_rows_by_length

TEXT_END_CUT = "text longer than max_length: its end cut off"
PAIR_CUT = "pair longer than max_length: the longer text's end cut off"
WORDS_CUT = "words beyond max_length: cut off with their labels"
WORDS_LOST = "words without a token of their own: their labels are lost"
NO_TEXT = "text of which the tokenizer makes no token"


@dataclass(frozen=True, slots=True)
class ClassExample:
    """A text or pair with its special tokens, and the id of its class."""

    encoded: EncodedText
    label: int
    row_id: str

    @property
    def documents(self) -> list[list[int]]:
        """The one token sequence."""
        return [self.encoded.ids]


@dataclass(frozen=True, slots=True)
class TokenExample:
    """A text with its special tokens; `labels` is the class of a word at its first token, else `IGNORED`, [N]."""

    encoded: EncodedText
    labels: list[int]
    row_id: str

    @property
    def documents(self) -> list[list[int]]:
        """The one token sequence."""
        return [self.encoded.ids]


@dataclass(frozen=True)
class LabeledBatch(RaggedBatch):
    """Texts with classes. Its weight is the number of labels that count.

    Attributes:
        labels: class of each document, [B]; or of each token, `IGNORED` where none counts, [N].
    """

    labels: Tensor


def encode_texts(
    rows: Sequence[LabeledText], tokenizer: Tokenizer, max_length: int, names: dict[int, str]
) -> tuple[list[ClassExample], Tally]:
    """Texts or pairs with the tokenizer's special tokens, truncated to `max_length` at their ends.

    Args:
        names: id2label, from `label_names` of the training rows or from a checkpoint.

    Raises:
        UserError: labels that `names` lacks.
    """
    template, ids, counts = special_token_template(tokenizer), require_labels(rows, names), Tally(rows=len(rows))
    firsts = tokenize_with_offsets(tokenizer, [row.text for row in rows])
    seconds = tokenize_with_offsets(tokenizer, [row.pair or "" for row in rows])
    examples = []
    for row, first, second in zip(rows, firsts, seconds, strict=True):
        if not first.ids or (row.pair is not None and not second.ids):
            counts.drop(NO_TEXT, row.row_id)
            continue
        budget = text_budget(max_length, template.size if row.pair is None else template.pair_size)
        second_ids = [] if row.pair is None else second.ids
        kept, kept_second = truncate_pair(first.ids, second_ids, budget)
        if len(first.ids) + len(second_ids) > budget:
            counts.note_cut(TEXT_END_CUT if row.pair is None else PAIR_CUT, row.row_id)
        encoded = template.single(kept) if row.pair is None else template.pair(kept, kept_second)
        examples.append(ClassExample(encoded, ids[row.label], row.row_id))
    counts.kept = len(examples)
    return examples, counts.with_documents(example.encoded.ids for example in examples)


def encode_words(
    rows: Sequence[LabeledWords], tokenizer: Tokenizer, max_length: int, names: dict[int, str]
) -> tuple[list[TokenExample], Tally]:
    """Words joined by blanks; each word's label is that of its first token, its other tokens are ignored.

    Raises:
        UserError: labels that `names` lacks.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 5.3.
    """
    template, ids = special_token_template(tokenizer), require_labels(rows, names)
    counts = Tally(rows=len(rows), kept=len(rows))
    budget, examples = text_budget(max_length, template.size), []
    for row, text in zip(rows, tokenize_with_offsets(tokenizer, [" ".join(row.words) for row in rows]), strict=True):
        firsts = first_tokens(row.words, text)
        kept = {first: ids[label] for first, label in zip(firsts, row.labels, strict=True) if first is not None}
        for _ in range(firsts.count(None)):
            counts.note_cut(WORDS_LOST, row.row_id)
        for _ in range(sum(first >= budget for first in kept)):
            counts.note_cut(WORDS_CUT, row.row_id)
        encoded = template.single(text.ids[:budget])
        shift = encoded.starts[0]
        labels = [
            kept.get(position - shift, IGNORED) if is_text else IGNORED
            for position, is_text in enumerate(encoded.is_text)
        ]
        examples.append(TokenExample(encoded, labels, row.row_id))
    return examples, counts.with_documents(example.encoded.ids for example in examples)


def first_tokens(words: Sequence[str], tokenized: TokenizedText) -> list[int | None]:
    """Index of each word's first token; None for a word without a token of its own.

    Args:
        tokenized: the words joined by blanks.
    """
    text = " ".join(words)
    word_of: list[int | None] = []  # by character
    for number, word in enumerate(words):
        word_of += [number] * len(word) + [None]  # the blank after a word belongs to no word
    firsts: list[int | None] = [None] * len(words)
    for index, (start, stop) in enumerate(tokenized.offsets):
        inside = next((at for at in range(start, stop) if not text[at].isspace()), None)  # skip the token's own blank
        word = None if inside is None else word_of[inside]
        if word is not None and firsts[word] is None:
            firsts[word] = index
    return firsts


def collate_classes(examples: Sequence[ClassExample], micro_batch_tokens: int) -> list[LabeledBatch]:
    """Classified texts as batches of at most `micro_batch_tokens` tokens; a longer text is a batch of its own."""
    return [
        LabeledBatch(build_ragged(group), torch.tensor([example.label for example in group]))
        for group in group_encoded(examples, micro_batch_tokens)
    ]


def collate_token_labels(examples: Sequence[TokenExample], micro_batch_tokens: int) -> list[LabeledBatch]:
    """Texts with classified words as batches of at most `micro_batch_tokens` tokens; a longer text is one of its own."""
    batches = []
    for group in group_encoded(examples, micro_batch_tokens):
        labels = torch.tensor([label for example in group for label in example.labels])
        ragged = replace(build_ragged(group), weight=float((labels != IGNORED).sum()))
        batches.append(LabeledBatch(ragged, labels))
    return batches


class EncodedExample(Protocol):
    """An example with one encoded text or pair."""

    @property
    def encoded(self) -> EncodedText: ...
    @property
    def row_id(self) -> str: ...


AnyEncoded = TypeVar("AnyEncoded", bound=EncodedExample)


def group_encoded(examples: Sequence[AnyEncoded], micro_batch_tokens: int) -> list[list[AnyEncoded]]:
    """Examples in groups of similar length, each of at most `micro_batch_tokens` tokens, the longest first."""
    return group_rows_by_length(examples, [len(example.encoded.ids) for example in examples], micro_batch_tokens)


def build_ragged(examples: Sequence[EncodedExample]) -> Ragged:
    """The examples as one ragged batch, its weight their number; segments only where an example has a second one."""
    ragged = Ragged.build(
        [example.encoded.ids for example in examples],
        weight=len(examples),
        row_ids=[example.row_id for example in examples],
    )
    segments = torch.tensor([segment for example in examples for segment in example.encoded.segments])
    return replace(ragged, segments=segments) if segments.any() else ragged

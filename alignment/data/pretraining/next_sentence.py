"""BERT's pairs: does B follow A? Texts to sentences, sentences to passages, and each epoch's passages to masked pairs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from alignment.data.pretraining.corruption import Masking, cut_pair
from alignment.data.pretraining.examples import (
    MaskableExample,
    MaskTokens,
    SeededRow,
    mask_example,
    masked_batch,
    measured,
    word_starts_in,
)
from alignment.data.rows.records import Tally, Text
from alignment.data.text.special_tokens import SpecialTokenTemplate, frame_of, tokenize_with_offsets
from alignment.errors import UserError
from alignment.ragged import RaggedBatch, group_rows_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FOLLOWS, OTHER = 0, 1
ONE_SENTENCE = "text of fewer than two sentences, which makes no pair"
LONG_SENTENCES = "two sentences longer than max_length: the longer one's end cut off"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")


@dataclass(frozen=True, slots=True)
class Sentence:
    """Ids of a sentence and True where a word begins."""

    ids: list[int]
    word_starts: list[bool]


@dataclass(frozen=True, slots=True)
class Passage:
    """Successive sentences of one text, two at least, that together about fill a pair; `document` numbers the text."""

    sentences: list[Sentence]
    document: int
    row_id: str


@dataclass(frozen=True)
class SentencePairBatch(RaggedBatch):
    """B pairs, masked. Its weight is B.

    Attributes:
        ragged: [CLS] A [SEP] B [SEP], with segments, masked targets and labels; its own weight counts masked tokens.
        labels: 0 where B follows A in its text, 1 where it comes from another, [B].
        cut_tokens: tokens cut off so that pairs fit.
    """

    labels: Tensor
    cut_tokens: int = 0

    @property
    def weight(self) -> float:
        """Pairs that count."""
        return float(len(self.labels))

    @cached_property
    def token_shares(self) -> Tensor:
        """One over the number of masked tokens in its pair, for each masked token, [M].

        With these as factors the masked loss, summed, is a sum of means over pairs, and B is its weight as well: both
        losses of a pair are one term of an update, and do not depend on how the batch is cut.
        """
        counts = torch.bincount(self.ragged.target_rows, minlength=len(self.labels))
        return 1.0 / counts[self.ragged.target_rows]


def sentences_of(text: str) -> list[str]:
    """The text cut after . ! and ? before a blank, and at line breaks; no sentence is empty."""
    return [sentence for sentence in SENTENCE_END.split(text) if sentence.strip()]


def tokenize_passages(
    rows: Sequence[Text], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Passage], Tally]:
    """Texts as passages of successive sentences; each sentence is in one passage.

    Raises:
        UserError: fewer than two texts have two sentences: there is no other text to take a sentence from.
    """
    frame, counts = frame_of(tokenizer), Tally(rows=len(rows))
    room, passages = max_length - frame.pair_size, []
    if room < 2:
        raise UserError(f"data.max_length {max_length} leaves no room for two sentences and {frame.pair_size} marks")
    for document, row in enumerate(rows):
        pieces = tokenize_with_offsets(tokenizer, sentences_of(row.text))
        sentences = [Sentence(piece.ids, piece.word_starts) for piece in pieces if piece.ids]
        if len(sentences) < 2:
            counts.drop(ONE_SENTENCE, row.row_id)
            continue
        counts.kept += 1
        groups = group_sentences([len(sentence.ids) for sentence in sentences], room)
        passages += [Passage(sentences[part], document, row.row_id) for part in groups]
        for part in groups:
            if sum(len(sentence.ids) for sentence in sentences[part]) > room:
                counts.shorten(LONG_SENTENCES, row.row_id)
    if counts.kept < 2:
        raise UserError("sentence pairs need at least two texts of two sentences or more; " + counts.lines()[0])
    return passages, measured(counts, [[i for s in passage.sentences for i in s.ids] for passage in passages])


def group_sentences(lengths: Sequence[int], room: int) -> list[slice]:
    """Successive groups of at least two sentences, each of at most `room` tokens where two sentences are not more."""
    edges, held = [0], 0
    for number, length in enumerate(lengths):
        if number - edges[-1] >= 2 and held + length > room:
            edges.append(number)
            held = 0
        held += length
    if len(lengths) - edges[-1] == 1:  # a last sentence alone takes the one before, or joins the two before
        if len(edges) > 1 and edges[-1] - edges[-2] > 2:
            edges[-1] -= 1
        else:
            edges.pop()
    return [slice(start, stop) for start, stop in zip(edges, [*edges[1:], len(lengths)], strict=True)]


def collate_sentence_pairs(
    draws: Sequence[SeededRow[Passage]],
    passages: Sequence[Passage],
    frame: SpecialTokenTemplate,
    masking: Masking,
    symbols: MaskTokens,
    max_length: int,
    micro_batch_tokens: int,
) -> list[SentencePairBatch]:
    """Masked pairs as batches; in half of them B is replaced by sentences of another text.

    Args:
        passages: all of them, to take other sentences from.
        frame: the tokenizer's, from `frame_of`.
    """
    made = []
    for draw in draws:
        generator = draw.generator()
        example, segments, label, cut = make_pair(draw.row, passages, frame, max_length, generator)
        made.append((example, *mask_example(example, masking, symbols, generator), segments, label, cut))
    groups = group_rows_by_length(made, [len(pair[0].ids) for pair in made], micro_batch_tokens)
    return [_pair_batch(group) for group in groups]


def _pair_batch(
    made: Sequence[tuple[MaskableExample, np.ndarray, np.ndarray, list[int], int, int]],
) -> SentencePairBatch:
    segments = torch.tensor([segment for *_, pair_segments, _, _ in made for segment in pair_segments])
    ragged = replace(masked_batch([pair[:3] for pair in made]), segments=segments)
    return SentencePairBatch(ragged, torch.tensor([pair[4] for pair in made]), sum(pair[5] for pair in made))


def make_pair(
    passage: Passage,
    passages: Sequence[Passage],
    frame: SpecialTokenTemplate,
    max_length: int,
    generator: np.random.Generator,
) -> tuple[MaskableExample, list[int], int, int]:
    """A passage cut in two at a random sentence, its second half replaced or not.

    The replacement is about as long as what it replaces, so that length tells nothing. What is replaced is not read
    in this epoch; another epoch cuts and replaces differently.

    Returns:
        the pair between its special tokens, its segments, its label, and the tokens cut off.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.2.
    """
    edge = int(generator.integers(1, len(passage.sentences)))
    first, second, label = passage.sentences[:edge], passage.sentences[edge:], FOLLOWS
    if generator.random() < 0.5:
        second, label = other_sentences(passage, passages, _tokens(second), generator), OTHER
    room = max_length - frame.pair_size
    sides = [[token for sentence in side for token in sentence.ids] for side in (first, second)]
    kept = cut_pair(sides[0], sides[1], room)
    words = [[flag for sentence in side for flag in sentence.word_starts] for side in (first, second)]
    framed = frame.pair(*kept)
    starts = word_starts_in(framed, [flags[: len(ids)] for flags, ids in zip(words, kept, strict=True)])
    example = MaskableExample(framed.ids, framed.ordinary, starts, passage.row_id)
    return example, framed.segments, label, sum(map(len, sides)) - sum(map(len, kept))


def other_sentences(
    passage: Passage, passages: Sequence[Passage], tokens: int, generator: np.random.Generator
) -> list[Sentence]:
    """Successive sentences of a passage of another text, together as near to `tokens` as whole sentences come.

    They begin at a random place from which there are enough left, or where there is none, at the passage's first.
    """
    other = passage
    while other.document == passage.document:
        other = passages[int(generator.integers(len(passages)))]
    sentences = other.sentences
    places = [place for place in range(1, len(sentences)) if _tokens(sentences[place:]) >= tokens]
    start = int(generator.integers(len(places) + 1))  # as fewer sentences hold less, these are 0, 1, ..., len(places)
    stop = start + 1
    while stop < len(sentences) and _tokens(sentences[start:stop]) + len(sentences[stop].ids) / 2 <= tokens:
        stop += 1
    return sentences[start:stop]


def _tokens(sentences: Sequence[Sentence]) -> int:
    return sum(len(sentence.ids) for sentence in sentences)

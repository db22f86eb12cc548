"""BERT's sentence pairs for masked language modeling with next-sentence prediction: texts to passages to masked pairs."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignment.data.examples import Example
from alignment.data.pretraining.corruption import Masking, SeededRow
from alignment.data.pretraining.examples import (
    MaskTokens,
    mask_example,
    maskable_example,
    masked_batch,
    word_starts_in,
)
from alignment.data.rows.records import Tally, Text
from alignment.data.text.special_tokens import SpecialTokenTemplate, special_token_template, tokenize_with_offsets
from alignment.data.text.truncation import text_budget, truncate_longest
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.ragged import RaggedBatch, group_rows_by_length

FOLLOWS, OTHER_TEXT = 0, 1
ONE_SENTENCE = "text of fewer than two sentences: no pair can be made"
LONG_SENTENCES = "two sentences longer than max_length: the longer one's end cut off"
SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")


class Sentence(NamedTuple):
    """Ids of a sentence and True where a word begins."""

    ids: list[int]
    word_starts: list[bool]


def passage_of(sentences: Sequence[Sentence], text: int, row_id: str) -> Example:
    """Two or more successive sentences of one text that together about fill a pair, as one document.

    Its mask is True where words begin; its values are the `sizes` of the sentences and the number of the `text`.
    """
    ids = [token for sentence in sentences for token in sentence.ids]
    starts = [start for sentence in sentences for start in sentence.word_starts]
    return Example.single(ids, starts, row_id, sizes=[len(sentence.ids) for sentence in sentences], text=text)


def sentences_in(passage: Example) -> list[Sentence]:
    """The sentences of a passage."""
    edges = [0, *accumulate(passage.values["sizes"])]
    return [Sentence(passage.ids[start:stop], passage.mask[start:stop]) for start, stop in pairwise(edges)]


class SentencePair(NamedTuple):
    """A pair of texts with its special tokens.

    Attributes:
        example: [CLS] A [SEP] B [SEP].
        segments: 0 or 1 for the text each token belongs to, [N].
        label: 0 where B follows A in its text, 1 where it comes from another text.
    """

    example: Example
    segments: list[int]
    label: int


@dataclass(frozen=True)
class SentencePairBatch(RaggedBatch):
    """B masked pairs. Its weight is B.

    Attributes:
        ragged: the pairs, with segments, masked targets and their labels; its own weight counts masked tokens.
        labels: 0 where B follows A in its text, 1 where it comes from another text, [B].
    """

    labels: Tensor

    @property
    def weight(self) -> float:
        """Pairs that count."""
        return float(len(self.labels))

    @cached_property
    def token_shares(self) -> Tensor:
        """One over the number of masked tokens in its pair, for each masked token, [M].

        With these factors the summed masked loss is a sum of means over pairs, and B is its weight too: both losses of a
        pair are one term of an update, and do not depend on how the batch is split.
        """
        counts = torch.bincount(self.ragged.target_rows, minlength=len(self.labels))
        return 1.0 / counts[self.ragged.target_rows]


def sentences_of(text: str) -> list[str]:
    """The text split after . ! and ? before white space, and at line breaks; no sentence is empty."""
    return [sentence for sentence in SENTENCE_END.split(text) if sentence.strip()]


def tokenize_passages(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Texts as passages of successive sentences; each sentence is in one passage.

    Raises:
        UserError: no budget for text, or fewer than two texts have two sentences, so that no B can come from another one.
    """
    counts, passages = Tally(rows=len(rows)), []
    budget = text_budget(max_length, special_token_template(tokenizer).size(2))
    for document, row in enumerate(rows):
        texts = tokenize_with_offsets(tokenizer, sentences_of(row.text))
        sentences = [Sentence(text.ids, text.word_starts) for text in texts if text.ids]
        if len(sentences) < 2:
            counts.drop(ONE_SENTENCE, row.row_id)
            continue
        counts.kept += 1
        groups = group_sentences([len(sentence.ids) for sentence in sentences], budget)
        passages += [passage_of(sentences[part], document, row.row_id) for part in groups]
        for part in groups:
            if sum(len(sentence.ids) for sentence in sentences[part]) > budget:
                counts.note_cut(LONG_SENTENCES, row.row_id)
    if counts.kept < 2:
        raise UserError("sentence pairs need at least two texts of two sentences or more; " + counts.lines()[0])
    return passages, counts.with_documents(ids for passage in passages for ids in passage.documents)


def group_sentences(lengths: Sequence[int], budget: int) -> list[slice]:
    """Successive groups of at least two sentences, each of at most `budget` tokens unless two sentences are longer."""
    edges, filled = [0], 0
    for number, length in enumerate(lengths):
        if number - edges[-1] >= 2 and filled + length > budget:
            edges.append(number)
            filled = 0
        filled += length
    if len(lengths) - edges[-1] == 1:  # a single last sentence takes one from the group before, or joins it
        if len(edges) > 1 and edges[-1] - edges[-2] > 2:
            edges[-1] -= 1
        else:
            edges.pop()
    return [slice(start, stop) for start, stop in zip(edges, [*edges[1:], len(lengths)], strict=True)]


def collate_sentence_pairs(
    rows: Sequence[SeededRow[Example]],
    micro_batch_tokens: int,
    *,
    passages: Sequence[Example],
    template: SpecialTokenTemplate,
    masking: Masking,
    mask_tokens: MaskTokens,
    max_length: int,
) -> list[SentencePairBatch]:
    """Masked pairs as batches; in half of the pairs B is replaced by sentences of another text.

    Args:
        passages: all passages, to take other sentences from.
        template: the tokenizer's, from `special_token_template`.
    """
    made = []
    for row in rows:
        generator = row.generator()
        pair = make_pair(row.row, passages, template, max_length, generator)
        made.append((pair, *mask_example(pair.example, masking, mask_tokens, generator)))
    batches = []
    for group in group_rows_by_length(made, [len(pair.example.ids) for pair, _, _ in made], micro_batch_tokens):
        ragged = masked_batch([(pair.example, ids, chosen) for pair, ids, chosen in group])
        segments = torch.tensor([segment for pair, _, _ in group for segment in pair.segments])
        labels = torch.tensor([pair.label for pair, _, _ in group])
        batches.append(SentencePairBatch(replace(ragged, segments=segments), labels))
    return batches


def make_pair(
    passage: Example,
    passages: Sequence[Example],
    template: SpecialTokenTemplate,
    max_length: int,
    generator: np.random.Generator,
) -> SentencePair:
    """A passage split in two at a random sentence, its second half replaced with probability 1/2.

    The replacement is about as long as what it replaces, so that the length does not give the label away. What is
    replaced is not read in this epoch; another epoch splits and replaces differently.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 and appendix A.2.
    """
    sentences = sentences_in(passage)
    edge = int(generator.integers(1, len(sentences)))
    first, second, label = sentences[:edge], sentences[edge:], FOLLOWS
    if generator.random() < 0.5:
        second, label = other_sentences(passage, passages, _tokens(second), generator), OTHER_TEXT
    sides = [[token for sentence in side for token in sentence.ids] for side in (first, second)]
    kept = truncate_longest(sides, text_budget(max_length, template.size(2)))
    words = [[flag for sentence in side for flag in sentence.word_starts] for side in (first, second)]
    encoded = template.encode(*kept)
    starts = word_starts_in(encoded, [flags[: len(ids)] for flags, ids in zip(words, kept, strict=True)])
    example = maskable_example(encoded, starts, passage.row_id, passage.source)
    return SentencePair(example, encoded.segments, label)


def other_sentences(
    passage: Example, passages: Sequence[Example], tokens: int, generator: np.random.Generator
) -> list[Sentence]:
    """Successive sentences of a passage of another text, together as close to `tokens` as whole sentences allow.

    They begin at a random sentence from which enough tokens are left, or at the passage's first if there is none.
    """
    other = passage
    while other.values["text"] == passage.values["text"]:
        other = passages[int(generator.integers(len(passages)))]
    sentences = sentences_in(other)
    starts = [start for start in range(1, len(sentences)) if _tokens(sentences[start:]) >= tokens]
    start = int(generator.integers(len(starts) + 1))  # fewer sentences have fewer tokens: starts are 1, 2, ...
    stop = start + 1
    while stop < len(sentences) and _tokens(sentences[start:stop]) + len(sentences[stop].ids) / 2 <= tokens:
        stop += 1
    return sentences[start:stop]


def _tokens(sentences: Sequence[Sentence]) -> int:
    return sum(len(sentence.ids) for sentence in sentences)

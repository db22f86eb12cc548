"""GPT-1's way to ask a language model for classes: start, text, delimiter, text, extract; the answer is read at extract.

One row becomes one document, or several that are read together: both orders of a similar pair, one for each choice.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from alignment.data.pretraining.corruption import cut_pair
from alignment.data.pretraining.examples import measured
from alignment.data.rows.records import Tally
from alignment.data.tasks.classification import PAIR_CUT, TEXT_END_CUT, text_budget
from alignment.data.tasks.rows import Choice, LabeledText, require_labels
from alignment.data.text.special_tokens import tokenize_with_offsets
from alignment.ragged import Ragged, RaggedBatch, group_rows_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = ("<start>", "<delimiter>", "<extract>")


@dataclass(frozen=True)
class GPT1Tokens:
    """Ids of the three tokens that frame GPT-1's inputs; `extract` is where the answer is read."""

    start: int
    delimiter: int
    extract: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> GPT1Tokens:
        """Those of a tokenizer from `add_gpt1_tokens`."""
        vocabulary = tokenizer.get_vocab()
        return cls(*(vocabulary[mark] for mark in MARKS))


def add_gpt1_tokens(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """A copy of the tokenizer with <start>, <delimiter> and <extract>, as new last tokens where it lacks them.

    The model needs a row for each: resize its embedding to `len` of the result.
    """
    marked = copy.deepcopy(tokenizer)
    lacking = [mark for mark in MARKS if mark not in marked.get_vocab()]
    marked.add_special_tokens({"extra_special_tokens": lacking}, replace_extra_special_tokens=False)
    return marked


@dataclass(frozen=True, slots=True)
class MultiSequenceExample:
    """A row as one document or several, all ending in the extract token, and its label."""

    documents: list[list[int]]
    label: int
    row_id: str


@dataclass(frozen=True)
class MultiSequenceBatch(RaggedBatch):
    """B rows as D documents. Its weight is B.

    Attributes:
        ragged: the documents; the answer is read at `ragged.last`. Its targets are all tokens but first ones, for the
            auxiliary language-model term.
        labels: class, or number of the right choice, [B].
        rows: row, within the batch, that each document belongs to, [D]; a row's documents come in order.
    """

    labels: Tensor
    rows: Tensor

    @property
    def weight(self) -> float:
        """Rows that count."""
        return float(len(self.labels))


def encode_classes(
    rows: Sequence[LabeledText], tokenizer: PreTrainedTokenizerBase, max_length: int, names: dict[int, str]
) -> tuple[list[MultiSequenceExample], Tally]:
    """Classification, start text extract; entailment, start premise delimiter hypothesis extract.

    Args:
        tokenizer: from `add_gpt1_tokens`.
        names: id2label.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.3, figure 1.
    """
    ids = require_labels(rows, names)
    texts = [[(row.text, row.pair)] for row in rows]
    return _views(texts, [ids[row.label] for row in rows], [row.row_id for row in rows], tokenizer, max_length)


def encode_similarity(
    rows: Sequence[LabeledText], tokenizer: PreTrainedTokenizerBase, max_length: int, names: dict[int, str]
) -> tuple[list[MultiSequenceExample], Tally]:
    """Similarity: both orders of the pair, as neither text comes first; their hidden states are to be added.

    Source: as `encode_classes`.
    """
    ids = require_labels(rows, names)
    texts = [[(row.text, row.pair), (row.pair or "", row.text)] for row in rows]
    return _views(texts, [ids[row.label] for row in rows], [row.row_id for row in rows], tokenizer, max_length)


def encode_choices(
    rows: Sequence[Choice], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[MultiSequenceExample], Tally]:
    """Multiple choice: start context delimiter choice extract, once for each choice; one score each, softmax over all.

    Source: as `encode_classes`.
    """
    texts: list[list[tuple[str, str | None]]] = [[(row.context, choice) for choice in row.choices] for row in rows]
    return _views(texts, [row.label for row in rows], [row.row_id for row in rows], tokenizer, max_length)


def _views(
    texts: Sequence[Sequence[tuple[str, str | None]]],
    labels: Sequence[int],
    row_ids: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> tuple[list[MultiSequenceExample], Tally]:
    marks, counts, examples = GPT1Tokens.of(tokenizer), Tally(rows=len(texts), kept=len(texts)), []
    flat = [text or "" for views in texts for pair in views for text in pair]
    encoded = iter([pieces.ids for pieces in tokenize_with_offsets(tokenizer, flat)])
    for views, label, row_id in zip(texts, labels, row_ids, strict=True):
        documents, cut = [], False
        for _, second in views:
            document, was_cut = _document(next(encoded), next(encoded), second is not None, marks, max_length)
            documents.append(document)
            cut |= was_cut
        if cut:
            counts.shorten(TEXT_END_CUT if views[0][1] is None else PAIR_CUT, row_id)
        examples.append(MultiSequenceExample(documents, label, row_id))
    return examples, measured(counts, [document for example in examples for document in example.documents])


def _document(first: list[int], second: list[int], pair: bool, marks: GPT1Tokens, most: int) -> tuple[list[int], bool]:
    """One document between its marks, and whether something had to be cut off."""
    room = text_budget(most, 3 if pair else 2)
    a, b = cut_pair(first, second, room)
    middle = [marks.delimiter, *b] if pair else []
    return [marks.start, *a, *middle, marks.extract], len(first) + len(second) > room


def collate_views(examples: Sequence[MultiSequenceExample], micro_batch_tokens: int) -> list[MultiSequenceBatch]:
    """Rows as batches of at most `micro_batch_tokens` tokens, all documents of a row together; a longer row alone."""
    lengths = [sum(map(len, example.documents)) for example in examples]
    batches = []
    for chosen in group_rows_by_length(examples, lengths, micro_batch_tokens):
        documents = [document for example in chosen for document in example.documents]
        views = torch.tensor([len(example.documents) for example in chosen])
        names = [example.row_id for example in chosen for _ in example.documents]
        batches.append(
            MultiSequenceBatch(
                Ragged.build(documents, row_ids=names),
                torch.tensor([example.label for example in chosen]),
                torch.repeat_interleave(torch.arange(len(chosen)), views),
            )
        )
    return batches

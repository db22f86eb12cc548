"""GPT-1's inputs for classification, similarity and multiple choice: start, text, delimiter, text, extract.

The answer is read at the extract token. A row becomes one document, or several that are read together: both orders of a
similar pair, or one document per choice.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.data.rows.records import Tally
from alignment.data.tasks.classification import PAIR_CUT, TEXT_END_CUT
from alignment.data.tasks.rows import Choice, LabeledText, require_labels
from alignment.data.text.special_tokens import tokenize_with_offsets
from alignment.data.text.truncation import text_budget, truncate_pair
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.ragged import Ragged, RaggedBatch, group_rows_by_length

GPT1_TOKENS = ("<start>", "<delimiter>", "<extract>")


@dataclass(frozen=True)
class GPT1Tokens:
    """Ids of the three special tokens of GPT-1's inputs; the answer is read at `extract`."""

    start: int
    delimiter: int
    extract: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "GPT1Tokens":
        """The ids in a tokenizer from `add_gpt1_tokens`."""
        vocabulary = tokenizer.get_vocab()
        return cls(*(vocabulary[token] for token in GPT1_TOKENS))


def add_gpt1_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """A copy of the tokenizer with <start>, <delimiter> and <extract>, added as last tokens where it lacks them.

    The model needs an embedding for each: resize its vocabulary to `len` of the result.
    """
    extended = copy.deepcopy(tokenizer)
    lacking = [token for token in GPT1_TOKENS if token not in extended.get_vocab()]
    extended.add_special_tokens({"extra_special_tokens": lacking}, replace_extra_special_tokens=False)
    return extended


@dataclass(frozen=True, slots=True)
class MultiSequenceExample:
    """A row as one document or several, each ending in the extract token, and its label."""

    documents: list[list[int]]
    label: int
    row_id: str


@dataclass(frozen=True)
class MultiSequenceBatch(RaggedBatch):
    """B rows as D documents. Its weight is B.

    Attributes:
        ragged: the documents; the answer is read at `ragged.last`. Its targets are all tokens but first ones, for the
            auxiliary language-model loss.
        labels: class, or number of the right choice, [B].
        rows: row, within the batch, that each document belongs to, [D]; a row's documents come in order.
    """

    labels: Tensor
    rows: Tensor

    @property
    def weight(self) -> float:
        """Rows that count."""
        return float(len(self.labels))


def encode_gpt1_texts(
    rows: Sequence[LabeledText], tokenizer: Tokenizer, max_length: int, names: dict[int, str]
) -> tuple[list[MultiSequenceExample], Tally]:
    """Classification: start text extract; entailment: start premise delimiter hypothesis extract.

    Args:
        tokenizer: from `add_gpt1_tokens`.
        names: id2label.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", section 3.3, figure 1.
    """
    ids = require_labels(rows, names)
    texts = [[(row.text, row.pair)] for row in rows]
    return _encode(texts, [ids[row.label] for row in rows], [row.row_id for row in rows], tokenizer, max_length)


def encode_gpt1_similarity(
    rows: Sequence[LabeledText], tokenizer: Tokenizer, max_length: int, names: dict[int, str]
) -> tuple[list[MultiSequenceExample], Tally]:
    """Similarity: both orders of the pair, as neither text comes first; their hidden states are to be added.

    Args:
        tokenizer: from `add_gpt1_tokens`.
        names: id2label.

    Source: Radford et al. 2018, section 3.3, figure 1.
    """
    ids = require_labels(rows, names)
    texts = [[(row.text, row.pair), (row.pair or "", row.text)] for row in rows]
    return _encode(texts, [ids[row.label] for row in rows], [row.row_id for row in rows], tokenizer, max_length)


def encode_gpt1_choices(
    rows: Sequence[Choice], tokenizer: Tokenizer, max_length: int
) -> tuple[list[MultiSequenceExample], Tally]:
    """Multiple choice: start context delimiter choice extract for each choice; a softmax over their scores follows.

    Args:
        tokenizer: from `add_gpt1_tokens`.

    Source: Radford et al. 2018, section 3.3, figure 1.
    """
    texts: list[list[tuple[str, str | None]]] = [[(row.context, choice) for choice in row.choices] for row in rows]
    return _encode(texts, [row.label for row in rows], [row.row_id for row in rows], tokenizer, max_length)


def _encode(
    texts: Sequence[Sequence[tuple[str, str | None]]],
    labels: Sequence[int],
    row_ids: Sequence[str],
    tokenizer: Tokenizer,
    max_length: int,
) -> tuple[list[MultiSequenceExample], Tally]:
    special, counts, examples = GPT1Tokens.of(tokenizer), Tally(rows=len(texts), kept=len(texts)), []
    flat = [text or "" for sequences in texts for pair in sequences for text in pair]
    ids = iter([text.ids for text in tokenize_with_offsets(tokenizer, flat)])
    for sequences, label, row_id in zip(texts, labels, row_ids, strict=True):
        documents, cut = [], False
        for _, second in sequences:
            document, was_cut = _document(next(ids), next(ids), second is not None, special, max_length)
            documents.append(document)
            cut |= was_cut
        if cut:
            counts.note_cut(TEXT_END_CUT if sequences[0][1] is None else PAIR_CUT, row_id)
        examples.append(MultiSequenceExample(documents, label, row_id))
    return examples, counts.with_documents(document for example in examples for document in example.documents)


def _document(
    first: list[int], second: list[int], is_pair: bool, special: GPT1Tokens, max_length: int
) -> tuple[list[int], bool]:
    """One document with its special tokens, and whether it was truncated."""
    budget = text_budget(max_length, 3 if is_pair else 2)
    a, b = truncate_pair(first, second, budget)
    rest = [special.delimiter, *b] if is_pair else []
    return [special.start, *a, *rest, special.extract], len(first) + len(second) > budget


def collate_multi_sequence(
    examples: Sequence[MultiSequenceExample], micro_batch_tokens: int
) -> list[MultiSequenceBatch]:
    """Rows as batches of at most `micro_batch_tokens` tokens, all documents of a row together; a longer row is alone."""
    lengths = [sum(map(len, example.documents)) for example in examples]
    batches = []
    for group in group_rows_by_length(examples, lengths, micro_batch_tokens):
        documents = [document for example in group for document in example.documents]
        row_ids = [example.row_id for example in group for _ in example.documents]
        sizes = torch.tensor([len(example.documents) for example in group])
        batches.append(
            MultiSequenceBatch(
                Ragged.build(documents, row_ids=row_ids),
                torch.tensor([example.label for example in group]),
                torch.repeat_interleave(torch.arange(len(group)), sizes),
            )
        )
    return batches

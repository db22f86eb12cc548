"""Pretraining objectives as data: texts to examples, and each epoch's examples to batches, corrupted anew.

What is done to the ids stands in corruption.py; causal language modeling is in batches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import torch

from alignment.data.batches import TEXT_CUT, Example
from alignment.data.pretraining import corruption
from alignment.data.pretraining.corruption import STAYS, Ids, Masking
from alignment.data.rows.records import Tally, Text
from alignment.data.stream import Stream
from alignment.data.text.chat import document_end_id
from alignment.data.text.special_tokens import (
    EncodedText,
    frame_of,
    mask_id,
    ordinary_ids,
    sentinel_ids,
    tokenize_with_offsets,
)
from alignment.errors import UserError
from alignment.ragged import Ragged, Seq2Seq, group_rows_by_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = "text of which the tokenizer makes no token"
TOO_SHORT = "text of a single token, which cannot be both read and written"
CORRUPTION_SALT = 0x6D61736B  # keeps a row's draws apart from the order of rows: numpy pads seeds with zeros

Row = TypeVar("Row")
Corrupt = Callable[[Ids, np.random.Generator], tuple[list[int], list[int]]]  # a text -> what is read, what is written


@dataclass(frozen=True, slots=True)
class SeededRow(Generic[Row]):
    """A row as it is dealt in one epoch. Its chance depends on nothing else: no rank, no batch, no neighbor."""

    row: Row
    seed: int
    epoch: int
    index: int

    def generator(self) -> np.random.Generator:
        """A fresh generator, the same one at each call."""
        return np.random.default_rng([self.seed, self.epoch, self.index, CORRUPTION_SALT])


@dataclass(frozen=True)
class EpochStream(Generic[Row]):
    """A stream whose rows know their epoch, for objectives that corrupt a row differently each time it is seen."""

    stream: Stream[Row]

    def rows_at(self, step: int) -> list[SeededRow[Row]]:
        """The rows of batch `step`, as `Stream.rows_at`."""
        first, rows = step * self.stream.batch_size, self.stream.rows
        return [
            SeededRow(rows[index], self.stream.seed, (first + place) // len(rows), index)
            for place, index in enumerate(self.stream.positions_at(step))
        ]


def fixed_seed_rows(rows: Sequence[Row], seed: int = 0) -> list[SeededRow[Row]]:
    """All rows in order with one fixed corruption each: held-out data, the same at every evaluation."""
    return [SeededRow(row, seed, 0, index) for index, row in enumerate(rows)]


@dataclass(frozen=True, slots=True)
class MaskableExample:
    """A text between its special tokens; `maskable` is True for its own tokens, `word_starts` where a word begins."""

    ids: list[int]
    maskable: list[bool]
    word_starts: list[bool]
    row_id: str


@dataclass(frozen=True)
class MaskTokens:
    """The mask token, and the ids that random replacements come from."""

    mask: int
    ordinary: np.ndarray

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> MaskTokens:
        """Those of a tokenizer.

        Raises:
            UserError: it has no mask token.
        """
        mask = mask_id(tokenizer)
        return cls(mask, np.setdiff1d(ordinary_ids(tokenizer), [mask]))


def tokenize_maskable(
    rows: Sequence[Text], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[MaskableExample], Tally]:
    """Texts for masked language modeling; a longer one is cut into successive pieces of about equal length."""
    frame, counts = frame_of(tokenizer), Tally(rows=len(rows))
    room = _room(max_length, frame.size, least=1)
    examples = []
    for row, pieces in zip(rows, tokenize_with_offsets(tokenizer, [row.text for row in rows]), strict=True):
        if not pieces.ids:
            counts.drop(NO_TOKEN, row.row_id)
            continue
        counts.kept += 1
        if len(pieces.ids) > room:
            counts.shorten(TEXT_CUT, row.row_id)
        for part in even_slices(len(pieces.ids), room):
            framed = frame.single(pieces.ids[part])
            starts = word_starts_in(framed, [pieces.word_starts[part]])
            examples.append(MaskableExample(framed.ids, framed.ordinary, starts, row.row_id))
    return examples, measured(counts, [example.ids for example in examples])


def word_starts_in(framed: EncodedText, texts: Sequence[Sequence[bool]]) -> list[bool]:
    """Where words begin in a framed text or pair; a text's first token begins one, whatever it was cut from."""
    starts = [False] * len(framed.ids)
    for first, text in zip(framed.starts, texts, strict=True):
        starts[first : first + len(text)] = [True, *text[1:]] if text else []
    return starts


def even_slices(length: int, most: int) -> list[slice]:
    """Successive stretches of `length` tokens, as few as can be, each of at most `most` and of about equal size."""
    number = -(-length // most)
    edges = [length * place // number for place in range(number + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def collate_masked(
    draws: Sequence[SeededRow[MaskableExample]], masking: Masking, symbols: MaskTokens, micro_batch_tokens: int
) -> list[Ragged]:
    """Masked texts as ragged batches: `targets` are the chosen places, `labels` what stood there. Weight: targets."""
    masked = [(draw.row, *mask_example(draw.row, masking, symbols, draw.generator())) for draw in draws]
    groups = group_rows_by_length(masked, [len(ids) for _, ids, _ in masked], micro_batch_tokens)
    return [masked_batch(group) for group in groups]


def mask_example(
    example: MaskableExample, masking: Masking, symbols: MaskTokens, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The example's ids, corrupted, and True at the chosen places, both [N]."""
    choice = corruption.choose(example.maskable, example.word_starts, masking, generator)
    ids = corruption.replace_chosen(example.ids, choice, symbols.ordinary, symbols.mask, masking, generator)
    return ids, choice != STAYS


def masked_batch(masked: Sequence[tuple[MaskableExample, np.ndarray, np.ndarray]]) -> Ragged:
    """One ragged batch of examples with their corrupted ids and chosen places."""
    ragged = Ragged.build([ids.tolist() for _, ids, _ in masked], row_ids=[example.row_id for example, _, _ in masked])
    targets = torch.from_numpy(np.flatnonzero(np.concatenate([chosen for _, _, chosen in masked])))
    rows = torch.repeat_interleave(torch.arange(len(masked)), torch.tensor(ragged.lengths))
    originals = torch.tensor([token for example, _, _ in masked for token in example.ids])
    return replace(
        ragged, target_index=targets, target_rows=rows[targets], labels=originals[targets], weight=float(len(targets))
    )


def tokenize_plain(
    rows: Sequence[Text], tokenizer: PreTrainedTokenizerBase, max_length: int, special: int = 1
) -> tuple[list[Example], Tally]:
    """Texts for encoder-decoders, no special tokens, cut so that what is read has at most `max_length` tokens.

    A longer text is cut into successive pieces of about equal length; a text of a single token is dropped.

    Args:
        special: room to leave for special tokens: 1 for the end token, 3 for BART's start, first and last.
    """
    room, counts, examples = _room(max_length, special, least=3), Tally(rows=len(rows)), []
    for row, pieces in zip(rows, tokenize_with_offsets(tokenizer, [row.text for row in rows]), strict=True):
        if len(pieces.ids) < 2:
            counts.drop(TOO_SHORT if pieces.ids else NO_TOKEN, row.row_id)
            continue
        counts.kept += 1
        if len(pieces.ids) > room:
            counts.shorten(TEXT_CUT, row.row_id)
        for part in even_slices(len(pieces.ids), room):
            examples.append(Example(pieces.ids[part], [True] * (part.stop - part.start), row.row_id))
    return examples, measured(counts, [example.ids for example in examples])


def span_corruption(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example], *, density: float = 0.15, mean_span: float = 3.0
) -> Corrupt:
    """T5's objective: both sides of `corrupt_spans`, each with the end token after it.

    Raises:
        UserError: the tokenizer has fewer sentinels than the longest example takes.
    """
    sentinels, end = sentinel_ids(tokenizer), document_end_id(tokenizer)
    needed = max(corruption.sentinels_needed(len(example.ids), density, mean_span) for example in examples)
    if needed > len(sentinels):
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has {len(sentinels)} sentinels (<extra_id_0>, ...), and a "
            f"text of {max(len(example.ids) for example in examples)} tokens takes {needed}; lower data.max_length, "
            "lengthen the mean span, or train the tokenizer with more sentinels"
        )
    corrupt = partial(corruption.corrupt_spans, sentinels=sentinels, density=density, mean_span=mean_span)
    return lambda ids, generator: _ended(corrupt(ids, generator=generator), end)


def prefix_modeling(tokenizer: PreTrainedTokenizerBase) -> Corrupt:
    """Read the first part of a text, write the rest; each with the end token after it."""
    end = document_end_id(tokenizer)
    return lambda ids, generator: _ended(corruption.split_prefix(ids, generator), end)


def infilling(tokenizer: PreTrainedTokenizerBase, *, density: float = 0.3, mean_span: float = 3.0) -> Corrupt:
    """BART's objective: read a text with spans masked, write all of it, both between the tokenizer's special tokens."""
    mask, frame = mask_id(tokenizer), frame_of(tokenizer)

    def corrupt(ids: Ids, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        source = corruption.infill(ids, mask, generator, density=density, mean_span=mean_span)
        return frame.single(source).ids, frame.single(ids).ids

    return corrupt


def _ended(sides: tuple[list[int], list[int]], end: int) -> tuple[list[int], list[int]]:
    return [*sides[0], end], [*sides[1], end]


def decoder_start_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that T5's decoder starts from: the padding token.

    Raises:
        UserError: there is none.
    """
    if tokenizer.pad_token_id is None:
        raise UserError(f"{tokenizer.name_or_path or 'the tokenizer'} has no padding token to start a decoder from")
    return int(tokenizer.pad_token_id)  # type: ignore[arg-type]


def collate_seq2seq(
    draws: Sequence[SeededRow[Example]], corrupt: Corrupt, start_id: int, micro_batch_tokens: int
) -> list[Seq2Seq]:
    """Corrupted texts as pairs of source and target, both sides together at most `micro_batch_tokens` tokens a batch.

    Each target begins with `start_id`, which starts the decoder and is never predicted.
    """
    sides = [corrupt(draw.row.ids, draw.generator()) for draw in draws]
    rows = [(draw.row.row_id, source, [start_id, *target]) for draw, (source, target) in zip(draws, sides, strict=True)]
    lengths = [len(source) + len(target) for _, source, target in rows]
    batches = []
    for group in group_rows_by_length(rows, lengths, micro_batch_tokens):
        names, sources, targets = zip(*group, strict=True)
        nothing = [[False] * len(source) for source in sources]
        batches.append(Seq2Seq(Ragged.build(sources, nothing, row_ids=names), Ragged.build(targets, row_ids=names)))
    return batches


def measured(counts: Tally, documents: Sequence[Ids]) -> Tally:
    """The tally with the number of documents and of their tokens filled in."""
    return replace(counts, documents=len(documents), tokens=sum(map(len, documents)))


def _room(max_length: int, special: int, least: int) -> int:
    """Tokens of text that fit beside the special ones."""
    if max_length - special < least:
        raise UserError(f"data.max_length {max_length} leaves no room beside {special} special tokens; raise it")
    return max_length - special

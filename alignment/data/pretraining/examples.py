"""Examples and batches of masked language modeling, span corruption, prefix language modeling and infilling.

The corruption itself is in corruption.py, next-sentence prediction in next_sentence.py. Causal language modeling needs no
corruption: its examples and batches are those of data/batches.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from alignment.data.examples import Example
from alignment.data.pretraining import corruption
from alignment.data.pretraining.corruption import NOT_CHOSEN, Ids, Masking, SeededRow
from alignment.data.rows.records import Tally, Text
from alignment.data.table import lengths_of, mask_of, runs_of
from alignment.data.text.chat import document_end_id
from alignment.data.text.special_tokens import (
    EncodedText,
    TokenizedText,
    sentinel_ids,
    special_token_template,
    tokenize_with_offsets,
)
from alignment.data.text.truncation import even_slices, text_budget
from alignment.data.tokenize import TEXT_CUT
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.ragged import Ragged, Seq2Seq, group_rows_by_length

MASK_NAMES = ("<mask>", "[MASK]")  # looked up where the tokenizer names no mask token
NO_TOKEN = "text of which the tokenizer makes no token"
TOO_SHORT = "text of a single token, too short for a source and a target"
Corrupt = Callable[[Ids, np.random.Generator], tuple[list[int], list[int]]]  # a text -> source and target


def maskable_example(text: EncodedText, word_starts: Sequence[bool], row_id: str, source: int = 0) -> Example:
    """A text with its special tokens; its mask is True for its own tokens.

    Args:
        word_starts: True where a word begins, [N]; the example keeps it as lengths of runs.
    """
    return Example.single(text.ids, text.is_text, row_id, source, word_starts=runs_of(word_starts))


class MaskTokens(NamedTuple):
    """The id of the mask token, and the ids that random replacements are drawn from, ascending: no special tokens."""

    mask_id: int
    random_ids: np.ndarray


def mask_tokens_of(tokenizer: Tokenizer) -> MaskTokens:
    """The mask tokens of a tokenizer.

    Raises:
        UserError: it has no mask token.
    """
    vocabulary = tokenizer.get_vocab()
    mask = next(
        (each for each in (tokenizer.mask_token_id, *map(vocabulary.get, MASK_NAMES)) if each is not None), None
    )
    if mask is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has no mask token; train a wordpiece one, or a bpe one whose "
            "special tokens hold <mask>"
        )
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return MaskTokens(mask, np.array(sorted({*vocabulary.values()} - special - {*tokenizer.all_special_ids, mask})))


def tokenize_maskable(rows: Sequence[Text], tokenizer: Tokenizer, max_length: int) -> tuple[list[Example], Tally]:
    """Texts for masked language modeling; a longer text is split into successive parts of about equal length."""
    template = special_token_template(tokenizer)
    parts, counts = _split(rows, tokenizer, text_budget(max_length, template.size(1), least=1), {0: NO_TOKEN})
    examples = []
    for row, text, part in parts:
        encoded = template.encode(text.ids[part])
        examples.append(maskable_example(encoded, word_starts_in(encoded, [text.word_starts[part]]), row.row_id))
    return examples, counts.with_documents(example.ids for example in examples)


def tokenize_plain(
    rows: Sequence[Text], tokenizer: Tokenizer, max_length: int, special_tokens: int = 1
) -> tuple[list[Example], Tally]:
    """Texts for encoder-decoders, without special tokens, short enough that a source has at most `max_length` tokens.

    A longer text is split into successive parts of about equal length; a text of a single token is dropped.

    Args:
        special_tokens: number of tokens that corruption will add: 1 for the end token, 3 for BART's decoder start,
            first and last token.
    """
    budget = text_budget(max_length, special_tokens, least=3)
    parts, counts = _split(rows, tokenizer, budget, {0: NO_TOKEN, 1: TOO_SHORT})
    examples = [
        Example.single(text.ids[part], [True] * (part.stop - part.start), row.row_id) for row, text, part in parts
    ]
    return examples, counts.with_documents(example.ids for example in examples)


def _split(
    rows: Sequence[Text], tokenizer: Tokenizer, budget: int, dropped: Mapping[int, str]
) -> tuple[list[tuple[Text, TokenizedText, slice]], Tally]:
    """Each text in parts of at most `budget` tokens.

    Args:
        dropped: number of tokens -> the reason why texts of that length are dropped.
    """
    parts, counts = [], Tally(rows=len(rows))
    for row, text in zip(rows, tokenize_with_offsets(tokenizer, [row.text for row in rows]), strict=True):
        if len(text.ids) in dropped:
            counts.drop(dropped[len(text.ids)], row.row_id)
            continue
        counts.kept += 1
        if len(text.ids) > budget:
            counts.note_cut(TEXT_CUT, row.row_id)
        parts += [(row, text, part) for part in even_slices(len(text.ids), budget)]
    return parts, counts


def word_starts_in(encoded: EncodedText, texts: Sequence[Sequence[bool]]) -> list[bool]:
    """True where words begin in an encoded text or pair; the first token of a text begins a word, even of a part of a text.

    Args:
        texts: word starts of the text, or of both texts of a pair.
    """
    starts = [False] * len(encoded.ids)
    for first, text in zip(encoded.starts, texts, strict=True):
        starts[first : first + len(text)] = [True, *text[1:]] if text else []
    return starts


def collate_masked(
    rows: Sequence[SeededRow[Example]], micro_batch_tokens: int, *, masking: Masking, mask_tokens: MaskTokens
) -> list[Ragged]:
    """Masked texts as ragged batches: targets are the chosen positions, `labels` the original tokens. Weight: targets."""
    masked = [(row.row, *mask_example(row.row, masking, mask_tokens, row.generator())) for row in rows]
    groups = group_rows_by_length(masked, [len(ids) for _, ids, _ in masked], micro_batch_tokens)
    return [masked_batch(group) for group in groups]


def mask_example(
    example: Example, masking: Masking, mask_tokens: MaskTokens, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The example's ids, corrupted, and True at the chosen positions, both [N]."""
    choice = corruption.choose(example.mask, mask_of(example.values["word_starts"]), masking, generator)
    ids = corruption.replace_chosen(
        example.ids, choice, masking, generator, mask_id=mask_tokens.mask_id, random_ids=mask_tokens.random_ids
    )
    return ids, choice != NOT_CHOSEN


def masked_batch(masked: Sequence[tuple[Example, np.ndarray, np.ndarray]]) -> Ragged:
    """One ragged batch of examples with their corrupted ids and chosen positions."""
    ragged = Ragged.build([ids.tolist() for _, ids, _ in masked], row_ids=[example.row_id for example, _, _ in masked])
    ragged = ragged.with_sources([example.source for example, _, _ in masked])
    targets = torch.from_numpy(np.flatnonzero(np.concatenate([chosen for _, _, chosen in masked])))
    rows = torch.repeat_interleave(torch.arange(len(masked)), torch.tensor(ragged.lengths))
    originals = torch.tensor([token for example, _, _ in masked for token in example.ids])
    return replace(
        ragged, target_index=targets, target_rows=rows[targets], labels=originals[targets], weight=float(len(targets))
    )


def span_corruption(
    tokenizer: Tokenizer, examples: Sequence[Example], *, density: float = 0.15, mean_span: float = 3.0
) -> Corrupt:
    """T5's span corruption of a text: source and target of `corrupt_spans`, each with the end token after it.

    Raises:
        UserError: the tokenizer has fewer sentinels than the longest example needs.
    """
    sentinels, end = sentinel_ids(tokenizer), document_end_id(tokenizer)
    lengths = np.unique(lengths_of(examples)).tolist()
    needed = 1 + max(corruption.span_plan(length, density, mean_span)[1] for length in lengths)
    if needed > len(sentinels):
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} has {len(sentinels)} sentinels (<extra_id_0>, ...), and a "
            f"text of {max(lengths)} tokens takes {needed}; lower data.max_length, "
            "lengthen the mean span, or train the tokenizer with more sentinels"
        )
    corrupt = partial(corruption.corrupt_spans, sentinels=sentinels, density=density, mean_span=mean_span)
    return lambda ids, generator: _with_end_token(corrupt(ids, generator=generator), end)


def prefix_modeling(tokenizer: Tokenizer) -> Corrupt:
    """T5's prefix language modeling of a text: its first part and the rest, each with the end token after it."""
    end = document_end_id(tokenizer)
    return lambda ids, generator: _with_end_token(corruption.split_prefix(ids, generator), end)


def infilling(tokenizer: Tokenizer, *, density: float = 0.3, mean_span: float = 3.0) -> Corrupt:
    """BART's text infilling: the text with masked spans and the whole text, both with the tokenizer's special tokens."""
    mask, template = mask_tokens_of(tokenizer).mask_id, special_token_template(tokenizer)

    def corrupt(ids: Ids, generator: np.random.Generator) -> tuple[list[int], list[int]]:
        source = corruption.infill(ids, mask, generator, density=density, mean_span=mean_span)
        return template.encode(source).ids, template.encode(ids).ids

    return corrupt


def _with_end_token(sides: tuple[list[int], list[int]], end: int) -> tuple[list[int], list[int]]:
    return [*sides[0], end], [*sides[1], end]


def collate_seq2seq(
    rows: Sequence[SeededRow[Example]], micro_batch_tokens: int, *, corrupt: Corrupt, start_id: int
) -> list[Seq2Seq]:
    """Corrupted texts as batches for encoder-decoders, source and target together at most `micro_batch_tokens` tokens.

    Each target begins with `start_id`, which starts the decoder and is never predicted.
    """
    sides = [corrupt(row.row.ids, row.generator()) for row in rows]
    pairs = [(row.row, source, [start_id, *target]) for row, (source, target) in zip(rows, sides, strict=True)]
    lengths = [len(source) + len(target) for _, source, target in pairs]
    batches = []
    for group in group_rows_by_length(pairs, lengths, micro_batch_tokens):
        examples, sources, targets = zip(*group, strict=True)
        names = [example.row_id for example in examples]
        nothing = [[False] * len(source) for source in sources]
        decoder = Ragged.build(targets, row_ids=names).with_sources([example.source for example in examples])
        batches.append(Seq2Seq(Ragged.build(sources, nothing, row_ids=names), decoder))
    return batches

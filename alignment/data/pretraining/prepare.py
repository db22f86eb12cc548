"""Texts for every pretraining objective, and the batches of encoder-decoders: span corruption, prefixes, infilling."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from alignment.data.config import DataConfig, Part
from alignment.data.examples import Example
from alignment.data.prepare import Preparation, Tokenize, prepare_with
from alignment.data.pretraining import corruption
from alignment.data.pretraining.corruption import Ids, SeededRow
from alignment.data.pretraining.masked import (
    NO_TOKEN,
    mask_tokens_of,
    split_texts,
    tokenize_for_corruption,
    tokenize_passages,
)
from alignment.data.rows.records import Tally, Text
from alignment.data.table import Rows, lengths_of
from alignment.data.text.special_tokens import document_end_id, sentinel_ids, special_token_template
from alignment.data.text.truncation import text_budget
from alignment.data.tokenize import tokenize_texts
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.ragged import Ragged, Seq2Seq, group_rows_by_length

Objective = Literal["causal", "masked", "sentence_pairs", "span_corruption", "prefix", "infilling"]
Corrupt = Callable[[Ids, np.random.Generator], tuple[list[int], list[int]]]  # a text -> source and target
TOO_SHORT = "text of a single token, too short for a source and a target"


def tokenize_plain(
    rows: Sequence[Text], tokenizer: Tokenizer, max_length: int, special_tokens: int = 1
) -> tuple[list[Example], Tally]:
    """Texts for encoder-decoders, without special tokens, in parts whose sources have at most `max_length` tokens.

    Args:
        special_tokens: number of tokens that corruption will add: 1 for the end token, 3 for BART's decoder start,
            first and last token.
    """
    budget = text_budget(max_length, special_tokens, least=3)
    parts, counts = split_texts(rows, tokenizer, budget, {0: NO_TOKEN, 1: TOO_SHORT})
    examples = [
        Example.single(text.ids[part], [True] * (part.stop - part.start), row.row_id) for row, text, part in parts
    ]
    return examples, counts.with_documents(example.ids for example in examples)


TOKENIZE_TEXT: dict[Objective, Tokenize] = {
    "causal": tokenize_texts,
    "masked": tokenize_for_corruption,
    "sentence_pairs": tokenize_passages,
    "span_corruption": tokenize_plain,
    "prefix": tokenize_plain,
    "infilling": partial(tokenize_plain, special_tokens=3),
}


def prepare_text(
    config: DataConfig, objective: Objective, tokenizer: Tokenizer, part: Part = "train"
) -> tuple[Rows, Tally]:
    """Token sequences of running text for a pretraining objective, and the whole tally.

    Those of masked are of `corruption_example`, those of sentence_pairs of `passage_of`.
    """
    # A second sentence may come from any other text, so that passages are made of all texts at once.
    whole = objective == "sentence_pairs"
    preparation = Preparation(f"text for {objective}", "text", TOKENIZE_TEXT[objective], whole=whole)
    if config.streaming and part == "train":
        from alignment.data.streaming import open_stream

        return open_stream(preparation, config, tokenizer)
    return prepare_with(preparation, config, tokenizer, part=part)


def span_corruption(
    tokenizer: Tokenizer, examples: Sequence[Example], *, density: float = 0.15, mean_span: float = 3.0
) -> Corrupt:
    """T5's span corruption of a text: source and target of `corrupt_spans`, each with the end token after it."""
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

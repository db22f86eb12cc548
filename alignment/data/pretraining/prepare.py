"""Texts as token sequences for a pretraining objective, from a data config in one call."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from alignment.data.config import DataConfig, Part
from alignment.data.examples import TokenizedRow
from alignment.data.prepare import Tokenize, prepare_with
from alignment.data.pretraining.examples import tokenize_maskable, tokenize_plain
from alignment.data.pretraining.next_sentence import tokenize_passages
from alignment.data.rows.records import Tally, Text
from alignment.data.tokenize import tokenize_texts
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError

Objective = Literal["causal", "masked", "sentence_pairs", "span_corruption", "prefix", "infilling"]

TOKENIZE_TEXT: dict[str, Tokenize] = {
    "causal": tokenize_texts,
    "masked": tokenize_maskable,
    "sentence_pairs": tokenize_passages,
    "span_corruption": tokenize_plain,
    "prefix": tokenize_plain,
    "infilling": partial(tokenize_plain, special_tokens=3),
}
UNKNOWN = "texts with characters that the tokenizer does not know: read as its unknown token"


def prepare_text(
    config: DataConfig, objective: Objective, tokenizer: Tokenizer, part: Part = "train"
) -> tuple[list[Any], Tally]:
    """Token sequences of running text for a pretraining objective, and the whole tally.

    Example for causal, span_corruption, prefix and infilling; MaskableExample for masked; Passage for sentence_pairs.
    Texts with characters the tokenizer does not know are counted.

    Raises:
        UserError: as `prepare`; an unknown objective; what the objective itself refuses.
    """
    if objective not in TOKENIZE_TEXT:
        raise UserError(f"unknown pretraining objective {objective!r}; known: {', '.join(TOKENIZE_TEXT)}")
    tokenize = partial(_tokenize_and_note_unknown, TOKENIZE_TEXT[objective])
    return prepare_with(tokenize, config, "text", tokenizer, part=part)


def _tokenize_and_note_unknown(
    tokenize: Tokenize, rows: list[Text], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Any], Tally]:
    examples, counts = tokenize(rows, tokenizer, max_length)
    for row_id in unknown_rows(examples, tokenizer.unk_token_id):
        counts.note_cut(UNKNOWN, row_id)
    return examples, counts


def unknown_rows(examples: Sequence[TokenizedRow], unknown_id: int | None) -> list[str]:
    """Names of the rows, each once, that have the unknown token among their ids."""
    if unknown_id is None:
        return []
    return list(dict.fromkeys(e.row_id for e in examples if any(unknown_id in ids for ids in e.documents)))

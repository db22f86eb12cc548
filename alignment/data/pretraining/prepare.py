"""Texts as token sequences for a pretraining objective, from a data config in one call."""

from functools import partial
from typing import Any, Literal

from alignment.data.config import DataConfig, Part
from alignment.data.prepare import Preparation, Tokenize, prepare_with
from alignment.data.pretraining.examples import tokenize_maskable, tokenize_plain
from alignment.data.pretraining.next_sentence import tokenize_passages
from alignment.data.rows.records import Tally, Text
from alignment.data.table import Rows
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
) -> tuple[Rows, Tally]:
    """Token sequences of running text for a pretraining objective, and the whole tally.

    Those of masked are of `maskable_example`, those of sentence_pairs of `passage_of`.
    Texts with characters the tokenizer does not know are counted.

    Raises:
        UserError: as `prepare`; an unknown objective; what the objective itself refuses.
    """
    if objective not in TOKENIZE_TEXT:
        raise UserError(f"unknown pretraining objective {objective!r}; known: {', '.join(TOKENIZE_TEXT)}")
    tokenize = partial(_tokenize_and_note_unknown, TOKENIZE_TEXT[objective])
    # A second sentence may come from any other text, so that passages are made of all texts at once.
    preparation = Preparation(f"text for {objective}", "text", tokenize, whole=objective == "sentence_pairs")
    if config.streaming and part == "train":
        from alignment.data.streaming import open_stream

        return open_stream(preparation, config, tokenizer)
    return prepare_with(preparation, config, tokenizer, part=part)


def _tokenize_and_note_unknown(
    tokenize: Tokenize, rows: list[Text], tokenizer: Tokenizer, max_length: int
) -> tuple[list[Any], Tally]:
    examples, counts = tokenize(rows, tokenizer, max_length)
    unknown = tokenizer.unk_token_id
    if unknown is not None:
        found = [each.row_id for each in examples if any(unknown in ids for ids in each.documents)]
        for row_id in dict.fromkeys(found):
            counts.note_cut(UNKNOWN, row_id)
    return examples, counts

"""Texts as token sequences for a pretraining objective, from a data config in one call."""

from functools import partial
from typing import Any, Literal

from alignment.data.codecs import EXAMPLES, Codec, mask_of, runs_of
from alignment.data.config import DataConfig, Part
from alignment.data.prepare import Preparation, Tokenize, prepare_with
from alignment.data.pretraining.examples import MaskableExample, tokenize_maskable, tokenize_plain
from alignment.data.pretraining.next_sentence import Passage, Sentence, tokenize_passages
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


def _maskable(row_id: str, source: int, *values: list[int]) -> MaskableExample:
    tokens, maskable, word_starts = values
    return MaskableExample(tokens, mask_of(maskable), mask_of(word_starts), row_id)


def _encode_passage(passage: Passage) -> tuple[Any, ...]:
    sentences = passage.sentences
    tokens = [token for sentence in sentences for token in sentence.ids]
    starts = [start for sentence in sentences for start in sentence.word_starts]
    return tokens, [len(sentence.ids) for sentence in sentences], runs_of(starts), passage.document


def _passage(row_id: str, source: int, *values: Any) -> Passage:
    tokens, parts, runs, document = values
    starts, sentences, first = mask_of(runs), [], 0
    for part in parts:
        sentences.append(Sentence(tokens[first : first + part], starts[first : first + part]))
        first += part
    return Passage(sentences, document, row_id)


MASKABLE: Codec[MaskableExample] = Codec(
    "maskable",
    {"tokens": "integers", "maskable": "integers", "word_starts": "integers"},
    lambda example: (example.ids, runs_of(example.maskable), runs_of(example.word_starts)),
    _maskable,
)
PASSAGES: Codec[Passage] = Codec(
    "passages",
    {"tokens": "integers", "parts": "integers", "word_starts": "integers", "document": "integer"},
    _encode_passage,
    _passage,
)
TEXT_CODECS: dict[str, Codec[Any]] = {"masked": MASKABLE, "sentence_pairs": PASSAGES}  # others: EXAMPLES

UNKNOWN = "texts with characters that the tokenizer does not know: read as its unknown token"


def prepare_text(
    config: DataConfig, objective: Objective, tokenizer: Tokenizer, part: Part = "train"
) -> tuple[Rows, Tally]:
    """Token sequences of running text for a pretraining objective, and the whole tally.

    Example for causal, span_corruption, prefix and infilling; MaskableExample for masked; Passage for sentence_pairs.
    Texts with characters the tokenizer does not know are counted.

    Raises:
        UserError: as `prepare`; an unknown objective; what the objective itself refuses.
    """
    if objective not in TOKENIZE_TEXT:
        raise UserError(f"unknown pretraining objective {objective!r}; known: {', '.join(TOKENIZE_TEXT)}")
    tokenize = partial(_tokenize_and_note_unknown, TOKENIZE_TEXT[objective])
    codec = TEXT_CODECS.get(objective, EXAMPLES)
    # A second sentence may come from any other text, so that passages are made of all texts at once.
    preparation = Preparation(f"text for {objective}", "text", tokenize, codec, whole=objective == "sentence_pairs")
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

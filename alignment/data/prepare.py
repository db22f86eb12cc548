"""From a data config to token sequences in one call: read, tokenize, and refuse to go on with too little."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from alignment.data.batches import (
    PROMPT_CUT,
    RESPONSE_CUT,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_prompts,
    tokenize_texts,
)
from alignment.data.pretraining.examples import tokenize_maskable, tokenize_plain
from alignment.data.pretraining.next_sentence import tokenize_passages
from alignment.data.rows.read import DataConfig, Part, overlap, read_rows
from alignment.data.rows.records import Kind, Tally
from alignment.data.tasks import classification, gpt1_inputs
from alignment.data.tasks.question_answering import encode_questions
from alignment.data.tasks.rows import FinetuneTask, content_key, label_names, read_labeled
from alignment.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Objective = Literal["causal", "masked", "sentence_pairs", "span_corruption", "prefix", "infilling"]
Tokenize = Callable[[Any, Any, int], tuple[list[Any], Tally]]

TOKENIZE: dict[str, Tokenize] = {
    "text": tokenize_texts,
    "demonstrations": tokenize_demonstrations,
    "comparisons": tokenize_comparisons,
    "prompts": tokenize_prompts,
}
TOKENIZE_TEXT: dict[str, Tokenize] = {
    "causal": tokenize_texts,
    "masked": tokenize_maskable,
    "sentence_pairs": tokenize_passages,
    "span_corruption": tokenize_plain,
    "prefix": tokenize_plain,
    "infilling": partial(tokenize_plain, special_tokens=3),
}
ENCODE: dict[str, Callable[..., tuple[list[Any], Tally]]] = {
    "classification": classification.encode_texts,
    "pair_classification": classification.encode_texts,
    "token_classification": classification.encode_words,
}
UNKNOWN = "texts with characters that the tokenizer does not know: read as its unknown token"


def prepare(
    config: DataConfig, kind: Kind, tokenizer: PreTrainedTokenizerBase, part: Part = "train"
) -> tuple[list[Any], Tally]:
    """Token sequences of one part of the data (Example, PairExample or PromptExample, by kind), and the whole tally.

    Raises:
        UserError: bad rows, as `read_rows`; more rows lost than `config.max_lost_share`, or prompts or responses cut
            than `config.max_cut_share`; no data named for this part.
    """
    return _prepare(config, kind, TOKENIZE[kind], tokenizer, part)


def prepare_text(
    config: DataConfig, objective: Objective, tokenizer: PreTrainedTokenizerBase, part: Part = "train"
) -> tuple[list[Any], Tally]:
    """Token sequences of running text for a pretraining objective, and the whole tally.

    Example for causal, span_corruption, prefix and infilling; MaskableExample for masked; Passage for sentence_pairs.
    Texts with characters the tokenizer does not know are counted.

    Raises:
        UserError: as `prepare`; an unknown objective; what the objective itself refuses.
    """
    if objective not in TOKENIZE_TEXT:
        raise UserError(f"unknown pretraining objective {objective!r}; known: {', '.join(TOKENIZE_TEXT)}")

    def tokenize(rows: Any, tokenizer: Any, max_length: int) -> tuple[list[Any], Tally]:
        examples, counts = TOKENIZE_TEXT[objective](rows, tokenizer, max_length)
        for row_id in unknown_rows(examples, tokenizer.unk_token_id):
            counts.shorten(UNKNOWN, row_id)
        return examples, counts

    return _prepare(config, "text", tokenize, tokenizer, part)


def unknown_rows(examples: Sequence[Any], unknown_id: int | None) -> list[str]:
    """Names of the rows, each once, in whose ids the unknown token stands."""
    sentences = [(e.row_id, s.ids) for e in examples for s in getattr(e, "sentences", [e])]
    return list(dict.fromkeys(row_id for row_id, ids in sentences if unknown_id is not None and unknown_id in ids))


def _prepare(
    config: DataConfig, kind: Kind, tokenize: Tokenize, tokenizer: PreTrainedTokenizerBase, part: Part
) -> tuple[list[Any], Tally]:
    rows, reading = _read(config, kind, part)
    examples, making = tokenize(rows, tokenizer, config.max_length)
    counts = _checked(reading.then(making), config, part)
    if part == "evaluation":  # the training rows are read once more: text alone, which is quick beside tokenizing it
        counts.trained_on = overlap(_read(config, kind, "train")[0], rows)
    return examples, counts


def _read(config: DataConfig, kind: Kind, part: Part) -> tuple[list[Any], Tally]:
    return read_rows(
        _sources(config, part),
        kind,
        split=config.split_of(part),
        columns=config.columns,
        max_rows=config.max_rows,
        on_bad_row=config.on_bad_row,
        skip_ties=config.skip_ties,
    )


def documents_of(example: Any) -> list[Sequence[int]]:
    """The token sequences that a model reads of an example, of whatever kind; of a passage all its sentences."""
    if hasattr(example, "chosen"):
        return [example.chosen.ids, example.rejected.ids]
    if hasattr(example, "sentences"):
        return [[token for sentence in example.sentences for token in sentence.ids]]
    if hasattr(example, "encoded"):
        return [example.encoded.ids]
    if hasattr(example, "pairs"):
        return [pair.ids for pair in example.pairs]
    return example.documents if hasattr(example, "documents") else [example.ids]


def prepare_labeled(
    config: DataConfig,
    task: FinetuneTask,
    tokenizer: PreTrainedTokenizerBase,
    part: Part = "train",
    *,
    names: dict[int, str] | None = None,
    encode: Callable[..., tuple[list[Any], Tally]] | None = None,
    **options: Any,
) -> tuple[list[Any], Tally, dict[int, str]]:
    """Examples of one part of labeled data, the whole tally, and the labels by id.

    Args:
        task: classification or pair_classification (ClassExample), token_classification (TokenExample),
            question_answering (SpanExample), or multiple_choice (MultiSequenceExample, with a tokenizer from
            `gpt1_inputs.add_gpt1_tokens`, or as `encode` has it).
        names: id2label that the rows must keep to; None: made from the rows. Questions and choices have none.
        encode: how sequences and pairs become examples, where not as BERT has them: `gpt1_inputs.encode_gpt1_texts` or
            `encode_gpt1_similarity`; how choices do, where not as GPT-1 has them: `multiple_choice.encode_choices`.
        options: of question_answering: `stride`, `max_question`.

    Raises:
        UserError: bad rows, unknown labels; more rows lost than `config.max_lost_share`; no data named for this part.
    """
    rows, reading = _read_labeled(config, task, part)
    if task == "question_answering":
        examples, making = encode_questions(rows, tokenizer, config.max_length, **options)
    elif task == "multiple_choice":
        examples, making = (encode or gpt1_inputs.encode_gpt1_choices)(rows, tokenizer, config.max_length)
    else:
        names = label_names(rows) if names is None else names
        examples, making = (encode or ENCODE[task])(rows, tokenizer, config.max_length, names)
    counts = _checked(reading.then(making), config, part)
    if part == "evaluation":
        counts.trained_on = overlap(_read_labeled(config, task, "train")[0], rows, content_key)
    return examples, counts, names or {}


def _read_labeled(config: DataConfig, task: FinetuneTask, part: Part) -> tuple[list[Any], Tally]:
    return read_labeled(
        _sources(config, part),
        task,
        split=config.split_of(part),
        columns=config.columns,
        max_rows=config.max_rows,
        on_bad_row=config.on_bad_row,
    )


def _sources(config: DataConfig, part: Part) -> list[str]:
    sources = config.sources(part)
    if not sources:
        raise UserError(f"data.{part} names no file")
    return sources


def _checked(counts: Tally, config: DataConfig, part: Part) -> Tally:
    name = ", ".join(config.sources(part))
    counts.require(config.max_lost_share, name)
    counts.require_whole(config.max_cut_share, (PROMPT_CUT, RESPONSE_CUT), name)
    return counts

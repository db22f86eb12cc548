"""Labeled rows as examples for a downstream task, from a data config in one call."""

from collections.abc import Callable
from typing import Any

from alignment.data.prepare import require_enough
from alignment.data.rows.read import DataConfig, Part, overlap
from alignment.data.rows.records import Tally
from alignment.data.tasks import classification, gpt1_inputs
from alignment.data.tasks.question_answering import encode_questions
from alignment.data.tasks.rows import FinetuneTask, content_key, label_names, read_labeled
from alignment.data.tokenizers.tokenizer import Tokenizer

ENCODE: dict[str, Callable[..., tuple[list[Any], Tally]]] = {
    "classification": classification.encode_texts,
    "pair_classification": classification.encode_texts,
    "token_classification": classification.encode_words,
}


def prepare_labeled(
    config: DataConfig,
    task: FinetuneTask,
    tokenizer: Tokenizer,
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
    rows, read = _read_labeled(config, task, part)
    if task == "question_answering":
        examples, tokenized = encode_questions(rows, tokenizer, config.max_length, **options)
    elif task == "multiple_choice":
        examples, tokenized = (encode or gpt1_inputs.encode_gpt1_choices)(rows, tokenizer, config.max_length)
    else:
        names = label_names(rows) if names is None else names
        examples, tokenized = (encode or ENCODE[task])(rows, tokenizer, config.max_length, names)
    counts = require_enough(read.followed_by(tokenized), config, part)
    if part == "evaluation":
        counts.trained_on = overlap(_read_labeled(config, task, "train")[0], rows, content_key)
    return examples, counts, names or {}


def _read_labeled(config: DataConfig, task: FinetuneTask, part: Part) -> tuple[list[Any], Tally]:
    return read_labeled(
        config.require_sources(part),
        task,
        split=config.split_of(part),
        columns=config.columns,
        max_rows=config.max_rows,
        on_bad_row=config.on_bad_row,
    )

"""How rows become a model's inputs: for each fine-tuning task and format, the functions that encode and collate."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from alignment.data.tasks.classification import collate_classes, collate_token_labels, encode_texts, encode_words
from alignment.data.tasks.gpt1_inputs import (
    collate_multi_sequence,
    encode_gpt1_choices,
    encode_gpt1_similarity,
    encode_gpt1_texts,
)
from alignment.data.tasks.multiple_choice import collate_choices, encode_choices
from alignment.data.tasks.question_answering import collate_spans, encode_questions
from alignment.data.tasks.rows import FinetuneTask, LabeledRow
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.models.families import family_of, is_external_type
from alignment.models.transformer import TransformerSpec
from alignment.training import Collate

Format = Literal["tokenizer", "gpt1", "gpt1_similarity"]
ENCODE: dict[tuple[str, str], Callable[..., Any]] = {
    ("classification", "tokenizer"): encode_texts,
    ("classification", "gpt1"): encode_gpt1_texts,
    ("pair_classification", "tokenizer"): encode_texts,
    ("pair_classification", "gpt1"): encode_gpt1_texts,
    ("pair_classification", "gpt1_similarity"): encode_gpt1_similarity,
    ("token_classification", "tokenizer"): encode_words,
    ("question_answering", "tokenizer"): encode_questions,
    ("multiple_choice", "tokenizer"): encode_choices,
    ("multiple_choice", "gpt1"): encode_gpt1_choices,
}
COLLATE: dict[tuple[str, str], Collate] = {
    ("classification", "tokenizer"): collate_classes,
    ("pair_classification", "tokenizer"): collate_classes,
    ("token_classification", "tokenizer"): collate_token_labels,
    ("question_answering", "tokenizer"): collate_spans,
    ("multiple_choice", "tokenizer"): collate_choices,
}


def collate_for_task(task: FinetuneTask, input_format: Format) -> Collate:
    """The function (examples, micro_batch_tokens) -> batches of a task."""
    return COLLATE.get((task, input_format), collate_multi_sequence)


def choose_format(
    input_format: Format | None, task: FinetuneTask, config: Mapping[str, object], language_coef: float
) -> Format:
    """The format of a run: the one asked for, else GPT-1's for pairs and choices of a decoder.

    A decoder's tokenizer has no token that separates two texts.

    Args:
        config: of the model, for its family.

    Raises:
        UserError: a decoder's format or loss for a model that is no decoder.
    """
    name, decoder = config.get("model_type"), False
    if not is_external_type(dict(config)):  # else an encoder
        spec = family_of(dict(config)).spec_from_config(dict(config))
        decoder = isinstance(spec, TransformerSpec) and spec.causal
    if input_format not in (None, "tokenizer") and not decoder:
        raise UserError(f"format={input_format} is a decoder's and {name} is none; leave it out")
    if language_coef and not decoder:
        raise UserError(f"language_coef={language_coef:g} needs a decoder and {name} is none; set it to 0")
    if input_format is not None:
        return input_format
    return "gpt1" if decoder and task in ("pair_classification", "multiple_choice") else "tokenizer"


def encode_rows(
    task: FinetuneTask,
    input_format: Format,
    rows: Sequence[LabeledRow],
    tokenizer: Tokenizer,
    *,
    max_length: int,
    names: dict[int, str],
    **options: int,
) -> list[Any]:
    """Examples of rows that are in memory.

    Args:
        names: id2label; questions and choices have none.
        options: of question_answering: `stride`, `max_question`.
    """
    labeled = () if task in ("question_answering", "multiple_choice") else (names,)
    examples, _ = ENCODE[task, input_format](rows, tokenizer, max_length, *labeled, **options)
    return examples

"""Predictions of a fine-tuned model: from rows to classes, labels of words, answers and choices."""

from collections.abc import Sequence
from typing import Any

from alignment.algorithms.finetune.model import HEADS
from alignment.algorithms.finetune.scoring import best_answers, predict_examples
from alignment.data.tasks.examples import NO_TEXT, TaskFormat, encode_rows
from alignment.data.tasks.rows import LabeledRow
from alignment.errors import UserError, raise_all
from alignment.loading import best_device, find_directory, load_tokenizer
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.safetensors_files import read_config


def predict(source: str, rows: Sequence[Any], *, micro_batch_tokens: int = 16_384) -> list[Any]:
    """The predictions of a model of `alignment finetune` for each row, in order.

    Rows by task: classification, a text -> its label; pair_classification, (text, text) -> its label;
    token_classification, a list of words -> a list of labels, None for words beyond `max_length` or without a token;
    question_answering, (question, context) -> the answer, "" for none; multiple_choice, (context, choices) -> the index
    of the best choice.

    Args:
        source: `output/model` of a run.

    Raises:
        UserError: a model of another origin, or rows of which the tokenizer makes no token.
    """
    if not rows:
        return []
    config, tokenizer, form = read_config(find_directory(source)), load_tokenizer(source), task_format(source)
    names = {int(number): name for number, name in (config.get("id2label") or {}).items()}
    label = names[0] if form.names_classes else 0
    labeled = [_with_label(form, row, str(number), label) for number, row in enumerate(rows)]
    examples, _ = encode_rows(labeled, form, tokenizer, names)
    encoded = {example.row_id for example in examples}
    raise_all(f"row {row.row_id}: {NO_TEXT}" for row in labeled if row.row_id not in encoded)
    logits, _ = predict_examples(load_finetuned(source, best_device()), examples, form.task, micro_batch_tokens)
    if form.task == "question_answering":
        return best_answers(examples, logits, [context for _, context in rows], form)
    if form.task == "token_classification":
        return [
            [None if token is None else names[int(each[token].argmax())] for token in example.word_tokens]
            for example, each in zip(examples, logits, strict=True)
        ]
    best = [int(each.argmax()) for each in logits]
    return [names[number] for number in best] if form.names_classes else best


def _with_label(form: TaskFormat, row: Sequence[object], row_id: str, label: str | int) -> LabeledRow:
    """The row in the form of a training row, `label` in the place of its labels."""
    count = {"token_classification": len(row), "question_answering": 0}.get(form.task, 1)
    inputs = {"classification": (row, None), "token_classification": (list(row),)}.get(form.task) or tuple(row)
    return LabeledRow(inputs, (label,) * count, row_id)


def task_format(source: str) -> TaskFormat:
    """The form of the rows of a fine-tuned model.

    Raises:
        UserError: a model of another origin.
    """
    settings = (read_config(find_directory(source)).get("task_specific_params") or {}).get("finetune")
    if settings is None:
        raise UserError(f"{source}: config.json does not say how rows are read; `alignment finetune` writes it there")
    return TaskFormat(**settings)


def load_finetuned(source: str, device: str = "cpu") -> Any:
    """A fine-tuned model in eval mode; errors as in `task_format`."""
    return load_pretrained(find_directory(source), HEADS[task_format(source).task], device=device)

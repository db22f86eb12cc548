"""Predictions of a fine-tuned model: the logits of examples, and from rows the classes, labels and answers."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms.finetune.inputs import collate_for_task, encode_rows
from alignment.algorithms.finetune.model import HEADS
from alignment.algorithms.finetune.scoring import Classifier, TaskExample, best_answers, predict_batch
from alignment.data.tasks.classification import TokenExample, first_tokens
from alignment.data.tasks.rows import Choice, FinetuneTask, LabeledRow, LabeledText, LabeledWords, Question
from alignment.data.text.special_tokens import tokenize_with_offsets
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError, raise_all
from alignment.loading import best_device, find_directory, load_tokenizer
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.safetensors_files import read_config
from alignment.ragged import group_by_length
from alignment.training import Collate


@torch.no_grad()
def predict_examples(
    model: Classifier, examples: Sequence[TaskExample], collate: Collate, task: FinetuneTask, micro_batch_tokens: int
) -> tuple[list[Tensor], float]:
    """The logits of each example, in order and on the CPU, and the mean loss of their labels.

    Args:
        model: in eval mode.
    """
    device = next(model.parameters()).device
    logits: list[Tensor] = [torch.empty(0)] * len(examples)
    loss, weight = torch.zeros((), dtype=torch.float64), 0.0
    lengths = [sum(map(len, example.documents)) for example in examples]
    for group in group_by_length(lengths, micro_batch_tokens):
        [batch] = collate([examples[number] for number in group], micro_batch_tokens)
        predictions = predict_batch(model, batch.to(device), task)
        for number, each in zip(group, predictions.logits, strict=True):
            logits[number] = each.float().cpu()
        loss += predictions.loss.double().cpu()
        weight += batch.weight
    return logits, float(loss / max(weight, 1.0))


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
    config, tokenizer = read_config(find_directory(source)), load_tokenizer(source)
    settings = finetune_settings(source)
    task, input_format = settings["task"], settings["format"]
    names = {int(number): name for number, name in (config.get("id2label") or {}).items()}
    labeled = [_labeled_row(task, row, str(number), names.get(0, "")) for number, row in enumerate(rows)]
    options = {name: settings[name] for name in ("stride", "max_question")} if task == "question_answering" else {}
    examples = encode_rows(
        task, input_format, labeled, tokenizer, max_length=settings["max_length"], names=names, **options
    )
    encoded = {example.row_id for example in examples}
    raise_all(
        f"row {row.row_id}: text of which the tokenizer makes no token" for row in labeled if row.row_id not in encoded
    )
    model = load_finetuned(source, best_device())
    logits, _ = predict_examples(model, examples, collate_for_task(task, input_format), task, micro_batch_tokens)
    if task == "question_answering":
        contexts = [context for _, context in rows]
        limits = {name: settings[name] for name in ("max_answer", "no_answer")}
        return best_answers(examples, logits, contexts, **limits)
    if task == "multiple_choice":
        return [int(each.argmax()) for each in logits]
    if task == "token_classification":
        return [
            _word_labels(words, example, each, tokenizer, names)
            for words, example, each in zip(rows, examples, logits, strict=True)
        ]
    return [names[int(each.argmax())] for each in logits]


def finetune_settings(source: str) -> dict[str, Any]:
    """The settings of the run that has written a model.

    Raises:
        UserError: a model of another origin.
    """
    settings = (read_config(find_directory(source)).get("task_specific_params") or {}).get("finetune")
    if settings is None:
        raise UserError(f"{source}: config.json does not say how rows are read; `alignment finetune` writes it there")
    return settings


def load_finetuned(source: str, device: str = "cpu") -> Any:
    """A fine-tuned model in eval mode; errors as in `finetune_settings`."""
    return load_pretrained(find_directory(source), HEADS[finetune_settings(source)["task"]], device=device)


def _labeled_row(task: FinetuneTask, row: Any, row_id: str, label: str) -> LabeledRow:
    """The row in the form of a training row; its label is a placeholder."""
    match task:
        case "classification":
            return LabeledText(row, None, label, row_id)
        case "pair_classification":
            return LabeledText(row[0], row[1], label, row_id)
        case "token_classification":
            return LabeledWords(list(row), [label] * len(row), row_id)
        case "question_answering":
            return Question(row[0], row[1], [], row_id)
        case _:
            return Choice(row[0], list(row[1]), 0, row_id)


def _word_labels(
    words: Sequence[str], example: TokenExample, logits: Tensor, tokenizer: Tokenizer, names: dict[int, str]
) -> list[str | None]:
    """The label of each word, read at its first token; None for a word that has no token in the example."""
    shift, is_text = example.encoded.starts[0], example.encoded.is_text
    labels: list[str | None] = []
    for first in first_tokens(words, tokenize_with_offsets(tokenizer, [" ".join(words)])[0]):
        if first is not None and first + shift < len(is_text) and is_text[first + shift]:
            labels.append(names[int(logits[first + shift].argmax())])
        else:
            labels.append(None)
    return labels

"""From a classifier's logits to the loss, held-out metrics and predictions of each fine-tuning task."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from alignment.algorithms.finetune.model import HEADS
from alignment.data.task_metrics import answer_metrics, are_entities, class_metrics, entity_metrics, number_metrics
from alignment.data.tasks import (
    NO_TEXT,
    FinetuneTask,
    LabeledExamples,
    LabeledRow,
    TaskBatch,
    TaskExample,
    TaskFormat,
    collate_tasks,
    encode_rows,
)
from alignment.errors import UserError, raise_all
from alignment.loading import best_device, find_directory, load_tokenizer
from alignment.losses.language import IGNORED, label_loss, mean_language_loss, span_loss, squared_error_loss
from alignment.models.huggingface.checkpoint import load_pretrained
from alignment.models.outputs import DoubleHeadsOutput, check_numbers
from alignment.models.safetensors_files import read_config
from alignment.ragged import group_by_length
from alignment.training import LossSum


class Predictions(NamedTuple):
    """A model's predictions for a batch, compared with the labels."""

    logits: Sequence[Tensor]  # of each row: classes [C]; tokens by classes [T, C], by start and end [T, 2]; choices [K]
    loss: Tensor  # -log p of the labels, summed over those that count; for an answer the mean of its start and end; of
    # numbers the squared error
    correct: Tensor | None  # number of labels with the highest logit; None for numbers
    log_probs: Tensor | None  # of the documents' own tokens, if the model has a language head too, [M]


def predict_batch(model: nn.Module, batch: TaskBatch, task: FinetuneTask) -> Predictions:
    """The logits of a batch's rows, and the loss of its labels.

    Source: answers: Devlin et al. 2019, arXiv:1810.04805, section 4.2; choices: Radford et al. 2018, section 3.3.
    """
    output = model(batch=batch.ragged)
    logits = _logits_by_row(output.logits, batch, task)
    if task == "token_classification":
        table = torch.cat(list(logits))
    else:  # questions: [B, T, 2], a softmax over T for the start and for the end; others: [B, C]
        table = pad_sequence(list(logits), batch_first=True, padding_value=-torch.inf)
    if task == "question_answering":
        spans = batch.labels.view(-1, 2)
        loss = span_loss(table, *spans.unbind(1))
        correct = 0.5 * (table.argmax(1) == spans).sum()
    elif task == "regression":
        loss = squared_error_loss(table.squeeze(1), batch.labels)
        correct = None
    else:
        loss = label_loss(table, batch.labels)
        correct = (table.argmax(-1) == batch.labels).sum()
    log_probs = output.log_probs if isinstance(output, DoubleHeadsOutput) else None
    return Predictions(logits, loss, None if correct is None else correct.float(), log_probs)


def _logits_by_row(logits: Tensor, batch: TaskBatch, task: FinetuneTask) -> Sequence[Tensor]:
    if task in ("token_classification", "question_answering"):
        return logits.split(list(batch.ragged.lengths))
    if task == "multiple_choice":
        return logits.squeeze(-1).split(batch.rows.bincount().tolist())
    # Both orders of a similar pair: with a linear head the sum of logits is the logit of the summed hidden states.
    return logits.new_zeros(len(batch.labels), logits.shape[-1]).index_add(0, batch.rows, logits).unbind()


def finetune_loss_fn(model: nn.Module, task: FinetuneTask, language_coef: float) -> Callable[[TaskBatch], LossSum]:
    """The loss of the labels plus `language_coef` times the language-model loss of the same texts.

    L3 = L2 + lambda L1; L1 is the mean over a text's tokens and over the texts of a row, summed over rows as L2 is.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", eq. 5, and their code.
    """

    def loss_fn(batch: TaskBatch) -> LossSum:
        predictions = predict_batch(model, batch, task)
        metrics = {} if predictions.correct is None else {"accuracy": predictions.correct}
        if predictions.log_probs is None:
            return LossSum(predictions.loss, metrics)
        language = auxiliary_language_loss(predictions.log_probs, batch)
        metrics |= {"label_loss": predictions.loss, "language_loss": language}
        return LossSum(predictions.loss + language_coef * language, metrics)

    return loss_fn


def auxiliary_language_loss(log_probs: Tensor, batch: TaskBatch) -> Tensor:
    """-log p of all tokens but first ones: mean over a text, mean over a row's texts, sum over rows."""
    ragged = batch.ragged
    losses = mean_language_loss(log_probs, ragged.target_rows, (ragged.sizes - 1).clamp(min=1))
    return (losses / batch.rows.bincount()[batch.rows]).sum()


@torch.no_grad()
def predict_examples(
    model: nn.Module, examples: Sequence[TaskExample], task: FinetuneTask, micro_batch_tokens: int
) -> tuple[list[Tensor], float]:
    """Each example's logits, in order and on the CPU, and the mean loss of their labels; the model is in eval mode."""
    device = next(model.parameters()).device
    logits: list[Tensor] = [torch.empty(0)] * len(examples)
    loss = torch.zeros((), dtype=torch.float64)
    weight = 0.0
    lengths = [sum(map(len, example.documents)) for example in examples]
    for group in group_by_length(lengths, micro_batch_tokens):
        [batch] = collate_tasks([examples[index] for index in group], micro_batch_tokens)
        predictions = predict_batch(model, batch.to(device), task)
        for index, example_logits in zip(group, predictions.logits, strict=True):
            logits[index] = example_logits.float().cpu()
        loss += predictions.loss.cpu().double()
        weight += batch.weight
    return logits, float(loss / max(weight, 1.0))


def task_metrics(form: TaskFormat, data: LabeledExamples, logits: Sequence[Tensor]) -> dict[str, float]:
    """Metrics of classes, numbers, words and entities, answers, or choices (accuracy), from each example's logits."""
    if form.task == "question_answering":
        answers = best_answers(data.examples, logits, [row.inputs[1] for row in data.rows], form)
        return answer_metrics(answers, [[text for text, _ in row.labels] for row in data.rows])
    if form.task == "token_classification":
        labels = [[label for label in example.labels if label != IGNORED] for example in data.examples]
        predicted = [
            example_logits[torch.tensor(example.labels) != IGNORED].argmax(-1).tolist()
            for example, example_logits in zip(data.examples, logits, strict=True)
        ]
        metrics = class_metrics(list(chain(*labels)), list(chain(*predicted)), len(data.names))
        if not are_entities(data.names.values()):
            return metrics
        tags = ([[data.names[label] for label in text] for text in texts] for texts in (labels, predicted))
        return metrics | entity_metrics(*tags)
    if form.task == "regression":
        return number_metrics(
            [example.labels[0] for example in data.examples], [float(example_logits) for example_logits in logits]
        )
    classes = [int(example_logits.argmax()) for example_logits in logits]
    right = [example.labels[0] for example in data.examples]
    if form.task == "multiple_choice":
        return {"accuracy": sum(map(int.__eq__, classes, right)) / len(right)}
    return class_metrics(right, classes, len(data.names))


def best_span(logits: Tensor, allowed: Sequence[bool], max_answer: int) -> tuple[float, int, int] | None:
    """The likeliest answer in a window: score (start + end logit), first and last token; None if no token is allowed.

    `logits` are [T, 2], start and end; `allowed` is True where an answer may start and end, [T].

    Source: Devlin et al. 2019, arXiv:1810.04805, section 4.2.
    """
    positions = torch.tensor(allowed).nonzero().squeeze(1)
    if not len(positions):
        return None
    starts, ends = logits.double()[positions].unbind(1)
    distance = positions[None, :] - positions[:, None]  # [starts, ends]
    joint = (starts[:, None] + ends[None, :]).masked_fill((distance < 0) | (distance >= max_answer), -torch.inf)
    first, last = divmod(int(joint.argmax()), len(positions))
    return float(joint[first, last]), int(positions[first]), int(positions[last])


def best_answers(
    examples: Sequence[TaskExample], logits: Sequence[Tensor], contexts: Sequence[str], form: TaskFormat
) -> list[str]:
    """The best answer to each question, by the sum of its start and end logits, over all windows of its context.

    With `form.no_answer` it is "" where in every window the first token, read as both ends, has more than the best
    answer. `logits` are of start and end in each window, [T, 2]; `contexts` go by the index of the question.

    Source: Devlin et al. 2019, arXiv:1810.04805, sections 4.2 and 4.3, threshold 0.
    """
    best: list[tuple[float, str]] = [(-torch.inf, "")] * len(contexts)
    null = [torch.inf] * len(contexts)
    for window, window_logits in zip(examples, logits, strict=True):
        question = window.question
        null[question] = min(null[question], float(window_logits[0].sum()))
        span = best_span(window_logits, [characters is not None for characters in window.offsets], form.max_answer)
        if span is not None and span[0] > best[question][0]:
            score, first, last = span
            start = window.offsets[first][0]  # type: ignore[index]
            stop = window.offsets[last][1]  # type: ignore[index]
            best[question] = (score, contexts[question][start:stop].strip())
    return [
        "" if form.no_answer and nothing > score else text for nothing, (score, text) in zip(null, best, strict=True)
    ]


# Predictions of a saved model


def predict(source: str, rows: Sequence[Any], *, micro_batch_tokens: int = 16_384) -> list[Any]:
    """The predictions of a model of `alignment finetune` (its `output/model`) for each row, in order.

    Rows by task: classification, a text -> its label; pair_classification, (text, text) -> its label; regression,
    either -> a number; token_classification, a list of words -> a list of labels, None for words beyond `max_length` or
    without a token; question_answering, (question, context) -> the answer, "" for none; multiple_choice, (context,
    choices) -> the index of the best choice.
    """
    if not rows:
        return []
    config = read_config(find_directory(source))
    tokenizer = load_tokenizer(source)
    form = task_format(source)
    names = {int(label_id): name for label_id, name in (config.get("id2label") or {}).items()}
    label = names[0] if form.names_classes else 0
    labeled = []
    for index, row in enumerate(rows):
        count = {"token_classification": len(row), "question_answering": 0}.get(form.task, 1)
        inputs = (
            (list(row),) if form.task == "token_classification" else (row, None) if isinstance(row, str) else tuple(row)
        )
        labeled.append(LabeledRow(inputs, (label,) * count, str(index)))
    examples, _ = encode_rows(labeled, form, tokenizer, names)
    encoded = {example.row_id for example in examples}
    raise_all(f"row {row.row_id}: {NO_TEXT}" for row in labeled if row.row_id not in encoded)
    logits, _ = predict_examples(load_finetuned(source, best_device()), examples, form.task, micro_batch_tokens)
    sums = torch.stack([example_logits.sum() for example_logits in logits])
    check_numbers(sums, lambda i: f"row {examples[i].row_id}", f"the output of {source}")
    if form.task == "question_answering":
        return best_answers(examples, logits, [context for _, context in rows], form)
    if form.task == "token_classification":
        words = []
        for example, example_logits in zip(examples, logits, strict=True):
            tokens = example.word_tokens
            words.append([None if token is None else names[int(example_logits[token].argmax())] for token in tokens])
        return words
    if form.task == "regression":
        return [float(example_logits) for example_logits in logits]
    best = [int(example_logits.argmax()) for example_logits in logits]
    return [names[label_id] for label_id in best] if form.names_classes else best


def task_format(source: str) -> TaskFormat:
    """The form of the rows of a fine-tuned model."""
    settings = (read_config(find_directory(source)).get("task_specific_params") or {}).get("finetune")
    if settings is None:
        raise UserError(f"{source}: config.json does not say how rows are read; `alignment finetune` writes it there")
    return TaskFormat(**settings)


def load_finetuned(source: str, device: str = "cpu") -> Any:
    """A fine-tuned model in eval mode; errors as in `task_format`."""
    return load_pretrained(find_directory(source), HEADS[task_format(source).task], device=device)

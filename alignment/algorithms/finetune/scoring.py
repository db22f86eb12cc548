"""From a classifier's logits to the loss, held-out metrics and answers of each fine-tuning task."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from alignment.algorithms.finetune.metrics import (
    answer_metrics,
    best_span,
    class_metrics,
    entity_metrics,
    is_begin_inside,
)
from alignment.data.tasks.classification import ClassExample, LabeledBatch, TokenExample
from alignment.data.tasks.gpt1_inputs import MultiSequenceBatch, MultiSequenceExample
from alignment.data.tasks.multiple_choice import ChoiceExample
from alignment.data.tasks.question_answering import SpanBatch, SpanExample
from alignment.data.tasks.rows import FinetuneTask, Question
from alignment.losses.classification import IGNORED, label_loss, span_loss
from alignment.losses.language import mean_language_loss
from alignment.models.outputs import ClassifierOutput, DoubleHeadsOutput
from alignment.ragged import Ragged
from alignment.training import LossSum

TaskExample = ClassExample | TokenExample | SpanExample | MultiSequenceExample | ChoiceExample
TaskBatch = LabeledBatch | SpanBatch | MultiSequenceBatch


class Classifier(Protocol):
    """A model with a classification head, and perhaps a language head."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...
    def __call__(self, *, batch: Ragged) -> ClassifierOutput | DoubleHeadsOutput: ...


class Predictions(NamedTuple):
    """A model's predictions for a batch, compared with the labels.

    Attributes:
        logits: of each example: classes [C]; tokens by classes [T, C]; tokens by start and end [T, 2]; choices [K].
        loss: -log p of the labels, summed over those that count; for an answer the mean of its start and end.
        correct: number of labels with the highest logit, likewise.
        log_probs: of the documents' own tokens, if the model has a language head too, [M].
    """

    logits: Sequence[Tensor]
    loss: Tensor
    correct: Tensor
    log_probs: Tensor | None


def predict_batch(model: Classifier, batch: TaskBatch, task: FinetuneTask) -> Predictions:
    """The logits of a batch's examples, and the loss of its labels.

    Source: answers: Devlin et al. 2019, arXiv:1810.04805, section 4.2; choices: Radford et al. 2018, section 3.3.
    """
    output = model(batch=batch.ragged)
    logits = logits_by_example(output.logits, batch, task)
    table = label_logits(logits, task)
    if isinstance(batch, SpanBatch):
        starts, ends = batch.answer_starts - batch.ragged.firsts, batch.answer_ends - batch.ragged.firsts
        loss = span_loss(table, starts, ends)
        correct = 0.5 * (table.argmax(1) == torch.stack([starts, ends], -1)).sum()
    else:
        loss = label_loss(table, batch.labels)
        correct = (table.argmax(-1) == batch.labels).sum()
    log_probs = output.log_probs if isinstance(output, DoubleHeadsOutput) else None
    return Predictions(logits, loss, correct.float(), log_probs)


def logits_by_example(logits: Tensor, batch: TaskBatch, task: FinetuneTask) -> Sequence[Tensor]:
    """The model's logits, split by example as in `Predictions.logits`."""
    if task in ("token_classification", "question_answering"):
        return logits.split(list(batch.ragged.lengths))
    if not isinstance(batch, MultiSequenceBatch):
        return logits.unbind()
    if task == "multiple_choice":
        return logits.squeeze(-1).split(batch.rows.bincount().tolist())
    # Both orders of a similar pair: with a linear head the sum of logits is the logit of the summed hidden states.
    return logits.new_zeros(len(batch.labels), logits.shape[-1]).index_add(0, batch.rows, logits).unbind()


def label_logits(logits: Sequence[Tensor], task: FinetuneTask) -> Tensor:
    """The logits that each label's softmax runs over, -inf at padding.

    Returns:
        Token classification: [N, C]. Question answering: [B, T, 2], a softmax over T for the start and for the end.
        Else: [B, C].
    """
    if task == "token_classification":
        return torch.cat(list(logits))
    return pad_sequence(list(logits), batch_first=True, padding_value=-torch.inf)


def finetune_loss_fn(model: Classifier, task: FinetuneTask, language_coef: float) -> Callable[[TaskBatch], LossSum]:
    """The loss of the labels plus `language_coef` times the language-model loss of the same texts.

    L3 = L2 + lambda L1; L1 is the mean over a text's tokens, the mean over the texts of a row, and summed over rows
    as L2 is.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", eq. 5; the means are
    those of their code.
    """

    def loss_fn(batch: TaskBatch) -> LossSum:
        predictions = predict_batch(model, batch, task)
        metrics = {"accuracy": predictions.correct}
        if predictions.log_probs is None:
            return LossSum(predictions.loss, metrics)
        language = auxiliary_language_loss(predictions.log_probs, batch)
        metrics |= {"label_loss": predictions.loss, "language_loss": language}
        return LossSum(predictions.loss + language_coef * language, metrics)

    return loss_fn


def auxiliary_language_loss(log_probs: Tensor, batch: TaskBatch) -> Tensor:
    """-log p of all tokens but first ones: mean over a text, mean over a row's texts, sum over rows.

    Args:
        log_probs: of the batch's targets, [M].
    """
    ragged = batch.ragged
    losses = mean_language_loss(log_probs, ragged.target_rows, (ragged.sizes - 1).clamp(min=1))
    return (losses / batch.rows.bincount()[batch.rows] if isinstance(batch, MultiSequenceBatch) else losses).sum()


def label_metrics(
    examples: Sequence[ClassExample | MultiSequenceExample | ChoiceExample],
    logits: Sequence[Tensor],
    task: FinetuneTask,
    names: dict[int, str],
) -> dict[str, float]:
    """Metrics of classes, or the accuracy of choices."""
    predictions = [int(each.argmax()) for each in logits]
    labels = [example.label for example in examples]
    if task == "multiple_choice":
        correct = [predicted == label for predicted, label in zip(predictions, labels, strict=True)]
        return {"accuracy": sum(correct) / len(correct)}
    return class_metrics(labels, predictions, len(names))


def word_metrics(examples: Sequence[TokenExample], logits: Sequence[Tensor], names: dict[int, str]) -> dict[str, float]:
    """Metrics of word classes over all texts; of entities too if the labels are B-, I- and O."""
    labels = [[label for label in example.labels if label != IGNORED] for example in examples]
    predictions = [word_classes(example, each) for example, each in zip(examples, logits, strict=True)]
    flat, flat_predictions = ([label for text in texts for label in text] for texts in (labels, predictions))
    metrics = class_metrics(flat, flat_predictions, len(names))
    if not is_begin_inside(names.values()):
        return metrics
    tags, predicted_tags = ([[names[label] for label in text] for text in texts] for texts in (labels, predictions))
    return metrics | entity_metrics(tags, predicted_tags)


def word_classes(example: TokenExample, logits: Tensor) -> list[int]:
    """The likeliest class of each word that has a label, read at its first token; logits: [T, C]."""
    counts = torch.tensor(example.labels) != IGNORED
    return logits[counts].argmax(-1).tolist()


def question_metrics(
    examples: Sequence[SpanExample],
    logits: Sequence[Tensor],
    questions: Sequence[Question],
    *,
    max_answer: int,
    no_answer: bool,
) -> dict[str, float]:
    """`exact_match` and `f1` of the best answers.

    Args:
        questions: the rows behind the examples, with their answers; see `best_answers` for the other arguments.
    """
    contexts = [question.context for question in questions]
    answers = best_answers(examples, logits, contexts, max_answer=max_answer, no_answer=no_answer)
    return answer_metrics(answers, [[text for text, _ in question.answers] for question in questions])


def best_answers(
    examples: Sequence[SpanExample],
    logits: Sequence[Tensor],
    contexts: Sequence[str],
    *,
    max_answer: int,
    no_answer: bool,
) -> list[str]:
    """The best answer to each question, by the sum of its start and end logits, over all windows of its context.

    Args:
        logits: of start and end in each window, [T, 2].
        contexts: by index of the question.
        max_answer: most tokens of an answer.
        no_answer: return "" where in every window the first token, read as both ends, has more than the best answer.

    Source: Devlin et al. 2019, arXiv:1810.04805, sections 4.2 and 4.3, threshold 0.
    """
    best: list[tuple[float, str]] = [(-torch.inf, "")] * len(contexts)
    null = [torch.inf] * len(contexts)
    for window, each in zip(examples, logits, strict=True):
        number = window.question
        null[number] = min(null[number], float(each[0].sum()))
        span = best_span(each, [characters is not None for characters in window.offsets], max_answer)
        if span is not None and span[0] > best[number][0]:
            score, first, last = span
            start, stop = window.offsets[first][0], window.offsets[last][1]  # type: ignore[index]
            best[number] = (score, contexts[number][start:stop].strip())
    return ["" if no_answer and nothing > score else text for nothing, (score, text) in zip(null, best, strict=True)]

"""From a reader's scores to losses, held-out metrics and answers. What rows become as tokens is in model.py."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
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
from alignment.data.tasks.rows import FinetuneTask
from alignment.losses.classification import IGNORED
from alignment.models.outputs import DoubleHeadsOutput
from alignment.ragged import group_by_length
from alignment.training import Collate, LossSum

Example = ClassExample | TokenExample | SpanExample | MultiSequenceExample | ChoiceExample
Batch = LabeledBatch | SpanBatch | MultiSequenceBatch


class Reading(NamedTuple):
    """What a reader makes of a batch.

    Attributes:
        rows: scores of each example: classes [C]; tokens [T, C]; span [T, 2]; choice, one for each choice.
        cost: -log p of the labels, summed over what counts; of a span the mean of its two ends.
        right: how many of these are likeliest, likewise.
        log_probs: of the documents' own tokens, where the model has a language head beside, [M].
    """

    rows: Sequence[Tensor]
    cost: Tensor
    right: Tensor
    log_probs: Tensor | None


def read(model: Any, batch: Batch, task: FinetuneTask) -> Reading:
    """A batch's scores and their cost.

    Source: spans: Devlin et al. 2019, arXiv:1810.04805, section 4.2; choices: Radford et al. 2018, section 3.3.
    """
    output = model(batch=batch.ragged)
    rows = scores_of_rows(output.logits, batch, task)
    table, labels = rivals(rows, task), labels_of(batch)
    share = 0.5 if task == "question_answering" else 1.0
    cost = share * F.cross_entropy(table, labels, ignore_index=IGNORED, reduction="sum")
    right = share * (table.argmax(-1) == labels).sum()
    return Reading(rows, cost, right.float(), output.log_probs if isinstance(output, DoubleHeadsOutput) else None)


def scores_of_rows(scores: Tensor, batch: Batch, task: FinetuneTask) -> Sequence[Tensor]:
    """The model's scores, cut into those of each example; see `Reading.rows`."""
    if task in ("token_classification", "question_answering"):
        return scores.split(list(batch.ragged.lengths))
    if not isinstance(batch, MultiSequenceBatch):
        return scores.unbind()
    if task == "multiple_choice":
        return scores.squeeze(-1).split(batch.rows.bincount().tolist())
    # Both orders of a similar pair: with a linear head the sum of scores is the score of the summed states.
    return scores.new_zeros(len(batch.labels), scores.shape[-1]).index_add(0, batch.rows, scores).unbind()


def rivals(rows: Sequence[Tensor], task: FinetuneTask) -> Tensor:
    """Scores that compete with each other, a row for each label, -inf where there is no rival.

    Tokens [N, C]; spans [2B, T], starts before ends; else [B, C].
    """
    if task == "token_classification":
        return torch.cat(list(rows))
    table = pad_sequence(list(rows), batch_first=True, padding_value=-torch.inf)
    return torch.cat(table.unbind(-1)) if task == "question_answering" else table


def labels_of(batch: Batch) -> Tensor:
    """The label of each row of `rivals`."""
    if not isinstance(batch, SpanBatch):
        return batch.labels
    firsts = batch.ragged.firsts
    return torch.cat([batch.answer_starts - firsts, batch.answer_ends - firsts])


def label_loss(model: Any, task: FinetuneTask, language_coef: float) -> Callable[[Batch], LossSum]:
    """-log p(label), plus `language_coef` times the language-model loss of the same texts.

    L3 = L2 + lambda L1; L1 is the mean over a text's tokens, the mean over the texts of a row, and summed over rows
    as L2 is.

    Source: Radford et al. 2018, "Improving language understanding by generative pre-training", eq. 5; the means are
    those of their code.
    """

    def loss_fn(batch: Batch) -> LossSum:
        reading = read(model, batch, task)
        metrics = {"accuracy": reading.right}
        if reading.log_probs is None:
            return LossSum(reading.cost, metrics)
        language = language_cost(reading.log_probs, batch)
        metrics |= {"label_loss": reading.cost, "language_loss": language}
        return LossSum(reading.cost + language_coef * language, metrics)

    return loss_fn


def language_cost(log_probs: Tensor, batch: Batch) -> Tensor:
    """-log p of all tokens but first ones: mean over a text, mean over a row's texts, sum over rows; log_probs: [M]."""
    ragged = batch.ragged
    predicted = (ragged.sizes - 1).clamp(min=1)
    costs = -log_probs.new_zeros(len(ragged.lengths)).index_add(0, ragged.target_rows, log_probs) / predicted
    return (costs / batch.rows.bincount()[batch.rows] if isinstance(batch, MultiSequenceBatch) else costs).sum()


@torch.no_grad()
def read_all(
    model: Any, examples: Sequence[Example], collate: Collate, task: FinetuneTask, micro_batch_tokens: int
) -> tuple[list[Tensor], float]:
    """Scores of every example, in order and on the CPU, and the mean cost of their labels.

    Args:
        model: in eval mode.
    """
    device = next(model.parameters()).device
    rows: list[Tensor] = [torch.empty(0)] * len(examples)
    cost, weight = torch.zeros((), dtype=torch.float64), 0.0
    for group in group_by_length([length_of(example) for example in examples], micro_batch_tokens):
        [batch] = collate([examples[number] for number in group], micro_batch_tokens)
        reading = read(model, batch.to(device), task)
        for number, scores in zip(group, reading.rows, strict=True):
            rows[number] = scores.float().cpu()
        cost += reading.cost.double().cpu()
        weight += batch.weight
    return rows, float(cost / max(weight, 1.0))


def length_of(example: Example) -> int:
    """Tokens of all documents of an example."""
    if isinstance(example, MultiSequenceExample):
        return sum(map(len, example.documents))
    encoded = example.pairs if isinstance(example, ChoiceExample) else [example.encoded]
    return sum(len(each.ids) for each in encoded)


def label_metrics(
    examples: Sequence[Any], rows: Sequence[Tensor], task: FinetuneTask, names: dict[int, str]
) -> dict[str, float]:
    """Metrics of classes, words and choices; entities too where the labels are B-, I- and O."""
    if task == "multiple_choice":
        right = [int(scores.argmax()) == example.label for example, scores in zip(examples, rows, strict=True)]
        return {"accuracy": sum(right) / len(right)}
    if task != "token_classification":
        predictions = [int(scores.argmax()) for scores in rows]
        return class_metrics([example.label for example in examples], predictions, len(names))
    labels = [[label for label in example.labels if label != IGNORED] for example in examples]
    found = [word_classes(example, scores) for example, scores in zip(examples, rows, strict=True)]
    flat, flat_found = ([label for text in texts for label in text] for texts in (labels, found))
    metrics = class_metrics(flat, flat_found, len(names))
    if not is_begin_inside(names.values()):
        return metrics
    gold, given = ([[names[label] for label in text] for text in texts] for texts in (labels, found))
    return metrics | entity_metrics(gold, given)


def word_classes(example: TokenExample, scores: Tensor) -> list[int]:
    """The likeliest class of each word that has a token to be read at; scores: [T, C]."""
    counts = torch.tensor(example.labels) != IGNORED
    return scores[counts].argmax(-1).tolist()


def question_metrics(
    examples: Sequence[SpanExample], rows: Sequence[Tensor], questions: Sequence[Any], most: int, no_answer: bool
) -> dict[str, float]:
    """`exact_match` and `f1` of the best answers; arguments as for `answers_to`, `questions` with their answers."""
    answers = answers_to(examples, rows, [question.context for question in questions], most, no_answer)
    return answer_metrics(answers, [[text for text, _ in question.answers] for question in questions])


def answers_to(
    examples: Sequence[SpanExample], rows: Sequence[Tensor], contexts: Sequence[str], most: int, no_answer: bool
) -> list[str]:
    """The best answer to each question over all windows of its context, compared by score.

    Args:
        rows: start and end scores of each window, [T, 2].
        contexts: by number of the question.
        most: tokens that an answer may have.
        no_answer: give "" where every window's first token, read as both ends, scores higher than the best answer.

    Source: Devlin et al. 2019, arXiv:1810.04805, sections 4.2 and 4.3, threshold 0.
    """
    best: list[tuple[float, str]] = [(-torch.inf, "")] * len(contexts)
    none = [torch.inf] * len(contexts)
    for window, scores in zip(examples, rows, strict=True):
        number = window.question
        none[number] = min(none[number], float(scores[0].sum()))
        span = best_span(scores, [place is not None for place in window.offsets], most)
        if span is not None and span[0] > best[number][0]:
            score, first, last = span
            start, stop = window.offsets[first][0], window.offsets[last][1]  # type: ignore[index]
            best[number] = (score, contexts[number][start:stop].strip())
    return ["" if no_answer and nothing > score else text for nothing, (score, text) in zip(none, best, strict=True)]

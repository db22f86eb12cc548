"""Objectives of a reward model: their rows and batches, the tokens that are scored, and the costs.

One table of objectives; an ensemble has the cost of each member, on rows of its own choice where it draws any.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from alignment.data.batches import (
    PairBatch,
    RankedBatch,
    StepBatch,
    collate_pairs,
    collate_rankings,
    collate_steps,
    padded_groups,
)
from alignment.data.encoder_inputs import encode_comparisons, encode_ordered_rankings, encode_rankings, with_segments
from alignment.data.prepare import TOKENIZE, Preparation, Tokenize
from alignment.data.rows.records import Kind
from alignment.data.tokenize import tokenize_comparisons, tokenize_ordered_rankings, tokenize_rankings, tokenize_steps
from alignment.errors import UserError
from alignment.loading import Checkpoint, architecture_of
from alignment.losses.preference import bradley_terry_loss, center_penalty, preference_metrics
from alignment.losses.ranking import (
    center_scores_penalty,
    ordered_pair_metrics,
    plackett_luce_loss,
    prompt_accuracy,
    ranking_loss,
    rao_kupper_loss,
    step_loss,
    step_metrics,
)
from alignment.models.families import FAMILIES, is_external_type
from alignment.models.model import Model
from alignment.models.safetensors_files import read_config
from alignment.ragged import Ragged, RaggedBatch, Sharing
from alignment.reward_model.model import document_scores
from alignment.training import Collate, LossFn, LossSum
from alignment.training.terms import ONE_SOURCE, Sources

RewardLoss = Literal["bradley_terry", "ranking", "plackett_luce", "rao_kupper", "steps"]
Means = dict[str, tuple[Tensor, Tensor]]  # (sum, weight) by metric, as in `LossSum.means`


class Measured(NamedTuple):
    """Metrics of a batch.

    Attributes:
        sums: over what the batch's weight counts.
        means: metrics with a weight of their own.
        accuracy: of each thing that the weight counts, [B].
    """

    sums: dict[str, Tensor]
    means: Means
    accuracy: Tensor


@dataclass(frozen=True)
class Objective:
    """One way to learn scores.

    Attributes:
        kind: of the rows.
        tokenize: rows -> examples, for a decoder.
        encode: the same for an encoder; None: only decoders can learn this.
        collate: examples -> batches.
        read_at: batch -> index of the tokens that a decoder's scores are read at, [D].
        cost: (scores [D], batch, theta, center_coef) -> cost of each thing that the batch's weight counts, [B].
        measure: (mean scores of the members [D], batch) -> metrics.
    """

    kind: Kind
    tokenize: Tokenize
    encode: Tokenize | None
    collate: Callable[..., Sequence[Any]]
    read_at: Callable[[Any], Tensor]
    cost: Callable[[Tensor, Any, float, float], Tensor]
    measure: Callable[[Tensor, Any], "Measured"]

    def collate_sharing(self, sharing: Sharing) -> Collate:
        """`collate` of batches in which responses share their prompt, where a prompt has several."""
        return self.collate if self.kind == "steps" else partial(self.collate, share_prompts=sharing)

    def preparation_for(self, source: str) -> Preparation:
        """The way from rows to examples for a checkpoint; no weights are read."""
        start = Checkpoint(source)
        architecture, tokenize = architecture_of(start), self.tokenize
        if architecture != "decoder":
            if architecture != "encoder" or self.encode is None or is_external_type(read_config(start.base)):
                encoders = "" if self.encode is None else f", or from an encoder of {', '.join(encoder_families())}"
                raise UserError(
                    f"{source}: this model is an {architecture}, and a reward model of this loss starts from a decoder, which "
                    f"reads prompt and response in one text{encoders}"
                )
            tokenize = self.encode
        name = self.kind if tokenize is TOKENIZE[self.kind] else tokenize.__name__
        return Preparation(name, self.kind, tokenize)


def encoder_families() -> list[str]:
    """The `model_type` of each family of encoders with a score head."""
    return [name for name, family in FAMILIES.items() if family.architecture == "encoder" and "scalar" in family.tasks]


def last_tokens(batch: RaggedBatch) -> Tensor:
    """The last token of each document, which saw the whole text."""
    return batch.ragged.last


# Pairs


def pair_cost(scores: Tensor, batch: PairBatch, theta: float, center_coef: float) -> Tensor:
    """Bradley-Terry cost of each pair, plus `center_penalty`, [B]; scores: the chosen ones, then the rejected, [2B]."""
    chosen, rejected = scores.chunk(2)
    cost = bradley_terry_loss(chosen, rejected, batch.margins)
    return cost + center_coef * center_penalty(chosen, rejected) if center_coef else cost


def measure_pairs(scores: Tensor, batch: PairBatch) -> Measured:
    """Accuracy, ties, margin, and the mean score of the two."""
    chosen, rejected = scores.chunk(2)
    lead = (chosen - rejected).detach()
    sums = preference_metrics(lead) | {"score": (chosen + rejected).detach().sum() / 2}
    return Measured(sums, {}, (lead > 0).float() + (lead == 0).float() / 2)


# Groups of K responses


def ranking_cost(
    loss: Callable[..., Tensor], scores: Tensor, batch: RankedBatch, theta: float, center_coef: float
) -> Tensor:
    """Cost of each prompt's group by `loss`, plus the centering of its pairs, [B]."""
    (rows, mask), (ranks, _) = padded_groups(scores, batch), padded_groups(batch.ranks, batch)
    options: dict[str, object] = {}
    if loss is rao_kupper_loss:
        options["theta"] = theta
    elif loss is ranking_loss:
        options["margin"] = batch.margins
    cost = loss(rows, ranks, mask=mask, **options)
    return cost + center_coef * center_scores_penalty(rows, mask) if center_coef else cost


def group_metrics(scores: Tensor, batch: RankedBatch) -> Measured:
    """Accuracy, ties and margin over ordered pairs, top-1 accuracy over prompts, and each prompt's mean score."""
    (rows, mask), (ranks, _) = padded_groups(scores, batch), padded_groups(batch.ranks, batch)
    score = (rows.detach().float().sum(1) / mask.sum(1)).sum()
    return Measured({"score": score}, ordered_pair_metrics(rows, ranks, mask), prompt_accuracy(rows, ranks, mask))


# Steps


def step_cost(scores: Tensor, batch: StepBatch, theta: float, center_coef: float) -> Tensor:
    """Cross-entropy of each step's label, [S]."""
    return step_loss(scores, batch.labels)


def measure_steps(scores: Tensor, batch: StepBatch) -> Measured:
    """Accuracy and ties over steps, the share of steps that are labeled right, and the mean score."""
    scores = scores.detach()
    sums = step_metrics(scores, batch.labels) | {"score": scores.float().sum()}
    return Measured(sums, {}, torch.where(scores == 0, 0.5, ((scores > 0) == batch.labels).float()))


def _groups(loss: Callable[..., Tensor], tokenize: Tokenize, encode: Tokenize) -> Objective:
    return Objective(
        "rankings", tokenize, encode, collate_rankings, last_tokens, partial(ranking_cost, loss), group_metrics
    )


OBJECTIVES: dict[RewardLoss, Objective] = {
    "bradley_terry": Objective(
        "comparisons", tokenize_comparisons, encode_comparisons, collate_pairs, last_tokens, pair_cost, measure_pairs
    ),
    "ranking": _groups(ranking_loss, tokenize_ordered_rankings, encode_ordered_rankings),
    "plackett_luce": _groups(plackett_luce_loss, tokenize_ordered_rankings, encode_ordered_rankings),
    "rao_kupper": _groups(rao_kupper_loss, tokenize_rankings, encode_rankings),
    "steps": Objective(
        "steps", tokenize_steps, None, collate_steps, lambda batch: batch.ends, step_cost, measure_steps
    ),
}


def objective_loss_fn(
    model: Model,
    objective: Objective,
    *,
    center_coef: float = 0.0,
    theta: float = 2.0,
    bootstrap: "Bootstrap | None" = None,
    is_encoder: bool = False,
    sources: Sources = ONE_SOURCE,
) -> LossFn:
    """Loss function of a reward model: the mean of its members' costs, summed over what a batch counts."""

    def loss_fn(batch: RaggedBatch) -> LossSum:
        ragged: Ragged = with_segments(batch.ragged) if is_encoder else batch.ragged
        # A decoder's last layer then computes these tokens alone; an encoder gives a score per document anyway.
        output = model(batch=ragged) if is_encoder else model(batch=ragged, tokens=objective.read_at(batch))
        scores = document_scores(output)  # [D, k]
        costs = torch.stack([objective.cost(one, batch, theta, center_coef) for one in scores.unbind(-1)], -1)
        if bootstrap is not None:
            costs = costs * bootstrap.counts(counted_rows(batch)).to(costs.device)
        sums, means, accuracy = objective.measure(scores.mean(-1), batch)
        if scores.shape[-1] > 1:
            deviation = scores.detach().std(-1, correction=0)
            means = means | {"spread": (deviation.sum(), deviation.new_tensor(float(len(deviation))))}
        loss = sources.loss_sum(costs.mean(-1), batch, sums, accuracy=accuracy)
        return replace(loss, means=means | loss.means)

    return loss_fn


def counted_rows(batch: RaggedBatch) -> list[str]:
    """The row id of each thing that the batch's weight counts."""
    row_ids = batch.row_ids
    if isinstance(batch, PairBatch):
        return list(row_ids[: len(row_ids) // 2])
    if isinstance(batch, RankedBatch):
        ends = torch.tensor(batch.sizes).cumsum(0).tolist()
        return [row_ids[end - 1] for end in ends]
    assert isinstance(batch, StepBatch)
    return [row_ids[row] for row in batch.rows.tolist()]


@dataclass(frozen=True)
class Bootstrap:
    """Number of times that each member of an ensemble counts each row: a Poisson(1) number, fixed by (seed, member, row id).

    As many rows as there are, drawn with replacement, have such counts where rows are many. Nothing is drawn at run time,
    so batches, ranks and resumption change nothing.

    Attributes:
        seed: of the run.
        members: k.

    Source: Oza and Russell 2001, "Online bagging and boosting", section 2.
    """

    seed: int
    members: int

    def counts(self, row_ids: Sequence[str]) -> Tensor:
        """[rows, k], float32."""
        return torch.tensor([[self._count(member, row) for member in range(self.members)] for row in row_ids])

    def _count(self, member: int, row_id: str) -> float:
        digest = hashlib.blake2b(f"{self.seed}:{member}:{row_id}".encode(), digest_size=8).digest()
        uniform = int.from_bytes(digest, "big") / 2**64
        count, probability = 0, math.exp(-1)
        while uniform >= probability and count < 16:
            uniform -= probability
            count += 1
            probability /= count
        return float(count)

"""The objectives of a reward model: rows, batches, the tokens that are scored, and the loss.

An ensemble has the cost of each member, on rows of its own choice where it draws any.
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
    """Metrics of a batch."""

    sums: dict[str, Tensor]  # over what the batch's weight counts
    means: Means  # metrics with a weight of their own
    accuracy: Tensor  # of each thing that the weight counts, [B]


@dataclass(frozen=True)
class Objective:
    """The rows of one way to learn scores."""

    kind: Kind  # of the rows
    tokenize: Tokenize  # rows -> examples, for a decoder
    encode: Tokenize | None  # the same for an encoder; None: only decoders can learn this
    collate: Callable[..., Sequence[Any]]  # examples -> batches

    def collate_sharing(self, sharing: Sharing) -> Collate:
        """`collate` of batches in which responses share their prompt, where a prompt has several."""
        return self.collate if self.kind == "steps" else partial(self.collate, share_prompts=sharing)

    def preparation_for(self, source: str) -> Preparation:
        """The preparation of rows for a checkpoint; no weights are read."""
        start = Checkpoint(source)
        architecture, tokenize = architecture_of(start), self.tokenize
        if architecture != "decoder":
            if architecture != "encoder" or self.encode is None or is_external_type(read_config(start.base)):
                names = [name for name, f in FAMILIES.items() if f.architecture == "encoder" and "scalar" in f.tasks]
                encoders = "" if self.encode is None else f", or from an encoder of {', '.join(names)}"
                raise UserError(
                    f"{source}: this model is an {architecture}, and a reward model of this loss starts from a decoder, which "
                    f"reads prompt and response in one text{encoders}"
                )
            tokenize = self.encode
        name = self.kind if tokenize is TOKENIZE[self.kind] else tokenize.__name__
        return Preparation(name, self.kind, tokenize)


RANKED = Objective("rankings", tokenize_ordered_rankings, encode_ordered_rankings, collate_rankings)
OBJECTIVES: dict[RewardLoss, Objective] = {
    "bradley_terry": Objective("comparisons", tokenize_comparisons, encode_comparisons, collate_pairs),
    "ranking": RANKED,
    "plackett_luce": RANKED,
    "rao_kupper": Objective("rankings", tokenize_rankings, encode_rankings, collate_rankings),
    "steps": Objective("steps", tokenize_steps, None, collate_steps),
}


def objective_loss_fn(
    model: Model,
    loss: RewardLoss,
    *,
    center_coef: float = 0.0,
    theta: float = 2.0,
    bootstrap: Callable[[Sequence[str]], Tensor] | None = None,
    is_encoder: bool = False,
    sources: Sources = ONE_SOURCE,
) -> LossFn:
    """Loss function of a reward model: the mean of its members' costs, summed over what a batch counts.

    A decoder's scores are read at the last token of each document, which saw the whole text, or at the end of each step.

    Args:
        model: called on a batch, also an ensemble of k members.
        loss: see `RewardConfig`.
        center_coef: weight of the penalty on scores away from 0.
        theta: of rao_kupper.
        bootstrap: row ids -> weight of each row for each member, [rows, k]; None: all count alike.
        is_encoder: True where the model gives one score per document, whatever is read.
        sources: told apart in metrics.
    """

    def loss_fn(batch: RaggedBatch) -> LossSum:
        ragged: Ragged = with_segments(batch.ragged) if is_encoder else batch.ragged
        read_at = batch.ends if isinstance(batch, StepBatch) else batch.ragged.last
        # A decoder's last layer then computes these tokens alone; an encoder gives a score per document anyway.
        output = model(batch=ragged) if is_encoder else model(batch=ragged, tokens=read_at)
        scores = document_scores(output)  # [D, k]
        members = [cost_of(loss, one, batch, theta=theta, center_coef=center_coef) for one in scores.unbind(-1)]
        costs = torch.stack(members, -1)
        if bootstrap is not None:
            costs = costs * bootstrap(counted_rows(batch)).to(costs.device)
        sums, means, accuracy = score_metrics(scores.mean(-1).detach(), batch)
        if scores.shape[-1] > 1:
            deviation = scores.detach().std(-1, correction=0)
            means = means | {"spread": (deviation.sum(), deviation.new_tensor(float(len(deviation))))}
        total = sources.loss_sum(costs.mean(-1), batch, sums, accuracy=accuracy)
        return replace(total, means=means | total.means)

    return loss_fn


def cost_of(loss: RewardLoss, scores: Tensor, batch: RaggedBatch, *, theta: float, center_coef: float) -> Tensor:
    """Cost of each pair, each prompt's group of K responses or each step of a batch, [B], centering included.

    Args:
        scores: what was read, [D]; of pairs the chosen ones, then the rejected.
    """
    if isinstance(batch, StepBatch):
        return step_loss(scores, batch.labels)
    if isinstance(batch, PairBatch):
        chosen, rejected = scores.chunk(2)
        cost = bradley_terry_loss(chosen, rejected, batch.margins)
        return cost + center_coef * center_penalty(chosen, rejected) if center_coef else cost
    assert isinstance(batch, RankedBatch)
    (rows, mask), (ranks, _) = padded_groups(scores, batch), padded_groups(batch.ranks, batch)
    if loss == "ranking":
        cost = ranking_loss(rows, ranks, mask=mask, margin=batch.margins)
    elif loss == "plackett_luce":
        cost = plackett_luce_loss(rows, ranks, mask=mask)
    else:
        cost = rao_kupper_loss(rows, ranks, mask=mask, theta=theta)
    return cost + center_coef * center_scores_penalty(rows, mask) if center_coef else cost


def score_metrics(scores: Tensor, batch: RaggedBatch) -> Measured:
    """Metrics of a batch by the mean scores of the members, [D], without gradient.

    Accuracy and ties of pairs, ordered pairs or steps, their margin, top-1 accuracy of groups, and the mean score.
    """
    if isinstance(batch, StepBatch):
        sums = step_metrics(scores, batch.labels) | {"score": scores.float().sum()}
        return Measured(sums, {}, torch.where(scores == 0, 0.5, ((scores > 0) == batch.labels).float()))
    if isinstance(batch, PairBatch):
        chosen, rejected = scores.chunk(2)
        lead = chosen - rejected
        sums = preference_metrics(lead) | {"score": (chosen + rejected).sum() / 2}
        return Measured(sums, {}, (lead > 0).float() + (lead == 0).float() / 2)
    assert isinstance(batch, RankedBatch)
    (rows, mask), (ranks, _) = padded_groups(scores, batch), padded_groups(batch.ranks, batch)
    score = (rows.float().sum(1) / mask.sum(1)).sum()
    return Measured({"score": score}, ordered_pair_metrics(rows, ranks, mask), prompt_accuracy(rows, ranks, mask))


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


def bootstrap_counts(row_ids: Sequence[str], seed: int, members: int) -> Tensor:
    """Weights of each row for each member of an ensemble: Poisson(1) numbers, fixed by (seed, member, row id); [rows, k].

    As many rows as there are, drawn with replacement, have such counts where rows are many. Nothing is drawn at run time,
    so batches, ranks and resumption change nothing.

    Source: Oza and Russell 2001, "Online bagging and boosting", section 2.
    """
    return torch.tensor([[_poisson(f"{seed}:{member}:{row}") for member in range(members)] for row in row_ids])


def _poisson(key: str) -> float:
    """A Poisson(1) number that is always the same for a key."""
    uniform = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64
    count, probability = 0, math.exp(-1)
    while uniform >= probability and count < 16:
        uniform -= probability
        count += 1
        probability /= count
    return float(count)

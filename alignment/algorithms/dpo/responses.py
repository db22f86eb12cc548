"""Log-probabilities of responses, and what is watched of them: rewards, displacement, how far length explains the margin."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.algorithms.dpo.setup import WeightedLoss
from alignment.algorithms.language import LogProbModel, sequence_log_probs
from alignment.data.batches import PairBatch, PreferenceBatch, RankedBatch, UnpairedBatch, padded_groups
from alignment.losses.direct_preference import f_divergence_scores
from alignment.losses.preference import preference_metrics
from alignment.losses.ranking import is_preferred, prompt_accuracy

Means = dict[str, tuple[Tensor, Tensor]]

MOMENTS = (
    "margin_squared",
    "length_difference_squared",
    "margin_by_length_difference",
)  # replaced before they are logged
SIMILAR = 0.1  # share of the longer response by which lengths may differ and still count as similar
# Where a note is written at the end of a run: means over its last tenth.
FALL_NATS, FALL_SHARE = 1.0, 0.02  # of the chosen responses' log-probability
CORRELATION, LENGTH_SHARE = 0.5, 0.5


@dataclass(frozen=True)
class ResponseLogProbs:
    """Log-probabilities of D responses.

    Attributes:
        policy: of each whole response under the policy, nats, [D].
        reference: under the reference, [D]; None where no loss asks for it.
        tokens: of each response, the end token among them, [D].
    """

    policy: Tensor
    reference: Tensor | None
    tokens: Tensor

    def of(self, loss: WeightedLoss) -> list[Tensor]:
        """The policy's, and where the loss takes a reference the reference's, in the form that the loss takes, [D] each."""
        columns = [self.policy]
        if loss.spec.reference:
            assert self.reference is not None
            columns.append(self.reference)
            if loss.divergence != "reverse_kl":
                scores = f_divergence_scores(self.policy - self.reference, loss.divergence, loss.alpha)
                columns = [scores, torch.zeros_like(scores)]
        return [column / self.tokens for column in columns] if loss.spec.means else columns

    def rewards(self, loss: WeightedLoss) -> Tensor:
        """Implicit rewards of the responses, without gradient, [D]; without a reference beta * log-probability."""
        policy, *reference = (column.detach() for column in self.of(loss))
        return loss.beta * (policy - reference[0] if reference else policy)


def response_log_probs(
    policy: LogProbModel, reference: LogProbModel | None, batch: PreferenceBatch
) -> ResponseLogProbs:
    """Log-probabilities of a batch's responses, the reference's computed here or beforehand."""
    ours = sequence_log_probs(policy, batch.ragged)
    theirs = batch.reference
    if theirs is None and reference is not None:
        theirs = sequence_log_probs(reference, batch.ragged)
    rows = batch.ragged.target_rows
    tokens = torch.zeros_like(ours).index_add(0, rows, torch.ones_like(rows, dtype=ours.dtype))
    return ResponseLogProbs(ours, theirs, tokens)


def preferred_responses(batch: PreferenceBatch) -> Tensor:
    """Which of a batch's responses are to be imitated: the chosen, the desirable, or the best ones; bool, [D]."""
    if isinstance(batch, PairBatch):
        return torch.arange(len(batch.lengths), device=batch.ragged.tokens.device) < len(batch.lengths) // 2
    return batch.desirable if isinstance(batch, UnpairedBatch) else batch.ranks == 0


def preferred_tokens(batch: PreferenceBatch) -> Tensor:
    """Tokens of a batch's preferred responses."""
    return preferred_responses(batch)[batch.ragged.target_rows].sum()


# What is watched


class WatchedMetrics(NamedTuple):
    """Metrics of one micro-batch.

    Attributes:
        sums: over its rows.
        means: with weights of their own.
        accuracy: of each row, [B].
    """

    sums: dict[str, Tensor]
    means: Means
    accuracy: Tensor


def pair_metrics(
    responses: ResponseLogProbs, batch: PairBatch, loss: WeightedLoss, kl: Tensor | None = None
) -> WatchedMetrics:
    """Sums over pairs, and means by length: rewards, accuracy, log-probabilities and their change since the reference.

    Args:
        responses: 2B, the chosen ones first.
        batch: the pairs.
        loss: the one whose implicit rewards are meant.
        kl: has no meaning for pairs.
    """
    chosen_reward, rejected_reward = responses.rewards(loss).chunk(2)
    chosen_tokens, rejected_tokens = responses.tokens.chunk(2)
    margins = (chosen_reward - rejected_reward).float()
    metrics = preference_metrics(chosen_reward - rejected_reward)
    metrics |= {"chosen_reward": chosen_reward.sum(), "rejected_reward": rejected_reward.sum()}
    for name, values in log_probs_and_changes(responses).items():
        chosen, rejected = values.chunk(2)
        metrics |= {f"chosen_{name}": chosen.sum(), f"rejected_{name}": rejected.sum()}
    lead = (chosen_tokens - rejected_tokens).float()
    metrics |= {
        "length_difference": lead.sum(),
        "margin_squared": margins.square().sum(),
        "length_difference_squared": lead.square().sum(),
        "margin_by_length_difference": (margins * lead).sum(),
    }
    similar = lead.abs() <= SIMILAR * torch.maximum(chosen_tokens, rejected_tokens)
    bins = {"chosen_shorter": (lead < 0) & ~similar, "similar_length": similar, "chosen_longer": (lead > 0) & ~similar}
    means = {f"margin_{name}": masked_mean(margins, mask) for name, mask in bins.items()}
    return WatchedMetrics(metrics, means, (margins > 0).float() + (margins == 0).float() / 2)


def desirability_metrics(
    responses: ResponseLogProbs, batch: UnpairedBatch, loss: WeightedLoss, kl: Tensor | None = None
) -> WatchedMetrics:
    """Sums over responses, and means over the desirable ones (as chosen_...) and the others (as rejected_...).

    A response counts as judged right where its reward lies on the side of the reference point that its label says; half
    where it is that point, as all are before the first update.
    """
    rewards, desirable = responses.rewards(loss), batch.desirable
    point = 0.0 if kl is None else kl
    gain = rewards - loss.beta * point
    right = torch.where(gain == 0, 0.5, ((gain > 0) == desirable).float())
    metrics = {"accuracy": right.sum()}
    if loss.spec.batch_input == "kl":
        metrics["kl"] = torch.as_tensor(point, device=rewards.device) * len(rewards)
    means = split_means({"reward": rewards, **log_probs_and_changes(responses)}, desirable, ~desirable)
    return WatchedMetrics(metrics, means, right)


def ranking_metrics(
    responses: ResponseLogProbs, batch: RankedBatch, loss: WeightedLoss, kl: Tensor | None = None
) -> WatchedMetrics:
    """Sums over prompts of accuracy and margin, each the mean over a prompt's ordered pairs; means over best and worst."""
    rewards = responses.rewards(loss)
    ranks, mask = padded_groups(batch.ranks, batch)  # [B, K]
    by_row, _ = padded_groups(rewards, batch)
    ordered = is_preferred(ranks, mask)  # [B, K, K]
    lead = torch.where(ordered, by_row.unsqueeze(2) - by_row.unsqueeze(1), 0.0)
    margin, accuracy = lead.sum((1, 2)) / ordered.sum((1, 2)).clamp(min=1), prompt_accuracy(by_row, ranks, mask)
    worst = torch.where(mask, ranks, -1).amax(1)[batch.groups]
    values = {"reward": rewards, **log_probs_and_changes(responses)}
    means = split_means(values, batch.ranks == 0, batch.ranks == worst)
    return WatchedMetrics({"accuracy": accuracy.sum(), "margin": margin.sum()}, means, accuracy)


def log_probs_and_changes(responses: ResponseLogProbs) -> dict[str, Tensor]:
    """Log-probabilities under the policy, and where there is a reference their change since it, nats, [D] each."""
    policy = responses.policy.detach()
    changes = {} if responses.reference is None else {"log_prob_change": policy - responses.reference}
    return {"log_prob": policy, **changes}


def split_means(values: Mapping[str, Tensor], preferred: Tensor, other: Tensor) -> Means:
    """Means of per-response values over the preferred and the other responses, as chosen_NAME and rejected_NAME.

    Args:
        values: [D] each.
        preferred, other: bool, [D].
    """
    sides = {"chosen": preferred, "rejected": other}
    return {f"{side}_{name}": masked_mean(each, mask) for name, each in values.items() for side, mask in sides.items()}


def masked_mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the values where the mask is True, and how many they are."""
    return torch.where(mask, values.float(), 0.0).sum(), mask.sum().float()


def logged_metrics(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """The metrics of an update as they are logged.

    Moments become `margin_length_correlation`, the correlation of margin and length difference over the pairs of the
    update, and `margin_length_share`, the share of the mean margin that the regression of margin on length difference
    gives to the mean length difference. Unpaired rows get a `margin`, chosen minus rejected mean reward.
    """
    logged = dict(metrics)
    squared, length_squared, product = (logged.pop(f"{prefix}{name}", None) for name in MOMENTS)
    if squared is not None and length_squared is not None and product is not None:
        margin, length = logged[f"{prefix}margin"], logged[f"{prefix}length_difference"]
        covariance = product - margin * length
        margin_variance, length_variance = squared - margin**2, length_squared - length**2
        if margin_variance > 1e-12 * squared and length_variance > 1e-9 * max(1.0, length_squared):
            correlation = covariance / math.sqrt(margin_variance * length_variance)
            logged[f"{prefix}margin_length_correlation"] = max(-1.0, min(1.0, correlation))
            if abs(margin) > 1e-9:
                logged[f"{prefix}margin_length_share"] = covariance / length_variance * length / margin
    sides = (f"{prefix}chosen_reward", f"{prefix}rejected_reward")
    if f"{prefix}margin" not in logged and all(side in logged for side in sides):
        logged[f"{prefix}margin"] = logged[sides[0]] - logged[sides[1]]
    return logged


def notes_of(lines: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """What a user should know of a finished run of DPO's family, from the lines of its metrics.jsonl."""
    if len(lines) < 5:
        return
    last = lines[-max(3, len(lines) // 10) :]
    yield from _displacement(lines, last)
    correlation, share = _mean(last, "margin_length_correlation"), _mean(last, "margin_length_share")
    if correlation is not None and abs(correlation) > CORRELATION:
        side = "longer" if correlation > 0 else "shorter"
        yield (
            f"length: the {side} response of a pair has the larger implicit reward (correlation of margin and length "
            f"difference {correlation:.2f} over the last {len(last)} updates), so the policy may learn length rather than "
            "quality; loss=rdpo with length_penalty, or a loss on means over tokens (simpo, sigmoid_norm), holds it back"
        )
    elif share is not None and share > LENGTH_SHARE:
        yield (
            f"length: {share:.0%} of the mean margin over the last {len(last)} updates follows from the chosen responses' "
            "being longer or shorter; loss=rdpo with length_penalty holds this back"
        )


def _displacement(lines: Sequence[Mapping[str, object]], last: Sequence[Mapping[str, object]]) -> Iterator[str]:
    """A note where the chosen responses have become less likely, with the rejected ones.

    Source: Razin et al. 2024, arXiv:2410.08847; Pal et al. 2024, arXiv:2402.13228.
    """
    changes, since = [_mean(last, f"{side}_log_prob_change") for side in ("chosen", "rejected")], "the reference"
    start = _mean(lines[:1], "chosen_log_prob")
    if None in changes:  # without a reference: other rows, so means over several updates
        first, since = lines[: len(last)], "the first updates"
        pairs = [(_mean(last, f"{side}_log_prob"), _mean(first, f"{side}_log_prob")) for side in ("chosen", "rejected")]
        changes = [None if None in pair else pair[0] - pair[1] for pair in pairs]  # type: ignore[operator]
        start = pairs[0][1]
    chosen, rejected = changes
    if chosen is None or rejected is None or start is None:
        return
    if chosen < -max(FALL_NATS, FALL_SHARE * abs(start)) and rejected < 0:
        yield (
            f"displacement: the chosen responses have become less likely, by {-chosen:.1f} nats each, and the rejected ones "
            f"by {-rejected:.1f} (mean over the last {len(last)} updates, against {since}): their probability goes to "
            "responses that are in no pair. sft_coef=1 holds the chosen ones up; a lower optim.learning_rate, a higher "
            "beta, or leaving out pairs of nearly equal responses help too"
        )


def read_metrics(path: Path) -> list[dict[str, object]]:
    """The lines of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _mean(lines: Sequence[Mapping[str, object]], key: str) -> float | None:
    """Mean of a metric over the lines that have it as a finite number; None where none has."""
    values = [
        float(value) for line in lines if isinstance(value := line.get(key), int | float) and math.isfinite(value)
    ]
    return sum(values) / len(values) if values else None

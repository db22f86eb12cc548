"""Log-probabilities of responses and their logged metrics: rewards, displacement, how far length explains margins."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean as mean
from typing import Any

import torch
from torch import Tensor

from alignment.algorithms.dpo.config import WeightedLoss
from alignment.data.batches import PairBatch, PreferenceBatch, RankedBatch, UnpairedBatch, padded_groups
from alignment.errors import raise_all
from alignment.losses.preference import Measured, f_divergence_scores, preference_metrics
from alignment.losses.ranking import is_preferred, prompt_accuracy
from alignment.models.outputs import LogProbModel
from alignment.ragged import Ragged, Seq2Seq
from alignment.training import Run

# Replaced before they are logged.
MOMENTS = ("margin_squared", "length_difference_squared", "margin_by_length_difference")
SIMILAR = 0.1  # share of the longer response by which lengths may differ and still count as similar
# Where a note is written at the end of a run: means over its last tenth.
# of the chosen responses' log-probability
FALL_NATS = 1.0
FALL_SHARE = 0.02
CORRELATION = 0.5
LENGTH_SHARE = 0.5


@dataclass(frozen=True)
class ResponseLogProbs:
    """Log-probabilities of D responses."""

    policy: Tensor  # of each whole response under the policy, nats, [D]
    reference: Tensor | None  # under the reference, [D]; None where no loss asks for it
    tokens: Tensor  # of each response, the end token among them, [D]

    def log_ratios(self, loss: WeightedLoss) -> Tensor:
        """log p - log p_ref of each response, [D], as the loss takes it: of means over tokens, of another divergence.

        Without a reference log p alone.
        """
        tokens = self.tokens if loss.spec.means else 1
        if self.reference is None or not loss.spec.reference:
            return self.policy / tokens
        if loss.divergence != "reverse_kl":
            return f_divergence_scores(self.policy - self.reference, loss.divergence, loss.alpha) / tokens
        return self.policy / tokens - self.reference / tokens

    def margins(self) -> tuple[Tensor, Tensor]:
        """Log-probability of the chosen minus the rejected response under policy and reference, [D / 2] each."""
        assert self.reference is not None
        chosen, rejected = self.policy.chunk(2)
        reference_chosen, reference_rejected = self.reference.chunk(2)
        return chosen - rejected, reference_chosen - reference_rejected

    def rewards(self, loss: WeightedLoss) -> Tensor:
        """Implicit rewards of the responses, without gradient, [D]; without a reference beta * log-probability."""
        return loss.beta * self.log_ratios(loss).detach()


def response_log_probs(
    policy: LogProbModel, reference: LogProbModel | None, batch: PreferenceBatch
) -> ResponseLogProbs:
    """Log-probabilities of a batch's responses, the reference's computed here or beforehand."""
    ours = sequence_log_probs(policy, batch.ragged)
    theirs = batch.reference
    rows = batch.ragged.target_rows
    if theirs is None and reference is not None:
        theirs = sequence_log_probs(reference, batch.ragged)
    tokens = torch.zeros_like(ours).index_add(0, rows, torch.ones_like(rows, dtype=ours.dtype))
    return ResponseLogProbs(ours, theirs, tokens)


def sequence_log_probs(model: LogProbModel, batch: Ragged | Seq2Seq) -> Tensor:
    """Log-probability of each document's targets together, nats, [B]."""
    log_probs = model(batch=batch).log_probs  # [M]
    return log_probs.new_zeros(len(batch.lengths)).index_add(0, batch.target_rows, log_probs)


def preferred_responses(batch: PreferenceBatch) -> Tensor:
    """True at a batch's responses that are to be imitated: the chosen, the desirable, or the best ones; [D]."""
    if isinstance(batch, PairBatch):
        return torch.arange(len(batch.lengths), device=batch.ragged.target_rows.device) < len(batch.lengths) // 2
    return batch.desirable if isinstance(batch, UnpairedBatch) else batch.ranks == 0


def require_margins(losses: Sequence[WeightedLoss], *parts: Sequence[Any]) -> None:
    """Refuse pairs without the margin that odpo makes its offset of, all at once."""
    for loss in losses:
        if loss.spec.needs == "margins":
            lowest = 0.0 if loss.parameters["offset_scale"] == "log" else -math.inf
            bad = [row.row_id for rows in parts for row in rows if row.values.get("margin", lowest) <= lowest]
            shown = ", ".join(bad[:5]) + (f" and {len(bad) - 5} more" if len(bad) > 5 else "")
            what = "a margin above 0" if lowest == 0 else "a margin"
            raise_all([f"{shown}: no {what}, of which {loss.name} makes its offset; take loss=sigmoid"] if bad else [])


# Metrics of a micro-batch


def metrics_of(
    responses: ResponseLogProbs, batch: PreferenceBatch, loss: WeightedLoss, kl: Tensor | float = 0.0
) -> Measured:
    """Metrics of a batch of any kind."""
    if isinstance(batch, PairBatch):
        return pair_metrics(responses, loss)
    if isinstance(batch, UnpairedBatch):
        return desirability_metrics(responses, batch, loss, kl)
    return ranking_metrics(responses, batch, loss)


def pair_metrics(responses: ResponseLogProbs, loss: WeightedLoss) -> Measured:
    """Sums over pairs, and means by length: rewards, accuracy, log-probabilities, their change since the reference."""
    rewards = responses.rewards(loss)
    chosen_reward, rejected_reward = rewards.chunk(2)
    chosen_tokens, rejected_tokens = responses.tokens.chunk(2)
    margins = (chosen_reward - rejected_reward).float()
    lead = (chosen_tokens - rejected_tokens).float()
    metrics = preference_metrics(chosen_reward - rejected_reward)
    for name, values in {"reward": rewards, **log_probs_and_changes(responses)}.items():
        chosen, rejected = values.chunk(2)
        metrics |= {f"chosen_{name}": chosen.sum(), f"rejected_{name}": rejected.sum()}
    metrics |= {
        "length_difference": lead.sum(),
        "margin_squared": margins.square().sum(),
        "length_difference_squared": lead.square().sum(),
        "margin_by_length_difference": (margins * lead).sum(),
    }
    similar = lead.abs() <= SIMILAR * torch.maximum(chosen_tokens, rejected_tokens)
    bins = {"chosen_shorter": (lead < 0) & ~similar, "similar_length": similar, "chosen_longer": (lead > 0) & ~similar}
    means = {f"margin_{name}": masked_mean(margins, mask) for name, mask in bins.items()}
    return Measured(metrics, means, (margins > 0).float() + (margins == 0).float() / 2)


def desirability_metrics(
    responses: ResponseLogProbs, batch: UnpairedBatch, loss: WeightedLoss, kl: Tensor | float = 0.0
) -> Measured:
    """Sums over responses, and means over the desirable ones (as chosen_...) and the others (as rejected_...).

    A response counts as judged right where its reward lies on the side of the reference point that its label says; half
    where it is that point, as all are before the first update.
    """
    rewards = responses.rewards(loss)
    desirable = batch.desirable
    gain = rewards - loss.beta * kl
    right = torch.where(gain == 0, 0.5, ((gain > 0) == desirable).float())
    metrics = {"accuracy": right.sum()}
    if loss.spec.needs == "kl":
        metrics["kl"] = torch.as_tensor(kl, device=rewards.device) * len(rewards)
    means = split_means({"reward": rewards, **log_probs_and_changes(responses)}, desirable, ~desirable)
    return Measured(metrics, means, right)


def ranking_metrics(responses: ResponseLogProbs, batch: RankedBatch, loss: WeightedLoss) -> Measured:
    """Sums over prompts of accuracy and margin (means over a prompt's ordered pairs); means over best and worst."""
    rewards = responses.rewards(loss)
    ranks, mask = padded_groups(batch.ranks, batch)  # [B, K]
    by_row, _ = padded_groups(rewards, batch)
    ordered = is_preferred(ranks, mask)  # [B, K, K]
    lead = torch.where(ordered, by_row.unsqueeze(2) - by_row.unsqueeze(1), 0.0)
    margin = lead.sum((1, 2)) / ordered.sum((1, 2)).clamp(min=1)
    accuracy = prompt_accuracy(by_row, ranks, mask)
    worst = torch.where(mask, ranks, -1).amax(1)[batch.groups]
    values = {"reward": rewards, **log_probs_and_changes(responses)}
    means = split_means(values, batch.ranks == 0, batch.ranks == worst)
    return Measured({"accuracy": accuracy.sum(), "margin": margin.sum()}, means, accuracy)


def log_probs_and_changes(responses: ResponseLogProbs) -> dict[str, Tensor]:
    """Log-probabilities under the policy, and where there is a reference their change since it, nats, [D] each."""
    policy = responses.policy.detach()
    changes = {} if responses.reference is None else {"log_prob_change": policy - responses.reference}
    return {"log_prob": policy, **changes}


def split_means(values: Mapping[str, Tensor], preferred: Tensor, other: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Means of per-response values, [D], over preferred and other responses, as chosen_NAME and rejected_NAME."""
    sides = {"chosen": preferred, "rejected": other}
    return {
        f"{side}_{name}": masked_mean(column, mask) for name, column in values.items() for side, mask in sides.items()
    }


def masked_mean(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the values where the mask is True, and their number."""
    return torch.where(mask, values.float(), 0.0).sum(), mask.sum().float()


# Metrics of an update and of a run


def logged_metrics(metrics: Mapping[str, float], prefix: str = "") -> dict[str, float]:
    """The metrics of an update as they are logged.

    Moments become `margin_length_correlation`, the correlation of margin and length difference over the pairs of the
    update, and `margin_length_share`, the share of the mean margin that the regression of margin on length difference
    gives to the mean length difference. Unpaired rows get a `margin`, chosen minus rejected mean reward.
    """
    logged = {name: value for name, value in metrics.items() if name.removeprefix(prefix) not in MOMENTS}
    if f"{prefix}{MOMENTS[0]}" in metrics:
        squared, length_squared, product = (metrics[f"{prefix}{name}"] for name in MOMENTS)
        margin = logged[f"{prefix}margin"]
        length = logged[f"{prefix}length_difference"]
        covariance = product - margin * length
        margin_variance = squared - margin**2
        length_variance = length_squared - length**2
        if margin_variance > 1e-12 * squared and length_variance > 1e-9 * max(1.0, length_squared):
            correlation = covariance / math.sqrt(margin_variance * length_variance)
            logged[f"{prefix}margin_length_correlation"] = max(-1.0, min(1.0, correlation))
            if abs(margin) > 1e-9:
                logged[f"{prefix}margin_length_share"] = covariance / length_variance * length / margin
    chosen = logged.get(f"{prefix}chosen_reward")
    rejected = logged.get(f"{prefix}rejected_reward")
    if chosen is not None and rejected is not None:
        logged.setdefault(f"{prefix}margin", chosen - rejected)
    return logged


def note_end(run: Run) -> None:
    """Note in a finished run what its metrics show of displacement and length."""
    if run.is_main:
        lines = (run.output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        for line in notes_of([json.loads(line) for line in lines]):
            run.note(line)


def notes_of(lines: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """Notes on a finished run of DPO's family, from the lines of its metrics.jsonl.

    Source: displacement: Razin et al. 2024, arXiv:2410.08847; Pal et al. 2024, arXiv:2402.13228.
    """
    if len(lines) < 5:
        return
    count = max(3, len(lines) // 10)
    now = _means(lines[-count:])
    first = _means(lines[:count])
    falls = {}  # nats; without a reference since the first updates, whose rows are others
    for side in ("chosen", "rejected"):
        change = now.get(f"{side}_log_prob_change")
        start, end = (means.get(f"{side}_log_prob", math.nan) for means in (first, now))
        falls[side] = start - end if change is None else -change
    if falls["rejected"] > 0 and falls["chosen"] > max(FALL_NATS, FALL_SHARE * abs(first.get("chosen_log_prob", 0.0))):
        yield (
            f"displacement: the chosen responses have become less likely, by {falls['chosen']:.1f} nats each, and the "
            f"rejected ones by {falls['rejected']:.1f} (mean over the last {count} updates): their probability goes to "
            "responses that are in no pair. sft_coef=1 holds the chosen ones up; a lower optim.learning_rate, a higher "
            "beta, or leaving out pairs of nearly equal responses help too"
        )
    correlation = now.get("margin_length_correlation", 0.0)
    share = now.get("margin_length_share", 0.0)
    if abs(correlation) > CORRELATION or share > LENGTH_SHARE:
        yield (
            f"length: the correlation of margin and length difference is {correlation:.2f} over the last {count} "
            f"updates, and {share:.0%} of the mean margin follows from lengths, so the policy may learn length rather "
            "than quality; loss=rdpo with length_penalty, or a loss on means over tokens (simpo, sigmoid_norm), holds "
            "it back"
        )


def _means(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each metric over the lines that have it as a finite number."""
    finite = [
        {name: x for name, x in line.items() if isinstance(x, int | float) and math.isfinite(x)} for line in lines
    ]
    names = dict.fromkeys(name for line in finite for name in line)
    return {name: mean([line[name] for line in finite if name in line]) for name in names}

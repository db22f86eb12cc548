"""The loss functions of PPO's updates: sums over a micro-batch, which the engine divides by the minibatch's weight."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.rollouts.rollout import Rollout, ragged_groups
from alignment.losses.policy import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    kl_estimates,
    sequence_log_ratios,
)
from alignment.models.classifiers import values_before_targets
from alignment.models.model import Model
from alignment.models.outputs import LanguageOutput
from alignment.ragged import RaggedBatch
from alignment.training import LossFn, LossSum


@dataclass(frozen=True)
class RolloutBatch(RaggedBatch):
    """Some rows of a rollout for one forward: the ragged tokens and, the tensors above for each response token, [M]."""

    log_probs: Tensor
    values: Tensor | None
    advantages: Tensor
    returns: Tensor
    weights: Tensor | None = None
    reference_log_probs: Tensor | None = None


BATCH_COLUMNS = ("log_probs", "values", "advantages", "returns", "weights", "reference_log_probs")


def policy_loss_fn(
    policy: nn.Module | Model, config: PPOConfig, ratio_errors: list[Tensor], *, kl_coef: float = 0.0
) -> LossFn:
    """Loss function of the policy: the clipped surrogate, with KL penalty and entropy bonus where the config has them.

    With a value head on the policy's trunk value_coef * value loss is added, from the same forward.

    Args:
        ratio_errors: each batch's largest |ratio - 1| is appended.
        kl_coef: weight of the KL penalty, read where it stands in the loss.
    """
    heads = {"values": True} if config.shares_trunk else {}

    def loss_fn(batch: RolloutBatch) -> LossSum:
        output = policy(batch=batch.ragged, temperature=config.temperature, entropy=True, **heads)
        cost, metrics = policy_cost(output, batch, config, kl_coef)
        ratio_errors.append(((output.log_probs - batch.log_probs).detach().exp() - 1).abs().max())
        if config.shares_trunk:
            assert output.values is not None
            value_costs = value_cost(output.values, batch, config)
            metrics["value_loss"] = value_costs.detach()
            cost = cost + config.value_coef * value_costs
        return loss_sum(cost, metrics, batch, config)

    return loss_fn


def value_loss_fn(value_model: Model, config: PPOConfig) -> LossFn:
    """Loss function of the value model: the clipped squared error, summed over response tokens."""

    def loss_fn(batch: RolloutBatch) -> LossSum:
        values = values_before_targets(value_model, batch.ragged)
        return loss_sum(value_cost(values, batch, config), {}, batch, config)

    return loss_fn


def policy_cost(
    output: LanguageOutput, batch: RolloutBatch, config: PPOConfig, kl_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Cost of each response token, and its metrics, [M] each.

    cost = weight * (surrogate + kl_coef * KL) - entropy_coef * entropy
    """
    assert output.entropy is not None
    change = output.log_probs - batch.log_probs
    tokens = (output.log_probs, batch.log_probs, batch.advantages)
    if config.ratio == "sequence":
        log_ratios = sequence_log_ratios(change, batch.ragged.target_rows, tokens_of_each(batch))
        tokens = (log_ratios, torch.zeros_like(log_ratios), batch.advantages)
    clip_range = config.clip_range
    high = config.clip_range_high
    dual_clip = config.dual_clip
    surrogate = clipped_policy_loss(*tokens, clip_range=clip_range, clip_range_high=high, dual_clip=dual_clip)
    clipped = clipped_tokens(*tokens, clip_range=clip_range, clip_range_high=high, dual_clip=dual_clip)
    weights = 1.0 if batch.weights is None else batch.weights
    cost = surrogate if batch.weights is None else surrogate * weights
    metrics = {
        "policy_loss": cost.detach(),
        "approx_kl": change.detach() ** 2 / 2,
        "clip_fraction": clipped.float(),
        "entropy": output.entropy.detach(),
    }
    if config.kl_in == "loss":
        assert batch.reference_log_probs is not None
        kl = kl_estimates(output.log_probs, batch.reference_log_probs)[config.kl_estimator]
        metrics["kl_loss"] = kl.detach()
        cost = cost + kl_coef * weights * kl
    if config.entropy_coef > 0:
        cost = cost - config.entropy_coef * output.entropy
    return cost, metrics


def value_cost(values: Tensor, batch: RolloutBatch, config: PPOConfig) -> Tensor:
    """Clipped squared error of the value before each response token, [M]."""
    assert batch.values is not None
    return clipped_value_loss(values, batch.values, batch.returns, clip_range=config.value_clip_range)


def loss_sum(cost: Tensor, metrics: dict[str, Tensor], batch: RolloutBatch, config: PPOConfig) -> LossSum:
    """Sums of cost and metrics, [M] each, over a micro-batch, for division by the sum of its `weighed` weights.

    Losses are divided as `loss_normalization` says; all other metrics are means over response tokens.
    """
    if config.normalization == "token_mean":
        return LossSum(cost.sum(), {name: value.sum() for name, value in metrics.items()})
    share = 1 / tokens_of_each(batch)[batch.ragged.target_rows] if config.normalization == "sequence_mean" else 1.0
    losses = {name: (value * share).sum() for name, value in metrics.items() if name.endswith("_loss")}
    tokens = torch.full((), float(len(cost)), device=cost.device)
    means = {name: (value.sum(), tokens) for name, value in metrics.items() if name not in losses}
    return LossSum((cost * share).sum(), losses, means)


def rollout_batches(rollout: Rollout, rows: Sequence[int], micro_batch_tokens: int) -> list[RolloutBatch]:
    """Micro-batches of the given rows of a rollout that has its advantages."""
    documents = [rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows]
    numbers = [rollout.numbers[i] for i in rows]
    batches = []
    for group, ragged in ragged_groups(*documents, numbers, micro_batch_tokens, rollout.share_prompts):
        members = [rows[i] for i in group]
        mask = rollout.mask[members]
        given = {name: getattr(rollout, name) for name in BATCH_COLUMNS}
        flat: dict[str, Any] = {n: x if x is None else x[members][mask] for n, x in given.items()}
        batches.append(RolloutBatch(ragged.to(mask.device), **flat))
    return batches


def normalized_batches(batches: Sequence[RolloutBatch], config: PPOConfig) -> list[RolloutBatch]:
    """Micro-batches with the weights that `loss_normalization` asks for; token_mean is what they have already."""
    if config.normalization == "token_mean":
        return list(batches)
    longest = config.max_new_tokens if config.normalization == "constant" else 1
    return [
        replace(batch, ragged=replace(batch.ragged, weight=float(len(batch.ragged.lengths) * longest)))
        for batch in batches
    ]


def tokens_of_each(batch: RolloutBatch) -> Tensor:
    """Tokens of each response, [B]."""
    return torch.bincount(batch.ragged.target_rows, minlength=len(batch.ragged.lengths))

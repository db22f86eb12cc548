"""Metrics of PPO alone: advantages, returns and values, importance weights, and the use of the devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from alignment.algorithms.policies import Role
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.state import PPOState
from alignment.algorithms.rollouts.metrics import moments, repeated_share, sample_metrics, spreads
from alignment.algorithms.rollouts.rollout import Rollout
from alignment.losses.policy import kl_estimates
from alignment.models.operations import forward_operations, is_counted
from alignment.models.transformer import TransformerSpec
from alignment.ragged import on_float64_device
from alignment.training.distributed import ProcessGroup
from alignment.training.speed import peak_tflops

BACKWARD = 2  # times the operations of a forward; what is recomputed for want of memory does not count


def rollout_metrics(rollout: Rollout, state: PPOState, config: PPOConfig) -> dict[str, float]:
    """Metrics of PPO's rollout of all ranks, with the weight of its KL penalty."""
    group = state.process_group
    metrics = {"kl_coef": state.kl.coef, "sampling_error": sampling_error(rollout, group.max)}
    metrics |= importance_metrics(rollout, config.importance_cap, group) | rollout_statistics(rollout, group)
    if rollout.values is not None:
        metrics["explained_variance"] = explained_variance(rollout, group.sum)
    return sample_metrics(rollout, state) | metrics


def sampling_error(rollout: Rollout, largest: Callable[[Tensor], Tensor]) -> float:
    """Largest difference, nats, between a token's log-probability when it was drawn and the one training computes."""
    return float(largest((rollout.sampled_log_probs - rollout.log_probs).abs().max()))


def importance_metrics(rollout: Rollout, cap: float | None, group: ProcessGroup) -> dict[str, float]:
    """`sampling_kl`, mean of log q - log p over tokens drawn from q, nats: the k1 estimate of KL(sampler || policy).

    Where there are importance weights, also their mean and largest and the share of tokens at the cap.
    """
    mask = rollout.mask
    weights = rollout.weights
    difference = on_float64_device((rollout.sampled_log_probs - rollout.log_probs)[mask]).double()
    columns = [torch.ones_like(difference), difference]
    if weights is not None and cap is not None:
        token_weights = on_float64_device(weights[mask])
        columns += [token_weights.double(), (token_weights >= cap).double()]
    count, *sums = group.sum(torch.stack([column.sum() for column in columns])).tolist()
    names = ("sampling_kl", "importance_weight_mean", "importance_clipped_share")
    metrics = {name: total / count for name, total in zip(names, sums, strict=False)}
    return metrics if weights is None else metrics | {"importance_weight_max": float(group.max(weights.max()))}


def explained_variance(rollout: Rollout, reduce: Callable[[Tensor], Tensor]) -> float:
    """1 - var(returns - values) / var(returns) over the tokens of all ranks that are learned from; 0: as a constant."""
    assert rollout.returns is not None and rollout.values is not None
    both = (column[rollout.learned_mask] for column in (rollout.returns, rollout.values))
    returns, values = (on_float64_device(column).double() for column in both)
    count, _, (spread, left) = spreads(torch.stack([returns, returns - values]), reduce)
    return 1 - left / spread if count > 1 and spread > 0 else 0.0


def rollout_statistics(rollout: Rollout, group: ProcessGroup) -> dict[str, float]:
    """Statistics over the responses and response tokens of all ranks; a collective operation.

    `empty_share` counts responses that are an end token alone. Advantages are those before whitening where there is a
    value model, else those that are learned from.
    """
    mask = rollout.mask
    lengths = rollout.mask.sum(1)
    means = {}
    if rollout.token_kl is None and rollout.reference_log_probs is not None:  # the estimates hold for its own samples
        k2 = kl_estimates(rollout.log_probs, rollout.reference_log_probs)["k2"]
        means["kl_k2"] = torch.where(mask, k2, 0.0).sum(1)
    means["empty_share"] = (lengths == 1) & rollout.ended
    means["repetition"] = torch.tensor([repeated_share(tokens) for tokens in rollout.responses], device=mask.device)
    statistics = moments({"response_tokens": lengths, **means}, group) | moments(token_columns(rollout), group)
    statistics |= moments({"score": rollout.scores[~rollout.scores.isnan()]}, group)
    kept = (
        "advantage_mean",
        "return_mean",
        "value_mean",
        "score_std",
        "response_tokens_std",
        "advantage_std",
        "return_std",
    )
    shortest, longest = group.max(torch.stack([-lengths.min(), lengths.max()])).tolist()
    statistics |= {name: statistics[f"{name}_mean"] for name in means}
    extremes = {"response_tokens_min": -float(shortest), "response_tokens_max": float(longest)}
    return {name: statistics[name] for name in (*kept, *means) if name in statistics} | extremes


def token_columns(rollout: Rollout) -> dict[str, Tensor]:
    """Advantages before whitening, returns and values of the tokens that are learned from, as far as there are any."""
    given = {"return": rollout.returns, "value": rollout.values}
    columns = {name: column[rollout.learned_mask] for name, column in given.items() if column is not None}
    if len(columns) == 2:
        columns["advantage"] = columns["return"] - columns["value"]
    elif rollout.advantages is not None:
        columns["advantage"] = rollout.advantages[rollout.learned_mask]
    return columns


# Model FLOPs utilization (MFU): the share of the devices' peak rate that each phase of an iteration reaches


def utilization(
    metrics: Mapping[str, float],
    config: PPOConfig,
    roles: Sequence[Role],
    group: ProcessGroup,
    *,
    documents: Sequence[int],
) -> dict[str, float]:
    """`mfu` of an iteration and of its phases: operations / (seconds * peak rate of all devices).

    Counted are the matrix products and attention of sampling, of the forwards of policy, reference and value model, and
    of the updates, without pretraining mix and scoring. Nothing where operations or the peak rate are not known.
    """
    models = {role.name: role.model for role in roles if role.name in ("policy", "reference", "value model")}
    if "policy" not in models or (peak := peak_tflops(group.device, config.training.precision)) is None:
        return {}
    tokens = sum(documents)
    forward = {
        name: operations_per_token(models["policy"] if model is None else model, tokens // len(documents))
        for name, model in models.items()
    }
    if not all(forward.values()):
        return {}
    passes = metrics.get("updates", config.epochs * config.minibatches) / config.minibatches
    work = {
        "sampling": forward["policy"],
        "forward": sum(forward.values()),
        "policy": passes * (1 + BACKWARD) * forward["policy"],
        "value": passes * (1 + BACKWARD) * forward.get("value model", 0.0),
    }
    seconds = {name: metrics.get(f"seconds_{name}", 0.0) for name in work}
    available = {name: seconds[name] * peak * 1e12 / tokens for name in work if seconds[name] > 0 and work[name] > 0}
    if not available:
        return {}
    whole = sum(work[name] for name in available) / sum(available.values())
    return {"mfu": whole} | {f"mfu_{name}": work[name] / available[name] for name in available}


def operations_per_token(model: nn.Module | None, length: int) -> float:
    """Operations of a forward per token of documents of `length` tokens; 0 where they are not known."""
    spec = getattr(model, "spec", None)
    if not isinstance(spec, TransformerSpec) or not is_counted(spec):
        return 0.0
    if getattr(model, "task", None) == "scalar":
        spec = replace(spec, vocabulary=1)
    return forward_operations(spec, max(1, length))

"""Statistics of a rollout that tell a healthy run from one that collapses: advantages, returns, lengths, repetition."""

from collections.abc import Sequence

import torch
from torch import Tensor

from alignment.algorithms.ppo.rollout import Rollout
from alignment.losses.policy import kl_estimates
from alignment.training.distributed import ProcessGroup

NGRAM = 4  # tokens of the n-grams whose repetition is counted


def rollout_statistics(rollout: Rollout, group: ProcessGroup) -> dict[str, float]:
    """Statistics over the responses and response tokens of all ranks; a collective operation.

    Returns:
        `kl_k2`: the k2 estimate of the KL from the reference, summed over a response, nats; of the policy's own samples.
        `score_std`. `response_tokens_min`, `_max`, `_std`. `empty_share`: responses that are an end token alone.
        `repetition`: see `repeated_share`.
        `advantage_mean`, `advantage_std`: as estimated, before they are whitened, where there is a value model; else as
        learned from. `return_mean`, `return_std`, `value_mean`: of tokens.
    """
    mask, lengths = rollout.mask, rollout.mask.sum(1)
    per_response = {}
    if rollout.token_kl is None:  # the estimates hold for the policy's own samples
        k2 = kl_estimates(rollout.log_probs, rollout.reference_log_probs)["k2"]
        per_response["kl_k2"] = torch.where(mask, k2, 0.0).sum(1)
    per_response |= {
        "response_tokens": lengths,
        "empty_share": (lengths == 1) & rollout.ended,
        "repetition": torch.tensor([repeated_share(response) for response in rollout.responses], device=mask.device),
    }
    found = moments(per_response, group) | moments(token_columns(rollout), group)
    found |= moments({"score": rollout.scores[~rollout.scores.isnan()]}, group)
    kept = [f"{name}_mean" for name in ("advantage", "return", "value")]
    kept += [f"{name}_std" for name in ("score", "response_tokens", "advantage", "return")]
    statistics = {name: found[name] for name in kept if name in found}
    statistics |= {
        name: found[f"{name}_mean"] for name in per_response if name in ("kl_k2", "empty_share", "repetition")
    }
    shortest, longest = group.max(torch.stack([-lengths.min(), lengths.max()])).tolist()
    return statistics | {"response_tokens_min": -float(shortest), "response_tokens_max": float(longest)}


def token_columns(rollout: Rollout) -> dict[str, Tensor]:
    """Advantages before whitening, returns and values of the tokens that are learned from, as far as there are any."""
    mask, columns = rollout.learned_mask, {}
    if rollout.returns is not None:
        columns["return"] = rollout.returns[mask]
    if rollout.values is not None:
        columns["value"] = rollout.values[mask]
    if len(columns) == 2:
        columns["advantage"] = columns["return"] - columns["value"]
    elif rollout.advantages is not None:
        columns["advantage"] = rollout.advantages[mask]
    return columns


def moments(columns: dict[str, Tensor], group: ProcessGroup) -> dict[str, float]:
    """`NAME_mean` and `NAME_std` (divided by n) of columns of one length over all ranks, in float64."""
    if not columns:
        return {}
    stacked = torch.stack([column.double() for column in columns.values()])
    *sums, count = group.sum(torch.cat([stacked.sum(1), stacked.new_tensor([stacked.shape[1]])])).tolist()
    means = [total / count for total in sums]
    squares = group.sum((stacked - stacked.new_tensor(means).unsqueeze(1)).square().sum(1)).tolist()
    return {f"{name}_mean": mean for name, mean in zip(columns, means, strict=True)} | {
        f"{name}_std": (square / count) ** 0.5 for name, square in zip(columns, squares, strict=True)
    }


def repeated_share(tokens: Sequence[int], size: int = NGRAM) -> float:
    """1 - distinct n-grams / n-grams of a response; 0 where it is shorter than one.

    Source: Welleck et al. 2020, arXiv:1908.04319, section 6 (seq-rep-n).
    """
    grams = list(zip(*(tokens[start:] for start in range(size)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else 0.0

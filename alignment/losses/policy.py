"""Formulas of policy gradients: rewards, advantages with and without a value model, clipped losses, importance weights.

Where a function takes `mask`, values in slots that do not count reach neither its result nor any gradient, be they NaN.
The unreduced losses have no mask: select what counts (`values[mask]`) before them.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]


def kl_estimates(log_probs: Tensor, reference_log_probs: Tensor) -> dict[str, Tensor]:
    """Three per-token estimates of KL(policy || reference) for tokens the policy sampled, in nats.

    With r = log p - log p_ref:  k1 = r,  k2 = r^2 / 2,  k3 = exp(-r) - 1 + r

    k1 is unbiased but signed and noisy; k2 is biased, never negative; k3 is unbiased and never negative.

    As a loss, through log p, they mean something else. Over tokens that the policy sampled, the gradient of k1 is zero
    in expectation; that of k2 is the gradient of KL(policy || reference); that of k3 is the gradient of
    KL(reference || policy), which has its minimum in the same place.

    Args:
        log_probs: of the sampled tokens under the policy, any shape.
        reference_log_probs: of the same tokens under the reference, same shape and temperature.

    Returns:
        {"k1", "k2", "k3"}, each of the same shape; sum them over a response for the KL of responses.

    Source: Schulman 2020, "Approximating KL divergence", http://joschu.net/blog/kl-approx.html; as losses: Tang and
    Munos 2025, arXiv:2506.09477.
    """
    log_ratio = log_probs - reference_log_probs
    return {"k1": log_ratio, "k2": log_ratio.square() / 2, "k3": torch.expm1(-log_ratio) + log_ratio}


def shape_rewards(
    scores: Tensor,
    log_probs: Tensor,
    reference_log_probs: Tensor,
    mask: Tensor,
    *,
    kl_coef: float,
    kl_estimator: KLEstimator = "k1",
) -> Tensor:
    """Reward of each response token: the KL penalty everywhere, the score on the last token that counts.

    reward_t = -kl_coef * (log p_t - log p_ref,t) + [t is last] * score

    Args:
        scores: one number per response, [B].
        log_probs: of the response tokens under the policy that sampled them, [B, R].
        reference_log_probs: under the reference, [B, R].
        mask: True at response tokens, end token included, [B, R].
        kl_coef: weight of the penalty; 0 switches it off.
        kl_estimator: of the penalty, see `kl_estimates`; the equation has k1.

    Returns:
        [B, R]; 0 where mask is False.

    Raises:
        ValueError: a row without a single token, whose score would vanish.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2 (their beta is kl_coef); Ziegler et al. 2019, arXiv:1909.08593.
    """
    empty = (~mask.any(1)).nonzero().flatten().tolist()
    if empty:
        raise ValueError(f"responses {empty} have no token that counts, so their scores would be lost")
    kl = kl_estimates(_kept(log_probs, mask), _kept(reference_log_probs, mask))[kl_estimator]
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)  # how many tokens count from here on
    return torch.where(is_last, scores.unsqueeze(1) - kl_coef * kl, -kl_coef * kl)


@torch.no_grad()
def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns by generalized advantage estimation, without gradient: both are targets.

    delta_t = reward_t + gamma * value_{t+1} - value_t
    advantage_t = delta_t + gamma * gae_lambda * advantage_{t+1}
    return_t = advantage_t + value_t

    After a row's last token value and advantage are 0, also for a response that was cut at its length limit: the reward
    model has scored it as it stands, so nothing of it lies in the future.

    Args:
        rewards: [B, R].
        values: the value model's estimate before each token, [B, R].
        mask: True at response tokens, which are adjacent in each row, [B, R].
        gamma: discount, in [0, 1].
        gae_lambda: in [0, 1]; 1: whole returns minus values, 0: one-step errors.

    Returns:
        Advantages and returns, [B, R]; 0 where mask is False.

    Source: Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    rewards = _kept(rewards, mask)
    values = _kept(values, mask)
    next_values = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], dim=1)
    deltas = rewards + gamma * next_values - values
    advantage = torch.zeros_like(deltas[:, 0])
    columns = []
    for delta in reversed(deltas.unbind(1)):
        advantage = torch.add(delta, advantage, alpha=gamma * gae_lambda)
        columns.append(advantage)
    advantages = _kept(torch.stack(columns[::-1], dim=1), mask)
    return advantages, advantages + values


def whiten(
    values: Tensor, mask: Tensor, *, shift_mean: bool = True, reduce: Callable[[Tensor], Tensor] = lambda total: total
) -> Tensor:
    """Values scaled to variance 1 and, unless `shift_mean` is False, shifted to mean 0, over the slots that count.

    whitened = (value - mean) / sqrt(variance + 1e-8)  [+ mean if not shift_mean]

    The variance is the biased one (divided by n), and is summed around the mean: E[x^2] - E[x]^2 cancels in float32.
    A deviation of at most 16 roundings of the mean is that of equal values, which become 0 (the mean, if it is kept).
    With fewer than two values in all there is no spread to scale by, and they come back unchanged.

    Args:
        values: any shape.
        mask: True where a value counts, same shape.
        shift_mean: False keeps the mean where it was.
        reduce: adds a tensor over all ranks, so that each rank scales by the statistics of all; called twice.

    Returns:
        Same shape; 0 where mask is False.

    Source: Huang et al. 2024, arXiv:2403.17031, "whitening"; Ziegler et al. 2019, code of lm-human-preferences.
    """
    kept = _kept(values, mask)
    count, total = reduce(torch.stack([mask.sum().to(kept.dtype), kept.sum()])).unbind()
    mean = total / count.clamp(min=1)
    centered = _kept(kept - mean, mask)
    variance = reduce(centered.square().sum()) / count.clamp(min=1)
    whitened = torch.where(variance <= _rounding_of(mean).square(), 0.0, centered * torch.rsqrt(variance + 1e-8))
    if not shift_mean:
        whitened = _kept(whitened + mean, mask)
    return torch.where(count < 2, kept, whitened)


def clipped_policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's pessimistic surrogate, to be minimized, one value per token.

    ratio = exp(log p - log p_old)
    cost  = max(-advantage * ratio, -advantage * clip(ratio, 1 - clip_range, 1 + clip_range_high))
    with dual_clip, where advantage < 0:  cost = min(cost, -advantage * dual_clip)

    Args:
        log_probs: of the response tokens under the policy now, any shape.
        old_log_probs: under the policy that sampled them, at the same temperature.
        advantages: same shape, without gradient.
        clip_range: how far the ratio may leave 1 before the gradient stops, > 0.
        clip_range_high: how far it may rise above 1; None: as far as it may fall below.
        dual_clip: ratio beyond which the cost of a negative advantage stops growing, > 1; None is off.

    Returns:
        Unreduced cost, same shape: -advantage in the first update, when the ratio is 1.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 (their epsilon is clip_range), with the sign turned; two
    ranges:
        Yu et al. 2025, arXiv:2503.14476, eq. 10 (clip-higher); dual clip: Ye et al. 2020, arXiv:1912.09729, eq. 5
        (their c).
    """
    ratio = torch.exp(log_probs - old_log_probs)
    clipped = ratio.clamp(1 - clip_range, 1 + (clip_range if clip_range_high is None else clip_range_high))
    cost = torch.maximum(-advantages * ratio, -advantages * clipped)
    if dual_clip is None:
        return cost
    return torch.where(advantages < 0, torch.minimum(cost, -advantages * dual_clip), cost)


@torch.no_grad()
def clipped_tokens(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_range: float,
    clip_range_high: float | None = None,
    dual_clip: float | None = None,
) -> Tensor:
    """True where `clipped_policy_loss` takes a clipped term, so that the token has no gradient.

    That is a ratio above 1 + clip_range_high at a positive advantage, or below 1 - clip_range or above dual_clip at a
    negative one. The other ratios outside the range make the unclipped term the larger cost, and are not clipped.

    Args:
        log_probs, old_log_probs, advantages, clip_range, clip_range_high, dual_clip: as for `clipped_policy_loss`.

    Returns:
        bool, same shape; its mean over tokens is the clip fraction.

    Source: Schulman et al. 2017, arXiv:1707.06347, eq. 7 and figure 1.
    """
    ratio = torch.exp(log_probs - old_log_probs)
    too_high = (ratio > 1 + (clip_range if clip_range_high is None else clip_range_high)) & (advantages > 0)
    too_low = ratio < 1 - clip_range
    if dual_clip is not None:
        too_low = too_low | (ratio > dual_clip)
    return too_high | (too_low & (advantages < 0))


def sequence_log_ratios(log_ratios: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Mean log-ratio of the response that each token belongs to: the log of the sequence-level ratio.

    log s_t = 1 / |y| sum_{u in y} (log p_u - log p_old,u),  y the response of token t

    Args:
        log_ratios: log p - log p_old of each response token, [M].
        rows: response of each token, [M].
        counts: tokens of each response, at least 1, [B].

    Returns:
        [M]; its exponential takes the ratio's place in `clipped_policy_loss`, with gradient to all tokens of a
        response.

    Source: Zheng et al. 2025, arXiv:2507.18071, eq. 7 (GSPO; their s_i).
    """
    sums = log_ratios.new_zeros(len(counts)).index_add(0, rows, log_ratios)
    return (sums / counts)[rows]


@torch.no_grad()
def importance_weights(
    log_probs: Tensor, sampled_log_probs: Tensor, mask: Tensor, *, cap: float, sequence: bool = False
) -> Tensor:
    """Truncated importance weight of each response token, without gradient; a factor of its policy loss.

    weight_t = min(exp(log p_t - log q_t), cap);  with `sequence` min(exp(sum over t of (log p_t - log q_t)), cap)

    q is what sampled the token: the policy's distribution cut by top-k, top-p or min-p, or the policy before its last
    updates. The factor makes the gradient, which is taken of responses of q, one of responses of p, up to the cap;
    PPO's own ratio, which begins at 1, stays within its clip range beside it.

    Args:
        log_probs: log p, of the response tokens under the policy before the update, [B, R].
        sampled_log_probs: log q, of the same tokens when they were drawn, [B, R].
        mask: True at response tokens, [B, R].
        cap: C, the largest weight, > 0; infinity does not truncate.
        sequence: one weight for all tokens of a response.

    Returns:
        [B, R]; 0 where mask is False.

    Source: Ionides 2008, "Truncated importance sampling"; behaviour and proximal policy apart: Hilton et al. 2021,
        arXiv:2110.00641, eq. 2; for samples of another engine: Yao et al. 2025, "Your efficient RL framework secretly
        brings you off-policy RL training"; for whole responses: Zheng et al. 2025, arXiv:2507.18071.
    """
    log_ratio = _kept(log_probs - sampled_log_probs, mask)
    if sequence:
        log_ratio = log_ratio.sum(1, keepdim=True)
    return _kept(log_ratio.exp().clamp(max=cap), mask)


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float) -> Tensor:
    """Squared error of the value model, pessimistic about steps of more than `clip_range`, one value per token.

    clipped = old_value + clip(value - old_value, -clip_range, clip_range)
    cost    = max((value - return)^2, (clipped - return)^2) / 2

    Args:
        values: of the value model now, any shape.
        old_values: of the value model at sampling time, same shape.
        returns: targets, same shape, without gradient.
        clip_range: in units of value, > 0.

    Returns:
        Unreduced cost, same shape.

    Source: Engstrom et al. 2020, arXiv:2005.12729, "value function clipping"; Huang et al. 2024, arXiv:2403.17031.
    """
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return torch.maximum((values - returns).square(), (clipped - returns).square()) / 2


def _kept(values: Tensor, mask: Tensor) -> Tensor:
    """Values where mask is True, 0 elsewhere, in value and gradient: a product with 0 would let NaN through."""
    return torch.where(mask, values, 0.0)


# Advantages without a value model. A group is the `group_size` responses to one prompt, which are adjacent rows: [B]
# holds B / group_size groups. A reward that is not a number is missing: its response has an advantage of 0, and the
# others have those of a group without it; one response left alone has an advantage of 0.


@torch.no_grad()
def rloo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response less the mean of the others in its group (REINFORCE leave-one-out).

    advantage_i = reward_i - 1 / (n - 1) sum_{j != i} reward_j = n / (n - 1) (reward_i - mean)

    Args:
        rewards: of whole responses, KL penalty included where the reward has it, [B].
        group_size: n, at least 2.

    Returns:
        [B].

    Source: Ahmadian et al. 2024, arXiv:2402.14740, eq. 8 (their k).
    """
    return _of_groups(rewards, group_size, lambda groups: _centered(groups) * (groups.shape[1] / (groups.shape[1] - 1)))


@torch.no_grad()
def grpo_advantages(rewards: Tensor, group_size: int, *, eps: float = 1e-4) -> Tensor:
    """Reward of each response less its group's mean, divided by the group's deviation.

    advantage_i = (reward_i - mean) / (deviation + eps),  the deviation with n - 1

    Args:
        rewards: of whole responses, [B].
        group_size: n, at least 2.
        eps: bounds the advantages of a group whose rewards differ by little; equal ones have 0 without it.

    Returns:
        [B].

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    return _of_groups(rewards, group_size, lambda groups: _centered(groups) / (groups.std(1, keepdim=True) + eps))


@torch.no_grad()
def dr_grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response less its group's mean.

    Without the deviation, prompts whose responses are nearly all right or nearly all wrong do not weigh more than
    others. The mean includes the response itself, which shrinks the expected gradient by (n - 1) / n and turns it
    nowhere.

    advantage_i = reward_i - mean

    Args:
        rewards: of whole responses, [B].
        group_size: n, at least 2.

    Returns:
        [B].

    Source: Liu et al. 2025, arXiv:2503.20783, section 3.2 (Dr. GRPO).
    """
    return _of_groups(rewards, group_size, _centered)


def _centered(groups: Tensor) -> Tensor:
    """Rewards less the mean of their group, [groups, n]; 0 where those of a group differ by roundings of its mean."""
    mean = groups.mean(1, keepdim=True)
    centered = groups - mean
    rounding = _rounding_of(mean)
    return torch.where(centered.abs().amax(1, keepdim=True) <= rounding, 0.0, centered)


def _rounding_of(mean: Tensor) -> Tensor:
    """The largest deviation from a mean that is that of equal values: 16 roundings of the mean."""
    return 16 * torch.finfo(mean.dtype).eps * mean.abs()


def _of_groups(rewards: Tensor, group_size: int, compare: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of `compare` ([groups, n] -> the same shape) on each group without its missing rewards, [B]."""
    groups = rewards.view(-1, group_size)
    known = ~groups.isnan()
    advantages = compare(groups)
    for group in (~known.all(1)).nonzero().flatten().tolist():
        left = groups[group, known[group]].unsqueeze(0)
        advantages[group] = 0.0
        if left.shape[1] > 1:
            advantages[group, known[group]] = compare(left)[0]
    return advantages.view(-1)


@torch.no_grad()
def rewards_to_go(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Sum of the rewards from each token on, discounted: REINFORCE's return, and REINFORCE++'s before whitening.

    return_t = reward_t + gamma * return_{t+1}

    Args:
        rewards: [B, R].
        mask: True at response tokens, which are adjacent in each row, [B, R].
        gamma: discount, in [0, 1].

    Returns:
        [B, R]; 0 where mask is False.

    Source: Hu et al. 2025, arXiv:2501.03262, section 3.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma=gamma, gae_lambda=1.0)[0]


@torch.no_grad()
def remax_advantages(rewards: Tensor, mask: Tensor, baselines: Tensor, *, gamma: float = 1.0) -> Tensor:
    """Return of each token less the reward of the greedy response to the same prompt.

    advantage_t = return_t - baseline

    Args:
        rewards: [B, R].
        mask: True at response tokens, which are adjacent in each row, [B, R].
        baselines: reward of the greedy response to each row's prompt, [B].
        gamma: discount, in [0, 1].

    Returns:
        [B, R]; 0 where mask is False.

    Source: Li et al. 2023, arXiv:2310.10505, algorithm 1.
    """
    return torch.where(mask, rewards_to_go(rewards, mask, gamma=gamma) - baselines.unsqueeze(1), 0.0)

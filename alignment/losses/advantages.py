"""Advantages without a value model: each response is compared with others, or with nothing.

A group is the `group_size` responses to one prompt, which are adjacent rows: [B] holds B / group_size groups. A reward
that is not a number is missing: its response has an advantage of 0, and the others have those of a group without it; one
response left alone has an advantage of 0. What comes out is a target: all functions work without gradient.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from alignment.losses.policy import gae


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
        eps: keeps a group of equal rewards at 0.

    Returns:
        [B].

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2.
    """
    return _of_groups(rewards, group_size, lambda groups: _centered(groups) / (groups.std(1, keepdim=True) + eps))


@torch.no_grad()
def dr_grpo_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Reward of each response less its group's mean.

    Without the deviation, prompts whose responses are nearly all right or nearly all wrong do not weigh more than
    others. The mean includes the response itself, which shrinks the expected gradient by (n - 1) / n and turns it nowhere.

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
    return groups - groups.mean(1, keepdim=True)


def _of_groups(rewards: Tensor, group_size: int, compare: Callable[[Tensor], Tensor]) -> Tensor:
    """The result of `compare` ([groups, n] -> the same shape) on each group without its missing rewards, [B]."""
    groups = rewards.view(-1, group_size)
    known, advantages = ~groups.isnan(), compare(groups)
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

"""Hand-worked numbers of the policy loss's options, and of the advantages without a value model."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import (
    clipped_policy_loss,
    clipped_tokens,
    dr_grpo_advantages,
    grpo_advantages,
    kl_estimates,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    sequence_log_ratios,
    shape_rewards,
)

near = partial(assert_close, atol=1e-6, rtol=0)
RATIOS = torch.tensor([1.25, 1.25, 5.0, 5.0, 0.5, 0.5])
ADVANTAGES = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])


def cost_and_gradient(**settings):
    log_probs = RATIOS.log().requires_grad_()
    cost = clipped_policy_loss(log_probs, torch.zeros(6), ADVANTAGES, clip_range=0.2, **settings)
    cost.sum().backward()
    return cost.detach(), log_probs.grad


def test_a_higher_upper_range_lets_rare_tokens_rise_further():
    """Clip-higher: at a positive advantage the ratio 1.25 goes on learning below 1.28, and nothing else changes."""
    cost, gradient = cost_and_gradient(clip_range_high=0.28)
    near(cost, torch.tensor([-1.25, 1.25, -1.28, 5.0, -0.5, 0.8]))
    near(gradient, torch.tensor([-1.25, 1.25, 0.0, 5.0, -0.5, 0.0]))
    symmetric, _ = cost_and_gradient()
    near(symmetric, torch.tensor([-1.2, 1.25, -1.2, 5.0, -0.5, 0.8]))


def test_dual_clip_bounds_the_cost_of_a_negative_advantage():
    """Ratio 5 at advantage -1 costs 3 and no more; a positive advantage is clipped as ever."""
    cost, gradient = cost_and_gradient(dual_clip=3.0)
    near(cost, torch.tensor([-1.2, 1.25, -1.2, 3.0, -0.5, 0.8]))
    near(gradient, torch.tensor([0.0, 1.25, 0.0, 0.0, -0.5, 0.0]))


@pytest.mark.parametrize("settings", [{}, {"clip_range_high": 0.28}, {"dual_clip": 3.0}])
def test_clipped_tokens_are_those_without_a_gradient(settings):
    _, gradient = cost_and_gradient(**settings)
    clipped = clipped_tokens(RATIOS.log(), torch.zeros(6), ADVANTAGES, clip_range=0.2, **settings)
    assert (clipped == (gradient == 0)).all() and clipped.any()


def test_the_sequence_ratio_is_the_geometric_mean_over_the_response():
    """Responses of 2 and 3 tokens, interleaved: means (0.2 + 0.6) / 2 and (0.3 - 0.9 + 0) / 3."""
    log_ratios = torch.tensor([0.2, 0.3, -0.9, 0.6, 0.0], requires_grad=True)
    rows, counts = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([2, 3])
    found = sequence_log_ratios(log_ratios, rows, counts)
    near(found, torch.tensor([0.4, -0.2, -0.2, 0.4, -0.2]))
    # every token of a response has the gradient of its one ratio: d sum_t exp(found_t) / d log_ratio_u = s
    found.exp().sum().backward()
    near(log_ratios.grad, torch.tensor([0.4, -0.2, -0.2, 0.4, -0.2]).exp())


def test_penalties_of_all_estimators_are_worked_by_hand():
    log_probs, reference = torch.tensor([[-0.9, -2.2]]), torch.tensor([[-1.1, -2.0]])
    mask = torch.ones(1, 2, dtype=torch.bool)
    shape = partial(shape_rewards, torch.tensor([1.0]), log_probs, reference, mask, kl_coef=0.5)
    near(shape(kl_estimator="k1"), torch.tensor([[-0.1, 1.1]]))
    near(shape(kl_estimator="k2"), torch.tensor([[-0.01, 0.99]]))
    near(shape(kl_estimator="k3"), torch.tensor([[-0.0093655, 0.9892985]]))  # (0.018731, 0.021403) / 2


def test_k1_holds_nothing_k2_follows_reverse_k3_forward_kl():
    """Gradients in expectation over tokens of the policy, by enumeration."""
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    reference = torch.tensor([0.5, 0.3, 0.2]).log()

    def gradient(loss):
        (grad,) = torch.autograd.grad(loss, logits)
        return grad

    def of_estimate(name):
        log_probs = logits.log_softmax(0)
        return gradient((log_probs.detach().exp() * kl_estimates(log_probs, reference)[name]).sum())

    log_probs = logits.log_softmax(0)
    reverse = (log_probs.exp() * (log_probs - reference)).sum()
    near(of_estimate("k1"), torch.zeros(3))
    near(of_estimate("k2"), gradient(reverse))
    near(of_estimate("k3"), gradient((reference.exp() * (reference - logits.log_softmax(0))).sum()))
    assert (of_estimate("k2") - of_estimate("k3")).abs().max() > 0.01


# --- advantages ---

REWARDS = torch.tensor([1.0, 2.0, 6.0, 4.0, 4.0, 4.0])  # two prompts, three responses to each


def test_leave_one_out_is_worked_by_hand():
    # 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2
    near(rloo_advantages(REWARDS, 3), torch.tensor([-3.0, -1.5, 4.5, 0.0, 0.0, 0.0]))


def test_grpo_divides_by_the_deviation_and_dr_grpo_does_not():
    # mean 3, squares 4 + 1 + 9 over 2: deviation sqrt(7) = 2.645751
    near(grpo_advantages(REWARDS, 3, eps=0.0)[:3], torch.tensor([-2.0, -1.0, 3.0]) / math.sqrt(7))
    near(grpo_advantages(REWARDS, 3)[3:], torch.zeros(3))
    near(dr_grpo_advantages(REWARDS, 3), torch.tensor([-2.0, -1.0, 3.0, 0.0, 0.0, 0.0]))


@pytest.mark.parametrize("advantages", [rloo_advantages, grpo_advantages, dr_grpo_advantages])
@pytest.mark.parametrize("size", [3, 5, 8])
def test_a_group_of_equal_rewards_has_advantages_of_exactly_0(advantages, size):
    """[E8c] Their mean is off by a rounding, which 1 / 1e-4 would make 10,000 times as large; one in two groups has it."""
    rewards = 1000 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    equal = rewards.repeat_interleave(size)
    assert not advantages(equal, size).any()
    rounded = torch.where(torch.arange(len(equal)) % size == 0, equal.nextafter(torch.tensor(math.inf)), equal)
    assert not advantages(rounded, size).any()  # sums of equal numbers in another order
    missing = torch.where(torch.arange(len(equal)) % size == 1, math.nan, equal)
    assert not advantages(missing, size).any()
    different = equal * (1 + 1e-5 * (torch.arange(len(equal)) % size))
    assert advantages(different, size).view(-1, size)[:, 1:].any(1).all()


@pytest.mark.parametrize("advantages", [rloo_advantages, grpo_advantages, dr_grpo_advantages])
def test_a_missing_reward_leaves_the_group_without_it(advantages):
    """Of four responses the second has none; a prompt that has one or no reward left tells nothing."""
    nan = math.nan
    found = advantages(torch.tensor([-3.0, nan, -2.0, -4.0, nan, nan, 5.0, nan, *[nan] * 4, 1.0, 2.0, 3.0, 6.0]), 4)
    near(found[[0, 2, 3]], advantages(torch.tensor([-3.0, -2.0, -4.0]), 3))
    assert torch.equal(found[1], torch.tensor(0.0)) and not found[4:12].any()
    assert torch.equal(found[12:], advantages(torch.tensor([1.0, 2.0, 3.0, 6.0]), 4))


def test_grpo_has_the_advantages_of_trl():
    """The three lines of trl's GRPOTrainer: mean and std over the group, divided with 1e-4."""
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    mean, std = (getattr(rewards.view(-1, 4), name)(dim=1).repeat_interleave(4) for name in ("mean", "std"))
    near(grpo_advantages(rewards, 4), (rewards - mean) / (std + 1e-4))


def test_returns_are_rewards_from_the_token_on():
    rewards = torch.tensor([[-0.1, 0.2, 1.0], [0.5, math.nan, math.nan]])
    mask = torch.tensor([[True, True, True], [True, False, False]])
    near(rewards_to_go(rewards, mask), torch.tensor([[1.1, 1.2, 1.0], [0.5, 0.0, 0.0]]))
    near(rewards_to_go(rewards, mask, gamma=0.5)[0], torch.tensor([0.25, 0.7, 1.0]))
    near(
        remax_advantages(rewards, mask, torch.tensor([0.3, -1.0])),
        torch.tensor([[0.8, 0.9, 0.7], [1.5, 0.0, 0.0]]),
    )


@pytest.mark.parametrize("advantages", [rloo_advantages, grpo_advantages, dr_grpo_advantages])
def test_a_group_does_not_see_the_others(advantages):
    alone = torch.cat([advantages(REWARDS[:3], 3), advantages(REWARDS[3:], 3)])
    rewards = REWARDS.clone().requires_grad_()
    together = advantages(rewards, 3)
    assert torch.equal(together, alone) and not together.requires_grad


def test_leave_one_out_has_the_expected_gradient():
    """Expectation over all pairs of responses of a three-armed bandit: RLOO exactly, Dr. GRPO (n - 1) / n of it."""
    logits, rewards = torch.tensor([0.3, -0.2, 0.9], requires_grad=True), torch.tensor([1.0, -2.0, 0.5])
    log_probs = logits.log_softmax(0)
    (expected,) = torch.autograd.grad((log_probs.exp() * rewards).sum(), logits, retain_graph=True)
    for advantages, part in ((rloo_advantages, 1.0), (dr_grpo_advantages, 0.5)):
        total = torch.zeros(())
        for i in range(3):
            for j in range(3):
                weight = (log_probs[i] + log_probs[j]).exp().detach()
                found = advantages(rewards[[i, j]], 2)
                total = total + weight * (found * log_probs[[i, j]]).mean()
        (gradient,) = torch.autograd.grad(total, logits, retain_graph=True)
        near(gradient, part * expected)

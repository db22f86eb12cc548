"""Hand-worked numbers of losses/policy.py, and what masked slots must not do."""

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from alignment.algorithms.ppo import AdaptiveKL, FixedKL
from alignment.losses import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    gae,
    kl_estimates,
    shape_rewards,
    whiten,
)

near = partial(assert_close, atol=1e-6, rtol=0)
LOG_PROBS = torch.tensor([[-0.9, -2.2, -1.4, -0.3]])
REFERENCE = torch.tensor([[-1.1, -2.0, -1.4, -0.8]])
ALL = torch.ones(1, 4, dtype=torch.bool)


def padded(values: torch.Tensor, filler: float) -> torch.Tensor:
    """Three slots that do not count behind each row."""
    return torch.cat([values, torch.full((len(values), 3), filler, dtype=values.dtype)], dim=1)


def padded_mask(mask: torch.Tensor) -> torch.Tensor:
    return torch.cat([mask, torch.zeros(len(mask), 3, dtype=torch.bool)], dim=1)


# --- KL estimates ---


def test_h28_kl_estimates_worked_by_hand():
    estimates = kl_estimates(LOG_PROBS, REFERENCE)
    near(estimates["k1"].sum(), torch.tensor(0.5))
    near(estimates["k3"], torch.tensor([[0.018731, 0.021403, 0.0, 0.106531]]))
    near(estimates["k3"].sum(), torch.tensor(0.146664))


def test_h13_approximate_kl_is_a_mean_over_what_counts():
    log_ratio = padded(torch.tensor([[0.2, -0.3, 0.0, -0.6]]), 0.0)
    log_ratio = torch.cat([log_ratio, torch.zeros(1, 1)], dim=1)  # 4 that count, 4 that do not
    mask = torch.arange(8).unsqueeze(0) < 4
    k2 = kl_estimates(log_ratio, torch.zeros_like(log_ratio))["k2"]
    near(k2[mask].mean(), torch.tensor(0.06125))
    near(k2.mean(), torch.tensor(0.030625))  # the lie: a mean over padding too


def test_kl_estimates_agree_with_the_true_kl_in_expectation():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).log(), torch.tensor([0.5, 0.3, 0.2]).log()
    truth = (policy.exp() * (policy - reference)).sum()
    estimates = kl_estimates(policy, reference)
    near((policy.exp() * estimates["k1"]).sum(), truth)
    near((policy.exp() * estimates["k3"]).sum(), truth)
    assert (estimates["k3"] >= 0).all() and (estimates["k2"] >= 0).all()


# --- rewards ---


def test_h27_rewards_worked_by_hand():
    rewards = shape_rewards(torch.tensor([1.7]), LOG_PROBS, REFERENCE, ALL, kl_coef=0.05)
    near(rewards, torch.tensor([[-0.01, 0.01, 0.0, 1.675]]))


def test_h29_score_falls_on_the_last_token_of_each_row():
    mask = torch.arange(5) < torch.tensor([[3], [5], [1]])
    zeros = torch.zeros(3, 5)
    rewards = shape_rewards(torch.ones(3), zeros, zeros, mask, kl_coef=0.0)
    near(rewards, torch.tensor([[0.0, 0, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, 0, 0, 0]]))
    advantages, returns = gae(rewards, zeros, mask, gamma=1.0, gae_lambda=1.0)
    near(returns, mask.float())  # ones up to the end, zero after
    near(advantages, mask.float())


def test_a_response_without_tokens_is_refused_by_row():
    mask = torch.tensor([[True, False], [False, False]])
    with pytest.raises(ValueError, match=r"\[1\]"):
        shape_rewards(torch.ones(2), torch.zeros(2, 2), torch.zeros(2, 2), mask, kl_coef=0.1)


@pytest.mark.parametrize("filler", [1e9, math.nan, -math.inf])
def test_i4_masked_slots_change_no_reward_and_no_gradient(filler):
    log_probs = padded(LOG_PROBS, filler).requires_grad_()
    reference = padded(REFERENCE, filler)
    rewards = shape_rewards(torch.tensor([1.7]), log_probs, reference, padded_mask(ALL), kl_coef=0.05)
    near(rewards, padded(torch.tensor([[-0.01, 0.01, 0.0, 1.675]]), 0.0))
    rewards.sum().backward()
    near(log_probs.grad, padded(torch.full((1, 4), -0.05), 0.0))


# --- advantages ---

REWARDS = torch.tensor([[-0.01, 0.01, 0.0, 1.675]])
VALUES = torch.tensor([[0.2, 0.35, 0.1, 0.6]])
ADVANTAGES = torch.tensor([[1.284928125, 1.2051875, 1.52125, 1.075]])
RETURNS = torch.tensor([[1.484928125, 1.5551875, 1.62125, 1.675]])


def test_h35_gae_worked_by_hand():
    advantages, returns = gae(REWARDS, VALUES, ALL, gamma=1.0, gae_lambda=0.95)
    near(advantages, ADVANTAGES)
    near(returns, RETURNS)


@pytest.mark.parametrize("filler", [1e9, math.nan])
def test_h35_i4_gae_ignores_slots_past_the_end(filler):
    mask = padded_mask(ALL)
    advantages, returns = gae(padded(REWARDS, filler), padded(VALUES, filler), mask, gamma=1.0, gae_lambda=0.95)
    near(advantages, padded(ADVANTAGES, 0.0))
    near(returns, padded(RETURNS, 0.0))


def test_gae_of_left_aligned_and_right_aligned_rows_is_the_same():
    mask = padded_mask(ALL)
    turned = [torch.roll(value, 3, dims=1) for value in (padded(REWARDS, 5.0), padded(VALUES, 5.0), mask)]
    advantages, _ = gae(*turned, gamma=0.9, gae_lambda=0.95)
    expected, _ = gae(REWARDS, VALUES, ALL, gamma=0.9, gae_lambda=0.95)
    near(advantages[:, 3:], expected)
    assert (advantages[:, :3] == 0).all()


def test_gae_limits_are_one_step_errors_and_whole_returns():
    one_step, _ = gae(REWARDS, VALUES, ALL, gamma=0.9, gae_lambda=0.0)
    near(one_step, REWARDS + 0.9 * torch.tensor([[0.35, 0.1, 0.6, 0.0]]) - VALUES)
    _, returns = gae(REWARDS, VALUES, ALL, gamma=1.0, gae_lambda=1.0)
    near(returns, REWARDS.flip(1).cumsum(1).flip(1))


def test_gae_gives_targets_without_gradient():
    values = VALUES.clone().requires_grad_()
    advantages, returns = gae(REWARDS, values, ALL, gamma=1.0, gae_lambda=0.95)
    assert not advantages.requires_grad and not returns.requires_grad


# --- whitening ---


@pytest.mark.parametrize("filler", [100.0, 1e9, math.nan])
def test_h30_i4_whitening_is_over_what_counts_with_biased_variance(filler):
    values = torch.tensor([1.0, 2.0, 3.0, filler], requires_grad=True)
    mask = torch.tensor([True, True, True, False])
    whitened = whiten(values, mask)
    near(whitened, torch.tensor([-1.224745, 0.0, 1.224745, 0.0]))
    (whitened * torch.tensor([1.0, 2.0, 4.0, 8.0])).sum().backward()
    assert torch.isfinite(values.grad).all() and values.grad[3] == 0


@pytest.mark.parametrize("value", [2.7, -0.1, 1e4, 1e-30, 0.0])
@pytest.mark.parametrize("count", [3, 7, 1000])
def test_equal_values_are_whitened_to_0(value, count):
    """Their mean is off by a rounding, and 1e-4, the root of the 1e-8 below the root, would blow it up ten thousandfold."""
    values, mask = torch.full((count,), value), torch.ones(count, dtype=torch.bool)
    assert (whiten(values, mask) == 0).all()
    assert_close(whiten(values, mask, shift_mean=False), values)


def test_values_that_differ_by_more_than_a_rounding_are_whitened():
    """1 and 1.0001: a deviation of 5e-5, which is half of 1e-4, so that they become 5e-5 / sqrt(1.25e-8) = 0.447."""
    found = whiten(torch.tensor([1.0, 1.0001]), torch.ones(2, dtype=torch.bool))
    assert_close(found, torch.tensor([-0.4472, 0.4472]), atol=2e-3, rtol=0)


def test_h30_whitening_can_keep_the_mean():
    grid = torch.linspace(1.2, 2.0, 9).reshape(3, 3)
    whitened = whiten(grid, torch.ones(3, 3, dtype=torch.bool), shift_mean=False)
    assert_close(whitened[[0, 2], [0, 2]], torch.tensor([0.0508, 3.1492]), atol=5e-5, rtol=0)


@pytest.mark.parametrize("count", [0, 1])
def test_h30_fewer_than_two_values_come_back_unchanged(count):
    mask = torch.arange(3) < count
    whitened = whiten(torch.tensor([5.0, math.nan, math.nan]), mask)
    near(whitened, torch.tensor([5.0 * count, 0.0, 0.0]))


def test_h30_variance_does_not_cancel_far_from_zero():
    values = torch.tensor([4095.0, 4096.0, 4097.0])
    near(whiten(values, torch.ones(3, dtype=torch.bool)), torch.tensor([-1.224745, 0.0, 1.224745]))


def test_h30_two_ranks_whiten_as_one():
    values = torch.tensor([[0.3, -1.0, 2.5], [7.0, 0.1, -4.0]])
    mask = torch.tensor([[True, True, False], [True, True, True]])
    # each rank's partial sums, worked apart: (count, sum), then squares around the common mean
    counts = torch.stack([mask.sum().float(), values[mask].sum()])
    squares = (values[mask] - values[mask].mean()).square().sum()
    expected = whiten(values, mask)
    for rank in range(2):
        answers = iter([counts, squares])
        near(whiten(values[rank], mask[rank], reduce=lambda _, it=answers: next(it)), expected[rank])


# --- clipped losses ---


def test_policy_loss_is_minus_the_advantage_when_nothing_has_changed():
    advantages = torch.tensor([1.0, -2.0])
    log_probs = torch.tensor([-0.5, -3.0], requires_grad=True)
    cost = clipped_policy_loss(log_probs, log_probs.detach(), advantages, clip_range=0.2)
    near(cost.detach(), -advantages)
    cost.sum().backward()
    near(log_probs.grad, -advantages)  # the policy gradient


def test_policy_loss_clips_only_where_that_costs_more():
    # ratios 1.5, 1.5, 0.5, 0.5 with clip 0.2
    log_probs = torch.tensor([1.5, 1.5, 0.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    cost = clipped_policy_loss(log_probs, torch.zeros(4), advantages, clip_range=0.2)
    near(cost.detach(), torch.tensor([-1.2, 1.5, -0.5, 0.8]))
    cost.sum().backward()
    near(log_probs.grad, torch.tensor([0.0, 1.5, -0.5, 0.0]))


def test_clipped_tokens_are_those_where_the_clipped_term_is_taken():
    # ratios 1.5 1.5 0.5 0.5 1.1 0.9 1.5 0.5 with clip 0.2: outside the range are six, and of these the clipped term is
    # the larger cost for the first (-1.2 > -1.5) and the fourth (0.8 > 0.5) alone; at advantage 0 both are 0
    log_probs = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1, 0.9, 1.5, 0.5]).log().requires_grad_()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0, 0.0, 0.0])
    clipped = clipped_tokens(log_probs, torch.zeros(8), advantages, clip_range=0.2)
    assert clipped.tolist() == [True, False, False, True, False, False, False, False]
    clipped_policy_loss(log_probs, torch.zeros(8), advantages, clip_range=0.2).sum().backward()
    assert ((log_probs.grad == 0) == (clipped | (advantages == 0))).all()  # no gradient there, and only there


def test_h35_value_loss_worked_by_hand():
    values, old = torch.tensor([0.9, 0.1]), torch.tensor([0.5, 0.2])
    cost = clipped_value_loss(values, old, torch.tensor([1.5, -0.4]), clip_range=0.2)
    near(cost, torch.tensor([0.32, 0.125]))
    near(cost.mean(), torch.tensor(0.2225))


@pytest.mark.parametrize("filler", [1e9, math.nan])
def test_i4_selecting_before_the_loss_keeps_masked_slots_out_of_gradients(filler):
    mask = padded_mask(ALL)
    log_probs = padded(LOG_PROBS, filler).requires_grad_()
    values = padded(VALUES, filler).requires_grad_()
    policy = clipped_policy_loss(log_probs[mask], padded(REFERENCE, filler)[mask], ADVANTAGES[0], clip_range=0.2)
    value = clipped_value_loss(values[mask], VALUES[0], RETURNS[0], clip_range=0.2)
    (policy.sum() + value.sum()).backward()
    for leaf in (log_probs, values):
        assert torch.isfinite(leaf.grad).all() and (leaf.grad[~mask] == 0).all() and (leaf.grad[mask] != 0).any()


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(2, 5, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(3))
    mask = torch.arange(5) < torch.tensor([[3], [5]])
    gradcheck = torch.autograd.gradcheck
    assert gradcheck(lambda a: whiten(a, mask), x)
    assert gradcheck(lambda a: whiten(a, mask, shift_mean=False), x)
    assert gradcheck(lambda a, b: shape_rewards(a[:, 0], a, b, mask, kl_coef=0.3), (x, y))
    assert gradcheck(lambda a, b: tuple(kl_estimates(a, b).values()), (x, y))
    assert gradcheck(lambda a, b, c: clipped_policy_loss(a, b, c, clip_range=0.2), (x, y, z))
    assert gradcheck(lambda a, b, c: clipped_value_loss(a, b, c, clip_range=0.2), (x, y, z))


# --- penalty weight ---


def test_h36_adaptive_coefficient_worked_by_hand():
    # error = clip(9 / 6 - 1) = 0.2; 0.2 * (1 + 0.2 * 256 / 10000) = 0.201024
    controller = AdaptiveKL(0.2, target=6.0, horizon=10_000)
    assert controller.update(9.0, 256) == pytest.approx(0.201024, abs=1e-12)
    assert controller.coef == pytest.approx(0.201024, abs=1e-12)
    # below the target by less than the clip: 5.4 / 6 - 1 = -0.1
    assert controller.update(5.4, 1000) == pytest.approx(0.201024 * 0.99)


@pytest.mark.parametrize("kl", [math.nan, math.inf])
def test_adaptive_coefficient_does_not_follow_a_broken_measurement(kl):
    controller = AdaptiveKL(0.2, target=6.0, horizon=1000)
    with pytest.raises(ValueError, match="KL"):
        controller.update(kl, 64)
    assert controller.coef == 0.2


@pytest.mark.parametrize("settings", [(0.0, 6.0, 100), (0.1, -1.0, 100), (0.1, 6.0, 0)])
def test_adaptive_controller_refuses_settings_it_cannot_steer_with(settings):
    with pytest.raises(ValueError, match="above 0"):
        AdaptiveKL(*settings)


def test_fixed_coefficient_stays():
    assert FixedKL(0.05).update(100.0, 64) == 0.05

"""Hand-worked numbers of losses/preference.py."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import bradley_terry_loss, dpo_loss


def test_h26_bradley_terry_loss_of_four_margins():
    margins = torch.tensor([0.7, -0.3, 0.0, 3.1])
    cost = bradley_terry_loss(margins, torch.zeros(4))
    assert cost.shape == (4,)
    assert_close(cost.mean(), torch.tensor(0.498688), atol=1e-6, rtol=0)


def test_bradley_terry_loss_sees_only_the_difference():
    chosen, rejected = torch.tensor([1.5, -2.0]), torch.tensor([0.5, 3.0])
    assert_close(bradley_terry_loss(chosen + 10, rejected + 10), bradley_terry_loss(chosen, rejected))


def test_margin_moves_the_point_of_indifference():
    # a lead of exactly the margin costs log 2, as a lead of 0 does without one
    cost = bradley_terry_loss(torch.tensor([2.0, 2.0]), torch.tensor([0.5, 1.0]), torch.tensor([1.5, 1.0]))
    assert_close(cost, torch.full((2,), math.log(2)))
    assert_close(bradley_terry_loss(torch.tensor([2.0]), torch.tensor([0.5]), 1.5), torch.tensor([math.log(2)]))


def test_bradley_terry_loss_is_finite_where_the_sigmoid_underflows():
    chosen = torch.tensor([-500.0], requires_grad=True)
    cost = bradley_terry_loss(chosen, torch.tensor([500.0]))
    cost.sum().backward()
    assert_close(cost.detach(), torch.tensor([1000.0]))
    assert_close(chosen.grad, torch.tensor([-1.0]))


H39_FIRST = [torch.tensor([value]) for value in (-23.5, -30.25, -25.0, -29.0)]
H39_SECOND = [torch.tensor([value]) for value in (-8.0, -6.5, -7.0, -7.0)]


def test_h39_dpo_loss_worked_by_hand():
    # margin = 0.2 * ((-23.5 + 25) - (-30.25 + 29)) = 0.30 + 0.25 = 0.55; softplus(-0.55) = 0.455492
    assert_close(dpo_loss(*H39_FIRST, beta=0.2), torch.tensor([0.455492]), atol=1e-6, rtol=0)
    smoothed = dpo_loss(*H39_FIRST, beta=0.2, label_smoothing=0.15)
    assert_close(smoothed, torch.tensor([0.537992]), atol=1e-6, rtol=0)
    # margin = 0.5 * ((-8 + 7) - (-6.5 + 7)) = -0.75
    assert_close(dpo_loss(*H39_SECOND, beta=0.5), torch.tensor([1.136871]), atol=1e-6, rtol=0)


def test_i7_dpo_loss_is_log_two_when_policy_equals_reference():
    same = torch.tensor([-3.0, -50.0])
    assert_close(dpo_loss(same, same, same, same, beta=0.1), torch.full((2,), math.log(2)))


def test_dpo_gradient_is_beta_times_the_doubt():
    # d cost / d chosen = -beta * sigmoid(-margin); the rejected side has the opposite sign
    chosen, rejected = (value.clone().requires_grad_() for value in H39_FIRST[:2])
    dpo_loss(chosen, rejected, *H39_FIRST[2:], beta=0.2).sum().backward()
    assert_close(chosen.grad, torch.tensor([-0.2 / (1 + math.exp(0.55))]))
    assert_close(rejected.grad, -chosen.grad)


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 0.1, "label_smoothing": 0.5}])
def test_settings_that_mean_nothing_are_refused(settings):
    with pytest.raises(ValueError, match=r"must be"):
        dpo_loss(*H39_FIRST, **settings)


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randn(3, dtype=torch.float64, generator=generator, requires_grad=True) for _ in range(4)]
    assert torch.autograd.gradcheck(lambda *x: dpo_loss(*x, beta=0.3, label_smoothing=0.1), columns)
    assert torch.autograd.gradcheck(lambda *x: bradley_terry_loss(*x, 0.4), columns[:2])

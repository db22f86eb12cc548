"""Hand-worked numbers of losses/distillation.py."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import distillation_loss, hidden_cosine_loss


def logits(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def test_at_temperature_one_it_is_the_divergence_of_teacher_from_student():
    # KL((3/4, 1/4) || (1/2, 1/2)) = 3/4 log 3/2 + 1/4 log 1/2 = 0.130812
    loss = distillation_loss(logits(0.5, 0.5), logits(0.75, 0.25), temperature=1.0)
    assert_close(loss, torch.tensor([0.130812]), atol=1e-6, rtol=0)
    # the other way round it is 1/2 log 2/3 + 1/2 log 2 = 0.143841
    other = distillation_loss(logits(0.75, 0.25), logits(0.5, 0.5), temperature=1.0)
    assert_close(other, torch.tensor([0.143841]), atol=1e-6, rtol=0)


def test_temperature_two_softens_both_and_weighs_four_times():
    # sqrt(9/10) : sqrt(1/10) = 3 : 1, so the teacher is (3/4, 1/4): 4 * 0.130812
    loss = distillation_loss(logits(0.5, 0.5), logits(0.9, 0.1), temperature=2.0)
    assert_close(loss, torch.tensor([0.523248]), atol=1e-5, rtol=0)


def test_gradient_is_temperature_times_the_difference_of_the_softened_distributions():
    student = logits(0.5, 0.5).requires_grad_()
    distillation_loss(student, logits(0.9, 0.1), temperature=2.0).sum().backward()
    assert_close(student.grad, 2.0 * torch.tensor([[0.5 - 0.75, 0.5 - 0.25]]))


def test_a_token_the_teacher_rules_out_counts_nothing_and_spoils_no_gradient():
    student = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    teacher = torch.tensor([[math.log(3), 0.0, -torch.inf]])
    loss = distillation_loss(student, teacher, temperature=1.0)
    assert_close(loss, torch.tensor([0.130812]), atol=1e-6, rtol=0)
    loss.sum().backward()
    assert student.grad is not None and torch.isfinite(student.grad).all()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_impossible_temperatures_are_refused(temperature):
    with pytest.raises(ValueError, match="above 0"):
        distillation_loss(torch.zeros(1, 2), torch.zeros(1, 2), temperature=temperature)


def test_vocabularies_must_agree():
    with pytest.raises(ValueError, match="differ"):
        distillation_loss(torch.zeros(1, 2), torch.zeros(1, 3), temperature=1.0)


def test_hidden_cosine_loss_is_worked_by_hand():
    student = torch.tensor([[1.0, 0.0], [1.0, 0.0], [2.0, 0.0], [3.0, 4.0]])
    teacher = torch.tensor([[5.0, 0.0], [0.0, 2.0], [-1.0, 0.0], [4.0, 3.0]])
    assert_close(hidden_cosine_loss(student, teacher), torch.tensor([0.0, 1.0, 2.0, 1 - 24 / 25]))

"""Hand-worked numbers of losses/language.py."""

import math

import pytest
import torch

from alignment.losses.language import IGNORED, label_loss, span_loss


def logits(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities).log()


def test_the_label_loss_is_a_sum_of_negative_log_probabilities():
    # -log 1/4 - log 1/2 = 3 log 2
    loss = label_loss(logits([0.25, 0.75], [0.5, 0.5]), torch.tensor([0, 1]))
    assert loss.item() == pytest.approx(3 * math.log(2), rel=1e-6)


def test_ignored_labels_cost_nothing_and_have_no_gradient():
    # the second row is ignored; in the first the third class is ruled out, which leaves 1/4 : 3/4
    table = torch.tensor([[0.25, 0.75, 0.0], [0.1, 0.2, 0.7]]).log().requires_grad_()
    loss = label_loss(table, torch.tensor([0, IGNORED]))
    assert loss.item() == pytest.approx(math.log(4), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, table)
    assert gradient.tolist() == [pytest.approx([-0.75, 0.75, 0.0]), [0.0, 0.0, 0.0]]


def test_the_span_loss_is_half_of_both_ends():
    # window 0: start 1/2, end 1/4; window 1 has two tokens: start 1/2, end 1/8; (1 + 2 + 1 + 3) log 2 / 2
    first = logits([0.25, 0.5, 0.25], [0.5, 0.5, 0.0])
    last = logits([0.5, 0.25, 0.25], [0.875, 0.125, 0.0])
    loss = span_loss(torch.stack([first, last], -1), torch.tensor([1, 0]), torch.tensor([1, 1]))
    assert loss.item() == pytest.approx(3.5 * math.log(2), rel=1e-6)


def test_the_next_sentence_loss_counts_class_zero_as_following():
    # B follows with probability 3/4: label 0 costs log 4/3, label 1 log 4
    table = logits([0.75, 0.25], [0.75, 0.25])
    assert label_loss(table[:1], torch.tensor([0])).item() == pytest.approx(math.log(4 / 3), rel=1e-6)
    assert label_loss(table, torch.tensor([0, 1])).item() == pytest.approx(math.log(16 / 3), rel=1e-6)

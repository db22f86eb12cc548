"""Hand-worked numbers of losses/language.py."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import entropy, token_log_probs
from alignment.losses.language import mean_language_loss


def test_token_log_prob_is_worked_by_hand():
    # softmax(0, ln 3) = (1/4, 3/4)
    logits = torch.tensor([[0.0, math.log(3)], [0.0, math.log(3)]])
    assert_close(token_log_probs(logits, torch.tensor([0, 1])), torch.tensor([0.25, 0.75]).log())


def test_token_log_probs_keep_leading_shape_and_ignore_a_shift():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 6, 3], [1, 1, 2]])
    log_probs = token_log_probs(logits, tokens)
    assert log_probs.shape == (2, 3)
    assert_close(token_log_probs(logits + 100.0, tokens), log_probs, atol=1e-4, rtol=0)
    assert_close(log_probs[1, 2], logits[1, 2].softmax(-1)[2].log())


def test_bfloat16_logits_give_float32_log_probs():
    logits = torch.zeros(1, 50, dtype=torch.bfloat16)
    log_probs = token_log_probs(logits, torch.tensor([4]))
    assert log_probs.dtype == torch.float32
    assert_close(log_probs, torch.tensor([-math.log(50)]))


def test_label_padding_of_minus_100_is_refused():
    with pytest.raises((RuntimeError, IndexError)):
        token_log_probs(torch.zeros(1, 5), torch.tensor([-100]))


def test_gradient_of_a_log_prob_is_one_hot_minus_softmax():
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    token_log_probs(logits, torch.tensor([0])).sum().backward()
    assert_close(logits.grad, torch.tensor([[0.75, -0.75]]))


def test_h13_entropy_of_a_uniform_policy_over_50_tokens():
    assert_close(entropy(torch.full((2, 50), 7.0)), torch.full((2,), 3.912023), atol=1e-5, rtol=0)


def test_entropy_of_a_certain_token_is_zero_with_finite_gradient():
    logits = torch.tensor([[1.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]], requires_grad=True)
    result = entropy(logits)
    assert_close(result, torch.tensor([0.0, math.log(2)]))
    result.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_gradients_agree_with_finite_differences():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, torch.tensor([0, 4, 2])), logits)
    assert torch.autograd.gradcheck(entropy, logits)


def test_the_mean_language_loss_is_a_mean_over_each_documents_predicted_tokens():
    # document 0: (1 + 3) / 2; document 1: 6 / 1; document 2 predicts nothing
    loss = mean_language_loss(torch.tensor([-1.0, -6.0, -3.0]), torch.tensor([0, 1, 0]), torch.tensor([2, 1, 1]))
    assert_close(loss, torch.tensor([2.0, 6.0, 0.0]))

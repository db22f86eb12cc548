"""Hand-worked numbers of losses/language.py."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import (
    TokenLoss,
    entropy,
    language,
    mean_language_loss,
    smoothed_token_loss,
    token_log_probs,
    token_log_probs_and_entropy,
)
from alignment.losses.language import kl_divergence


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


def test_gradient_of_a_log_prob_is_one_hot_minus_softmax():
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    token_log_probs(logits, torch.tensor([0])).sum().backward()
    assert_close(logits.grad, torch.tensor([[0.75, -0.75]]))


def test_entropy_of_a_certain_token_is_zero_with_finite_gradient():
    logits = torch.tensor([[1.0, -torch.inf, -torch.inf], [0.0, 0.0, -torch.inf]], requires_grad=True)
    result = entropy(logits)
    assert_close(result, torch.tensor([0.0, math.log(2)]))
    result.sum().backward()
    assert torch.isfinite(logits.grad).all()


def test_the_divergence_is_of_the_whole_distribution():
    """p = 0.5 0.4 0.1, q = 0.52 0.42 0.06: 0.5 log 0.5/0.52 + 0.4 log 0.4/0.42 + 0.1 log 0.1/0.06 = 0.011956.

    Tokens drawn with top_p 0.9 are the first two, 5/9 and 4/9: the mean of log p - log q over them is -0.043474.
    """
    p, q = torch.tensor([0.5, 0.4, 0.1]).log(), torch.tensor([0.52, 0.42, 0.06]).log()
    assert kl_divergence(p + 2.0, q - 1.0).item() == pytest.approx(0.011956, abs=1e-6)
    assert ((p - q)[:2] * torch.tensor([5 / 9, 4 / 9])).sum().item() == pytest.approx(-0.043474, abs=1e-6)
    ruled_out = torch.tensor([0.0, -torch.inf])
    assert kl_divergence(ruled_out, ruled_out).item() == 0
    assert kl_divergence(ruled_out, torch.zeros(2)).item() == pytest.approx(math.log(2))


def test_gradients_agree_with_finite_differences():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: token_log_probs(x, torch.tensor([0, 4, 2])), logits)
    assert torch.autograd.gradcheck(entropy, logits)


def fused(logits, tokens):
    """As `chunked_token_log_probs` computes them."""
    return language._TokenLogProbsAndEntropy.apply(logits, tokens)


ALONE = {token_log_probs_and_entropy: token_log_probs, fused: lambda *inputs: language._TokenLogProbs.apply(*inputs)}


@pytest.mark.parametrize("both", [token_log_probs_and_entropy, fused])
def test_an_entropy_that_is_not_used_changes_no_bit(both):
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(2))
    tokens = torch.tensor([0, 49, 7, 7])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    (log_probs, entropies), expected = both(ours, tokens), ALONE[both](theirs, tokens)
    assert torch.equal(log_probs, expected) and torch.equal(entropies, entropy(theirs))
    log_probs.sum().backward()
    expected.sum().backward()
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize("both", [token_log_probs_and_entropy, fused])
def test_the_gradient_of_the_entropy_is_worked_by_hand(both):
    # p = (1/4, 3/4): H = ln 4 - 3/4 ln 3 = 0.562335; -p (ln p + H) = (1/4 (ln 4 - H), -(3/4) (ln(3/4) + H))
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    both(logits, torch.tensor([0]))[1].sum().backward()
    assert_close(logits.grad, torch.tensor([[0.205990, -0.205990]]), atol=1e-6, rtol=0)
    mixed = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: both(x, torch.tensor([0, 4, 2])), mixed)
    ruled_out = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    both(ruled_out, torch.tensor([0]))[1].sum().backward()
    assert torch.isfinite(ruled_out.grad).all()


def test_the_entropy_of_chunks_has_the_gradient_of_the_whole(monkeypatch):
    torch.manual_seed(0)
    head, tokens, hidden = torch.nn.Linear(4, 9, bias=False), torch.randint(9, (10,)), torch.randn(10, 4)
    expected = hidden.clone().requires_grad_()
    (entropy(head(expected) / 0.7) * torch.arange(10.0)).sum().backward()
    for chunk, kept in ((2**20, 2**20), (27, 2**20), (27, 0)):
        monkeypatch.setattr(language, "CHUNK_ELEMENTS", {"cpu": chunk})
        monkeypatch.setattr(language, "KEPT_ELEMENTS", {"cpu": kept})
        states = hidden.clone().requires_grad_()
        found = language.chunked_token_log_probs(head, states, tokens, temperature=0.7, entropy=True)
        (found.entropy * torch.arange(10.0)).sum().backward()
        assert_close(states.grad, expected.grad, atol=1e-5, rtol=1e-5)


def relative(rounded, exact):
    """Norm of the difference over the norm."""
    return ((rounded.float() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("trains", [True, False], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("known", [None, 290])
@pytest.mark.parametrize(("chunk", "kept"), [(2**20, 2**20), (3000, 2**20), (3000, 4000)])
def test_bfloat16_on_a_cpu_keeps_float32_logits(monkeypatch, trains, known, chunk, kept):
    """Values are float32's to its last bits; gradients are of bfloat16 products, whose entries have errors below 2^-8."""
    monkeypatch.setattr(language, "CHUNK_ELEMENTS", {"cpu": chunk})
    monkeypatch.setattr(language, "KEPT_ELEMENTS", {"cpu": kept})
    torch.manual_seed(0)
    head, tokens = torch.nn.Linear(48, 300, bias=False).requires_grad_(trains), torch.randint(290, (37,))
    hidden, weights = 5 * torch.randn(37, 48), torch.randn(2, 37)

    def outputs(precision, of_log_probs, of_entropy):
        states, head.weight.grad = hidden.clone().requires_grad_(), None
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = language.chunked_token_log_probs(head, states, tokens, temperature=0.7, entropy=True, known=known)
        (of_log_probs * weights[0] @ found.log_probs + of_entropy * weights[1] @ found.entropy).backward()
        gradients = [states.grad, head.weight.grad] if trains else [states.grad]
        return [found.log_probs.detach(), found.entropy.detach()], gradients

    for used in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)):
        (values, gradients), (exact, exact_gradients) = outputs("bf16", *used), outputs("fp32", *used)
        assert_close(values, exact, atol=1e-5, rtol=1e-5)
        assert all(relative(*pair) < 2**-8 for pair in zip(gradients, exact_gradients, strict=True))


def test_the_mean_language_loss_is_over_each_documents_tokens():
    # document 0: (1 + 3) / 2; document 1: 6 / 1; document 2 predicts nothing
    loss = mean_language_loss(torch.tensor([-1.0, -6.0, -3.0]), torch.tensor([0, 1, 0]), torch.tensor([2, 1, 1]))
    assert_close(loss, torch.tensor([2.0, 6.0, 0.0]))


def test_label_smoothing_and_z_loss_are_worked_by_hand():
    # logits (0, ln 3): Z = 4, p = (1/4, 3/4); target 1; eps = 0.2: 0.8 * ln(4/3) + 0.1 * (ln 4 + ln(4/3)) = 0.397551
    logits, target = torch.tensor([[0.0, math.log(3)]]), torch.tensor([1])
    smoothed = 0.9 * math.log(4 / 3) + 0.1 * math.log(4)
    assert_close(smoothed_token_loss(logits, target, TokenLoss(0.2, 0.0)), torch.tensor([smoothed]))
    # z-loss at 0.01: ln(4/3) + 0.01 * (ln 4)^2 = 0.287682 + 0.019218
    assert_close(smoothed_token_loss(logits, target, TokenLoss(0.0, 0.01)), torch.tensor([0.306900]))
    both = smoothed + 1e-4 * math.log(4) ** 2
    assert_close(smoothed_token_loss(logits, target, TokenLoss(0.2, 1e-4)), torch.tensor([both]))


@pytest.mark.parametrize("eps", [0.0, 0.1, 0.9])
def test_label_smoothing_is_that_of_torch_in_value_and_gradient(eps):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, 11, generator=generator)
    tokens, weights = torch.randint(11, (6,), generator=generator), torch.rand(6, generator=generator)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = smoothed_token_loss(ours, tokens, TokenLoss(eps, 0.0))
    expected = torch.nn.functional.cross_entropy(theirs, tokens, label_smoothing=eps, reduction="none")
    assert_close(loss, expected, atol=1e-6, rtol=1e-6)
    (loss * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_the_regularized_loss_agrees_with_finite_differences():
    logits = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    tokens = torch.tensor([0, 4, 2])
    for loss in (TokenLoss(0.1, 0.0), TokenLoss(0.0, 0.5), TokenLoss(0.3, 0.2)):
        assert torch.autograd.gradcheck(lambda x, loss=loss: smoothed_token_loss(x, tokens, loss), logits)


@pytest.mark.parametrize("kept", [2**26, 0], ids=["kept", "computed twice"])
@pytest.mark.parametrize("loss", [None, TokenLoss(0.1, 1e-2)], ids=["plain", "regularized"])
def test_chunks_change_no_log_probability_no_loss_and_no_gradient(monkeypatch, loss, kept):
    torch.manual_seed(0)
    head, tokens = torch.nn.Linear(4, 9, bias=False), torch.randint(9, (10,))
    hidden = torch.randn(10, 4)

    def outputs(elements):
        monkeypatch.setattr(language, "CHUNK_ELEMENTS", {"cpu": elements})
        monkeypatch.setattr(language, "KEPT_ELEMENTS", {"cpu": kept})
        states = hidden.clone().requires_grad_()
        found = language.chunked_token_log_probs(head, states, tokens, entropy=True, loss=loss)
        total = found.log_probs.sum() if found.losses is None else (found.losses + 0.5 * found.log_probs).sum()
        total.backward()
        return found, states.grad

    (whole, whole_gradient), (cut, gradient) = outputs(2**20), outputs(27)
    for one, other in zip(whole, cut, strict=True):
        if one is not None and other is not None:
            assert_close(one, other, atol=1e-6, rtol=0)
    assert_close(gradient, whole_gradient, atol=1e-6, rtol=0)
    assert (whole.losses is None) == (loss is None)
    if loss is not None:
        assert_close(whole.losses, smoothed_token_loss(head(hidden), tokens, loss))
        assert_close(whole.log_probs, token_log_probs(head(hidden), tokens))

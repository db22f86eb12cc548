"""Hand-worked numbers of distillation's losses, in losses/language.py."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from alignment.losses import (
    chunked_token_log_probs,
    distillation_loss,
    hidden_cosine_loss,
    language,
    reverse_kl,
    token_log_probs,
)
from alignment.losses.language import TeacherLoss


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


def test_gradient_is_temperature_times_the_softened_difference():
    student = logits(0.5, 0.5).requires_grad_()
    distillation_loss(student, logits(0.9, 0.1), temperature=2.0).sum().backward()
    assert_close(student.grad, 2.0 * torch.tensor([[0.5 - 0.75, 0.5 - 0.25]]))


def test_a_token_the_teacher_rules_out_counts_nothing():
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


# The reverse KL of student from teacher

STUDENT, TEACHER = logits(1 / 2, 1 / 4, 1 / 4), logits(1 / 4, 1 / 2, 1 / 4)


def drawn(*shape, seed=0, dtype=torch.float32):
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def test_reverse_kl_is_worked_by_hand():
    # 1/2 log 2 + 1/4 log 1/2 + 1/4 log 1 = 1/4 log 2 = 0.173287; a shift of the logits changes nothing
    assert_close(reverse_kl(STUDENT + 3, TEACHER - 2), torch.tensor([math.log(2) / 4]), atol=1e-6, rtol=0)
    # the likeliest token against all others: (1/2, 1/2) and (1/4, 3/4): 1/2 log 2 + 1/2 log 2/3 = 1/2 log 4/3
    found = reverse_kl(STUDENT + 3, TEACHER - 2, likeliest=1)
    assert_close(found, torch.tensor([math.log(4 / 3) / 2]), atol=1e-6, rtol=0)


def test_the_gradient_of_the_reverse_kl_is_worked_by_hand():
    # p(v) (log p(v) - log q(v) - kl): 1/2 (1 - 1/4), 1/4 (-1 - 1/4), 1/4 (0 - 1/4) times log 2
    student = STUDENT.clone().requires_grad_()
    reverse_kl(student, TEACHER).sum().backward()
    assert_close(student.grad, math.log(2) * torch.tensor([[3 / 8, -5 / 16, -1 / 16]]))


@pytest.mark.parametrize("likeliest", [None, 2, 7])
def test_the_reverse_kl_is_torch_s_and_its_gradient_that_of_the_formula(likeliest):
    student, teacher = drawn(5, 7, dtype=torch.float64).requires_grad_(), drawn(5, 7, seed=1, dtype=torch.float64)
    p, q = student.softmax(-1), teacher.softmax(-1)
    if likeliest == 2:
        index = p.topk(2).indices
        p, q = (torch.cat([x.gather(1, index), 1 - x.gather(1, index).sum(1, keepdim=True)], 1) for x in (p, q))
    plain = (p * (p / q).log()).sum(1)
    found = reverse_kl(student, teacher, likeliest=likeliest)
    assert_close(found, plain)
    assert_close(found, F.kl_div(q.log(), p, reduction="none").sum(1))
    weights = torch.arange(1.0, 6.0, dtype=torch.float64)
    [wanted] = torch.autograd.grad((weights * plain).sum(), student)
    assert_close(torch.autograd.grad((weights * found).sum(), student)[0], wanted)
    assert torch.autograd.gradcheck(lambda x: reverse_kl(x, teacher, likeliest=likeliest), student)


@pytest.mark.parametrize("likeliest", [None, 1, 3])
def test_a_student_that_equals_its_teacher_has_no_cost_and_no_gradient(likeliest):
    student, teacher = drawn(4, 9).requires_grad_(), drawn(4, 9)
    cost = reverse_kl(student, teacher, likeliest=likeliest)
    cost.sum().backward()
    assert_close(cost, torch.zeros(4), atol=1e-7, rtol=0)
    assert_close(student.grad, torch.zeros(4, 9), atol=2e-7, rtol=0)  # AVX2 leaves 1.01e-7


def test_fewer_tokens_tell_less_apart_and_all_tokens_everything():
    student, teacher = drawn(50, 9), drawn(50, 9, seed=1)
    costs = torch.stack([reverse_kl(student, teacher, likeliest=k) for k in range(1, 10)])
    assert (costs.diff(dim=0) > -1e-6).all() and (costs >= 0).all()
    assert_close(costs[-1], reverse_kl(student, teacher), rtol=0, atol=0)
    assert_close(costs[-2], costs[-1])  # eight tokens and the ninth are all nine


@pytest.mark.parametrize("likeliest", [None, 1, 2])
def test_tokens_that_are_ruled_out_spoil_no_gradient(likeliest):
    student = torch.tensor([[0.0, -torch.inf, -torch.inf], [1.0, 0.0, -torch.inf]], requires_grad=True)
    cost = reverse_kl(student, torch.tensor([[0.0, 0.0, -torch.inf]]).expand(2, 3), likeliest=likeliest)
    cost.sum().backward()
    assert cost[0].item() == pytest.approx(math.log(2)) and torch.isfinite(cost).all()
    assert student.grad is not None and torch.isfinite(student.grad).all()


def test_of_a_sure_student_the_rest_keeps_its_digits():
    """The others have e^-20 of p and e^-10 of q: 1 - p(first) would be 0 in float32, and its gradient too."""
    student = torch.tensor([[20.0, 0.0, -40.0]], requires_grad=True)
    whole = reverse_kl(student.detach().double(), torch.tensor([[10.0, 0.0, -40.0]]).double(), likeliest=1)
    found = reverse_kl(student, torch.tensor([[10.0, 0.0, -40.0]]), likeliest=1)
    assert_close(found.double(), whole, rtol=1e-3, atol=0)
    found.sum().backward()
    assert student.grad is not None and student.grad[0, 1] < 0


@pytest.mark.parametrize("kept", [0, 2**20])
@pytest.mark.parametrize("likeliest", [None, 2])
def test_the_loss_from_a_teacher_does_not_depend_on_the_chunks(monkeypatch, kept, likeliest):
    head, of_teacher = torch.nn.Linear(4, 7), torch.nn.Linear(6, 7)
    hidden, states, tokens = drawn(10, 4).requires_grad_(), drawn(10, 6, seed=1), torch.arange(10) % 7
    whole = reverse_kl(head(hidden) / 0.8, of_teacher(states) / 0.8, likeliest=likeliest)
    weights = torch.arange(1.0, 11.0)
    wanted = torch.autograd.grad((weights * whole).sum(), [hidden, head.weight, head.bias])
    loss = TeacherLoss(of_teacher, states, likeliest)
    for rows in (100, 3):  # in one piece, and in four
        monkeypatch.setitem(language.CHUNK_ELEMENTS, "cpu", rows * 7)
        monkeypatch.setitem(language.KEPT_ELEMENTS, "cpu", kept)
        found = chunked_token_log_probs(head, hidden, tokens, temperature=0.8, loss=loss)
        assert found.losses is not None and not found.log_probs.requires_grad
        assert_close(found.losses, whole)
        assert_close(found.log_probs, token_log_probs(head(hidden).detach() / 0.8, tokens))
        gradients = torch.autograd.grad((weights * found.losses).sum(), [hidden, head.weight, head.bias])
        assert_close(gradients, wanted)
        assert of_teacher.weight.grad is None

"""Hand-worked numbers of Bradley-Terry, of DPO and of every loss of its family, and what each paper says of it."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from alignment.losses import (
    aot_paired_loss,
    aot_unpaired_loss,
    apo_down_loss,
    apo_zero_loss,
    bco_loss,
    bradley_terry_loss,
    cpo_loss,
    discopop_loss,
    dpo_loss,
    exo_loss,
    f_divergence_scores,
    hinge_loss,
    ipo_loss,
    kto_loss,
    nca_loss,
    odpo_loss,
    orpo_loss,
    rdpo_loss,
    robust_loss,
    simpo_loss,
    sppo_loss,
)
from alignment.losses.preference import BatchOrder, log_one_minus_exp, rank_matches
from alignment.losses.preference_table import LOSSES

PAIR = torch.tensor([1.5]), torch.tensor([-1.25])  # log-ratios -23.5 + 25 and -30.25 + 29; their margin is 2.75
SAME = torch.zeros(1), torch.zeros(1)


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def test_h26_bradley_terry_loss_of_four_margins():
    margins = torch.tensor([0.7, -0.3, 0.0, 3.1])
    cost = bradley_terry_loss(margins, torch.zeros(4))
    assert cost.shape == (4,)
    assert_close(cost.mean(), torch.tensor(0.498688), atol=1e-6, rtol=0)
    assert_close(bradley_terry_loss(margins + 10, torch.full((4,), 10.0)), cost)  # it sees only the difference


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


def test_h39_dpo_loss_worked_by_hand():
    # 0.2 * (1.5 + 1.25) = 0.55; softplus(-0.55) = 0.455492
    assert_close(dpo_loss(*PAIR, beta=0.2), torch.tensor([0.455492]), atol=1e-6, rtol=0)
    assert_close(dpo_loss(*PAIR, beta=0.2, label_smoothing=0.15), torch.tensor([0.537992]), atol=1e-6, rtol=0)
    # 0.5 * ((-8 + 7) - (-6.5 + 7)) = -0.75
    second = torch.tensor([-1.0]), torch.tensor([0.5])
    assert_close(dpo_loss(*second, beta=0.5), torch.tensor([1.136871]), atol=1e-6, rtol=0)
    assert_close(dpo_loss(*SAME, beta=0.1), torch.tensor([math.log(2)]))  # i7


def test_dpo_gradient_is_beta_times_the_doubt():
    # d cost / d chosen = -beta * sigmoid(-margin); the rejected side has the opposite sign
    chosen, rejected = (value.clone().requires_grad_() for value in PAIR)
    dpo_loss(chosen, rejected, beta=0.2).sum().backward()
    assert_close(chosen.grad, torch.tensor([-0.2 / (1 + math.exp(0.55))]))
    assert_close(rejected.grad, -chosen.grad)


def f_dpo(chosen, rejected, *, beta, **settings):
    return dpo_loss(*(f_divergence_scores(side, **settings) for side in (chosen, rejected)), beta=beta)


WORKED = [  # loss, what it takes more, cost of PAIR by hand at beta 0.2, cost where policy and reference are equal
    # (2.75 - 1 / 0.4)^2 = 0.25^2; (0 - 2.5)^2
    (ipo_loss, {}, 0.0625, 6.25),
    # 1 - 0.2 * 2.75; 1
    (hinge_loss, {}, 0.45, 1.0),
    # (0.9 * softplus(-0.55) - 0.1 * softplus(0.55)) / 0.8 = (0.9 * 0.455492 - 0.1 * 1.005492) / 0.8
    (robust_loss, {"label_smoothing": 0.1}, 0.386742, math.log(2)),
    # q = sigmoid(0.55) = 0.634136; 0.634136 * log(0.634136 / 0.9) + 0.365864 * log(0.365864 / 0.1)
    (exo_loss, {"label_smoothing": 0.1}, 0.252528, 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)),
    # rewards 0.3 and -0.25: softplus(-0.3) + (softplus(0.3) + softplus(-0.25)) / 2 = 0.554355 + (0.854355 + 0.575939) / 2
    (nca_loss, {}, 1.269502, 2 * math.log(2)),
    # softplus(-0.3) + softplus(-0.25)
    (bco_loss, {}, 1.130294, 2 * math.log(2)),
    # against a shift of 0.1: softplus(-0.2) + softplus(-0.35) = 0.598139 + 0.533382
    (bco_loss, {"shift": 0.1}, 1.131521, softplus(0.1) + softplus(-0.1)),
    # (1.5 - 2.5)^2 + (-1.25 + 2.5)^2 = 1 + 1.5625
    (sppo_loss, {}, 2.5625, 12.5),
    # sigmoid(-0.3) + sigmoid(-0.25) = 0.425557 + 0.437823
    (apo_zero_loss, {}, 0.863380, 1.0),
    # sigmoid(0.3) + sigmoid(-0.55) = 0.574443 + 0.365864
    (apo_down_loss, {}, 0.940307, 1.0),
    # s = sigmoid(0.55 / 0.5) = 0.750260; 0.249740 * 0.455492 + 0.750260 * exp(-0.55)
    (discopop_loss, {"tau": 0.5}, 0.546617, 0.5 * math.log(2) + 0.5),
    # an offset of log(e) = 1: softplus(1 - 0.55)
    (odpo_loss, {"margins": torch.tensor([math.e])}, 0.943248, softplus(1.0)),
    (odpo_loss, {"margins": torch.tensor([0.25]), "offset_scale": "linear"}, softplus(-0.3), softplus(0.25)),
    # the chosen response is 5 tokens longer: softplus(-(0.55 + 0.02 * 5))
    (rdpo_loss, {"length_difference": torch.tensor([5.0]), "length_penalty": 0.02}, 0.420055, softplus(-0.1)),
    # without a reference the log-probabilities take the place of log-ratios: 0.9 * softplus(-0.55) + 0.1 * softplus(0.55)
    (cpo_loss, {"label_smoothing": 0.1}, 0.510492, math.log(2)),
    # softplus(0.5 - 0.55)
    (simpo_loss, {"gamma": 0.5}, 0.668460, softplus(0.5)),
    # f' = 1 - 1/u: 1 - e^-1.5 - (1 - e^1.25) = 0.776870 + 2.490343; softplus(-0.2 * 3.267213)
    (f_dpo, {"divergence": "forward_kl"}, 0.418876, math.log(2)),
    # f' = log(2u / (1 + u)): -softplus(-1.5) + softplus(1.25) = -0.201413 + 1.501929
    (f_dpo, {"divergence": "js"}, 0.571528, math.log(2)),
    # f' = (1 - u^-0.5) / 0.5: 2 (e^0.625 - e^-0.75) = 2 (1.868246 - 0.472367)
    (f_dpo, {"divergence": "alpha", "alpha": 0.5}, 0.452443, math.log(2)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("loss", "settings", "cost", "at_start"), WORKED, ids=lambda value: getattr(value, "__name__", "")
)
def test_each_loss_is_worked_by_hand(loss, settings, cost, at_start):
    assert_close(loss(*PAIR, beta=0.2, **settings), torch.tensor([cost]), atol=2e-6, rtol=0)
    assert_close(loss(*SAME, beta=0.2, **settings), torch.tensor([at_start]), atol=2e-6, rtol=0)


def test_special_cases_are_the_plain_loss():
    plain = dpo_loss(*PAIR, beta=0.2)
    assert_close(robust_loss(*PAIR, beta=0.2, label_smoothing=0.0), plain)
    assert_close(f_dpo(*PAIR, beta=0.2, divergence="reverse_kl"), plain)
    assert_close(odpo_loss(*PAIR, torch.tensor([1.0]), beta=0.2), plain)  # log 1
    assert_close(rdpo_loss(*PAIR, torch.tensor([7.0]), beta=0.2, length_penalty=0.0), plain)
    assert_close(aot_unpaired_loss(*PAIR, beta=0.2), plain)  # one pair is its own order
    assert_close(f_dpo(*PAIR, beta=0.2, divergence="alpha", alpha=1e-4), plain, atol=1e-4, rtol=0)
    forward = f_dpo(*PAIR, beta=0.2, divergence="forward_kl")
    assert_close(f_dpo(*PAIR, beta=0.2, divergence="alpha", alpha=1.0), forward)


def test_the_robust_cost_is_on_average_that_of_the_true_labels():
    right = robust_loss(*PAIR, beta=0.2, label_smoothing=0.3)
    flipped = robust_loss(*PAIR[::-1], beta=0.2, label_smoothing=0.3)
    assert_close(0.7 * right + 0.3 * flipped, dpo_loss(*PAIR, beta=0.2))


def test_exo_costs_nothing_where_the_policy_has_the_labels_distribution():
    # beta * margin = log(0.9 / 0.1)
    zero = torch.zeros(1)
    assert_close(exo_loss(torch.tensor([math.log(9.0)]), zero, beta=1.0, label_smoothing=0.1), zero)


@pytest.mark.parametrize("divergence", ["forward_kl", "js", "alpha"])
def test_f_divergence_scores_grow_with_the_ratio_and_stay_finite(divergence):
    ratios = torch.tensor([-500.0, -3.0, 0.0, 3.0, 500.0], requires_grad=True)
    scores = f_divergence_scores(ratios, divergence)
    assert (scores.diff() >= 0).all() and torch.isfinite(scores).all() and scores[2].abs() < 1e-6
    (slopes,) = torch.autograd.grad(scores.sum(), ratios)
    assert torch.isfinite(slopes).all()
    assert_close(slopes[2], torch.tensor({"js": 0.5}.get(divergence, 1.0)))


def test_orpo_is_worked_by_hand():
    # p = 0.5 and 0.2: odds 1 and 0.25, their ratio 4: -log(4 / 5)
    cost = orpo_loss(torch.tensor([0.5]).log(), torch.tensor([0.2]).log())
    assert_close(cost, torch.tensor([0.223144]), atol=1e-6, rtol=0)


def test_orpo_is_finite_at_both_ends_of_probability():
    means = torch.tensor([-1e-7, -100.0, -0.6931471], requires_grad=True)
    cost = orpo_loss(means, torch.full((3,), -1.0))
    (slopes,) = torch.autograd.grad(cost.sum(), means)
    assert torch.isfinite(cost).all() and torch.isfinite(slopes).all()
    exact = torch.tensor([math.log(-math.expm1(-1e-7)), math.log1p(-math.exp(-100.0)), math.log1p(-0.5)])
    assert_close(log_one_minus_exp(means.detach()), exact, atol=1e-5, rtol=0)


def test_orpo_of_a_certain_response_is_finite():
    # A template's one-token answer can have p = 1 in float32, so that log p is 0 and the odds have no bound.
    means = torch.tensor([0.0, -1.0], requires_grad=True), torch.tensor([-1.0, 0.0], requires_grad=True)
    cost = orpo_loss(*means)
    assert torch.isfinite(cost).all() and cost[0] < 1e-6 < 80 < cost[1]
    assert all(torch.isfinite(slopes).all() for slopes in torch.autograd.grad(cost.sum(), means))


def test_kto_is_worked_by_hand():
    # gains 0.2 * (1.5 - 0.5) = 0.2 and -(0.2 * (-1.25 - 0.5)) = 0.35; 1 - sigmoid of each, the second one weighted
    policy, reference = torch.tensor([-23.5, -30.25]), torch.tensor([-25.0, -29.0])
    desirable = torch.tensor([True, False])
    cost = kto_loss(policy, reference, desirable, torch.tensor(0.5), beta=0.2, undesirable_weight=1.5)
    assert_close(cost, torch.tensor([0.450166, 1.5 * 0.413382]), atol=1e-6, rtol=0)
    start = kto_loss(policy, policy, desirable, 0.0, beta=0.2, desirable_weight=1.2)
    assert_close(start, torch.tensor([0.6, 0.5]))
    halves = kto_loss(policy, reference, desirable, 0.0, beta=0.2)
    assert_close(halves.sum(), apo_zero_loss(*PAIR, beta=0.2)[0])


# AOT

QUANTILES = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([0.5, 2.5, 1.5])  # sorted 1, 2, 3 and 0.5, 1.5, 2.5


@pytest.mark.parametrize("loss", [aot_paired_loss, aot_unpaired_loss])
def test_aot_pairs_the_quantiles(loss):
    assert_close(loss(*QUANTILES, beta=1.0), torch.full((3,), softplus(-0.5)))  # every lead is 0.5
    others, shares = rank_matches(torch.arange(3), *QUANTILES)
    assert others.tolist() == [[2.5, 0.5, 1.5]] and shares.tolist() == [[1.0, 1.0, 1.0]]


def columns(count: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(count, generator=generator).requires_grad_() for _ in range(2)]


def sorted_form(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return F.softplus(-0.7 * (first.sort().values - second.sort().values)).sum()


def test_aot_of_equal_values_is_that_of_the_sorted_form():
    # A row that is in the batch twice: policy margins 1, 1, 2 and reference margins 5, 5, 0.1 -> leads 0.9, -4, -3
    policy, reference = torch.tensor([1.0, 1.0, 2.0]), torch.tensor([5.0, 5.0, 0.1])
    whole = aot_paired_loss(policy, reference, beta=1.0)
    assert_close(whole, torch.tensor([(softplus(-0.9) + softplus(4.0)) / 2] * 2 + [softplus(3.0)]))
    parts = [
        aot_paired_loss(policy[i:][:1], reference[i:][:1], beta=1.0, order=BatchOrder(policy, reference, place))
        for i, place in enumerate(torch.arange(3).split(1))
    ]
    assert_close(torch.cat(parts), whole)
    twice = [column.detach()[[0, 1, 1, 2, 2, 2, 3, 4]].requires_grad_() for column in columns(5, seed=3)]
    ours, direct = aot_unpaired_loss(*twice, beta=0.7).sum(), sorted_form(*twice)
    assert_close(ours, direct)
    for one, other in zip(*(torch.autograd.grad(total, twice) for total in (ours, direct)), strict=True):
        assert_close(one.sum(), other.sum())
        assert_close(one[1], one[2])  # what is equal is moved alike


@pytest.mark.parametrize("loss", [aot_paired_loss, aot_unpaired_loss])
def test_aot_of_a_batch_in_parts_is_that_of_the_whole(loss):
    values = columns(12, seed=1)
    trained = values[: 1 if loss is aot_paired_loss else 2]  # the reference's margins have no gradient
    whole = loss(*values, beta=0.7, label_smoothing=0.1)
    grads = torch.autograd.grad(whole.sum(), trained)
    detached = [column.detach() for column in values]
    parts = [
        loss(*piece, beta=0.7, label_smoothing=0.1, order=BatchOrder(*detached, positions))
        for *piece, positions in zip(*(x.split(5) for x in (*values, torch.arange(12))), strict=True)
    ]
    assert_close(torch.cat(parts), whole)
    for part, wanted in zip(torch.autograd.grad(torch.cat(parts).sum(), trained), grads, strict=True):
        assert_close(part, wanted)


def test_aot_unpaired_has_the_gradient_of_the_sorted_form():
    values = columns(9, seed=2)
    ours, direct = aot_unpaired_loss(*values, beta=0.7).sum(), sorted_form(*values)
    assert_close(ours, direct)
    for one, other in zip(*(torch.autograd.grad(total, values) for total in (ours, direct)), strict=True):
        assert_close(one, other)


# All of the table


def cost_of(name: str, *values: torch.Tensor, **settings: float) -> torch.Tensor:
    """The sum of a loss's costs of log-ratios (without a reference of log-probabilities), with its defaults."""
    spec = LOSSES[name]
    rows = len(values[0])
    extra = {
        "margins": [torch.tensor([0.5, 1.0, 2.0][-rows:])], "length_difference": [torch.tensor([3.0, 0.0, -2.0][:rows])],
    }.get(spec.needs or "", [])  # fmt: skip
    if spec.rows == "labels":
        extra = [torch.zeros(rows), torch.tensor([True, False, True]), 0.1]
    elif spec.rows == "rankings":
        extra = [torch.tensor([1, 0, 2])]
    parameters = {} if name == "orpo" else {**spec.defaults, **settings}  # beta is the weight of orpo's term
    return spec.function(*values, *extra, **parameters).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_agree_with_finite_differences(name):
    generator = torch.Generator().manual_seed(0)
    count = 2 if LOSSES[name].rows == "comparisons" and name != "aot" else 1
    values = [(-torch.rand(3, dtype=torch.float64, generator=generator) - 0.2).requires_grad_() for _ in range(count)]
    fixed = [torch.rand(3, dtype=torch.float64, generator=generator)] if name == "aot" else []
    settings = {"beta": 0.3} if name == "hinge" else {}  # away from the kink
    assert torch.autograd.gradcheck(lambda *x: cost_of(name, *x, *fixed, **settings), values)


def test_discopop_prefers_the_rejected_response_between_two_log_ratios():
    """Section 5 of its paper: at beta = tau = 0.05 the slope is 0 at margins of -2.3714 and 1.44012 nats, and rises between."""
    margins = torch.tensor([-5.0, -2.3714, 0.0, 1.44012, 5.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(5, dtype=torch.float64)
    (slopes,) = torch.autograd.grad(discopop_loss(margins, zero, beta=0.05, tau=0.05).sum(), margins)
    assert slopes[[0, 4]].max() < -1e-3 and slopes[2] > 1e-3
    assert_close(slopes[[1, 3]], torch.zeros(2, dtype=torch.float64), atol=1e-5, rtol=0)

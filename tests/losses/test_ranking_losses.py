"""Losses over ranked responses: worked numbers, limits, and a batch of groups against one group at a time."""

import math
from functools import partial
from itertools import permutations

import pytest
import torch
from torch.testing import assert_close

from alignment.losses import (
    bradley_terry_loss,
    center_penalty,
    dpo_loss,
    plackett_luce_loss,
    ranked_dpo_loss,
    ranking_loss,
    rao_kupper_loss,
    step_loss,
)
from alignment.losses.ranking import center_scores_penalty, ordered_pair_metrics, step_metrics

SCORES = torch.tensor([2.0, 1.0, 0.0])


def test_three_responses_cost_the_mean_of_their_three_pairs():
    """Leads 1, 1, 2: (0.313262 + 0.313262 + 0.126928) / 3 = 0.251151."""
    loss = ranking_loss(SCORES, torch.tensor([0, 1, 2]))
    assert loss.shape == () and loss.item() == pytest.approx(0.251151, abs=1e-6)


def test_equal_ranks_form_no_pair():
    """Only 2 over 1 and 2 over 0 are left: (0.313262 + 0.126928) / 2."""
    assert ranking_loss(SCORES, torch.tensor([0, 1, 1])).item() == pytest.approx(0.220095, abs=1e-6)
    assert ranking_loss(SCORES, torch.tensor([0, 0, 0])) == 0


def test_two_responses_are_the_bradley_terry_loss_with_its_margin():
    pairs, ranks = torch.randn(6, 2), torch.tensor([[0, 1]]).expand(6, 2)
    margin = torch.rand(6)
    assert_close(ranking_loss(pairs, ranks, margin=margin), bradley_terry_loss(*pairs.unbind(1), margin))
    assert_close(plackett_luce_loss(pairs, ranks), bradley_terry_loss(*pairs.unbind(1)))
    assert_close(rao_kupper_loss(pairs, ranks, theta=1 + 1e-7), bradley_terry_loss(*pairs.unbind(1)))
    assert_close(center_scores_penalty(pairs, pairs == pairs), center_penalty(*pairs.unbind(1)))


def test_a_ranking_has_the_probability_of_its_choices():
    """exp(2) / (e^2 + e + 1) * e / (e + 1) = 0.665241 * 0.731059; all six orders together are certain."""
    assert plackett_luce_loss(SCORES, torch.tensor([0, 1, 2])).item() == pytest.approx(
        -math.log(0.665241 * 0.731059), abs=1e-5
    )
    orders = torch.tensor(list(permutations(range(3))))
    assert plackett_luce_loss(SCORES.expand(6, 3), orders).neg().exp().sum().item() == pytest.approx(1.0, abs=1e-6)


def test_tied_responses_are_chosen_before_the_rest():
    """2 and 1 tie above 0: e^2 / (e^2 + 1) * e / (e + 1)."""
    loss = plackett_luce_loss(SCORES, torch.tensor([0, 0, 1]))
    assert loss.item() == pytest.approx(0.126928 + 0.313262, abs=1e-6)
    assert plackett_luce_loss(SCORES, torch.tensor([1, 1, 1])) == 0


def test_wins_ties_and_losses_cost_what_their_probabilities_say():
    """Scores 1 and 0, theta 2: e / (e + 2) = 0.576117, 1 / (2e + 1) = 0.155362, the tie has the rest."""
    scores = torch.tensor([[1.0, 0.0]]).expand(3, 2)
    costs = rao_kupper_loss(scores, torch.tensor([[0, 1], [1, 0], [0, 0]]), theta=2.0)
    assert_close(costs.neg().exp(), torch.tensor([0.576117, 0.155362, 1 - 0.576117 - 0.155362]), atol=1e-6, rtol=0)
    tie, first, second = (rao_kupper_loss(torch.tensor([a, b]), torch.tensor(r), theta=2.0)
                          for a, b, r in ((1.0, 0.0, [0, 0]), (1.0, -1.0, [0, 1]), (0.0, -1.0, [0, 1])))  # fmt: skip
    of_three = rao_kupper_loss(torch.tensor([1.0, 0.0, -1.0]), torch.tensor([0, 0, 1]), theta=2.0)
    assert_close(of_three, (tie + first + second) / 3)
    with pytest.raises(ValueError, match="theta must be above 1"):
        rao_kupper_loss(scores, torch.tensor([[0, 1]]).expand(3, 2), theta=1.0)


LOSSES = {
    "ranking": ranking_loss,
    "plackett_luce": plackett_luce_loss,
    "rao_kupper": partial(rao_kupper_loss, theta=1.7),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_padded_batch_of_groups_gives_the_numbers_of_each_group_alone(name):
    torch.manual_seed(0)
    sizes = (2, 5, 3, 4)
    groups = [(torch.randn(size, dtype=torch.float64), torch.randint(0, 3, (size,))) for size in sizes]
    mask = torch.tensor([[place < size for place in range(5)] for size in sizes])
    scores = torch.full((4, 5), 1e9, dtype=torch.float64).masked_scatter(mask, torch.cat([s for s, _ in groups]))
    scores.requires_grad_()
    ranks = torch.zeros(4, 5, dtype=torch.long).masked_scatter(mask, torch.cat([r for _, r in groups]))
    together = LOSSES[name](scores, ranks, mask=mask)
    alone = torch.stack([LOSSES[name](s, r) for s, r in groups])
    assert_close(together, alone)
    together.sum().backward()
    assert scores.grad is not None and scores.grad.isfinite().all() and (scores.grad[~mask] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_scores_that_fit_the_ranks_cost_less_and_a_shift_costs_nothing(name):
    ranks = torch.tensor([1, 0, 2, 1])
    good, bad = torch.tensor([1.0, 3.0, -2.0, 1.0]), torch.tensor([0.0, -3.0, 2.0, 1.0])
    assert LOSSES[name](good, ranks) < LOSSES[name](bad, ranks)
    assert_close(LOSSES[name](good + 7, ranks), LOSSES[name](good, ranks))


def test_metrics_count_ordered_pairs_and_the_best_of_each_prompt():
    """First prompt: pairs (a, b) right, (a, c) tied, (b, c) wrong, best is a tie of a and c. Second: one right pair."""
    scores = torch.tensor([[2.0, 1.0, 2.0], [0.5, 0.0, 9.0]])
    ranks, mask = torch.tensor([[0, 1, 2], [0, 1, 0]]), torch.tensor([[True, True, True], [True, True, False]])
    found = {
        name: (value.item(), number.item())
        for name, (value, number) in ordered_pair_metrics(scores, ranks, mask).items()
    }
    assert found == {"accuracy": (2.5, 4.0), "ties": (1.0, 4.0), "margin": (0.5, 4.0), "top1": (1.5, 2.0)}


def test_a_step_costs_its_cross_entropy():
    """Logit 2 on a right step costs 0.126928, on a wrong one 2.126928."""
    scores, labels = torch.tensor([2.0, 2.0, 0.0]), torch.tensor([True, False, True])
    assert_close(step_loss(scores, labels), torch.tensor([0.126928, 2.126928, math.log(2)]), atol=1e-6, rtol=0)
    sums = {name: value.item() for name, value in step_metrics(scores, labels).items()}
    assert sums == {"accuracy": 1.5, "ties": 1.0, "right": 2.0}


# DPO on rankings

POLICY = torch.tensor([-10.0, -12.0, -11.0])
REFERENCE = torch.tensor([-14.0, -14.0, -11.0])  # implicit rewards at beta 0.5: 2, 1, 0


def test_dpo_on_a_ranking_is_plackett_luce_of_implicit_rewards():
    """e^2 / (e^2 + e + 1) * e / (e + 1) = 0.665241 * 0.731059; without what lies between two networks 1 / 3!."""
    ranks = torch.tensor([0, 1, 2])
    loss = ranked_dpo_loss(POLICY - REFERENCE, ranks, beta=0.5)
    assert loss.item() == pytest.approx(-math.log(0.665241 * 0.731059), abs=1e-5)
    assert ranked_dpo_loss(torch.zeros(3), ranks, beta=0.5).item() == pytest.approx(math.log(6), abs=1e-6)
    shifted = ranked_dpo_loss(POLICY - REFERENCE - 7, ranks, beta=0.5)
    assert_close(shifted, loss)
    turned = ranked_dpo_loss(POLICY - REFERENCE, torch.tensor([2, 1, 0]), beta=0.5)
    assert turned.item() == pytest.approx(-math.log(0.090031 * 0.268941), abs=1e-4)


def test_the_gradient_of_dpo_on_a_ranking_is_what_the_choices_lack():
    """d / d log p of the best = -beta (1 - 0.665241); of the second beta (0.244728 - (1 - 0.731059)); of the worst the rest."""
    policy = POLICY.clone().requires_grad_(True)
    ranked_dpo_loss(policy - REFERENCE, torch.tensor([0, 1, 2]), beta=0.5).backward()
    wanted = torch.tensor([-0.334759, 0.244728 - 0.268941, 0.090031 + 0.268941]) / 2
    assert_close(policy.grad, wanted, atol=1e-5, rtol=0)


def test_dpo_on_two_responses_is_dpo_of_the_pair():
    log_ratios, ranks = torch.randn(5, 2), torch.tensor([[0, 1]]).expand(5, 2)
    pairs = dpo_loss(*log_ratios.unbind(1), beta=0.3)
    assert_close(ranked_dpo_loss(log_ratios, ranks, beta=0.3), pairs)
    padded = [torch.cat([each, each.new_zeros(5, 1)], 1) for each in (log_ratios, ranks)]
    mask = torch.tensor([[True, True, False]]).expand(5, 3)
    assert_close(ranked_dpo_loss(*padded, mask=mask, beta=0.3), pairs)

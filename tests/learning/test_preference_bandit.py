"""Every loss of pairs on a bandit of three actions: where its paper says that the policy goes."""

import math

import pytest
import torch

from alignment.losses.preference_table import LOSSES

PAIRS = [name for name, spec in LOSSES.items() if spec.rows == "comparisons" and name != "discopop"]


def trained(name: str, wins: float = 1.0, steps: int = 600, rate: float = 0.05, **settings: float) -> torch.Tensor:
    """Log-probabilities after training from a uniform policy; action 0 wins against action 1 with probability `wins`."""
    spec = LOSSES[name]
    logits = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.Adam([logits], rate)
    extra = {"margins": [torch.tensor([2.0])], "length_difference": [torch.zeros(1)]}.get(spec.needs, [])
    parameters = {} if name == "orpo" else spec.defaults  # beta is the weight of orpo's term
    for _ in range(steps):
        log_ratios = logits.log_softmax(0) + (math.log(3) if spec.reference else 0.0)  # to a uniform reference
        first, second = log_ratios[:1], log_ratios[1:2]
        costs = [
            spec.function(*sides, *extra, **{**parameters, **settings}).sum()
            for sides in ((first, second), (second, first))
        ]
        optimizer.zero_grad()
        (wins * costs[0] + (1 - wins) * costs[1]).backward()
        optimizer.step()
    return logits.detach().log_softmax(0)


@pytest.mark.parametrize("name", PAIRS)
def test_the_chosen_action_gains_on_the_rejected_one(name):
    log_probs = trained(name, steps=60)
    assert log_probs[0] - log_probs[1] > 0.5


def test_dpo_settles_at_the_log_odds_of_the_labels_over_beta():
    """beta * margin = log(0.8 / 0.2) where four of five labels prefer action 0."""
    log_probs = trained("sigmoid", wins=0.8, beta=0.5)
    assert (log_probs[0] - log_probs[1]).item() == pytest.approx(math.log(4) / 0.5, abs=0.02)


def test_ipo_settles_at_its_target():
    """margin = (2 p - 1) / (2 beta): bounded also where labels never contradict each other."""
    for wins in (1.0, 0.8):
        log_probs = trained("ipo", wins=wins, beta=0.5)
        assert (log_probs[0] - log_probs[1]).item() == pytest.approx((2 * wins - 1) / (2 * 0.5), abs=0.01)


def test_apo_down_lowers_both_and_apo_zero_raises_the_chosen_action():
    start = -math.log(3)
    assert trained("apo_zero", steps=100)[0] > start
    assert trained("apo_down", steps=100, beta=3.0)[1] < start

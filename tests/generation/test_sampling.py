"""The sampling distribution and the draws from it."""

import math

import pytest
import torch
from torch.testing import assert_close

from alignment.generation.sampling import SamplingConfig, draw, sampling_log_probs, uniforms


def probabilities(logits, **settings):
    return sampling_log_probs(torch.tensor(logits), SamplingConfig(**settings)).exp()


def test_temperature_divides_the_logits():
    # exp(2/2) : exp(0) = e : 1
    assert_close(probabilities([2.0, 0.0], temperature=2.0), torch.tensor([math.e / (1 + math.e), 1 / (1 + math.e)]))


def test_zero_temperature_is_greedy():
    assert probabilities([1.0, 3.0, 2.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_the_likeliest_and_renormalises():
    weights = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert_close(probabilities(weights, top_k=2), torch.tensor([0.625, 0.375, 0.0]))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    weights = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    assert_close(probabilities(weights, top_p=0.6), torch.tensor([0.0, 0.625, 0.375]))
    assert_close(probabilities(weights, top_p=0.1), torch.tensor([0.0, 1.0, 0.0]))  # never nothing


def test_draw_follows_the_cumulative_probability():
    log_probs = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(5, 4)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71], dtype=torch.float64)
    assert draw(log_probs, uniform).tolist() == [0, 0, 2, 2, 3]


def test_draw_never_takes_an_impossible_token():
    log_probs = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    assert draw(log_probs, torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64)).tolist() == [1, 1]


def test_draws_have_the_stated_frequencies():
    probability = torch.tensor([0.1, 0.2, 0.7])
    uniform = uniforms(0, range(4000), 1)[:, 0]
    counts = draw(probability.log().expand(4000, 3), uniform).bincount(minlength=3) / 4000
    assert_close(counts, probability, atol=0.02, rtol=0)


def test_a_row_draws_the_same_numbers_in_any_batch():
    assert_close(uniforms(7, [3, 9], 4)[1], uniforms(7, [9], 4)[0])
    assert not torch.equal(uniforms(7, [3], 4), uniforms(8, [3], 4))


@pytest.mark.parametrize("settings", [{"top_p": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"max_new_tokens": 0}])
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError):
        SamplingConfig(**settings)

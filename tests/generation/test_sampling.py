"""The sampling distribution and the draws from it."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from alignment.generation.requests import DecodingRequest, RunningRequest
from alignment.generation.sampling import SamplingConfig, sample_token, sample_token_unasked, sampling_log_probs

ANYWHERE_AND_ON_A_GPU = pytest.mark.parametrize("sample", [sample_token, sample_token_unasked])


def probabilities(logits, **settings):
    return sampling_log_probs(torch.tensor(logits), SamplingConfig(**settings)).exp()


def test_temperature_divides_the_logits():
    # exp(2/2) : exp(0) = e : 1
    assert_close(probabilities([2.0, 0.0], temperature=2.0), torch.tensor([math.e / (1 + math.e), 1 / (1 + math.e)]))


def test_zero_temperature_is_greedy():
    assert probabilities([1.0, 3.0, 2.0], temperature=0.0).tolist() == [0.0, 1.0, 0.0]


def test_top_k_keeps_the_likeliest_and_renormalizes():
    weights = torch.tensor([0.5, 0.3, 0.2]).log().tolist()
    assert_close(probabilities(weights, top_k=2), torch.tensor([0.625, 0.375, 0.0]))


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    weights = torch.tensor([0.2, 0.5, 0.3]).log().tolist()
    assert_close(probabilities(weights, top_p=0.6), torch.tensor([0.0, 0.625, 0.375]))
    assert_close(probabilities(weights, top_p=0.1), torch.tensor([0.0, 1.0, 0.0]))  # never nothing


def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest():
    # the bar is 0.3 * 0.5 = 0.15
    weights = torch.tensor([0.5, 0.3, 0.14, 0.06]).log().tolist()
    assert_close(probabilities(weights, min_p=0.3), torch.tensor([0.625, 0.375, 0.0, 0.0]))
    assert_close(probabilities(weights, min_p=1.0), torch.tensor([1.0, 0.0, 0.0, 0.0]))  # never nothing


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.1},
        {"min_p": 0.02, "temperature": 1.5},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.6, "top_k": 12, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.4},
    ],
)
def test_the_distribution_is_that_of_transformers(settings):
    """Its processors in its own order: each filter sees what the ones before it left."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(8, 100, generator=generator)
    tokens = torch.randint(100, (8, 30), generator=generator)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=1, vocab_size=100)
    )
    processors = model._get_logits_processor(GenerationConfig(do_sample=True, **{"top_k": 0, **settings}), 30)
    wanted = processors(tokens, logits).log_softmax(-1)
    found = sampling_log_probs(logits, SamplingConfig(**settings), tokens)
    assert_close(found, wanted, atol=1e-6, rtol=0)
    assert 8 < (found > -torch.inf).sum() < 400


@ANYWHERE_AND_ON_A_GPU
def test_draw_follows_the_cumulative_probability(sample):
    log_probs = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(5, 4)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71], dtype=torch.float64)
    assert sample(log_probs, uniform).tolist() == [0, 0, 2, 2, 3]


@ANYWHERE_AND_ON_A_GPU
def test_draw_never_takes_an_impossible_token(sample):
    log_probs = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).repeat(2, 1)
    assert sample(log_probs, torch.tensor([0.0, 1 - 1e-16], dtype=torch.float64)).tolist() == [1, 1]


@ANYWHERE_AND_ON_A_GPU
def test_draws_have_the_stated_frequencies(sample):
    probability = torch.tensor([0.1, 0.2, 0.7])
    uniform = torch.tensor([draws(0, row, 1)[0] for row in range(4000)], dtype=torch.float64)
    counts = sample(probability.log().expand(4000, 3), uniform).bincount(minlength=3) / 4000
    assert_close(counts, probability, atol=0.02, rtol=0)


def draws(seed, row, steps):
    request = RunningRequest(1, DecodingRequest([5], SamplingConfig(seed=seed), row=row))
    return tuple(request.upcoming_draw(step) for step in range(steps))


def test_draws_are_those_of_numpys_generator_of_seed_and_row():
    """Also beyond the first 64, which are made at once."""
    assert draws(7, 9, 100) == tuple(np.random.default_rng([7, 9]).random(100))


@pytest.mark.parametrize(
    "settings",
    [
        {"top_p": 0.0},
        {"temperature": -1.0},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"min_p": 1.1},
        {"min_p": -0.1},
        {"repetition_penalty": 0.0},
        {"no_repeat_ngram_size": -1},
        {"max_new_tokens": 3, "min_new_tokens": 4},
    ],
)
def test_impossible_settings_are_refused(settings):
    with pytest.raises(ValueError):
        SamplingConfig(**settings)


def test_top_p_stops_at_the_token_with_which_p_is_reached():
    assert probabilities([0.0, 0.0], top_p=0.5).tolist() == [1.0, 0.0]  # a half reaches a half


def test_a_row_and_a_seed_do_not_stand_in_for_each_other():
    assert len({draws(seed, row, 4) for seed in range(4) for row in range(4)}) == 16


@pytest.mark.parametrize("possible", [0, 1, 2])
def test_a_number_next_to_one_draws_the_last_possible_token(possible):
    log_probs = torch.full((1, 3), -torch.inf)
    log_probs[0, : possible + 1] = -torch.tensor(possible + 1.0).log()
    assert sample_token(log_probs, torch.tensor([1 - 1e-16], dtype=torch.float64)).tolist() == [possible]


def test_logits_of_low_precision_give_probabilities_of_full_precision():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = sampling_log_probs(logits, SamplingConfig(temperature=0.7))
    assert found.dtype == torch.float32
    assert_close(found, (logits.float() / 0.7).log_softmax(-1))

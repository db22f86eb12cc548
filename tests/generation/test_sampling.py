"""The sampling distribution, the processors that look back, and the draws."""

import math

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from alignment.generation import BeamConfig, DecodingRequest, SamplingConfig, decode_responses
from alignment.generation.requests import RunningRequest
from alignment.generation.sampling import (
    TokenHistory,
    forbid_repeated_ngrams,
    limit_repeats,
    penalize_repetition,
    sample_token,
    sampling_log_probs,
)
from tests.generation.peers import their_responses


@pytest.mark.parametrize(
    ("weights", "settings", "expected"),
    [
        ([math.e**2, 1], {"temperature": 2.0}, [math.e / (1 + math.e), 1 / (1 + math.e)]),  # exp(2/2) : exp(0)
        ([1, 3, 2], {"temperature": 0.0}, [0, 1, 0]),
        ([0.5, 0.3, 0.2], {"top_k": 2}, [0.625, 0.375, 0]),
        ([0.2, 0.5, 0.3], {"top_p": 0.6}, [0, 0.625, 0.375]),
        ([0.2, 0.5, 0.3], {"top_p": 0.1}, [0, 1, 0]),  # never nothing
        ([1, 1], {"top_p": 0.5}, [1, 0]),  # a half reaches a half
        ([0.5, 0.3, 0.14, 0.06], {"min_p": 0.3}, [0.625, 0.375, 0, 0]),  # the bar is 0.3 * 0.5
        ([0.5, 0.3, 0.14, 0.06], {"min_p": 1.0}, [1, 0, 0, 0]),
    ],
)
def test_filters_worked_by_hand(weights, settings, expected):
    found = sampling_log_probs(torch.tensor(weights).float().log(), SamplingConfig(**settings)).exp()
    assert_close(found, torch.tensor(expected).float())


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


def test_logits_of_low_precision_give_probabilities_of_full_precision():
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = sampling_log_probs(logits, SamplingConfig(temperature=0.7))
    assert found.dtype == torch.float32
    assert_close(found, (logits.float() / 0.7).log_softmax(-1))


@pytest.mark.parametrize(
    ("kind", "settings", "word"),
    [
        (SamplingConfig, {"top_p": 0.0}, "top_p"),
        (SamplingConfig, {"temperature": -1.0}, "temperature"),
        (SamplingConfig, {"max_new_tokens": 3, "min_new_tokens": 4}, "min_new_tokens"),
        (BeamConfig, {"num_beams": 0}, "num_beams"),
        (BeamConfig, {"early_stopping": "always"}, "must be 'never', got 'always'"),
    ],
)
def test_impossible_settings_are_refused(kind, settings, word):
    with pytest.raises(ValueError, match=word):
        kind(**settings)


# Draws


def test_a_draw_follows_the_cumulative_probability_and_is_never_impossible():
    log_probs = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(5, 4)
    uniform = torch.tensor([0.0, 0.19, 0.21, 0.69, 0.71], dtype=torch.float64)
    assert sample_token(log_probs, uniform).tolist() == [0, 0, 2, 2, 3]
    for possible in range(3):  # a number next to 1 rounds up to the total
        log_probs = torch.full((1, 3), -torch.inf)
        log_probs[0, : possible + 1] = -torch.tensor(possible + 1.0).log()
        assert sample_token(log_probs, torch.tensor([1 - 1e-16], dtype=torch.float64)).tolist() == [possible]
    assert sample_token(torch.tensor([[-torch.inf, 0.0]]), torch.zeros(1, dtype=torch.float64)).tolist() == [1]


def draws(seed, row, steps):
    request = RunningRequest(1, DecodingRequest([5], SamplingConfig(seed=seed), row=row))
    return tuple(request.uniform_at(step) for step in range(steps))


def test_draws_are_those_of_numpys_generator_of_seed_and_row():
    """Also beyond the first 64, which are made at once; and a row and a seed do not stand in for each other."""
    assert draws(7, 9, 100) == tuple(np.random.default_rng([7, 9]).random(100))
    assert len({draws(seed, row, 4) for seed in range(4) for row in range(4)}) == 16
    uniform = torch.tensor([draws(0, row, 1)[0] for row in range(4000)], dtype=torch.float64)
    probability = torch.tensor([0.1, 0.2, 0.7])
    counts = sample_token(probability.log().expand(4000, 3), uniform).bincount(minlength=3) / 4000
    assert_close(counts, probability, atol=0.02, rtol=0)


# Processors that look back


def random_logits(rows, vocabulary=50):
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))


def random_history(lengths, vocabulary=50):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def test_processors_worked_by_hand():
    scores = torch.tensor([[4.0, 4.0, -4.0, -4.0], [4.0, 4.0, -4.0, -4.0]])
    seen = torch.tensor([[0, 2, 2], [-1, -1, 3]])  # token 2 was there twice and counts once
    assert penalize_repetition(scores, seen, 2.0).tolist() == [[2.0, 4.0, -8.0, -4.0], [4.0, 4.0, -4.0, -8.0]]
    # 5 6 ... 5: a 6 would make "5 6" twice; 7 stood there, but not after a 5
    seen = torch.tensor([[5, 6, 7, 5], [-1, -1, 7, 5]])
    assert (forbid_repeated_ngrams(torch.zeros(2, 8), seen, 2) == -torch.inf).nonzero().tolist() == [[0, 6]]
    with pytest.raises(ValueError, match="need the tokens so far"):
        sampling_log_probs(torch.zeros(1, 4), SamplingConfig(repetition_penalty=1.1))


@pytest.mark.parametrize("size", [1, 2, 3, 13])
def test_processors_are_those_of_transformers(size):
    """Of six tokens in all, most n-grams have been there before; one of 13 cannot have been among 12 tokens."""
    from transformers import NoRepeatNGramLogitsProcessor, RepetitionPenaltyLogitsProcessor

    logits = random_logits(3, vocabulary=6)
    ids = torch.tensor(random_history((12, 12, 12), vocabulary=6))
    wanted = NoRepeatNGramLogitsProcessor(size)(ids, logits)
    assert torch.equal(forbid_repeated_ngrams(logits, ids, size), wanted)
    assert (wanted == -torch.inf).any() == (size < 13)
    penalized = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits)
    assert torch.equal(penalize_repetition(logits, ids, 1.7), penalized)


def history_of(documents, width):
    history = TokenHistory(torch.device("cpu"))
    history.reserve(len(documents), width)
    for row, document in enumerate(documents):
        history.put(row, document)
    return history


@pytest.mark.parametrize("settings", [(1.3, 0), (1.0, 1), (1.0, 2), (1.0, 4)])
def test_a_shorter_document_beside_a_longer_one_changes_nothing(settings):
    documents, logits = random_history((9, 3, 1), vocabulary=6), random_logits(3, vocabulary=6)
    together = limit_repeats(logits, history_of(documents, 11).seen(torch.arange(3)), *settings)
    for row, document in enumerate(documents):
        alone = limit_repeats(logits[row : row + 1], torch.tensor([document]), *settings)
        assert torch.equal(together[row : row + 1], alone)


def test_the_history_grows_and_moves():
    history = history_of([[7, 8], [9]], 3)
    assert history.seen(torch.arange(2)).tolist() == [[-1, 7, 8], [-1, -1, 9]]
    history.append(torch.arange(2), torch.tensor([3, 4]))
    history.keep(torch.tensor([1, 1, 0]))
    assert history.seen(torch.arange(3)).tolist() == [[-1, 9, 4], [-1, 9, 4], [7, 8, 3]]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 15},
        {"repetition_penalty": 0.8, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
    ],
)
def test_greedy_responses_are_those_of_transformers(peers, random_prompts, settings):
    config, plain = (SamplingConfig(24, temperature=0, **each) for each in (settings, {}))
    found, other = (
        decode_responses(peers.ours, random_prompts, each, peers.stops).token_ids for each in (config, plain)
    )
    options = {"max_new_tokens": 24, **settings}
    assert found == [their_responses(peers.theirs, each, peers.stops, **options)[0] for each in random_prompts]
    assert (found == other) == (not settings)  # each rule did matter
    assert len({len(tokens) for tokens in other}) >= 4


def test_drawn_log_probs_are_those_of_the_penalized_distribution(peers, random_prompts):
    """Worked out again from the model's logits over the whole text and the tokens before each place."""
    config = SamplingConfig(12, temperature=0.7, top_p=0.9, min_p=0.02, repetition_penalty=1.5)
    found = decode_responses(peers.ours, random_prompts, config, peers.stops)
    for prompt, tokens, log_probs in zip(random_prompts, found.token_ids, found.log_probs, strict=True):
        with torch.no_grad():
            logits = peers.ours(torch.tensor([prompt + tokens])).logits[0]
        for place, (token, log_prob) in enumerate(zip(tokens, log_probs, strict=True)):
            seen = torch.tensor([prompt + tokens[:place]])
            wanted = sampling_log_probs(logits[len(prompt) + place - 1][None], config, seen)[0, token]
            assert_close(torch.tensor(log_prob), wanted, atol=1e-4, rtol=0)

"""Rules that look back: worked by hand, equal to transformers' logits processors, and to its greedy responses."""

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from alignment.generation import SamplingConfig, decode_responses
from alignment.generation.logits_processors import (
    TokenHistory,
    discourage_repetition,
    forbid_repeated_ngrams,
    penalize_repetition,
)
from alignment.generation.sampling import sampling_log_probs
from tests.generation.peers import their_responses

INF = torch.inf


def random_logits(rows, vocabulary=50, seed=0):
    return 3 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def random_history(lengths, vocabulary=50, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def as_ids(documents) -> Any:
    return torch.tensor(documents)


def test_a_seen_token_is_divided_where_positive_and_multiplied_where_negative():
    scores = torch.tensor([[4.0, 4.0, -4.0, -4.0], [4.0, 4.0, -4.0, -4.0]])
    seen = torch.tensor([[0, 2, 2], [-1, -1, 3]])  # token 2 was there twice and counts once
    assert penalize_repetition(scores, seen, 2.0).tolist() == [[2.0, 4.0, -8.0, -4.0], [4.0, 4.0, -4.0, -8.0]]


def test_the_penalty_equals_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    documents, logits = random_history((12, 12, 12)), random_logits(3)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(as_ids(documents), logits)
    assert torch.equal(penalize_repetition(logits, as_ids(documents), 1.7), wanted)


def test_a_repeated_pair_is_forbidden():
    # 5 6 ... 5: a 6 would make "5 6" twice; 7 stood there, but not after a 5
    seen = torch.tensor([[5, 6, 7, 5], [-1, -1, 7, 5]])
    forbidden = forbid_repeated_ngrams(torch.zeros(2, 8), seen, 2) == -INF
    assert forbidden.nonzero().tolist() == [[0, 6]]


@pytest.mark.parametrize("size", [1, 2, 3, 13])
def test_repeated_runs_are_those_of_transformers(size):
    """Of six tokens in all, most runs have been there before; a run of 13 cannot have been among 12 tokens."""
    from transformers import NoRepeatNGramLogitsProcessor

    documents, logits = random_history((12, 12, 12), vocabulary=6), random_logits(3, vocabulary=6)
    wanted = NoRepeatNGramLogitsProcessor(size)(as_ids(documents), logits)
    assert torch.equal(forbid_repeated_ngrams(logits, torch.tensor(documents), size), wanted)
    assert (wanted == -INF).any() == (size < 13)


def history_of(documents, width):
    history = TokenHistory(torch.device("cpu"))
    history.reserve(len(documents), width)
    for row, document in enumerate(documents):
        history.put(row, document)
    return history


@pytest.mark.parametrize("settings", [(1.3, 0), (1.0, 1), (1.0, 2), (1.0, 4)])
def test_a_shorter_prompt_beside_a_longer_one_changes_nothing(settings):
    documents, logits = random_history((9, 3, 1), vocabulary=6), random_logits(3, vocabulary=6)
    together = discourage_repetition(logits, history_of(documents, 11).seen(torch.arange(3)), *settings)
    for row, document in enumerate(documents):
        alone = discourage_repetition(logits[row : row + 1], torch.tensor([document]), *settings)
        assert torch.equal(together[row : row + 1], alone)


def test_the_past_grows_and_moves():
    history = history_of([[7, 8], [9]], 3)
    assert history.seen(torch.arange(2)).tolist() == [[-1, 7, 8], [-1, -1, 9]]
    history.append(torch.arange(2), torch.tensor([3, 4]))
    history.keep(torch.tensor([1, 1, 0]))
    assert history.seen(torch.arange(3)).tolist() == [[-1, 9, 4], [-1, 9, 4], [7, 8, 3]]


def test_a_rule_without_a_past_is_refused():
    with pytest.raises(ValueError, match="need the tokens so far"):
        sampling_log_probs(torch.zeros(1, 4), SamplingConfig(repetition_penalty=1.1))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.8},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 15},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 4},
    ],
)
def test_greedy_responses_under_rules_are_those_of_transformers(peers, random_prompts, settings):
    config = SamplingConfig(24, temperature=0, **settings)
    found = decode_responses(peers.ours, random_prompts, config, peers.stops).token_ids
    assert found == [
        their_responses(peers.theirs, prompt, peers.stops, max_new_tokens=24, **settings)[0]
        for prompt in random_prompts
    ]
    plain = decode_responses(peers.ours, random_prompts, SamplingConfig(24, temperature=0), peers.stops).token_ids
    assert (found == plain) == (not settings)  # each rule did matter
    assert len({len(tokens) for tokens in plain}) >= 4


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

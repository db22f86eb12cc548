"""Beam search finds what transformers' finds, token by token, and scores it by the model's own log-probabilities."""

import pytest
import torch
from torch.testing import assert_close

from alignment import generate, load_model, load_tokenizer
from alignment.generation import BeamConfig, SamplingConfig, beam_search, decode_responses, decoding_config
from alignment.ragged import Ragged
from tests.generation.peers import their_responses, up_to_stop


def wanted(peers, prompts, config, stops):
    """transformers' `generate` has settings of the same names."""
    return [their_responses(peers.theirs, prompt, stops, **vars(config))[0] for prompt in prompts]


CONFIGS = [
    BeamConfig(4, max_new_tokens=24),
    BeamConfig(4, max_new_tokens=24, early_stopping=True),
    BeamConfig(4, max_new_tokens=24, early_stopping="never"),
    BeamConfig(3, 0.5, 24),
    BeamConfig(3, 2.0, 24),
    BeamConfig(3, 2.0, 24, early_stopping=True),
    BeamConfig(3, 2.0, 24, early_stopping="never"),
    BeamConfig(4, -1.0, 24, early_stopping="never"),
    BeamConfig(4, 0.0, 24, early_stopping="never"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_best_hypotheses_are_those_of_transformers(peers, random_prompts, config):
    found = beam_search(peers.ours, random_prompts, config, peers.stops)
    assert found.token_ids == wanted(peers, random_prompts, config, peers.stops)
    assert found.ended == [tokens[-1] in peers.stops for tokens in found.token_ids]


def test_the_settings_make_a_difference(all_peers, random_prompts):
    """Else the comparison above could not fail: lengths vary, and so do the answers with the settings."""
    peers = all_peers["llama"]
    found = [beam_search(peers.ours, random_prompts, config, peers.stops).token_ids for config in CONFIGS]
    assert len(set(map(len, found[0]))) >= 4 and len(set(map(str, found))) >= 4


@pytest.mark.parametrize("early_stopping", [False, "never"])
@pytest.mark.parametrize(
    "stops", [[], [7, 20, 33], list(range(0, 211, 9)), list(range(190))], ids=["none", "three", "many", "most"]
)
def test_any_number_of_stop_tokens(all_peers, random_prompts, stops, early_stopping):
    """More stop tokens need more candidates: as many beams as there are must be left to go on."""
    config = BeamConfig(3, max_new_tokens=12, early_stopping=early_stopping)
    found = beam_search(all_peers["llama"].ours, random_prompts, config, stops)
    assert found.token_ids == wanted(all_peers["llama"], random_prompts, config, stops)


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 10},
        {"repetition_penalty": 0.9, "no_repeat_ngram_size": 3, "min_new_tokens": 3},
    ],
)
def test_rules_hold_in_every_beam(peers, random_prompts, rules):
    config, plain = BeamConfig(4, max_new_tokens=16, **rules), BeamConfig(4, max_new_tokens=16)
    found = beam_search(peers.ours, random_prompts, config, peers.stops).token_ids
    assert found == wanted(peers, random_prompts, config, peers.stops)
    assert found != beam_search(peers.ours, random_prompts, plain, peers.stops).token_ids


def test_one_beam_is_greedy_and_a_wider_search_finds_likelier_texts(peers, random_prompts):
    """Not for every prompt, a search is no proof; but in sum, without stop tokens or length penalty."""
    found = [beam_search(peers.ours, random_prompts, BeamConfig(beams, 0.0, 12), []) for beams in (1, 4, 16)]
    greedy = decode_responses(peers.ours, random_prompts, SamplingConfig(12, temperature=0), [])
    assert found[0].token_ids == greedy.token_ids
    total = [sum(map(sum, each.log_probs)) for each in found]
    assert total[0] < total[1] < total[2]


def test_log_probs_are_the_models_whatever_the_batch(peers, random_prompts):
    config = BeamConfig(4, 2.0, 20, early_stopping=True)
    found = beam_search(peers.ours, random_prompts, config, peers.stops)
    for prompt, tokens, log_probs in zip(random_prompts, found.token_ids, found.log_probs, strict=True):
        mask = [False] * len(prompt) + [True] * len(tokens)
        with torch.no_grad():
            exact = peers.ours(batch=Ragged.build([prompt + tokens], [mask])).log_probs
        assert_close(torch.tensor(log_probs), exact, atol=1e-4, rtol=0)
    for batch_size in (1, 5):
        parts = beam_search(peers.ours, random_prompts, config, peers.stops, batch_size=batch_size)
        assert parts.token_ids == found.token_ids


def test_more_beams_than_tokens_to_begin_with_are_refused(all_peers):
    with pytest.raises(ValueError, match=r"12 beams.*211 tokens 200 end one"):
        beam_search(all_peers["gpt2"].ours, [[5]], BeamConfig(12), range(200))
    beam_search(all_peers["gpt2"].ours, [[5]], BeamConfig(11, max_new_tokens=3), range(200))


# --- generate -------------------------------------------------------------------------------------------------------


def test_generate_searches_with_beams(checkpoints):
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(checkpoints["llama"]).eval()
    model, tokenizer = load_model(checkpoints["llama"]), load_tokenizer(checkpoints["llama"])
    prompts, stops = ["Hotel Old Oak. The spa is", "Guest"], [tokenizer.eos_token_id]
    found = generate(
        model, tokenizer, prompts, max_new_tokens=16, num_beams=4, length_penalty=0.5, repetition_penalty=1.2
    )
    settings = {"num_beams": 4, "length_penalty": 0.5, "repetition_penalty": 1.2, "max_new_tokens": 16}
    for prompt, tokens, text, log_probs in zip(prompts, found.token_ids, found.texts, found.log_probs, strict=True):
        ids = tokenizer(prompt).input_ids
        assert tokens == their_responses(theirs, ids, stops, **settings)[0] == up_to_stop(tokens, stops)
        assert len(log_probs) == len(tokens) and text.startswith(tokenizer.decode(tokens[:-1]))


def test_settings_of_one_way_to_decode_do_not_go_with_the_other():
    for sampling in (SamplingConfig(temperature=0.7), SamplingConfig(top_k=5), SamplingConfig(min_p=0.1)):
        with pytest.raises(ValueError, match=r"num_beams=4\) does not sample"):
            decoding_config(sampling, 4)
    with pytest.raises(ValueError, match="belong to beam search"):
        decoding_config(SamplingConfig(), 1, length_penalty=2.0)
    with pytest.raises(ValueError, match="belong to beam search"):
        decoding_config(SamplingConfig(), early_stopping=True)
    greedy = SamplingConfig(9, temperature=0, top_k=5, repetition_penalty=1.5, no_repeat_ngram_size=3, min_new_tokens=2)
    assert decoding_config(greedy, 4, 0.5, True) == BeamConfig(4, 0.5, 9, True, 1.5, 3, 2)


def test_a_search_keeps_to_the_batch_size_in_cache_rows(tokenizer, checkpoints, monkeypatch):
    model, sizes = load_model(checkpoints["llama"]), []
    decode = model.decode
    monkeypatch.setattr(model, "decode", lambda tokens, cache: (sizes.append(len(tokens)), decode(tokens, cache))[1])
    found = []
    for batch_size, most in ((7, 6), (100, 21)):  # two prompts of three beams each; all seven prompts at once
        sizes.clear()
        found.append(generate(model, tokenizer, list("abcdefg"), max_new_tokens=3, num_beams=3, batch_size=batch_size))
        assert max(sizes) == most
    assert found[0].token_ids == found[1].token_ids

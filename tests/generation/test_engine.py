"""The decoding engine: what a request gets is its own, whatever decodes beside it and whenever it came."""

import random
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import LoRASpec, PrefixSpec, attach
from alignment.errors import UserError
from alignment.generation import DecodingEngine, DecodingRequest, SamplingConfig, TokenEvent
from alignment.generation.requests import RunningRequest
from alignment.generation.sampling import sampling_log_probs
from alignment.models.build import build_language_model
from alignment.ragged import Ragged

LLAMA = {
    "model_type": "llama", "vocab_size": 97, "max_position_embeddings": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
SETTINGS = [  # side by side in one batch
    SamplingConfig(20),
    SamplingConfig(30, 0.7, top_k=5, seed=1),
    SamplingConfig(11, 0.0),
    SamplingConfig(25, 1.2, top_p=0.8, repetition_penalty=1.5),
    SamplingConfig(40, min_p=0.1, no_repeat_ngram_size=2, min_new_tokens=8),
    SamplingConfig(1, 1.5, top_k=9, top_p=0.6, min_p=0.2),
]
STOPS = [1, 2, 3, 4, 5, 6]
Found = dict[int, list[TokenEvent]]


@pytest.fixture(scope="module")
def model():
    return make_model()


def make_model():
    """Logits far from flat: which token is drawn does not hang on rounding."""
    torch.manual_seed(0)
    model = build_language_model(dict(LLAMA)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def requests() -> list[DecodingRequest]:
    """36 requests, some of them with equal prompts, of all settings."""
    generator = random.Random(0)
    prompts = [[generator.randrange(97) for _ in range(generator.randint(1, 20))] for _ in range(24)]
    prompts += prompts[:6] * 2
    return [
        DecodingRequest(
            prompt, SETTINGS[number % len(SETTINGS)], number, stop_ids=STOPS[: 1 + number % 6], alternatives=number % 3,
            log_probs="model" if number % 4 == 1 else "sampled",
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip


def finish(engine: DecodingEngine, numbers: dict[int, int]) -> Found:
    """All events, by what the requests are called in `numbers`."""
    found: Found = {name: [] for name in numbers.values()}
    while engine.unfinished:
        for event in engine.step():
            found[numbers[event.request]].append(event)
    return found


def decode(model, requests, order, max_rows: int, **options) -> Found:
    engine = DecodingEngine(model, max_rows=max_rows, **options)
    return finish(engine, {engine.add(requests[i]): i for i in order})


@pytest.fixture(scope="module")
def alone(model, requests) -> Found:
    return {i: decode(model, requests, [i], 1)[i] for i in range(len(requests))}


def assert_same(found: Found, wanted: Found) -> None:
    for number, events in found.items():
        expected = wanted[number]
        assert [event.token for event in events] == [event.token for event in expected], number
        assert [event.finish for event in events] == [event.finish for event in expected]
        log_probs = [torch.tensor([event.log_prob for event in each]) for each in (events, expected)]
        assert_close(*log_probs, atol=1e-5, rtol=0)
        for one, other in zip(events, expected, strict=True):
            assert [token for token, _ in one.alternatives] == [token for token, _ in other.alternatives]


@pytest.mark.parametrize("max_rows", [2, 5, 16, 64])
def test_a_request_gets_what_it_gets_alone(model, requests, alone, max_rows):
    """Settings, lengths, stop tokens and logits processors differ from row to row, and rows are taken over by others."""
    order = list(range(len(requests)))
    assert_same(decode(model, requests, order, max_rows), alone)
    random.Random(max_rows).shuffle(order)
    assert_same(decode(model, requests, order, max_rows), alone)
    lengths = {len(events) for events in alone.values()}
    assert len(lengths) > 8 and {events[-1].finish for events in alone.values()} == {"stop", "length"}


def test_requests_that_come_later_change_nothing(model, requests, alone):
    engine, numbers, found = DecodingEngine(model, max_rows=6), {}, {i: [] for i in range(len(requests))}
    waiting = list(range(len(requests)))
    while engine.unfinished or waiting:
        for i in waiting[:2]:
            numbers[engine.add(requests[i])] = i
        del waiting[:2]
        for event in engine.step():
            found[numbers[event.request]].append(event)
    assert_same(found, alone)


def test_a_request_draws_the_numbers_of_its_seed_and_row(model):
    request = DecodingRequest([5, 6], SamplingConfig(80, seed=3), row=11)
    [events] = decode(model, [request], [0], 1).values()
    document = [5, 6]
    for step, event in enumerate(events):
        number = RunningRequest(1, request).uniform_at(step)
        with torch.no_grad():
            probability = model(torch.tensor([document])).logits[0, -1].softmax(-1).double()
        cumulative = probability.cumsum(0)
        low, high = cumulative[event.token] - probability[event.token], cumulative[event.token]
        assert low - 1e-5 <= number * cumulative[-1] <= high + 1e-5
        document.append(event.token)
    assert len(events) == 80


# --- log-probabilities ----------------------------------------------------------------------------------------------


def test_log_probs_are_of_the_drawn_distribution_or_of_the_model(model):
    sampling = SamplingConfig(12, 0.6, top_k=4, top_p=0.9)
    asked = DecodingRequest([7, 8, 9], sampling, alternatives=6)
    requests = [
        asked,
        replace(asked, log_probs="model"),
        replace(asked, sampling=SamplingConfig(12, 0.0), log_probs="model"),
    ]
    for request, events in zip(requests, decode(model, requests, range(3), 3).values(), strict=True):
        document = [7, 8, 9]
        for event in events:
            with torch.no_grad():
                logits = model(torch.tensor([document])).logits[0, -1]
            sampled = request.log_probs == "sampled"
            wanted = sampling_log_probs(logits, sampling) if sampled else logits.log_softmax(-1)
            assert event.log_prob == pytest.approx(float(wanted[event.token]), abs=1e-5)
            top = wanted.topk(6)
            kept = 4 if sampled else 6  # behind them all are at -inf
            assert [token for token, _ in event.alternatives[: min(2, kept)]] == top.indices.tolist()[: min(2, kept)]
            assert_close(torch.tensor([value for _, value in event.alternatives]), top.values, atol=1e-5, rtol=0)
            document.append(event.token)
        assert len(events) == 12


# --- shared prompts -------------------------------------------------------------------------------------------------


def test_samples_of_one_prompt_share_its_prefill(model, monkeypatch):
    """8 responses to each of 3 prompts, in any order and with any number of rows, cost the 3 prompts."""
    prompts = [[5, 6, 7], [8] * 10, [9, 10]]
    requests = [DecodingRequest(prompts[i % 3], SamplingConfig(6 + i), row=i) for i in range(24)]
    wanted = {i: decode(model, requests, [i], 1)[i] for i in range(24)}
    read = prefilled(model, monkeypatch)
    for max_rows in (1, 4, 24):
        engine = DecodingEngine(model, max_rows=max_rows)
        assert_same(finish(engine, {engine.add(request): i for i, request in enumerate(requests)}), wanted)
        assert sum(read) == 3 + 10 + 2
        read.clear()


def prefilled(model, monkeypatch) -> list[int]:
    """Tokens of each prefill from now on."""
    read, prefill = [], model.prefill
    monkeypatch.setattr(
        model, "prefill", lambda batch, *rest: (read.append(len(batch.tokens)), prefill(batch, *rest))[1]
    )
    return read


def test_rows_are_filled_again_before_all_have_ended(model, monkeypatch):
    """20 responses of 2 tokens beside one of 40 take 39 steps with 4 rows; in groups they would take 43."""
    sizes, decode_step = [], model.decode
    monkeypatch.setattr(
        model, "decode", lambda tokens, cache: (sizes.append(len(tokens)), decode_step(tokens, cache))[1]
    )
    engine = DecodingEngine(model, max_rows=4)
    for number in range(21):
        engine.add(DecodingRequest([5, number], SamplingConfig(40 if number == 0 else 2)))
    engine.run()
    assert len(sizes) == 39
    assert sizes[:6] == [4] * 6 and sizes[-20:] == [1] * 20


def test_a_cancelled_request_leaves_its_row_to_others(model, requests, alone):
    engine = DecodingEngine(model, max_rows=4)
    numbers = {engine.add(requests[i]): i for i in range(12)}
    begun = {numbers[event.request]: [event] for event in engine.step()}
    running = next(i for i in begun if requests[i].sampling.max_new_tokens > 5)
    for number, i in numbers.items():
        if i in (11, running):
            engine.cancel(number)
            engine.cancel(number)  # twice is no error
    rest = finish(engine, numbers)
    assert not rest.pop(11) and not rest.pop(running) and len(rest) == 10
    assert_same({i: [*begun.get(i, []), *events] for i, events in rest.items()}, alone)


def test_requests_out_of_range_are_refused(model):
    with pytest.raises(UserError, match="96 positions"):
        DecodingEngine(model).add(DecodingRequest([5] * 50, SamplingConfig(47)))
    with pytest.raises(ValueError, match="at least one token"):
        DecodingRequest([])
    with pytest.raises(ValueError, match="list of texts"):
        DecodingRequest([5], stop="end")
    with pytest.raises(ValueError, match="need an engine with a tokenizer"):
        DecodingEngine(model).add(DecodingRequest([5], stop=["end"]))
    with pytest.raises(ValueError, match="max_rows"):
        DecodingEngine(model, max_rows=0)


# --- adapters and other architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [LoRASpec(rank=4), PrefixSpec(tokens=5)], ids=["lora", "prefix"])
def test_adapters_act(spec, requests):
    """Rows behind a prefix are filled, copied and moved with it."""
    model, plain = make_model(), make_model()
    torch.manual_seed(1)
    attach(model, spec)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    model.eval()
    chosen = [replace(request, log_probs="model") for request in requests[:18]] + requests[24:30]
    found = decode(model, chosen, range(len(chosen)), 5)
    assert_same(found, {i: decode(model, chosen, [i], 1)[i] for i in range(len(chosen))})
    assert [event.token for event in found[0]] != [event.token for event in decode(plain, chosen, [0], 1)[0]]
    for number, events in list(found.items())[:18:5]:
        tokens = [event.token for event in events]
        document = [*chosen[number].prompt, *tokens]
        mask = [False] * len(chosen[number].prompt) + [True] * len(tokens)
        with torch.no_grad():
            wanted = model(batch=Ragged.build([document], [mask])).log_probs
        assert_close(torch.tensor([event.log_prob for event in events]), wanted, atol=1e-4, rtol=0)


def test_classes_of_transformers_decode_in_groups(all_peers, random_prompts, monkeypatch):
    """Their caches take a whole group; what a request gets is the same, and equal prompts are computed once."""
    from alignment.models.external.models import ExternalLanguageModel

    peers = all_peers["llama"]
    model = ExternalLanguageModel(peers.theirs, peers.theirs.config.to_dict(), "language").eval()
    prompts = [*random_prompts[:8], random_prompts[3]]
    requests = [
        DecodingRequest(prompt, replace(SETTINGS[number % 6], max_new_tokens=10 + number), number, stop_ids=peers.stops)
        for number, prompt in enumerate(prompts)
    ]
    ours = {i: decode(peers.ours, requests, [i], 1)[i] for i in range(len(requests))}
    engine, read = DecodingEngine(model, max_rows=9), prefilled(model, monkeypatch)
    found = finish(engine, {engine.add(request): i for i, request in enumerate(requests)})
    assert sum(read) == sum(map(len, prompts[:8]))
    for number, events in found.items():
        assert [event.token for event in events] == [event.token for event in ours[number]]
    small = decode(model, requests, range(len(requests)), 2)
    assert_same(small, found)

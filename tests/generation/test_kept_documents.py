"""Kept documents: prompts that begin as earlier ones do are computed from there on, and nothing else changes."""

import random
from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

from alignment.adapters import PrefixSpec, attach
from alignment.generation import DecodingEngine, DecodingRequest, SamplingConfig
from alignment.generation.filling import LEAST_SHARED, KeptDocuments, common_prefix_length
from alignment.models import transformer
from alignment.models.build import build_language_model
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.layer_contexts import continue_rows
from tests.generation.test_engine import assert_same, finish

ROTARY = {
    "vocab_size": 97, "max_position_embeddings": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
FAMILIES = {
    "llama": {"model_type": "llama", **ROTARY},
    "gpt2": {"model_type": "gpt2", "vocab_size": 97, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "mistral": {"model_type": "mistral", **ROTARY, "sliding_window": 11},
    "bloom": {"model_type": "bloom", "vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "gemma2": {"model_type": "gemma2", **ROTARY, "head_dim": 8, "sliding_window": 11, "query_pre_attn_scalar": 8},
}  # fmt: skip
GREEDY = SamplingConfig(12, 0.0)
Turns = list[list[int]]


def make(family: str, **changes):
    """Logits far from flat: which token is likeliest does not hang on rounding."""
    torch.manual_seed(0)
    model = build_language_model({**FAMILIES[family], **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="module")
def model():
    return make("llama")


def tokens(count: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(97) for _ in range(count)]


def ask(prompt: list[int], **changes) -> DecodingRequest:
    return DecodingRequest(prompt, replace(GREEDY, **changes), log_probs="model")


def respond(engine: DecodingEngine, request: DecodingRequest):
    return finish(engine, {engine.add(request): 0})[0]


def converse(model, engine: DecodingEngine, turns: int = 4, first: int = 20, said: int = 5) -> list[int]:
    """A dialogue whose prompts grow, each response checked beside an engine that keeps nothing; tokens computed per turn."""
    document, computed = tokens(first, 1), []
    for turn in range(turns):
        before = engine.prefilled_tokens
        request = ask(list(document))
        events = respond(engine, request)
        assert_same({0: events}, {0: respond(DecodingEngine(model), request)})
        computed.append(engine.prefilled_tokens - before)
        document += [event.token for event in events] + tokens(said, 2 + turn)
    return computed


@pytest.mark.parametrize("family", FAMILIES)
def test_a_growing_dialogue_computes_only_what_is_new(family):
    """5 new tokens and the last one of the response, which was drawn but never read."""
    model = make(family)
    assert converse(model, DecodingEngine(model, kept_tokens=1000)) == [20, 6, 6, 6]
    assert converse(model, DecodingEngine(model)) == [20, 37, 54, 71]


def test_a_response_that_ends_early_or_is_cancelled_is_kept(model):
    document = tokens(20, 1)
    whole = [event.token for event in respond(DecodingEngine(model), ask(document))]
    engine = DecodingEngine(model, kept_tokens=1000)
    stop = next(place for place, token in enumerate(whole) if token not in whole[:place] and place > 3)
    respond(engine, replace(ask(document), stop_ids=[whole[stop]]))
    second = engine.prefilled_tokens
    follow = ask([*document, *whole[: stop + 1], 7])
    assert_same({0: respond(engine, follow)}, {0: respond(DecodingEngine(model), follow)})
    assert engine.prefilled_tokens - second == 2
    engine = DecodingEngine(model, kept_tokens=1000)
    number = engine.add(ask(document))
    for _ in range(5):
        engine.step()
    engine.cancel(number)
    follow = ask([*document, *whole[:5], 8, 9])
    assert_same({0: respond(engine, follow)}, {0: respond(DecodingEngine(model), follow)})
    assert engine.prefilled_tokens == 20 + 1 + 2


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("max_rows", [2, 5, 16])
def test_requests_behind_one_system_prompt_compute_it_once(family, max_rows):
    """At the same time and one after the other; 12 questions of 1 to 12 tokens behind 40."""
    model, system = make(family), tokens(40, 1)
    requests = [ask([*system, number, *tokens(number, number)], max_new_tokens=3 + number) for number in range(12)]
    engine = DecodingEngine(model, max_rows=max_rows, kept_tokens=200)
    found = finish(engine, {engine.add(request): number for number, request in enumerate(requests)})
    assert_same(found, {number: respond(DecodingEngine(model), request) for number, request in enumerate(requests)})
    assert engine.prefilled_tokens == 40 + sum(range(1, 13))


@pytest.mark.parametrize("kept_tokens", [40, 100, 400])
def test_any_mixture_gets_what_it_gets_without_and_no_more_is_kept_than_may_be(model, kept_tokens):
    """Dialogues of all lengths in turn, few rows, many evictions, sampled and greedy, added while others run."""
    generator = random.Random(kept_tokens)
    engine, plain = (DecodingEngine(model, max_rows=3, kept_tokens=kept) for kept in (kept_tokens, 0))
    systems = [tokens(length, length) for length in (18, 25, 33)]
    dialogues = [list(generator.choice(systems)) + tokens(3, number) for number in range(8)]
    for turn in range(6):
        chosen = generator.sample(range(8), 5)
        requests = [
            DecodingRequest(
                list(dialogues[i]), SamplingConfig(generator.randint(1, 9), generator.choice([0.0, 0.9]), seed=3), row=i
            )
            for i in chosen
        ]
        found = finish(engine, {engine.add(request): i for i, request in zip(chosen, requests, strict=True)})
        wanted = finish(plain, {plain.add(request): i for i, request in zip(chosen, requests, strict=True)})
        assert_same(found, wanted)
        for i, events in found.items():
            dialogues[i] += [event.token for event in events] + tokens(2, turn)
            if generator.random() < 0.2:
                del dialogues[i][generator.randint(10, len(dialogues[i])) :]
        assert 0 < engine._filler._documents.tokens <= kept_tokens
    shares = {40: (0.3, 0.8), 100: (0.2, 0.7), 400: (0.05, 0.45)}
    low, high = shares[kept_tokens]
    assert low < engine.prefilled_tokens / plain.prefilled_tokens < high


def test_an_equal_prompt_computes_its_last_token(model):
    engine = DecodingEngine(model, kept_tokens=100)
    request = ask(tokens(30, 1))
    first = respond(engine, request)
    assert_same({0: respond(engine, request)}, {0: first})
    assert engine.prefilled_tokens == 31


def test_a_wrong_position_is_seen(model, monkeypatch):
    """The comparison above is worth something: rows continued one position too early give other responses."""

    def one_behind(*arguments):
        new = continue_rows(*arguments)
        return new._replace(positions=new.positions - 1)

    monkeypatch.setattr(transformer, "continue_rows", one_behind)
    with pytest.raises(AssertionError):
        converse(model, DecodingEngine(model, kept_tokens=1000))


def test_behind_a_prefix_the_virtual_tokens_count_once():
    model = make("llama")
    torch.manual_seed(1)
    attach(model, PrefixSpec(tokens=5))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    engine = DecodingEngine(model.eval(), kept_tokens=1000)
    assert converse(model, engine) == [20, 6, 6, 6]
    assert engine._filler._documents.tokens == 5 + 20 + 4 * 12 + 3 * 5 - 1


def test_beyond_the_original_context_of_dynamic_scaling_prompts_are_computed_whole():
    """The angles of all tokens depend on the length there: 20 and 37 tokens are within 48, the next turns are not."""
    model = make("llama", max_position_embeddings=48, rope_scaling=DYNAMIC)
    assert model.longest_extended == 48
    model.trunk.spec = replace(model.trunk.spec, max_positions=256)
    assert converse(model, DecodingEngine(model, kept_tokens=1000)) == [20, 6, 54, 71]


def test_classes_of_transformers_compute_whole_prompts(all_peers):
    from alignment.models.external.models import ExternalLanguageModel

    peers = all_peers["llama"]
    model = ExternalLanguageModel(peers.theirs, peers.theirs.config.to_dict(), "language").eval()
    assert converse(model, DecodingEngine(model, kept_tokens=1000), turns=2) == [20, 37]


def test_ranks_that_decode_together_keep_nothing(model):
    engine = DecodingEngine(model, kept_tokens=100)
    engine.add(ask([5, 6]))
    with pytest.raises(ValueError, match="kept_tokens must be 0"):
        engine.run(largest=lambda number: number)


# --- the store ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "other", "count"),
    [((), (1,), 0), ((1, 2, 3), (1, 2, 3), 3), ((1, 2), (1, 2, 3), 2), ((1, 2, 4), (1, 2, 3), 2), ((2, 1), (1, 1), 0)],
)
def test_common_prefixes(one, other, count):
    assert common_prefix_length(one, other) == common_prefix_length(other, one) == count


def test_common_prefixes_of_random_documents():
    generator = random.Random(0)
    for _ in range(300):
        one, other = (tuple(generator.choices((0, 1), (1, 9), k=generator.randint(0, 30))) for _ in range(2))
        expected = next(
            (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
        )
        assert common_prefix_length(one, other) == expected


def make_cache() -> Cache:
    cache = Cache(1, 2, 64, 1, 2, dtype=torch.float32, device=torch.device("cpu"))
    cache.keys[0].normal_()
    cache.values[0].normal_()
    return cache


def test_the_longest_common_beginning_is_found_and_one_token_is_left():
    cache, kept = make_cache(), KeptDocuments(100)
    one, other = tuple(range(30)), (*range(20), *range(50, 60))
    kept.add(one, cache, 0, 30)
    kept.add(other, cache, 1, 30)
    assert kept.tokens == 60
    found = kept.find((*range(25), 99, 98))
    assert found.length == 25
    assert_close(found.source.keys[0], cache.keys[0][0, :, :30], atol=0, rtol=0)
    assert kept.find((*range(20), *range(50, 60), 7)).length == 30
    assert kept.find(one).length == 29
    assert kept.find(tuple(range(LEAST_SHARED + 1))).length == LEAST_SHARED
    assert kept.find(tuple(range(LEAST_SHARED))) is None  # one of them has to be computed
    assert kept.find((*range(LEAST_SHARED - 1), 99, 98)) is None


def test_the_document_used_least_recently_goes_first_and_beginnings_give_way_to_what_continues_them():
    cache, kept = make_cache(), KeptDocuments(70)
    documents = [tuple(range(100 * number, 100 * number + 30)) for number in range(4)]
    kept.add(documents[0], cache, 0, 30)
    kept.add(documents[1], cache, 0, 30)
    assert kept.find((*documents[0], 1)).length == 30
    kept.add(documents[2], cache, 0, 30)
    assert kept.tokens == 60 and kept.find((*documents[1], 1)) is None and kept.find((*documents[0], 1)) is not None
    kept.add((*documents[0], 7, 8), cache, 1, 32)  # in place of its beginning
    assert kept.tokens == 62 and kept.find((*documents[0], 7, 8, 9)).length == 32
    kept.add(documents[0][:20], cache, 0, 20)  # known already, and used by that
    assert kept.tokens == 62
    kept.add(documents[3], cache, 0, 30)
    assert kept.find((*documents[2], 1)) is None and kept.find((*documents[0], 1)) is not None
    kept.add(tuple(range(900, 900 + LEAST_SHARED - 1)), cache, 0, LEAST_SHARED - 1)  # too short to be of use
    assert kept.tokens == 62


def test_of_a_document_that_is_too_long_the_first_tokens_are_kept():
    cache, kept, document = make_cache(), KeptDocuments(40), tuple(range(60))
    for _ in range(2):  # the second time it is known
        kept.add(document, cache, 0, 63)  # behind 3 virtual tokens
        assert kept.tokens == 40
        found = kept.find((*document, 7))
        assert found.length == 37
        assert_close(found.source.values[0], cache.values[0][0, :, :40], atol=0, rtol=0)
    few = KeptDocuments(LEAST_SHARED + 2)
    few.add(document, cache, 0, 63)
    assert few.tokens == 0


def test_a_dialogue_that_outgrows_what_is_kept_computes_what_is_behind_it(model):
    """70 of the 100 and more tokens of the last turns are kept."""
    assert converse(model, DecodingEngine(model, kept_tokens=70), turns=6) == [20, 6, 6, 6, 18, 35]

"""Layers with windows keep their window only, and decoding is that of the whole forward and of a cache that keeps all."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from alignment.generation import BeamConfig, DecodingEngine, DecodingRequest, SamplingConfig, beam_search
from alignment.models.build import build_language_model
from alignment.models.init_weights import initialize
from alignment.models.language_model import LanguageModel
from alignment.models.layers import AttentionSpec, RelativeBiasSpec
from alignment.models.layers.kv_cache import Cache
from alignment.ragged import Ragged

SHAPE = {
    "vocab_size": 61, "max_position_embeddings": 512, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 7,
}  # fmt: skip
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "mistral": SHAPE | {"model_type": "mistral"},
    "gemma2": SHAPE | {"model_type": "gemma2", "layer_types": ALTERNATING},
    "gemma3_text": SHAPE | {"model_type": "gemma3_text", "layer_types": ALTERNATING},
}
SIZES = (30, 1, 7, 8, 19, 3)


@pytest.fixture(scope="module", params=[*CONFIGS, "buckets"])
def model(request):
    torch.manual_seed(0)
    model = build_language_model(dict(CONFIGS.get(request.param, CONFIGS["mistral"]))).eval()
    if request.param == "buckets":  # of relative positions, in place of rotary angles
        attention = replace(model.spec.blocks[0].attention, rotary=None, position_bias=RelativeBiasSpec(8, 12))
        spec = replace(model.spec, blocks=tuple(replace(block, attention=attention) for block in model.spec.blocks))
        model = initialize(LanguageModel(spec.build(), model.head, model.config)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.15 * torch.randn_like(parameter)
    return model


@pytest.fixture
def keep_all(monkeypatch):
    """Called, layers keep all keys and mask those beyond their window."""
    return lambda: monkeypatch.setattr(AttentionSpec, "reach", None)


def texts(sizes=SIZES, more: int = 0) -> list[list[int]]:
    generator = random.Random(0)
    return [[generator.randrange(61) for _ in range(size + more)] for size in sizes]


def step(model, cache: Cache, documents: list[list[int]], lengths: list[int]) -> None:
    """Decode one more token of each document; the logits are those of the whole forward."""
    logits = model.decode(
        torch.tensor([document[length] for document, length in zip(documents, lengths, strict=True)]), cache
    )
    for row, (document, length) in enumerate(zip(documents, lengths, strict=True)):
        with torch.no_grad():
            whole = model(torch.tensor([document[: length + 1]])).logits[0, -1]
        assert_close(logits[row], whole, atol=2e-5, rtol=0)
        lengths[row] += 1


def test_decoding_beyond_the_window_equals_the_whole_forward(model):
    """Rows of all lengths, dropped, swapped, doubled, filled anew and copied on the way."""
    documents, lengths = texts(more=40), list(SIZES)
    cache = model.new_cache(6, 50)
    model.prefill(Ragged.build([text[:size] for text, size in zip(documents, lengths, strict=True)]), cache)
    for _ in range(3):
        step(model, cache, documents, lengths)
    for change, rows in (
        (cache.keep, [4, 1, 0, 3]),
        (cache.reorder, [1, 0, 1, 3, 2]),
        (cache.reorder, [2, 1, 0, 4, 3]),
    ):
        change(torch.tensor(rows))
        documents, lengths = [documents[row] for row in rows], [lengths[row] for row in rows]
        for _ in range(3):
            step(model, cache, documents, lengths)
    cache.reserve(7, 80)
    saved = cache.save(0, lengths[0])
    cache.load(5, saved)
    cache.copy(torch.tensor([3]), torch.tensor([6]), lengths[3])
    documents, lengths = (
        [documents[row] for row in (0, 1, 2, 3, 4, 0, 3)],
        [lengths[row] for row in (0, 1, 2, 3, 4, 0, 3)],
    )
    documents[1], lengths[1] = texts((60,))[0], 25
    model.prefill(Ragged.build([documents[1][:25]]), cache, torch.tensor([1]))
    for _ in range(9):
        step(model, cache, documents, lengths)


def test_a_prompt_read_in_chunks_goes_on_as_one_under_a_mask(model, keep_all):
    documents, found = texts((200, 20), more=9), []
    for change in (lambda: None, keep_all):
        change()
        cache = model.new_cache(2, 210)
        logits = [model.prefill(Ragged.build([text[:-9] for text in documents]), cache)]
        for step in range(9):
            logits.append(model.decode(torch.tensor([text[step - 9] for text in documents]), cache))
        found.append(torch.stack(logits))
    assert_close(*found, atol=2e-5, rtol=0)


def test_beams_are_those_of_a_cache_that_keeps_all(model, keep_all):
    search = [beam_search(model, texts(), BeamConfig(4, max_new_tokens=25), [5])]
    keep_all()
    search.append(beam_search(model, texts(), BeamConfig(4, max_new_tokens=25), [5]))
    assert search[0].token_ids == search[1].token_ids


def test_continuous_batches_are_those_of_a_cache_that_keeps_all(model, keep_all):
    """Prompts that come again wait as saved documents; finished rows are filled anew; the cache grows meanwhile."""
    prompts = texts() * 3
    settings = [SamplingConfig(9 + 4 * (number % 5), seed=number) for number in range(len(prompts))]

    def decoded() -> list[list[int]]:
        engine, found = DecodingEngine(model, max_rows=4), [[] for _ in prompts]
        numbers = {
            engine.add(DecodingRequest(prompt, each, number, stop_ids=[5])): number
            for number, (prompt, each) in enumerate(zip(prompts, settings, strict=True))
        }
        while engine.unfinished:
            for event in engine.step():
                found[numbers[event.request]].append(event.token)
        return found

    kept = decoded()
    keep_all()
    assert decoded() == kept


def test_a_layer_with_a_window_has_no_more_slots_than_the_window(model):
    def slots(capacity: int) -> list[int]:
        return [keys.shape[2] for keys in model.new_cache(2, capacity).keys]

    windows = [block.attention.window for block in model.spec.layers]
    assert 7 in windows and slots(5) == [5, 5, 5]
    for capacity in (8, 500):
        assert slots(capacity) == [window or capacity for window in windows]
    cache = model.new_cache(2, 5)
    cache.reserve(2, 500)
    assert [values.shape[2] for values in cache.values] == slots(500)

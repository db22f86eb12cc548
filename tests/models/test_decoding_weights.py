"""Weights of decoding: the same numbers from fewer kernels, with and without adapters, and everything back afterwards."""

from typing import Any

import pytest
import torch
from torch import nn

from alignment.adapters import DoRASpec, LoRASpec, attach
from alignment.generation import SamplingConfig, decode_responses
from alignment.models import decoding_weights as joining
from alignment.models.build import build_language_model
from alignment.models.decoding_weights import decoding_weights
from alignment.ragged import Ragged
from tests.kernels import Kernels, Waits, choose_as_on_a_gpu

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1]]
TOKENS = torch.tensor([1, 2, 3, 4])


def decoder(family: str = "llama", layers: int = 2, **changes: Any) -> Any:
    torch.manual_seed(0)
    model = build_language_model({"model_type": family, **SMALL, "num_hidden_layers": layers, **changes})
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


def with_lora(model: Any, spec: Any) -> Any:
    attach(model, spec)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model.eval()


@torch.no_grad()
def one_step(model: Any, mode: Any = None) -> torch.Tensor:
    """Logits of one decoding step behind the prompts, counted by a mode."""
    cache = model.new_cache(len(PROMPTS), 16)
    model.prefill(Ragged.build(PROMPTS), cache)
    if mode is None:
        return model.decode(TOKENS, cache)
    model.decode(TOKENS.flip(0), cache)  # autocast keeps its copies of weights from here on
    with mode:
        return model.decode(TOKENS, cache)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "olmo2", "phi3", "mixtral"])
@pytest.mark.parametrize("spec", [None, LoRASpec(rank=4), LoRASpec(rank=4, layers="query|down"), DoRASpec(rank=4)])
def test_a_step_gives_the_same_logits_and_every_module_is_back_afterwards(family, spec):
    model = decoder(family, **({"head_dim": 16} if family in ("qwen3", "gemma3_text") else {}))
    if spec is not None:
        with_lora(model, spec)
    modules = {name: type(module) for name, module in model.named_modules()}
    expected = one_step(model)
    with decoding_weights(model):
        joined = [module for module in model.modules() if getattr(module, "joined", None) is not None]
        torch.testing.assert_close(one_step(model), expected, rtol=1e-5, atol=1e-5)
    assert bool(joined) or isinstance(spec, DoRASpec)
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert all(getattr(module, "joined", None) is None for module in model.modules())
    torch.testing.assert_close(one_step(model), expected, rtol=0, atol=0)


def test_joined_layers_give_the_bits_of_separate_ones_on_a_cpu():
    model = decoder(intermediate_size=120)
    expected = one_step(model)
    with decoding_weights(model):
        assert torch.equal(one_step(model), expected)


def test_large_weights_are_copied_where_they_are_rounded_or_merged_anyway(monkeypatch):
    monkeypatch.setattr(joining, "SMALL", 0)
    model = decoder()
    with torch.autocast("cpu", torch.bfloat16), decoding_weights(model):
        assert model.trunk.blocks[0].attention.joined is None  # there is no GPU, or it has no room
    monkeypatch.setattr(joining, "fits_on_gpu", lambda device, size: True)
    with decoding_weights(model):
        assert not any(getattr(module, "joined", None) for module in model.modules())
    with torch.autocast("cpu", torch.bfloat16), decoding_weights(model):
        weight, _ = model.trunk.blocks[0].attention.joined
        assert weight.dtype == torch.bfloat16
    with_lora(model, LoRASpec(rank=4, layers="query"))
    with decoding_weights(model):
        assert model.trunk.blocks[0].attention.joined is not None
        assert model.trunk.blocks[0].feedforward.joined is None


def test_a_hooked_layer_keeps_its_hook():
    model, calls = decoder(), []
    model.trunk.blocks[0].attention.key.register_forward_hook(lambda *_: calls.append(1))
    with decoding_weights(model):
        one_step(model)
        assert model.trunk.blocks[0].attention.joined is None and model.trunk.blocks[1].attention.joined is not None
    assert len(calls) == 2


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16 weights"])
@pytest.mark.parametrize("spec", [None, LoRASpec(rank=4)], ids=["plain", "lora"])
def test_a_decoding_step_of_32_layers_starts_few_kernels(monkeypatch, precision, spec):
    model, kernels = decoder(layers=32), Kernels()
    if precision == "bf16 weights":
        model.to(torch.bfloat16)
    if spec is not None:
        with_lora(model, spec)
    choose_as_on_a_gpu(monkeypatch)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"), decoding_weights(model):
        one_step(model, kernels)
    assert kernels.total <= (700 if spec is None else 750), kernels.count.most_common()
    casts = kernels.count["_to_copy"]
    assert casts <= 70, kernels.count.most_common()  # one for each of the 65 norms


@pytest.mark.parametrize("steps", [8])
def test_decoding_reads_the_drawn_tokens_once_in_eight_steps(monkeypatch, steps):
    monkeypatch.setattr("alignment.generation.engine.CHECK_STEPS", steps)
    model, counts = decoder(), []
    for length in (16, 80):
        with Waits() as waits:
            found = sample_unread(model, length, monkeypatch)
        assert [len(ids) for ids in found.token_ids] == [length] * len(PROMPTS)
        counts.append(sum(waits.count.values()))
    assert (counts[1] - counts[0]) / 64 <= 0.2, waits.count


def sample_unread(model: Any, length: int, monkeypatch: Any) -> Any:
    """Responses of a length by an engine that reads what it has drawn as seldom as on a GPU."""
    from alignment.generation import engine

    class Engine(engine.DecodingEngine):
        def __init__(self, *arguments: Any, **options: Any):
            super().__init__(*arguments, **options)
            self._most_unseen = engine.CHECK_STEPS

    with monkeypatch.context() as patch:
        patch.setattr(engine, "DecodingEngine", Engine)
        return decode_responses(model, PROMPTS, SamplingConfig(length, 1.0), [])


def test_a_rollout_has_few_shapes_of_attention(monkeypatch):
    choose_as_on_a_gpu(monkeypatch)
    shapes = set()
    original = torch.nn.functional.scaled_dot_product_attention

    def noted(query: torch.Tensor, key: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        if query.shape[2] <= 2:  # of decoding: the queries that share a key head
            shapes.add((*query.shape, *key.shape))
        return original(query, key, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
    model = decoder(max_position_embeddings=512)
    prompts = [[1 + row % 90] * (1 + row % 40) for row in range(64)]
    sampled = decode_responses(model, prompts, SamplingConfig(256, 1.0), [3])
    assert max(map(len, sampled.token_ids)) == 256 and len({len(ids) for ids in sampled.token_ids}) > 10
    assert len(shapes) <= 10, sorted(shapes)

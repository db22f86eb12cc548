"""torch.compile: the same numbers as without it, and few compilations however many shapes a run has."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from alignment.errors import UserError
from alignment.generation import SamplingConfig, decode_responses
from alignment.models.build import build_language_model
from alignment.ragged import Ragged

LLAMA = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture
def graphs() -> Iterator[list[int]]:
    """One entry for each graph that torch compiles within the test."""
    built: list[int] = []
    torch._dynamo.reset()
    yield built
    torch._dynamo.reset()


@pytest.fixture
def counted(graphs, monkeypatch):
    """Makes torch.compile count its graphs; they run as Python, since the compiler itself is torch's."""

    def count(graph, inputs):
        graphs.append(len(inputs))
        return graph.forward

    compiled_call = torch.nn.Module.compile
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self, **options: compiled_call(self, backend=count, **options)
    )


@pytest.fixture
def model_pair(counted):
    """A model and its compiled copy."""
    torch.manual_seed(0)
    return with_compiled_copy(build_language_model(LLAMA))


def with_compiled_copy(model: Any) -> tuple[Any, Any]:
    compiled = copy.deepcopy(model)
    compiled.compile_blocks()
    return model, compiled


def random_batch(draw: random.Random) -> Ragged:
    return Ragged.build([[draw.randrange(64) for _ in range(draw.randint(2, 60))] for _ in range(draw.randint(2, 7))])


def test_losses_and_gradients_are_the_same_and_shapes_do_not_recompile(model_pair, graphs):
    model, compiled = model_pair
    draw = random.Random(0)
    for number in range(12):
        batch = random_batch(draw)
        results = []
        for each in (model, compiled):
            each.zero_grad()
            total = each(batch=batch).log_probs.sum()
            total.backward()
            results.append([total, *(parameter.grad for parameter in each.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=4e-6)  # AVX2: 2.1e-6
        if number == 1:
            first = len(graphs)
    assert 0 < first <= 8  # before and after attention, and not once for each of the layers
    assert len(graphs) == first


def test_decoding_gives_the_same_tokens_and_steps_do_not_recompile(model_pair, graphs):
    model, compiled = model_pair
    draw = random.Random(1)
    counts = []
    for rows in (3, 5, 4):
        prompts = [[draw.randrange(64) for _ in range(draw.randint(2, 30))] for _ in range(rows)]
        plain, fast = (decode_responses(each, prompts, SamplingConfig(24, 1.0), [63]) for each in (model, compiled))
        assert plain.token_ids == fast.token_ids
        counts.append(len(graphs))
    assert counts[-1] == counts[1] <= 12


def test_a_machine_without_a_compiler_is_told_so(monkeypatch):
    from torch._inductor import cpp_builder
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler()

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    with pytest.raises(UserError, match=r"training\.compile: there is no C\+\+ compiler"):
        build_language_model(LLAMA).compile_blocks()


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"gradient_checkpointing": True}, {"precision": "bf16"}], ids=str)
def test_an_sft_run_learns_the_same_with_the_real_compiler(make_stage, checkpoints, read_metrics, tmp_path, changes):
    import dataclasses

    losses = []
    for name, compile in (("plain", False), ("compiled", True)):
        torch._dynamo.reset()
        run, config = make_stage("sft", checkpoints["llama"], tmp_path / name)
        training = dataclasses.replace(config.training, compile=compile, **changes)
        run(dataclasses.replace(config, training=training))
        losses.append([line["loss"] for line in read_metrics(tmp_path / name)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-2 if changes.get("precision") else 1e-4)

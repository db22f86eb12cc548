"""Decoding by CUDA graphs on a CPU: a tape of operations on fixed memory stands in for a graph, as one is captured on a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from alignment.adapters import LoRASpec, attach
from alignment.errors import UserError
from alignment.generation import DecodingEngine, DecodingRequest, SamplingConfig, cuda_graphs, decode_responses
from alignment.generation.cuda_graphs import GraphedDecoder
from alignment.models.build import build_language_model, build_model
from alignment.models.layers.layer_contexts import decoding_width
from alignment.ragged import Ragged
from tests.kernels import choose_as_on_a_gpu

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
PROMPTS = [[1 + (7 * row + place) % 90 for place in range(1 + (row * 11) % 50)] for row in range(14)]
STOPS = [3, 4]
FORBIDDEN = {
    "_local_scalar_dense",
    "nonzero",
    "masked_select",
    "equal",
    "bincount",
    "_unique2",
}  # they wait for the GPU


class Lent:
    """A tensor that a graph reads where it lies and does not keep alive."""

    def __init__(self, tensor: Tensor):
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._type, self._place = tensor.dtype, (tensor.storage_offset(), tensor.size(), tensor.stride())

    def read(self) -> Tensor:
        """The tensor, which must not have been given back."""
        assert not self._storage.expired(), "a graph reads memory that was given back"
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return torch.empty(0, dtype=self._type).set_(storage, *self._place)  # pyright: ignore[reportArgumentType]


class Tape(TorchDispatchMode):
    """The operations of a step, each with its arguments and results, where they lie; only results are kept alive."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any]] = []
        self._own: set[int] = set()  # addresses of the results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and note it."""
        name = func.name().split("::")[1].split(".")[0]
        of_a_list = name == "lift_fresh" and args[0].dim() > 0  # a single number goes along with the kernel
        assert name not in FORBIDDEN and not of_a_list, f"{name} cannot be captured"
        made, given = func(*args, **(kwargs or {})), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        addresses = set() if name == "lift_fresh" else {x.untyped_storage().data_ptr() for x in given}
        self._own |= {x.untyped_storage().data_ptr() for x in tree_leaves(made) if isinstance(x, Tensor)} - addresses
        lent = tree_map_only(
            Tensor, lambda x: x if x.untyped_storage().data_ptr() in self._own else Lent(x), (args, kwargs)
        )
        is_lent = any(isinstance(x, Lent) for x in tree_leaves(lent))
        if not func.is_view:
            self.operations.append((func, lent, None if is_lent and made is given[0] else made))
        return made

    def replay(self) -> None:
        """Compute every operation again, from and into the memory of the first time."""
        for func, lent, made in self.operations:
            args, kwargs = tree_map_only(Lent, Lent.read, lent)
            for old, new in zip(tree_leaves(made), tree_leaves(func(*args, **(kwargs or {}))), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


class ClaimsAGPU(Tensor):
    """A CPU's tensor that says it lies on a GPU."""

    is_cuda = True  # pyright: ignore[reportAssignmentType]


@pytest.fixture
def captures(monkeypatch) -> list[Tape]:
    """The tapes of all captured steps; models choose as on a GPU from now on."""
    tapes: list[Tape] = []

    def capture(step: Callable[[], None], pool: None) -> tuple[Callable[[], None], None]:
        with Tape() as tape:
            step()
        tapes.append(tape)
        return tape.replay, None

    monkeypatch.setattr(cuda_graphs, "capture", capture)
    choose_as_on_a_gpu(monkeypatch)
    return tapes


def decoder(family: str = "llama", **changes: Any) -> Any:
    """A decoder with logits far from flat: which token is drawn does not hang on rounding."""
    torch.manual_seed(0)
    model = build_language_model({"model_type": family, **SMALL, **changes}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return claiming_a_gpu(model)


def claiming_a_gpu(model: Any) -> Any:
    model.parameters = lambda: iter([torch.zeros(1).as_subclass(ClaimsAGPU)])
    return model


def assert_same(found: Any, expected: Any) -> None:
    assert found.token_ids == expected.token_ids and found.ended == expected.ended
    for one, other in zip(found.log_probs, expected.log_probs, strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_responses_are_those_of_steps_one_by_one(captures, family):
    changes = {"qwen3": {"head_dim": 16}, "gemma3_text": {"head_dim": 16, "sliding_window": 16}}
    model = decoder(family, **changes.get(family, {"sliding_window": 16} if family == "mistral" else {}))
    expected = decode_responses(model, PROMPTS, SamplingConfig(110, 1.0), STOPS, batch_size=6)
    found = decode_responses(model, PROMPTS, SamplingConfig(110, 1.0), STOPS, batch_size=6, cuda_graphs=True)
    lengths = list(map(len, found.token_ids))
    # Rows enter while others run, and the last rows are fewer, over two or three widths of 64.
    assert max(lengths) >= 80 and len(set(lengths)) > 3 and any(found.ended)
    assert_same(found, expected)
    assert 4 <= len(captures) <= 3 * 3  # rows: six, three or fewer, one; widths: 64, 128, 192


def test_an_adapted_bfloat16_model_responds_as_in_single_steps(captures):
    model = decoder()
    attach(model, LoRASpec(rank=4))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    claiming_a_gpu(model.eval())
    with torch.autocast("cpu", torch.bfloat16):
        expected = decode_responses(model, PROMPTS[:6], SamplingConfig(20, 1.0), STOPS, batch_size=4)
        found = decode_responses(model, PROMPTS[:6], SamplingConfig(20, 1.0), STOPS, batch_size=4, cuda_graphs=True)
    assert captures
    assert_same(found, expected)


def test_a_second_run_of_an_engine_reads_the_weights_of_then(captures):
    drawn = []
    for graphs in (False, True):
        model = decoder()
        engine = DecodingEngine(model, max_rows=4, cuda_graphs=graphs)
        for _ in range(2):
            numbers = [engine.add(DecodingRequest(PROMPTS[row], SamplingConfig(12), row)) for row in range(4)]
            rows = engine.run()
            drawn.append([rows[number].tokens for number in numbers])
            with torch.no_grad():
                for block in model.trunk.blocks:
                    block.attention.query.weight.neg_()
                    block.feedforward.down.weight.neg_()
    assert captures and drawn[:2] == drawn[2:] and drawn[0] != drawn[1]


@torch.no_grad()
def test_rows_may_be_put_in_another_order_between_steps(captures):
    model = decoder()
    caches = [model.new_cache(3, 200) for _ in range(2)]
    decode = [model.decode, GraphedDecoder(model).decode]
    for cache in caches:
        model.prefill(Ragged.build(PROMPTS[2:5]), cache)
    for step in range(40):
        tokens = torch.tensor([5 + step, 6, 7 + step % 3])
        one, other = (function(tokens, cache) for function, cache in zip(decode, caches, strict=True))
        torch.testing.assert_close(other, one, rtol=0, atol=1e-6)
        assert torch.equal(caches[0].lengths, caches[1].lengths) and caches[0].longest == caches[1].longest
        if step in (7, 20):
            for cache in caches:
                cache.reorder(torch.tensor([2, 0, 2]))
    assert len(captures) == 2  # of the two widths


@torch.no_grad()
def test_a_graph_holds_the_table_of_angles_that_it_reads(captures):
    model = decoder()
    graphs, tokens = GraphedDecoder(model), torch.tensor([5, 6, 7])
    caches = [model.new_cache(3, 60) for _ in range(2)]
    for cache in caches:
        model.prefill(Ragged.build(PROMPTS[:3]), cache)
    for step in range(6):
        if step == 3:  # the table grows with a longer document
            model.prefill(Ragged.build([[1] * 100]), model.new_cache(1, 120))
        found, expected = graphs.decode(tokens, caches[0]), model.decode(tokens, caches[1])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert len(captures) == 1


@torch.no_grad()
def test_a_larger_cache_is_captured_anew(captures):
    model = decoder()
    cache, plain = model.new_cache(3, 100), model.new_cache(3, 100)
    graphs, tokens = GraphedDecoder(model), torch.tensor([5, 6, 7])
    for each in (cache, plain):
        model.prefill(Ragged.build(PROMPTS[:3]), each)
    for room in (100, 220, 220):
        for each in (cache, plain):
            each.reserve(3, room)
        for _ in range(4):
            found, expected = graphs.decode(tokens, cache), model.decode(tokens, plain)
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert len(captures) == 2 and decoding_width(cache) == 64


@pytest.mark.parametrize(
    "config, why",
    [
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, "a mixture of experts"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "depend on a document's length"),
        (
            {
                "model_type": "phi3",
                "original_max_position_embeddings": 64,
                "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            },
            "depend on a document's length",
        ),
    ],
)
def test_models_whose_steps_depend_on_their_data_are_refused(config, why):
    model = claiming_a_gpu(build_language_model({"model_type": "llama", **SMALL, "pad_token_id": 0, **config}))
    with pytest.raises(UserError, match=f"^cuda_graphs: .*{why}.*; set it to false$"):
        DecodingEngine(model, cuda_graphs=True)


def test_what_cannot_be_captured_is_refused():
    def refuse(model: Any, why: str) -> None:
        with pytest.raises(UserError, match=f"^cuda_graphs: {why}; set it to false$"):
            decode_responses(model, PROMPTS, SamplingConfig(4), [], cuda_graphs=True)

    model = decoder()
    del model.parameters
    refuse(model, "there is no GPU")
    for name, value in (("row_adapters", object()), ("trunk.compiled", True)):
        model = decoder()
        owner, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(owner), attribute, value)
        refuse(model, "an adapter for each row, and compiled blocks, cannot be captured")
    sizes = {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    refuse(
        claiming_a_gpu(build_model({"model_type": "t5", **sizes})),
        "only decoders that run as our class can be captured",
    )

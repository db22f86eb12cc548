"""Windows in chunks equal the masked form, forward and backward, and make nothing of the length squared."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from alignment.models.build import build_language_model
from alignment.models.layers import (
    AlibiSpec,
    AttentionSpec,
    BlockSpec,
    PlainFeedForwardSpec,
    RelativeBiasSpec,
    RMSNormSpec,
)
from alignment.models.layers.attention import AttentionFn
from alignment.models.layers.layer_contexts import PositionModules, padded_attentions
from alignment.models.layers.padded_layout import pad_layout, shared_layouts
from alignment.models.layers.windowed import windowed_attentions
from alignment.ragged import Ragged

from .test_shared_prompts import two_forms

PLAIN = AttentionSpec(4, 4, 8, 0.3, False, False, window=9)
GROUPED = replace(PLAIN, key_value_heads=2)
SPECS = {
    "causal": PLAIN,
    "of both sides": replace(GROUPED, causal=False),
    "one token": replace(GROUPED, window=1),
    "wider than a chunk's least": replace(GROUPED, window=45),
    "softcap": replace(GROUPED, softcap=1.5),
    "ALiBi": replace(GROUPED, position_bias=AlibiSpec()),
    "buckets of both sides": replace(PLAIN, causal=False, position_bias=RelativeBiasSpec(8, 12)),
}
LENGTHS = (300, 7, 1, 193, 64, 40)


def documents(lengths=LENGTHS) -> Ragged:
    return Ragged.build([[1] * length for length in lengths])


def two_ways(spec: AttentionSpec, batch: Ragged, prefix: Tensor | None) -> tuple[list[AttentionFn], Any]:
    """One layer's attention in chunks and under a mask, and the position bias of both."""
    torch.manual_seed(0)
    bias = None if spec.position_bias is None else spec.position_bias.build(spec.heads, spec.causal).double()
    if bias is not None:
        for weight in bias.parameters():
            torch.nn.init.normal_(weight)
        bias.register_forward_hook(lambda *call: call[-1].double())  # ALiBi's are fp32, and the kernel takes one type
    layers = [BlockSpec(spec, PlainFeedForwardSpec(1, "relu", False), RMSNormSpec(1e-6))]
    queries, keys = (pad_layout(batch.lengths, 4),) * 2 if batch.shared is None else shared_layouts(batch, 4)
    masks = PositionModules({}, bias).masks(
        queries, keys, 0 if prefix is None else prefix.shape[2], torch.device("cpu")
    )
    [chunks] = windowed_attentions([spec], batch, bias, prefix)
    assert chunks is not None
    return [chunks, *padded_attentions(layers, queries, keys, masks, prefix)], bias


def heads(spec: AttentionSpec, tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = (spec.heads, spec.key_value_heads, spec.key_value_heads)
    return [torch.randn(tokens, count, 8, dtype=torch.double, generator=generator) for count in counts]


def assert_equal_ways(spec: AttentionSpec, batch: Ragged, prefix_tokens: int = 0) -> None:
    parts = [x.requires_grad_() for x in heads(spec, len(batch.tokens))]
    prefix = torch.stack(heads(spec, prefix_tokens, seed=1)[1:])[None].requires_grad_() if prefix_tokens else None
    ways, bias = two_ways(spec, batch, prefix)
    leaves = [*parts, *([] if prefix is None else [prefix]), *([] if bias is None else bias.parameters())]
    found = []
    for attend in ways:
        mixed = attend(*parts, 0.0)
        found.append((mixed, *torch.autograd.grad((mixed * torch.arange(8).cos()).sum(), leaves, retain_graph=True)))
    for chunked, masked in zip(*found, strict=True):
        assert_close(chunked, masked, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", SPECS)
def test_documents_and_gradients_equal_the_masked_form(name):
    assert_equal_ways(SPECS[name], documents())


@pytest.mark.parametrize("seed", range(12))
def test_random_lengths_and_windows_equal_the_masked_form(seed):
    draw = random.Random(seed)
    lengths = [draw.randint(1, 90) for _ in range(draw.randint(0, 4))] + [draw.randint(257, 330)]
    spec = replace(
        PLAIN, window=draw.randint(1, 64), causal=draw.random() < 0.5, key_value_heads=draw.choice([1, 2, 4]),
        softcap=draw.choice([None, 2.0]), position_bias=draw.choice([None, RelativeBiasSpec(8, 40)]),
    )  # fmt: skip
    assert_equal_ways(spec, documents(draw.sample(lengths, len(lengths))), draw.choice([0, 0, 3, 70]))


@pytest.mark.parametrize("name", ["causal", "of both sides", "ALiBi", "softcap", "one token"])
def test_a_prefix_is_read_within_the_window_alone(name):
    assert_equal_ways(SPECS[name], documents(), prefix_tokens=11)


@pytest.mark.parametrize("name", ["causal", "softcap", "ALiBi", "one token", "wider than a chunk's least"])
@pytest.mark.parametrize("prefix_tokens", [0, 11])
def test_shared_prompts_equal_the_masked_form(name, prefix_tokens):
    _, batch = two_forms([(250, (20, 7, 90)), (5, (3, 4)), (0, (9, 14)), (30, (40, 2, 1)), (12, (4,))])
    assert batch.shared is not None
    assert_equal_ways(SPECS[name], batch, prefix_tokens)


def test_documents_of_few_windows_keep_the_mask():
    specs = [replace(GROUPED, window=window) for window in (None, 2, 32, 33, 48)]
    for longest, expected in (
        (128, [True, True, True, True, True]),
        (129, [True, False, False, True, True]),
        (193, [True, False, False, False, False]),
    ):
        masked = [attend is None for attend in windowed_attentions(specs, documents((longest, 5)), None)]
        assert masked == expected
    falcon = replace(GROUPED, position_bias=AlibiSpec(bfloat16=True))  # its biases count from the first key of all
    assert windowed_attentions([falcon], documents(), None) == [None] and falcon.reach is None


def test_dropout_drops_weights_and_keeps_their_mean():
    [attend] = windowed_attentions([PLAIN], documents(), None)
    assert attend is not None
    torch.manual_seed(0)
    query, key, _ = heads(PLAIN, sum(LENGTHS))
    sums = attend(query, key, torch.ones_like(key), 0.5)[..., 0]  # of each query's weights
    assert (sums != 1).float().mean() > 0.99 and sums.mean() == pytest.approx(1, abs=0.05)


def test_bfloat16_differs_from_float32_by_its_rounding():
    [attend] = windowed_attentions([GROUPED], documents(), None)
    assert attend is not None
    parts = [x.float() for x in heads(GROUPED, sum(LENGTHS))]
    low = attend(*(x.bfloat16() for x in parts), 0.0)
    assert low.dtype == torch.bfloat16
    assert_close(low.float(), attend(*parts, 0.0), atol=0.02, rtol=0.02)


class LargestTensor(TorchDispatchMode):
    """Notes the numbers in the largest tensor that any operation returns."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return found


@pytest.mark.parametrize("name", ["mistral", "gemma2", "modernbert"])  # plain, softcap, both sides
def test_no_tensor_grows_faster_than_the_document(name):
    shape = {
        "vocab_size": 32, "max_position_embeddings": 4096, "hidden_size": 32, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 4,
    }  # fmt: skip
    decoder, layers = {"sliding_window": 16, "num_key_value_heads": 2, "head_dim": 8}, ["sliding_attention"] * 2
    more = {
        "mistral": decoder,
        "gemma2": decoder | {"layer_types": layers},
        "modernbert": {"local_attention": 32, "layer_types": layers},
    }[name]
    model = build_language_model({"model_type": name, **shape, **more}).train()
    largest = []
    for length in (1024, 2048):
        with LargestTensor() as tensors:
            model(batch=Ragged.build([[3] * length])).log_probs.sum().backward()
        largest.append(tensors.numbers)
    assert largest[1] <= 2.1 * largest[0] and largest[1] < 2048**2 / 4

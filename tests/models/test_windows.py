"""Windowed and soft-capped attention against loops over positions: documents, prefixes, gradients, cache steps."""

import math

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from alignment.models.layers import AttentionSpec, BlockSpec, PlainFeedForwardSpec, RMSNormSpec
from alignment.models.layers.attention import AttentionFn
from alignment.models.layers.kv_cache import Cache
from alignment.models.layers.layer_contexts import PositionModules, decoding_masks, padded_attentions
from alignment.models.layers.padded_layout import pad_layout
from alignment.models.layers.sdpa import cached_attention, filling_attention
from alignment.ragged import Ragged

LENGTHS = (40, 7, 1, 33, 40, 12)
BATCH = Ragged.build([[0] * length for length in LENGTHS])
POSITION_MODULES = PositionModules({}, None)
HEADS, WIDTH = 4, 6
SHAPES = [(None, None), (1, None), (5, None), (64, None), (None, 1.5), (5, 1.5)]  # window, softcap


def attention(key_heads: int = 2, *, window: int | None, softcap: float | None, causal: bool = True) -> AttentionSpec:
    return AttentionSpec(HEADS, key_heads, WIDTH, 0.7, False, False, causal=causal, window=window, softcap=softcap)


def layers_of(*specs: AttentionSpec) -> list[BlockSpec]:
    return [BlockSpec(spec, PlainFeedForwardSpec(1, "relu", False), RMSNormSpec(1e-6)) for spec in specs]


def random_heads(spec: AttentionSpec, tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    counts = (spec.heads, spec.key_value_heads, spec.key_value_heads)
    return [torch.randn(tokens, heads, spec.head_dim, dtype=torch.double, generator=generator) for heads in counts]


def one_by_one(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    """Attention of one document, score by score; queries are its last positions. [T, H, K], [S, KV, K] -> [T, H, K]."""
    offset, mixed = len(key) - len(query), torch.zeros_like(query)
    for row in range(len(query)):
        place = row + offset
        for head in range(spec.heads):
            shared = head // (spec.heads // spec.key_value_heads)
            weights, total = {}, 0.0
            for other in range(len(key)):
                apart = place - other
                if (spec.causal and apart < 0) or (spec.window is not None and abs(apart) >= spec.window):
                    continue
                score = spec.scale * float(query[row, head] @ key[other, shared])
                if spec.softcap is not None:
                    score = spec.softcap * math.tanh(score / spec.softcap)
                weights[other] = math.exp(score)
                total += weights[other]
            for other, weight in weights.items():
                mixed[row, head] += weight / total * value[other, shared]
    return mixed


def document_by_document(query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
    pieces = zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True)
    return torch.cat([one_by_one(q, k, v, spec) for q, k, v in pieces])


def attentions(*specs: AttentionSpec, prefix: Tensor | None = None, lengths=LENGTHS) -> list[AttentionFn]:
    layout = pad_layout(lengths, HEADS)
    masks = POSITION_MODULES.masks(layout, layout, 0 if prefix is None else prefix.shape[2], torch.device("cpu"))
    return padded_attentions(layers_of(*specs), layout, layout, masks, prefix)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "softcap"), SHAPES)
def test_documents_equal_the_loop(window, softcap, causal):
    spec = attention(window=window, softcap=softcap, causal=causal)
    query, key, value = random_heads(spec, sum(LENGTHS))
    [attend] = attentions(spec)
    assert_close(attend(query, key, value, 0.0), document_by_document(query, key, value, spec))


def test_layers_of_one_trunk_keep_their_own_windows():
    specs = [attention(window=window, softcap=None) for window in (5, None, 2, 5)]
    query, key, value = random_heads(specs[0], sum(LENGTHS))
    for spec, attend in zip(specs, attentions(*specs), strict=True):
        assert_close(attend(query, key, value, 0.0), document_by_document(query, key, value, spec))


@pytest.mark.parametrize(("window", "softcap"), SHAPES)
def test_a_prefix_is_the_positions_before_the_first_token(window, softcap):
    spec = attention(window=window, softcap=softcap)
    query, key, value = random_heads(spec, sum(LENGTHS))
    prefix = torch.stack(random_heads(spec, 3, seed=1)[1:])[None]  # [1 layer, 2, P, KV, K]
    [attend] = attentions(spec, prefix=prefix)
    pieces = zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True)
    expected = [one_by_one(q, torch.cat([prefix[0, 0], k]), torch.cat([prefix[0, 1], v]), spec) for q, k, v in pieces]
    assert_close(attend(query, key, value, 0.0), torch.cat(expected))


@pytest.mark.parametrize(("window", "softcap"), SHAPES)
def test_gradients_are_those_of_small_differences(window, softcap):
    lengths = (4, 1, 9)
    spec = attention(window=None if window is None else min(window, 3), softcap=softcap)
    [attend] = attentions(spec, lengths=lengths)
    inputs = [x.requires_grad_() for x in random_heads(spec, sum(lengths))]
    assert torch.autograd.gradcheck(lambda q, k, v: attend(q, k, v, 0.0), inputs)


@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize(("window", "softcap"), SHAPES)
def test_cache_steps_equal_the_loop(window, softcap, key_heads):
    steps, spec = 9, attention(key_heads, window=window, softcap=softcap)
    query, key, value = random_heads(spec, sum(LENGTHS))
    kept = random_heads(spec, steps * len(LENGTHS), seed=1)
    new = [x.unflatten(0, (steps, len(LENGTHS))) for x in kept]
    cache = Cache(
        1, len(LENGTHS), max(LENGTHS) + steps, key_heads, WIDTH,
        dtype=torch.double, device=torch.device("cpu"), windows=[window],
    )  # fmt: skip
    rows = torch.arange(len(LENGTHS))
    sizes = torch.tensor(LENGTHS)
    [attend] = attentions(spec)
    [places] = cache.places(rows.repeat_interleave(sizes), BATCH.positions, LENGTHS)
    filling_attention(cache, 0, places, attend)(query, key, value, 0.0)
    documents = [list(x.split(LENGTHS)) for x in (key, value)]
    for step in range(steps):
        positions = sizes + step
        width = max(LENGTHS) + step + 1
        [mask] = decoding_masks(layers_of(spec), POSITION_MODULES, positions, width, slots=cache.slots)
        [places] = cache.places(rows, positions)
        attend = filling_attention(cache, 0, places, cached_attention(cache, 0, spec, mask))
        mixed = attend(*(x[step] for x in new), 0.0)
        for row in range(len(LENGTHS)):
            for stored, x in zip(documents, new[1:], strict=True):
                stored[row] = torch.cat([stored[row], x[step, row : row + 1]])
            expected = one_by_one(new[0][step, row : row + 1], documents[0][row], documents[1][row], spec)
            assert_close(mixed[row : row + 1], expected)

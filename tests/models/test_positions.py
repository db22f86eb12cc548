"""Positions that are added: vectors by the paper, ALiBi and T5's buckets by exact integers, the paper's list, transformers."""

import pytest
import torch
from torch.testing import assert_close
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.t5.modeling_t5 import T5Attention

from alignment.models.layers.positions import (
    Alibi,
    BFloat16Alibi,
    LearnedPositions,
    RelativeBias,
    SinusoidalPositions,
    alibi_slopes,
    relative_buckets,
)


def relative_positions(queries: int, keys: int) -> torch.Tensor:
    """Key position minus query position; the last query has the position of the last key."""
    return torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]


def test_slopes_of_eight_heads_are_the_papers():
    assert alibi_slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


def test_slopes_of_six_heads_take_every_second_of_eight():
    # Press et al.'s own code: those of 4 heads, then the first, third ... of 8 heads.
    assert alibi_slopes(6) == [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 12, 71, 112])
def test_slopes_are_blooms(heads):
    at_place_one = bloom_alibi(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    assert_close(torch.tensor(alibi_slopes(heads)), at_place_one)


def test_alibi_lowers_scores_by_slope_times_distance():
    bias = Alibi(2, scale=3.0)(relative_positions(2, 3))  # slopes 1/16, 1/256; queries at places 1 and 2
    assert_close(bias[0], -3 / 16 * torch.tensor([[1.0, 0, 1], [2, 1, 0]]))
    assert_close(bias[1], -3 / 256 * torch.tensor([[1.0, 0, 1], [2, 1, 0]]))


@pytest.mark.parametrize("heads", [4, 12])
def test_rounded_alibi_is_falcons(heads):
    expected = falcon_alibi(torch.ones(1, 700, dtype=torch.long), heads, torch.float32) / 8**0.5
    assert_close(BFloat16Alibi(heads, 8**-0.5)(relative_positions(1, 700)), expected.view(heads, 1, 700))


def test_rounded_alibi_rounds_by_hand():
    # bfloat16 has 8 bits: 257 becomes 256, half of it 128. The slope of head 0 of 8 is 1/2.
    assert BFloat16Alibi(8)(relative_positions(1, 258))[0, 0, -1] == 128.0


def bucket_by_integers(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """The same from whole numbers alone: (d / exact)^n >= (max / exact)^k says that step k has begun."""
    offset = 0
    if bidirectional:
        buckets //= 2
        offset, distance = (buckets, distance) if distance > 0 else (0, -distance)
    else:
        distance = max(0, -distance)
    exact = buckets // 2
    if distance < exact:
        return offset + distance
    steps = buckets - exact
    reached = [k for k in range(steps) if distance**steps * exact**k >= max_distance**k * exact**steps]
    return offset + exact + max(reached)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 50), (8, 20)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets(buckets, max_distance, bidirectional):
    apart = torch.arange(-300, 301)
    ours = relative_buckets(apart, buckets, max_distance, bidirectional)
    theirs = T5Attention._relative_position_bucket(apart, bidirectional, buckets, max_distance)
    assert torch.equal(ours, theirs)
    exact = [bucket_by_integers(d, buckets, max_distance, bidirectional) for d in apart.tolist()]
    # A logarithm in fp32 may fall short of a step that begins at this very distance; there it is one bucket less.
    short = [d for d, a, b in zip(apart.tolist(), ours.tolist(), exact, strict=True) if a != b]
    assert all(ours[d + 300] == exact[d + 300] - 1 for d in short)
    assert len(short) <= 4


def test_relative_bias_is_trained_by_all_relative_positions_of_a_bucket():
    module = RelativeBias(4, 8, heads=1, bidirectional=False)
    torch.nn.init.zeros_(module.weight)
    module(relative_positions(3, 3)).sum().backward()
    # of 9 pairs: 3 at distance 0 and 3 to the right (bucket 0), 2 at distance 1, 1 at distance 2
    assert module.weight.grad is not None
    assert module.weight.grad.flatten().tolist() == [6.0, 2.0, 1.0, 0.0]


def test_learned_positions_start_at_the_row_they_are_told():
    module = LearnedPositions(4, 3, first=2)
    assert module.weight.shape == (6, 3)
    with torch.no_grad():
        module.weight.copy_(torch.arange(6.0)[:, None].expand(6, 3))
    assert module(torch.tensor([0, 3]))[:, 0].tolist() == [2.0, 5.0]


def test_sinusoids_are_those_of_the_paper():
    # D = 4: sin(p), cos(p), sin(p / 100), cos(p / 100)
    place = torch.tensor(7.0)
    expected = torch.stack([place.sin(), place.cos(), (place / 100).sin(), (place / 100).cos()])
    assert_close(SinusoidalPositions(4)(torch.tensor([7]))[0], expected)

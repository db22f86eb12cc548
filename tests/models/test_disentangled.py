"""DeBERTa's attention and convolution against loops over tokens; its classes of distances by hand."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from alignment.models.layers import DisentangledSpec
from alignment.models.layers.attention import AttentionContext
from alignment.models.layers.disentangled import Convolution, DisentangledAttention, relative_classes, relative_rows
from alignment.models.layers.padded_layout import pad_layout

BOTH = DisentangledSpec(2, 4, 8, 32, True, True, shared_projection=True)
WIDTH, LENGTHS = 8, (21, 1, 34, 5)


def no_attention(*_: object) -> Tensor:
    raise AssertionError("this attention looks by itself")


def sight(relative: Tensor) -> AttentionContext:
    return AttentionContext(no_attention, layout=pad_layout(LENGTHS, BOTH.heads), relative=relative)


def drawn(spec: DisentangledSpec) -> tuple[DisentangledAttention, Tensor, Tensor]:
    torch.manual_seed(0)
    rows = 2 * (spec.buckets or spec.max_distance)
    return DisentangledAttention(spec, WIDTH), torch.randn(sum(LENGTHS), WIDTH), torch.randn(rows, WIDTH)


def naive(layer: DisentangledAttention, x: Tensor, relative: Tensor) -> Tensor:
    """The formula of the docstring, one document, one head and one pair of tokens at a time."""
    spec = layer.spec
    shared = spec.shared_projection
    span, terms = len(relative) // 2, 1 + spec.content_to_position + spec.position_to_content
    mixed = torch.zeros(len(x), spec.heads * spec.head_dim)
    for head in range(spec.heads):
        own = slice(head * spec.head_dim, (head + 1) * spec.head_dim)
        q, k, v = layer.query(x)[:, own], layer.key(x)[:, own], layer.value(x)[:, own]
        scores = torch.zeros(len(x), len(x))
        for i in range(len(x)):
            for j in range(len(x)):
                place = torch.tensor(i - j)
                if spec.buckets:
                    place = relative_classes(place, spec.buckets, spec.max_distance)
                row = relative[min(max(int(place) + span, 0), 2 * span - 1)]
                total = q[i] @ k[j]
                if spec.content_to_position:
                    total = total + q[i] @ (layer.key if shared else layer.position_key)(row)[own]
                if spec.position_to_content:
                    total = total + k[j] @ (layer.query if shared else layer.position_query)(row)[own]
                scores[i, j] = total / (spec.head_dim * terms) ** 0.5
        mixed[:, own] = scores.softmax(-1) @ v
    return layer.output(mixed)


@pytest.mark.parametrize(
    "spec",
    [
        BOTH,
        replace(BOTH, shared_projection=False),
        replace(BOTH, content_to_position=False),
        replace(BOTH, position_to_content=False, shared_projection=False),
        replace(BOTH, buckets=0, max_distance=16),  # distances beyond 16 share the outermost rows
    ],
    ids=["both", "own projections", "position to content", "content to position", "no buckets"],
)
@torch.no_grad()
def test_attention_equals_a_loop_over_pairs_of_tokens(spec):
    layer, x, relative = drawn(spec)
    expected = torch.cat([naive(layer, document, relative) for document in x.split(LENGTHS)])
    assert_close(layer(x, sight(relative)), expected, atol=1e-5, rtol=1e-5)


def test_dropout_falls_on_the_vectors_of_distances_in_training_only():
    layer, x, relative = drawn(replace(BOTH, relative_dropout=0.5))
    assert_close(layer.eval()(x, sight(relative)), layer(x, sight(relative)))
    assert not torch.equal(layer.train()(x, sight(relative)), layer(x, sight(relative)))


def test_attention_without_a_term_of_distances_is_refused():
    with pytest.raises(ValueError, match="plain attention"):
        DisentangledAttention(replace(BOTH, content_to_position=False, position_to_content=False), WIDTH)


def test_classes_are_exact_near_by_and_logarithmic_far_away():
    # buckets = 8: exact to 4; then 4 + ceil(3 ln(d/4) / ln(31/4)): d = 5 -> 4 + ceil(0.33) = 5, d = 8 -> 4 + ceil(1.02)
    # = 6, d = 16 -> 4 + ceil(2.03) = 7, d = 31 -> 4 + 3 = 7, and on the other side the same below zero.
    given = torch.tensor([0, 1, 4, 5, 8, 16, 31, -4, -5, -31])
    assert relative_classes(given, 8, 32).tolist() == [0, 1, 4, 5, 6, 7, 7, -4, -5, -7]


def test_rows_of_the_table_stay_inside_it_however_far_tokens_are():
    rows = relative_rows(torch.tensor([-5000, -1, 0, 1, 5000]), BOTH)  # distances are key minus query, rows count back
    assert rows.tolist() == [15, 9, 8, 7, 0]


@torch.no_grad()
def test_convolution_equals_a_loop_that_sees_zeros_beyond_a_document():
    torch.manual_seed(0)
    layer = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    x = torch.randn(sum(LENGTHS), WIDTH)
    expected = []
    for document in x.split(LENGTHS):
        framed = torch.cat([torch.zeros(1, WIDTH), document, torch.zeros(1, WIDTH)])
        for place in range(len(document)):
            halves = []
            for group in range(2):
                own = slice(group * 4, group * 4 + 4)
                near = framed[place : place + 3, own]  # [3, 4]
                halves.append((weight[own] * near.T).sum((1, 2)) + bias[own])
            expected.append(torch.cat(halves).tanh())
    mixed = Convolution(layer, torch.tanh, nn.Identity())(x, pad_layout(LENGTHS, 2))
    assert_close(mixed, torch.stack(expected), atol=1e-5, rtol=1e-5)

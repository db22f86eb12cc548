"""Norms: numbers worked by hand, the rounding order of each reference, and where a layer's norms stand."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from alignment.models.layers.attention import AttentionContext
from alignment.models.layers.block import Block, ParallelBlock, PostNormBlock, SandwichBlock
from alignment.models.layers.norms import RMSNorm

X = torch.tensor([[3.0, 4.0], [0.0, 0.0]])  # mean square 12.5 and 0


def with_weight(norm: nn.Module, *weight: float) -> nn.Module:
    norm.weight.data = torch.tensor(weight)
    return norm


@pytest.mark.parametrize("norm", [RMSNorm(2, 0.0625), RMSNorm(2, 0.0625, "round_last")])
def test_rms_norm_divides_by_the_root_of_the_mean_square_plus_eps(norm):
    # sqrt(12.5 + 0.0625) = 3.5443; a row of zeros stays one, for eps keeps the divisor above 0
    expected = torch.tensor([[2 * 3 / 3.544361, -4 / 3.544361], [0.0, 0.0]])
    assert_close(with_weight(norm, 2.0, -1.0)(X), expected, atol=1e-6, rtol=0)


def test_the_unit_offset_norm_multiplies_by_one_plus_weight():
    norm = RMSNorm(2, 0.0625, "unit_offset")
    assert_close(norm(X), RMSNorm(2, 0.0625)(X), atol=0, rtol=0)  # weight 0 as it comes
    expected = torch.tensor([[1.5 * 3 / 3.544361, 0.0], [0.0, 0.0]])
    assert_close(with_weight(norm, 0.5, -1.0)(X), expected, atol=1e-6, rtol=0)


def reference(name: str, width: int, eps: float) -> nn.Module:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

    return {"llama": LlamaRMSNorm, "olmo2": Olmo2RMSNorm, "gemma": GemmaRMSNorm}[name](width, eps=eps)


OURS = {"llama": "round_first", "olmo2": "round_last", "gemma": "unit_offset"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OURS)
def test_each_norm_rounds_as_its_reference(name, dtype):
    generator = torch.Generator().manual_seed(0)
    theirs, ours = reference(name, 64, 1e-6), RMSNorm(64, 1e-6, OURS[name])
    weight, x = torch.randn(64, generator=generator), 5 * torch.randn(200, 64, generator=generator)
    theirs.weight.data, ours.weight.data = weight, weight.clone()
    with torch.no_grad():
        assert torch.equal(ours.to(dtype)(x.to(dtype)), theirs.to(dtype)(x.to(dtype)))


class Part(nn.Module):
    """An attention or feed-forward that adds a constant to 3 x, so that every order of norms gives another number."""

    def __init__(self, constant: float):
        super().__init__()
        self.constant = constant

    def forward(self, x, context=None):
        return 3 * x + self.constant


class Scaled(nn.Module):
    """Stands for a norm: a share of x."""

    def __init__(self, share: float):
        super().__init__()
        self.share = share

    def forward(self, x):
        return self.share * x


def tenth() -> nn.Module:
    return Scaled(0.1)


A, F = Part(1.0), Part(2.0)
ALL = AttentionContext(lambda query, key, value, dropout: query)  # the output of every token is needed
KEEP = nn.Identity()


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        # x = 10. attention: 3 * 1 + 1 = 4, x = 14; feed-forward: 3 * 1.4 + 2 = 6.2
        (Block(A, F, tenth, KEEP), 20.2),
        # attention: 3 * 0.1 + 1 = 1.3, x = 11.3; feed-forward: 3 * 1.13 + 2 = 5.39
        (Block(A, F, tenth, KEEP, attention_norm=lambda: Scaled(0.01)), 16.69),
        # (10 + 31) / 10 = 4.1; (4.1 + 3 * 4.1 + 2) / 10
        (PostNormBlock(A, F, tenth, KEEP), 1.84),
        # attention: (3 * 1 + 1) / 10 = 0.4, x = 10.4; feed-forward: (3 * 1.04 + 2) / 10 = 0.512
        (SandwichBlock(A, F, tenth, KEEP), 10.912),
        # attention: 31 / 10, x = 13.1; feed-forward: (39.3 + 2) / 10 = 4.13
        (SandwichBlock(A, F, tenth, KEEP, attention_norm=nn.Identity, feedforward_norm=nn.Identity), 17.23),
        # both read 1: 4 + 5
        (ParallelBlock(A, F, tenth, KEEP, feedforward_norm=None), 19.0),
        (ParallelBlock(A, F, tenth, KEEP), 19.0),
    ],
)
def test_where_the_norms_of_a_layer_stand(block, expected):
    assert_close(block(torch.tensor([10.0]), ALL), torch.tensor([expected]))


def test_a_parallel_block_with_two_norms_reads_the_same_x_through_each():
    block = ParallelBlock(A, F, tenth, KEEP)
    block.feedforward_norm = Scaled(0.01)
    # 10 + (3 * 1 + 1) + (3 * 0.1 + 2)
    assert_close(block(torch.tensor([10.0]), ALL), torch.tensor([16.3]))


@pytest.mark.parametrize("order", ["round_first", "round_last", "unit_offset"])
@pytest.mark.parametrize("types", [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_the_fused_norm_of_a_gpu_rounds_as_the_order_says(order, types, monkeypatch):
    torch.manual_seed(0)
    x, norm = torch.randn(64, 32, dtype=getattr(torch, types[0])), RMSNorm(32, 1e-5, order)
    nn.init.normal_(norm.weight)
    norm.to(getattr(torch, types[1]))
    expected = norm(x)
    monkeypatch.setattr("alignment.models.layers.norms.on_gpu", lambda x: True)
    found = norm(x)
    assert found.dtype == expected.dtype and found.shape == x.shape
    differ = found != expected  # sums in another order tip a rounding here and there, by one step of the type
    assert_close(found, expected, rtol=1e-6 if types[0] == "float32" else 2**-7, atol=1e-6)
    assert float(differ.float().mean()) < (1.0 if types[0] == "float32" else 0.02)

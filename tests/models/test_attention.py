"""The variable-length kernel is called where it applies and with what it needs; a stand-in plays it, so no CUDA here."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from alignment.commands.doctor import attention_kernel
from alignment.models.activation_checkpointing import checkpointed
from alignment.models.build import build_language_model
from alignment.models.layers import AttentionSpec, sdpa
from alignment.models.layers.padded_layout import attention_masks, pad_layout
from alignment.models.layers.sdpa import padded_attention, varlen_applies, varlen_attention
from alignment.ragged import Ragged
from tests.models.conftest import DECODERS

CONFIGS = {
    name: {"model_type": case["model_type"], "vocab_size": 61, **case["config"]} for name, case in DECODERS.items()
}

LENGTHS = (5, 1, 9)
STARTS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)


def stand_in(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """The variable-length kernel's contract, sequence by sequence: the last query has the position of the last key."""
    assert starts_q.dtype == starts_k.dtype == torch.int32 and enable_gqa == (query.shape[1] != key.shape[1])
    assert (longest_q, longest_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    mixed = []
    for q_ends, k_ends in zip(pairwise(starts_q.tolist()), pairwise(starts_k.tolist()), strict=True):
        q, (k, v) = query[slice(*q_ends)], (x[slice(*k_ends)] for x in (key, value))
        queries = torch.arange(len(q))[:, None] + len(k) - len(q)
        left, right = (len(k) if size == -1 else size for size in window_size)
        seen = (torch.arange(len(k)) >= queries - left) & (torch.arange(len(k)) <= queries + right)
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed.append(F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa))
    return torch.cat([x[0].transpose(0, 1) for x in mixed])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_the_kernel_path_equals_the_padded_path(monkeypatch, key_heads, window, causal):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(15, heads, 8, generator=generator) for heads in (4, key_heads, key_heads))
    spec = AttentionSpec(4, key_heads, 8, 0.3, False, False, causal=causal, window=window)
    layout = pad_layout(LENGTHS, 4)
    masks = attention_masks(layout, layout, causal=causal, window=window, bias=None, device="cpu")
    kernel = varlen_attention(spec, STARTS, max(LENGTHS), STARTS, max(LENGTHS))(query, key, value, 0.0)
    padded = padded_attention(spec, layout, layout, masks)(query, key, value, 0.0)
    assert_close(kernel, padded, atol=1e-6, rtol=0)


def test_the_kernel_path_refuses_dropout_rather_than_drop_it(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    x = torch.randn(15, 4, 8)
    with pytest.raises(ValueError, match="no attention dropout"):
        varlen_attention(AttentionSpec(4, 4, 8, 0.3, False, False), STARTS, 40, STARTS, 40)(x, x, x, 0.1)


@pytest.mark.parametrize("masks", [None, 1, 2])
@pytest.mark.parametrize(("heads", "key_heads", "tokens"), [(4, 4, 64), (6, 2, 65), (3, 1, 150), (2, 2, 20)])
def test_blocks_of_queries_in_bfloat16_stay_near_float32(heads, key_heads, tokens, masks):
    """Values and gradients are within 2^-7 of float32's on the same rounded inputs, in the norm."""
    torch.manual_seed(0)
    keys = tokens if masks is None else tokens + 30  # a mask lets queries see a prompt before them
    mask = None if masks is None else torch.rand(masks, 1, tokens, keys) < 0.5
    shapes = [(2, size, count, 16) for size, count in ((tokens, heads), (keys, key_heads), (keys, key_heads))]
    rounded = [(1.5 * torch.randn(shape)).bfloat16().transpose(1, 2).requires_grad_() for shape in shapes]
    exact = [x.detach().float().requires_grad_() for x in rounded]
    spec = AttentionSpec(heads, key_heads, 16, scale=0.25, bias=False, output_bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sdpa.attend(*rounded, spec, mask=mask, causal=mask is None, dropout=0.0)
    expected = sdpa.attend(*exact, spec, mask=mask, causal=mask is None, dropout=0.0)
    assert "Blocked" in type(mixed.grad_fn.next_functions[0][0]).__name__ and mixed.dtype == torch.bfloat16
    grad = torch.randn(expected.shape).bfloat16()
    mixed.backward(grad)
    expected.backward(grad.float())
    pairs = [(mixed, expected), *((x.grad, y.grad) for x, y in zip(rounded, exact, strict=True))]
    assert all((x.float() - y).norm() < 2**-7 * y.norm() for x, y in pairs)


@pytest.mark.parametrize("family", DECODERS)
def test_queries_keys_and_values_have_one_type_under_autocast(family, monkeypatch):
    """Scaled-dot-product attention casts by itself under autocast; the variable-length kernel takes one type only."""
    from alignment.models.layers import sdpa

    seen, attend = [], sdpa.attend

    def watch(q, k, v, *others, **options):
        seen.append((q.dtype, k.dtype, v.dtype))
        return attend(q, k, v, *others, **options)

    monkeypatch.setattr(sdpa, "attend", watch)
    model = build_language_model(CONFIGS[family])
    with torch.autocast("cpu", torch.bfloat16):
        model(batch=Ragged.build([[3, 5, 7], [2, 4]]))
    assert set(seen) == {(torch.bfloat16,) * 3}


@pytest.mark.parametrize(
    ("capability", "head_dim", "applies"),
    [((8, 0), 256, True), ((9, 0), 64, True), ((7, 5), 64, False), ((8, 0), 264, False), ((8, 0), 20, False)],
)
def test_old_devices_and_other_heads_use_padded_documents(capability, head_dim, applies, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: capability)
    weight = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda", 0))
    [block, _] = build_language_model(CONFIGS["llama"] | {"num_hidden_layers": 2}).spec.blocks
    block = replace(block, attention=replace(block.attention, head_dim=head_dim))
    assert varlen_applies([block.attention], weight, training=True) is applies


def test_doctor_says_that_documents_are_padded_on_old_devices(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (7, 5))
    assert attention_kernel().startswith("scaled-dot-product;")


@pytest.mark.parametrize(("keep", "calls"), [("nothing", 2), ("attention", 1), ("products", 1)])
def test_kept_activations_include_the_variable_length_kernels(keep, calls):
    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[str(function)] += 1
            return function(*args, **(kwargs or {}))

    def layer(x):
        return varlen_attn(2 * x, 2 * x, 2 * x, starts, starts, 6, 6, window_size=(-1, 0)).sin()

    with FakeTensorMode(), Counting():  # the kernel itself wants a GPU; who calls it does not
        starts = torch.zeros(2, dtype=torch.int32)
        x = torch.zeros(6, 2, 8, dtype=torch.bfloat16, requires_grad=True)
        checkpointed(keep)(layer, x).sum().backward()
    assert counts["torch_attn._varlen_attn.default"] == calls

"""The variable-length kernel is called with what it needs; a stand-in plays it, so no CUDA here."""

import pytest
import torch
from torch.nn import functional as F
from torch.testing import assert_close

from alignment.models.masks import pack
from alignment.models.sight import look_at_documents, look_with_kernel
from alignment.models.spec import AttentionSpec
from alignment.models.viewing import rectangle_mask

LENGTHS = (5, 1, 9)
STARTS = torch.tensor([0, 5, 6, 15], dtype=torch.int32)


def stand_in(query, key, value, starts_q, starts_k, longest_q, longest_k, *, scale, window_size, enable_gqa):
    """Document by document, as the kernel's documentation says; refuses what the kernel would."""
    assert starts_q.dtype == starts_k.dtype == torch.int32 and longest_q == longest_k == max(LENGTHS)
    assert enable_gqa or query.shape[1] == key.shape[1]
    pieces = []
    for begin, end in zip(starts_q[:-1].tolist(), starts_q[1:].tolist(), strict=True):
        q, k, v = (x[begin:end].transpose(0, 1)[None] for x in (query, key, value))
        apart = torch.arange(end - begin) - torch.arange(end - begin)[:, None]  # key place minus query place
        left, right = (end - begin if size == -1 else size for size in window_size)
        seen = (apart >= -left) & (apart <= right)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        pieces.append(mixed[0].transpose(0, 1))
    return torch.cat(pieces)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_the_kernel_path_equals_the_padded_path(monkeypatch, key_heads, window, causal):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(15, heads, 8, generator=generator) for heads in (4, key_heads, key_heads))
    spec = AttentionSpec(4, key_heads, 8, 0.3, False, False, causal=causal, window=window)
    packing = pack(LENGTHS, 4)
    rectangles = zip(packing.lengths, packing.groups, strict=True)
    masks = [rectangle_mask(lengths, columns, 0, causal, window, None, "cpu") for lengths, (_, columns) in rectangles]
    kernel = look_with_kernel(STARTS, max(LENGTHS), spec)(query, key, value, 0.0)
    padded = look_at_documents(packing, spec, masks, None)(query, key, value, 0.0)
    assert_close(kernel, padded, atol=1e-6, rtol=0)


def test_the_kernel_path_refuses_dropout_rather_than_drop_it(monkeypatch):
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", stand_in)
    x = torch.randn(15, 4, 8)
    with pytest.raises(ValueError, match="no attention dropout"):
        look_with_kernel(STARTS, max(LENGTHS), AttentionSpec(4, 4, 8, 0.3, False, False))(x, x, x, 0.1)

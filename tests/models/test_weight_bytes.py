"""Bytes of weights: counted once however often they are held, by hand."""

import torch

from alignment.models.weight_bytes import total_bytes, written


def test_a_tensor_counts_once_whatever_holds_it():
    one, other = torch.nn.Linear(3, 5, bias=False), torch.nn.Linear(3, 5)
    assert total_bytes(one) == 3 * 5 * 4 and total_bytes(one, other) == (15 + 15 + 5) * 4
    other.weight = one.weight
    assert total_bytes(one, other) == (15 + 5) * 4
    one.register_buffer("mean", torch.zeros(7, dtype=torch.bfloat16))
    assert total_bytes(one) == 15 * 4 + 7 * 2
    assert total_bytes(torch.nn.Linear(9, 9, device="meta")) == 0


def test_views_of_one_storage_count_their_own_part():
    whole = torch.zeros(10, 4)
    upper, lower = torch.nn.Linear(4, 6, bias=False), torch.nn.Linear(4, 4, bias=False)
    upper.weight, lower.weight = torch.nn.Parameter(whole[:6]), torch.nn.Parameter(whole[6:])
    assert total_bytes(upper) == 6 * 4 * 4 and total_bytes(upper, lower) == 10 * 4 * 4


def test_quantized_weights_count_with_their_constants():
    """NF4 with double quantization, blocks of 64: 4 bits a weight, 1 byte a block, and for 256 blocks one fp32 scale."""
    from bitsandbytes.nn.modules import Linear4bit, Linear8bitLt

    layer = Linear4bit(256, 256, bias=False, quant_type="nf4", compress_statistics=True)
    layer.load_state_dict({"weight": torch.randn(256, 256)})
    blocks = 256 * 256 // 64
    # Beside them the 16 numbers of NF4, the 256 of the scales' own code, and the scales' mean.
    assert total_bytes(layer.to("cpu")) == 256 * 128 + blocks + 4 * (blocks // 256) + 4 * (16 + 256 + 1)
    layer = Linear8bitLt(256, 256, bias=False, has_fp16_weights=False)
    layer.load_state_dict({"weight": torch.randn(256, 256)})
    layer.to("cpu")
    assert total_bytes(layer) == 256 * 256 + 4 * 256
    layer(torch.ones(1, 256))
    assert total_bytes(layer) == 256 * 256 + 4 * 256  # the first call moves them from the weight to the layer


def test_bytes_in_words():
    assert [written(count) for count in (5, 999, 1e3, 12_345, 1.2345e9)] == [
        "5 bytes", "999 bytes", "1 kB", "12.3 kB", "1.23 GB",
    ]  # fmt: skip

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


def test_bytes_in_words():
    assert [written(count) for count in (5, 999, 1e3, 12_345, 1.2345e9)] == [
        "5 bytes", "999 bytes", "1 kB", "12.3 kB", "1.23 GB",
    ]  # fmt: skip

"""Packing: every token has one place, rectangles waste little, and gradients find their way back."""

import torch
from torch.testing import assert_close

from alignment.models.layers.padded_layout import pad, pad_layout, pad_layouts, select_rows, unpad, visible


def test_visible_cuts_at_the_query_and_at_the_window():
    apart = torch.tensor([-3, -2, -1, 0, 1, 2])
    assert visible(apart, True, None).tolist() == [True, True, True, True, False, False]
    assert visible(apart, True, 2).tolist() == [False, False, True, True, False, False]
    assert visible(apart, False, 2).tolist() == [False, False, True, True, True, False]


def test_two_sets_packed_together_share_their_rows():
    ours, theirs = pad_layouts([5, 90, 6, 40], [100, 3, 7, 40], heads=64)
    assert [documents for documents, _ in ours.groups] == [documents for documents, _ in theirs.groups]
    one, other = torch.arange(141.0), torch.arange(150.0)
    assert torch.equal(unpad(pad(one, ours), ours), one) and torch.equal(unpad(pad(other, theirs), theirs), other)
    starts = dict(zip([0.0, 5.0, 95.0, 101.0], [0.0, 100.0, 103.0, 110.0], strict=True))  # a document's first token
    for a, b in zip(pad(one, ours), pad(other, theirs), strict=True):
        assert [starts[x] for x in a[:, 0].tolist()] == b[:, 0].tolist()


def test_equal_lengths_are_one_rectangle_without_copies():
    layout = pad_layout([5, 5, 5], heads=2)
    x = torch.randn(15, 4)
    assert layout.groups == ((3, 5),) and layout.slots is None
    assert pad(x, layout)[0].data_ptr() == x.data_ptr()


def test_short_documents_get_their_own_rectangle_where_it_saves_work():
    # 20 short ones at 4 heads: widening them from 16 to 112 columns costs 20 * 4 * (112^2 - 16^2), far above a call
    layout = pad_layout([110, *[10] * 20], heads=4)
    assert layout.groups == ((1, 112), (20, 16))


def test_gather_undoes_spread_for_any_lengths():
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, 200, (int(torch.randint(1, 30, (1,), generator=generator)),), generator=generator)
        layout = pad_layout(lengths.tolist(), heads=8)
        x = torch.randn(int(lengths.sum()), 3, generator=generator)
        assert torch.equal(unpad(pad(x, layout), layout), x)
        assert sum(documents for documents, _ in layout.groups) == len(lengths)


def test_each_document_has_one_row_and_starts_at_its_left():
    lengths = [40, 3, 90, 17]
    layout = pad_layout(lengths, heads=64)
    rows = [row[row > 0] for part in pad(torch.arange(1, 151), layout) for row in part]
    # what fills the gaps is token 0, that is 1 here; a document is the run of successive numbers at the left
    starts = {1: 40, 41: 3, 44: 90, 134: 17}
    for row in rows:
        length = starts.pop(int(row[0]))
        assert torch.equal(row[:length], torch.arange(int(row[0]), int(row[0]) + length))
    assert not starts


def test_gradient_comes_back_from_real_places_only():
    layout = pad_layout([3, 20, 40], heads=100)
    x = torch.randn(63, 2, requires_grad=True)
    sum(part.sum() for part in pad(x, layout)).backward()
    assert_close(x.grad, torch.ones(63, 2))


def test_take_has_the_gradient_of_indexing():
    x = torch.randn(6, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: select_rows(x, torch.tensor([4, 0, 5])), x)

"""The order of rows is a pure function of (seed, epoch, position): stopping anywhere changes nothing (HAZARDS H38)."""

import numpy as np
import pytest

from alignment.data.stream import Stream, order

ROWS = [f"row {index}" for index in range(10)]


def seen(stream, steps):
    return [row for step in steps for row in stream.rows_at(step)]


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10, 25])
def test_every_epoch_has_every_row_once(batch_size):
    stream = Stream(ROWS, batch_size, seed=5, epochs=3)
    rows = seen(stream, range(-(-30 // batch_size)))
    assert len(rows) == 30
    epochs = [rows[start : start + 10] for start in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(ROWS) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("stop", [1, 4, 5, 6, 7])  # 5 and 6: in the middle of the second epoch
def test_h38_resumed_stream_deals_the_same_rows(stop):
    whole = seen(Stream(ROWS, 3, seed=1, epochs=2.5), range(9))
    resumed = seen(Stream(ROWS, 3, seed=1, epochs=2.5), range(stop, 9))
    assert resumed == whole[3 * stop :]


def test_batches_cross_epochs_and_only_the_last_is_smaller():
    stream = Stream(ROWS, 4, seed=0, epochs=1.5)
    assert [len(stream.rows_at(step)) for step in range(4)] == [4, 4, 4, 3]
    assert len(Stream(ROWS, 4, seed=0).rows_at(3)) == 4
    for step in (-1, 4):
        with pytest.raises(IndexError):
            stream.rows_at(step)


def test_orders_differ_by_seed_and_epoch():
    orders = {tuple(order(10, seed, epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9


@pytest.mark.parametrize("rows", [1, 2, 7, 1000, 65_537])
def test_the_order_is_numpys_permutation_in_half_the_memory(rows):
    expected = np.random.default_rng([5, 3]).permutation(rows)
    assert order(rows, 5, 3).tolist() == expected.tolist() and order(rows, 5, 3).itemsize == 4

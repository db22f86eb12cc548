"""Examples to ragged micro-batches: nothing lost, limits kept, the same every time."""

import random

import pytest

from alignment.data.batches import Example, collate, collate_pairs, collate_rankings
from tests.examples import pair_example, ranked_example


def example(length, name, first_target=1):
    return Example.single(list(range(length)), [index >= first_target for index in range(length)], name)


@pytest.fixture
def examples():
    chance = random.Random(0)
    return [example(chance.randint(2, 30), str(index), chance.randint(0, 2)) for index in range(50)]


@pytest.mark.parametrize("most", [1, 10, 33, 100, 10_000])
def test_every_document_comes_once_and_limits_are_kept(examples, most):
    batches = collate(examples, most)
    assert sorted(name for batch in batches for name in batch.row_ids) == sorted(row.row_id for row in examples)
    assert all(len(batch.tokens) <= most or len(batch.lengths) == 1 for batch in batches)
    assert sum(batch.weight for batch in batches) == sum(sum(row.mask[1:]) for row in examples)


def test_h08_no_target_lies_on_a_seam():
    [batch] = collate([example(3, "a", 0), example(2, "b", 0)], 100)
    assert batch.target_index.tolist() == [1, 2, 4]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]


def pair(chosen, rejected, name, margin=None):
    return pair_example(example(chosen, name), example(rejected, name), margin, name)


def test_pairs_lie_chosen_first_and_weigh_one_each():
    [batch] = collate_pairs([pair(2, 5, "a"), pair(4, 3, "b"), pair(2, 2, "c")], 100)
    assert batch.ragged.lengths == (2, 4, 2, 5, 3, 2)
    assert batch.ragged.row_ids == ("a", "b", "c", "a", "b", "c")
    assert batch.weight == batch.ragged.weight == 3.0
    assert batch.margins is None


def test_margins_travel_with_their_pairs():
    [batch] = collate_pairs([pair(2, 2, "a", 0.5), pair(9, 2, "b"), pair(3, 2, "c", 2.0)], 100)
    assert batch.ragged.row_ids[:3] == ("b", "c", "a")
    assert batch.margins is not None and batch.margins.tolist() == [0.0, 2.0, 0.5]
    assert batch.to("cpu").margins.tolist() == [0.0, 2.0, 0.5]


def test_batches_know_the_source_of_what_they_count():
    first = Example.single([1, 2, 3], [False, True, True], "a", source=2)
    other = Example.single([1, 2], [False, True], "b", source=0)
    [batch] = collate([other, first], 100)
    assert batch.sources.tolist() == [2, 0]  # the longer one first
    assert batch.counted_sources.tolist() == [2, 2, 0]  # one for each target

    pairs = [pair_example(first, other, None, "a", source=1), pair_example(other, first, None, "b", source=3)]
    [paired] = collate_pairs(pairs, 100)
    assert paired.ragged.sources.tolist() == [1, 3, 1, 3] and paired.counted_sources.tolist() == [1, 3]

    rows = [
        ranked_example((first, other, first), (0, 1, 2), "a", source=1),
        ranked_example((other, other), (0, 1), "b"),
    ]
    [ranked] = collate_rankings(rows, 100)
    assert ranked.ragged.sources.tolist() == [1, 1, 1, 0, 0] and ranked.counted_sources.tolist() == [1, 0]

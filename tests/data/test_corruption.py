"""Corruption of token ids: proportions, units, and that nothing is lost; with hand-worked numbers where possible."""

from itertools import pairwise

import numpy as np
import pytest

from alignment.data.pretraining import corruption
from alignment.data.pretraining.corruption import NOT_CHOSEN, Masking
from alignment.data.tokenize import truncate_longest

MASK, ORDINARY = 4, np.arange(10, 1000)


def generator(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def encoded(length: int) -> tuple[list[int], list[bool]]:
    """[CLS] text [SEP] with text ids of their own."""
    return [2, *range(10, 10 + length), 3], [False, *[True] * length, False]


def within(count: int, trials: int, share: float, sigmas: float = 4.0) -> bool:
    """Whether a count is as likely as a binomial one within so many standard deviations."""
    return abs(count - trials * share) <= sigmas * (trials * share * (1 - share)) ** 0.5


@pytest.mark.parametrize(("count", "expected"), [(1, 1), (3, 1), (10, 2), (20, 3), (100, 15), (127, 19)])
def test_the_budget_is_the_rounded_share_and_at_least_one(count, expected):
    # 0.15 * 10 = 1.5, which rounds to the even 2; 0.15 * 127 = 19.05
    choice = corruption.choose([True] * count, [True] * count, Masking(), generator(count))
    assert (choice != NOT_CHOSEN).sum() == corruption.budget(count, 0.15) == expected


def test_eighty_ten_ten_and_no_special_token_at_random():
    ids, maskable = encoded(20_000)
    choice = corruption.choose(maskable, maskable, Masking(), generator(0))
    new = corruption.replace_chosen(ids, choice, Masking(), generator(1), mask_id=MASK, random_ids=ORDINARY)
    chosen = choice != NOT_CHOSEN
    assert chosen.sum() == 3000
    assert (new[~chosen] == np.array(ids)[~chosen]).all()
    masked, kept = new[chosen] == MASK, new[chosen] == np.array(ids)[chosen]
    assert within(int(masked.sum()), 3000, 0.8)
    assert within(int(kept.sum()), 3000, 0.1 + 0.1 / len(ORDINARY))  # a random token can be the old one
    assert set(new[chosen][~masked & ~kept]) <= set(ORDINARY)


def test_words_are_the_runs_between_starts_and_special_tokens():
    maskable = [False, True, True, True, False, True, True, False]
    starts = [False, True, False, True, False, False, True, False]
    assert corruption.words_of(maskable, starts) == [(1, 3), (3, 4), (5, 6), (6, 7)]


def test_whole_words_are_chosen_together_within_the_budget():
    lengths = generator(3).integers(1, 5, 200)
    starts = [index == 0 for length in lengths for index in range(length)]
    maskable = [True] * len(starts)
    for seed in range(20):
        chosen = corruption.choose(maskable, starts, Masking(units="words"), generator(seed)) != NOT_CHOSEN
        words = corruption.words_of(maskable, starts)
        assert all(len(set(chosen[start:stop])) == 1 for start, stop in words)
        room = corruption.budget(len(starts), 0.15)
        assert room - 3 <= chosen.sum() <= room  # short of the budget by less than the longest word


def test_a_word_longer_than_the_budget_is_chosen_where_there_is_no_other():
    maskable, starts = [False, True, True, True, False], [False, True, False, False, False]
    choice = corruption.choose(maskable, starts, Masking(units="words"), generator(0))
    assert (choice != NOT_CHOSEN).tolist() == [False, True, True, True, False]


def test_span_lengths_have_the_published_mean():
    # sum of n 0.2 0.8^(n-1) for n = 1..10 is 5 (1 - 3 * 0.8^10) = 3.38939; over 1 - 0.8^10 = 0.892626: 3.79710
    chances = corruption.span_lengths(0.2, 10)
    assert chances.sum() == pytest.approx(1.0)
    assert (np.arange(1, 11) * chances).sum() == pytest.approx(3.79710, abs=1e-5)


def test_spans_are_whole_words_share_one_fate_and_meet_the_budget():
    lengths = generator(4).integers(1, 4, 300)
    starts = [False, *[index == 0 for length in lengths for index in range(length)], False]
    maskable = [False, *[True] * (len(starts) - 2), False]
    ids = [2, *range(10, 10 + len(starts) - 2), 3]
    masking = Masking(units="spans")
    words = corruption.words_of(maskable, starts)
    for seed in range(20):
        choice = corruption.choose(maskable, starts, masking, generator(seed))
        chosen = choice != NOT_CHOSEN
        room = corruption.budget(sum(maskable), 0.15)
        assert room <= chosen.sum() <= room + 2
        assert not chosen[0] and not chosen[-1]
        assert all(len(set(choice[start:stop])) == 1 for start, stop in words)
        new = corruption.replace_chosen(ids, choice, masking, generator(seed, 1), mask_id=MASK, random_ids=ORDINARY)
        for span in range(choice.max() + 1):
            positions = np.flatnonzero(choice == span)
            assert (np.diff(positions) == 1).all()
            assert len(set(new[positions] == MASK)) == 1


def test_the_boundaries_of_spans_are_worked_by_hand():
    # spans at 1-2 and, beside each other, 4 and 5-7
    choice = np.array([-1, 1, 1, -1, 0, 2, 2, 2, -1])
    expected = [[0, 3, 0], [0, 3, 1], [3, 5, 0], [4, 8, 0], [4, 8, 1], [4, 8, 2]]
    assert corruption.span_boundaries(choice).tolist() == expected


def test_shares_above_one_are_refused():
    with pytest.raises(ValueError, match="add up"):
        Masking(mask_share=0.9, random_share=0.2)


SENTINELS = list(range(999, 899, -1))  # descending, as in T5's vocabulary


def put_together(source: list[int], target: list[int]) -> list[int]:
    """The text behind both sides of a span corruption, by following the sentinels."""
    spans: dict[int, list[int]] = {}
    for token in target:
        if token in SENTINELS:
            spans[token] = []
            last = spans[token]
        else:
            last.append(token)
    return [part for token in source for part in (spans[token] if token in SENTINELS else [token])]


@pytest.mark.parametrize(("density", "mean_span"), [(0.15, 3.0), (0.5, 1.0), (0.9, 2.0), (0.01, 8.0)])
def test_source_and_target_together_are_the_text_every_token_once(density, mean_span):
    for length in [*range(2, 40), 77, 100]:
        ids = list(range(length))
        source, target = corruption.corrupt_spans(
            ids, SENTINELS, generator(length), density=density, mean_span=mean_span
        )
        noise, spans = corruption.span_plan(length, density, mean_span)
        assert put_together(source, target) == ids
        assert [token for token in source if token in SENTINELS] == SENTINELS[:spans]
        assert [token for token in target if token in SENTINELS] == SENTINELS[: spans + 1]
        assert target[-1] == SENTINELS[spans]
        assert (len(source), len(target)) == (length - noise + spans, noise + spans + 1)


def test_span_plan_is_worked_by_hand():
    # 512 tokens: 0.15 * 512 = 76.8, so 77 in spans; 77 / 3 = 25.7, so 26 spans (T5's own numbers)
    assert corruption.span_plan(512, 0.15, 3.0) == (77, 26)
    assert corruption.span_plan(2, 0.15, 3.0) == (1, 1)
    assert corruption.span_plan(10, 0.9, 1.0) == (9, 1)  # spans need gaps between them


def test_random_partitions_are_all_equally_likely():
    # 5 in 3 parts: C(4, 2) = 6 ways
    chance = generator(0)
    seen = [tuple(corruption.random_partition(5, 3, chance).tolist()) for _ in range(3000)]
    assert len(set(seen)) == 6
    assert all(sum(way) == 5 and min(way) >= 1 for way in set(seen))
    assert all(within(seen.count(way), 3000, 1 / 6) for way in set(seen))


def test_a_prefix_and_the_rest_are_the_text_and_every_cut_occurs():
    ids, chance = [7, 8, 9, 10], generator(0)
    cuts = [corruption.split_prefix(ids, chance) for _ in range(300)]
    assert all(first + second == ids for first, second in cuts)
    assert {len(first) for first, _ in cuts} == {1, 2, 3}


def test_infilling_keeps_the_other_tokens_in_order_and_takes_the_share():
    for length in range(1, 60):
        ids = list(range(10, 10 + length))
        corrupted = corruption.infill(ids, MASK, generator(length))
        kept = [token for token in corrupted if token != MASK]
        assert kept == sorted(kept) and set(kept) <= set(ids)
        assert len(ids) - len(kept) == corruption.budget(length, 0.3)
        assert MASK in corrupted and len(corrupted) <= length


def test_infilled_spans_have_the_poisson_mean():
    ids = list(range(10, 100_010))
    corrupted = corruption.infill(ids, MASK, generator(0))
    assert 30_000 / corrupted.count(MASK) == pytest.approx(3.0, abs=0.1)


class Draws:
    """A generator whose draws are given: `choice` and `permutation` return them, `integers` the one number."""

    def __init__(self, drawn):
        self.drawn = drawn

    def choice(self, count, size, replace):
        assert size == len(self.drawn) <= count and not replace
        return np.array(self.drawn)

    def permutation(self, count):
        assert sorted(self.drawn) == list(range(count))
        return np.array(self.drawn)

    def integers(self, count):
        assert self.drawn < count
        return self.drawn


def test_barts_noises_are_worked_by_hand():
    a, b, c, d, e, stop = ids = [10, 11, 12, 13, 14, 9]
    # 0.3 * 6 = 1.8: two tokens are masked or deleted
    assert corruption.mask_random_tokens(ids, MASK, Draws([4, 1])) == [a, MASK, c, d, MASK, stop]
    assert corruption.delete_tokens(ids, Draws([5, 0, 2, 3])) == [a, c, d, stop]
    assert corruption.rotate_text(ids, Draws(4)) == [e, stop, a, b, c, d]
    text = [a, b, stop, c, stop, stop, d, e]  # three sentences: the run of stops ends one, the last has no stop
    assert corruption.permute_sentences(text, {stop}, Draws([2, 0, 1])) == [d, e, a, b, stop, c, stop, stop]


def test_noises_keep_to_their_share_and_lose_nothing_else():
    for length in range(1, 60):
        ids = list(range(10, 10 + length))
        count = corruption.budget(length, 0.9)
        masked = corruption.mask_random_tokens(ids, MASK, generator(length), density=0.9)
        assert masked.count(MASK) == count and len(masked) == length
        deleted = corruption.delete_tokens(ids, generator(length), density=0.9)
        assert deleted == sorted(deleted) and len(deleted) == max(1, length - count)
        rotated = corruption.rotate_text(ids, generator(length))
        assert sorted(rotated) == ids and sum(b < a for a, b in pairwise(rotated)) <= 1
        shuffled = corruption.permute_sentences(ids, {12, 20}, generator(length))
        assert sorted(shuffled) == ids


def test_every_order_of_sentences_and_every_rotation_occurs():
    chance, ids = generator(0), [10, 9, 11, 9, 12, 9]
    orders = {tuple(corruption.permute_sentences(ids, {9}, chance)[::2]) for _ in range(200)}
    assert len(orders) == 6
    assert {corruption.rotate_text(ids, chance)[0] for _ in range(200)} == {9, 10, 11, 12}


@pytest.mark.parametrize(
    ("first", "second", "room", "expected"),
    [(5, 3, 8, (5, 3)), (5, 3, 6, (3, 3)), (5, 3, 5, (3, 2)), (1, 9, 4, (1, 3)), (9, 0, 4, (4, 0))],
)
def test_of_a_pair_the_longer_text_is_truncated(first, second, room, expected):
    a, b = truncate_longest([range(first), range(second)], room)
    assert (len(a), len(b)) == expected
    assert a == list(range(len(a))) and b == list(range(len(b)))

"""Which responses are kept of n: the best, those above a threshold, ties, equal texts, and pairs."""

import math

from alignment.rewards.selection import choose_best, choose_pair

SCORES, TEXTS = [0.5, 2.0, -1.0, 2.0, math.nan, 0.5], ["a", "b", "c", "d", "e", "f"]


def test_the_best_are_kept_and_the_first_of_equal_ones():
    assert choose_best(SCORES, TEXTS) == [1]
    assert choose_best(SCORES, TEXTS, keep=3) == [1, 3, 0]
    assert choose_best(SCORES, TEXTS, keep=None) == [1, 3, 0, 5, 2]


def test_a_threshold_keeps_what_reaches_it_and_nothing_else():
    assert choose_best(SCORES, TEXTS, keep=None, threshold=0.5) == [1, 3, 0, 5]
    assert choose_best(SCORES, TEXTS, keep=2, threshold=0.5) == [1, 3]
    assert choose_best(SCORES, TEXTS, threshold=2.5) == []
    assert choose_best([math.nan, math.nan], ["a", "b"], keep=None) == []


def test_equal_texts_count_once_with_their_best_score():
    texts = ["same", "b", "same", "same"]
    scores = [0.0, 1.0, 3.0, 3.0]
    assert choose_best(scores, texts, keep=3) == [2, 1]
    assert choose_best(scores, texts, keep=3, distinct=False) == [2, 3, 1]


def test_a_pair_is_the_best_against_the_worst():
    assert choose_pair(SCORES, TEXTS) == (1, 2)
    assert choose_pair(SCORES, TEXTS, threshold=2.0) == (1, 2)
    assert choose_pair(SCORES, TEXTS, threshold=2.5) is None
    assert choose_pair([1.0, 1.0], ["a", "b"]) is None
    assert choose_pair([2.0, 1.0], ["a", "a"]) is None
    assert choose_pair([math.nan, 1.0], ["a", "b"]) is None
    assert choose_pair([math.nan, math.nan], ["a", "b"]) is None

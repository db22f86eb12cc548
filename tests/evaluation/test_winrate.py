"""Win rates, their intervals, and how two orders become one verdict."""

import numpy as np
import pytest
from scipy.stats import binomtest

from alignment.errors import UserError
from alignment.evaluation import agreement, merge_orders, win_rate
from alignment.evaluation.winrate import mean_interval, paired_interval


def test_win_rate_counts_ties_as_half():
    result = win_rate([1.0, 1.0, 0.5, 0.0])
    assert (result.rate, result.n, result.wins, result.losses, result.ties) == (0.625, 4, 2, 1, 1)
    assert result.low < result.rate < result.high


@pytest.mark.parametrize(("wins", "n"), [(0, 10), (10, 10), (1, 2), (63, 100), (500, 1000)])
def test_interval_without_ties_is_wilsons(wins, n):
    wilson = binomtest(wins, n).proportion_ci(method="wilson")
    assert paired_interval(wins, n - wins, n) == pytest.approx((wilson.low, wilson.high), abs=1e-9)


def test_interval_stands_for_every_small_count_and_mirrors():
    for n in (1, 2, 3, 7, 20):
        for wins in range(n + 1):
            for losses in range(n + 1 - wins):
                low, high = paired_interval(wins, losses, n)
                rate = (wins + (n - wins - losses) / 2) / n
                assert 0 <= low <= rate <= high <= 1 and high > low, (wins, losses, n)
                assert paired_interval(losses, wins, n) == pytest.approx((1 - high, 1 - low), abs=1e-9)


def test_ties_narrow_the_interval_but_all_ties_keep_a_width():
    widths = [high - low for low, high in (paired_interval(w, w, 100) for w in (50, 25, 5, 0))]
    assert widths == sorted(widths, reverse=True) and widths[-1] > 0.03
    # by hand, all ties: n d / (1 - d) = 1.96^2, so d = 3.8415 / 103.8415 and the bound is (1 + d) / 2
    assert paired_interval(0, 0, 100)[1] == pytest.approx((1 + 3.8415 / 103.8415) / 2, abs=1e-6)


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.2), (0.2, 0.7, 0.1), (0.9, 0.05, 0.05)])
def test_interval_covers_the_truth_about_95_times_in_100(shares):
    drawn = np.random.default_rng(0).multinomial(100, shares, size=1000)
    truth = shares[0] + shares[1] / 2
    intervals = {(int(wins), int(losses)): paired_interval(int(wins), int(losses), 100) for wins, _, losses in drawn}
    hits = [low <= truth <= high for low, high in (intervals[int(w), int(lost)] for w, _, lost in drawn)]
    assert 0.93 <= np.mean(hits) <= 0.97


def test_contradictions_count_half_and_narrow_no_interval():
    """Four wins and four contradictions: 3/4, as sure as three of four, for the contradictions are tosses of a coin."""
    result = win_rate([1.0] * 4 + [0.5] * 4, inconsistent=4)
    assert (result.rate, result.n, result.wins, result.ties) == (0.75, 8, 4, 4)
    assert (result.low, result.high) == paired_interval(3, 1, 4)
    ties = win_rate([1.0] * 4 + [0.5] * 4)
    assert ties.low > result.low and ties.high < result.high
    widths = [(rate := win_rate([1.0] * 60 + [0.5] * 40, inconsistent=k)).high - rate.low for k in (0, 10, 20, 40)]
    assert widths == sorted(widths)


def test_other_verdicts_and_no_verdicts_are_refused():
    with pytest.raises(UserError, match=r"verdict 1 is 0\.7(?s:.*)verdict 2 is None"):
        win_rate([1.0, 0.7, None])
    with pytest.raises(UserError, match="at least one"):
        win_rate([])


def test_both_orders_must_agree_on_a_winner():
    # ours first: our verdict; other first: its verdict, so 0.0 means that ours won again
    first = [1.0, 0.0, 1.0, 1.0, 0.5, None, 1.0]
    second = [0.0, 1.0, 1.0, 0.5, 0.5, 0.0, None]
    merged = merge_orders(first, second)
    assert merged.verdicts == [1.0, 0.0, 0.5, 0.5, 0.5, None, None]
    assert (merged.inconsistent, merged.failures) == (2, 2)


def test_agreement_gives_half_where_one_calls_a_tie():
    # agree, oppose, tie against win, failure left out: (1 + 0 + 0.5) / 3
    assert agreement([1.0, 1.0, 0.5, None], [1.0, 0.0, 1.0, 1.0]) == pytest.approx(0.5)
    with pytest.raises(UserError, match="both"):
        agreement([None], [1.0])


def test_the_interval_of_a_mean_is_none_where_nothing_varies():
    assert mean_interval([1.0]) is None and mean_interval([2.0, 2.0]) is None
    assert mean_interval([0.0, 2.0]) == pytest.approx([1 - 1.96, 1 + 1.96], abs=1e-3)  # deviation sqrt(2), error 1

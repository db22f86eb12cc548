"""Win rates, their intervals, and how two orders become one verdict."""

import itertools
import math
from statistics import NormalDist

import numpy as np
import pytest
from scipy.stats import binomtest, sem

from alignment.errors import UserError
from alignment.evaluation import agreement, detectable_difference, holm, merge_orders, sign_test, win_rate
from alignment.statistics.winrate import Z_95, clustered_error, mean_interval, paired_interval


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
    with pytest.raises(UserError, match=r"verdict 1 is 1\.7(?s:.*)verdict 2 is None(?s:.*)verdict 3 is nan"):
        win_rate([1.0, 1.7, None, math.nan])
    with pytest.raises(UserError, match="clusters has 1 names for 2 rows"):
        win_rate([1.0, 0.0], clusters=["a"])
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


# --- clusters, preferences, tests ------------------------------------------------------------------------------------


def test_every_row_its_own_cluster_is_bit_equal_to_no_clusters():
    verdicts = [1.0, 0.5, 0.0, 1.0, 0.5, 1.0, 1.0]
    for inconsistent in (0, 1, 2):
        alone = win_rate(verdicts, inconsistent=inconsistent, clusters=list("abcdefg"))
        assert alone == win_rate(verdicts, inconsistent=inconsistent)
        assert alone.clusters == alone.effective == 7
    assert win_rate(verdicts).standard_error == pytest.approx(sem(verdicts))


def test_a_prompt_counted_twice_says_no_more_than_once():
    verdicts = [1.0, 0.0, 0.5, 1.0, 1.0, 0.0, 0.5, 1.0, 0.5, 1.0]
    once, twice = win_rate(verdicts), win_rate(verdicts * 2, clusters=[*range(10)] * 2)
    assert (twice.rate, twice.n, twice.clusters) == (once.rate, 20, 10)
    assert twice.standard_error == pytest.approx(once.standard_error)
    # spread 20 s^2 over 20, variance of the rate s^2 / 9 where s^2 is the mean squared deviation: 9 independent rows
    assert twice.effective == pytest.approx(9)
    low, high = paired_interval(5 * 0.9, 2 * 0.9, 9)
    assert (twice.low, twice.high) == pytest.approx((low, high))
    assert win_rate([1.0] * 6, clusters=[1, 1, 1, 2, 2, 2]).low == pytest.approx(paired_interval(2, 0, 2)[0])
    assert win_rate([1.0, 0.0], clusters=["a", "a"]).standard_error is None


@pytest.mark.parametrize("wins", [0, 1, 10, 15, 20, 29, 30])
def test_one_cluster_says_as_much_as_one_item(wins):
    """[B-H6] Whatever the rounding of the sum of deviations, which is 0 or 1e-17."""
    found = win_rate([1.0] * wins + [0.0] * (30 - wins), clusters=["p"] * 30)
    assert (found.effective, found.clusters, found.standard_error) == (1, 1, None)
    assert (found.low, found.high) == pytest.approx(paired_interval(wins / 30, 1 - wins / 30, 1))
    tossed = win_rate([1.0] * wins + [0.5] * (30 - wins), clusters=["p"] * 30, inconsistent=30 - wins)
    assert tossed.effective == 1 and tossed.high - tossed.low > 0.75


@pytest.mark.parametrize("values", [[0.35, 0.2, 0.5], [0.1] * 3, [0.7] * 10])
def test_preferences_of_which_no_spread_is_known_have_no_narrow_interval(values):
    for clusters in (["p"] * 3 * len(values), [*range(3)] * len(values)):  # one cluster, and three that are equal
        found = win_rate([value for value in values for _ in range(3)], clusters=clusters)
        assert (found.low, found.high) == (0, 1)
    if len(set(values)) == 1:
        assert (win_rate(values).low, win_rate(values).high) == (0, 1) and mean_interval(values) is None


@pytest.mark.parametrize(("wins", "size"), [(1, 2), (1, 3), (2, 3), (1, 5), (3, 7)])
def test_clusters_of_equal_shares_count_one_each(wins, size):
    clusters = [i // size for i in range(10 * size)]
    found = win_rate(([1.0] * wins + [0.0] * (size - wins)) * 10, clusters=clusters)
    assert found.effective == 10
    tossed = [1.0] * wins + [0.0] * (size - wins) + [0.5]
    clusters = [i // (size + 1) for i in range(10 * (size + 1))]
    assert win_rate(tossed * 10, inconsistent=10, clusters=clusters).effective == 10


def test_a_mean_counted_twice_is_as_sure_as_once():
    values = [0.3, 1.7, -0.4, 2.2, 0.1]
    assert mean_interval(values * 2, [*range(5)] * 2) == pytest.approx(mean_interval(values))
    assert mean_interval(values, ["p"] * 5) is None and mean_interval(values, "abcde") == mean_interval(values)


def test_contradictions_widen_a_clustered_interval_too():
    verdicts, clusters = [1.0, 0.5] * 40, [i // 4 for i in range(80)]
    ties, coins = (win_rate(verdicts, inconsistent=k, clusters=clusters) for k in (0, 40))
    assert coins.low < ties.low < ties.rate == coins.rate < ties.high < coins.high
    assert (win_rate([0.5] * 4, inconsistent=4, clusters="aabb").low, win_rate([0.5] * 4, inconsistent=4).high) == (
        0,
        1,
    )


def test_preferences_give_their_mean_and_its_normal_interval():
    values = [0.2, 0.9, 0.6, 0.5, 0.99]
    soft = win_rate(values)
    assert soft.rate == pytest.approx(np.mean(values)) and soft.standard_error == pytest.approx(sem(values))
    assert (soft.wins, soft.losses, soft.ties) == (3, 1, 1)
    assert (soft.low, soft.high) == pytest.approx(
        (soft.rate - 1.96 * sem(values), soft.rate + 1.96 * sem(values)), abs=1e-4
    )
    assert win_rate([0.01, 0.99, 0.99, 0.99]).high == 1.0  # cut off
    assert (win_rate([0.9]).low, win_rate([0.9, 0.9]).high) == (0.0, 1.0)  # nothing is known of their spread
    # two clusters with sums of deviations 0.4 and -0.4: sqrt(2 * 0.32) / 4
    assert clustered_error(np.array([0.6, 0.6, 0.2, 0.2]), list("aabb"))[0] == pytest.approx(math.sqrt(0.64) / 4)


def test_the_sign_test_leaves_ties_out_and_holm_adjusts_it():
    assert sign_test(8, 2) == pytest.approx(2 * (1 + 10 + 45) / 1024)
    assert sign_test(0, 0) == sign_test(3, 3) == 1.0
    # by hand: 0.01 * 3; 0.03 * 2; 0.04 * 1, which is raised to the one before it
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0] and holm([]) == []


def test_holm_equals_the_closed_testing_of_bonferroni():
    p = np.random.default_rng(0).uniform(0, 0.5, 5).tolist()
    subsets = [s for size in range(1, 6) for s in itertools.combinations(range(5), size)]
    closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in subsets if i in s) for i in range(5)]
    assert holm(p) == pytest.approx(closed)


@pytest.mark.parametrize(("n", "ties"), [(100, 0.0), (400, 0.4)])
def test_the_detectable_difference_is_found_four_times_of_five(n, ties):
    difference = detectable_difference(n, ties=ties)
    assert difference is not None
    wins, losses = (1 - ties) / 2 + difference, (1 - ties) / 2 - difference
    drawn = np.random.default_rng(0).multinomial(n, [wins, ties, losses], size=2000)
    leads = (drawn[:, 0] - drawn[:, 2]) / n / 2
    # the score test at one half: |rate - 1/2| over the root of (wins + losses) / 4n
    shown = np.abs(leads) > Z_95 * np.sqrt((drawn[:, 0] + drawn[:, 2]) / n / 4 / n)
    assert np.mean(shown) == pytest.approx(0.8, abs=0.03)
    shorter = (Z_95 + NormalDist().inv_cdf(0.8)) * math.sqrt(
        (1 - ties) / 4 / n
    )  # the textbook's, which takes d for small
    assert difference == pytest.approx(shorter, rel=0.05)
    assert detectable_difference(4 * n, ties=ties) == pytest.approx(difference / 2, rel=0.05)


def test_too_few_prompts_can_show_nothing():
    assert detectable_difference(2) is None and detectable_difference(4, ties=0.9) is None


def covered(
    draws: int, *, clusters: int, size: int, correlation: float, band: float, generator: np.random.Generator
) -> float:
    """Share of intervals that hold the true rate: clustered normal leads, ties where they are within the band."""
    names = np.repeat(np.arange(clusters), size)
    shared = generator.standard_normal((draws, clusters)).repeat(size, 1)
    own = generator.standard_normal((draws, clusters * size))
    leads = 0.3 + math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
    verdicts = (np.sign(leads) * (np.abs(leads) > band) + 1) / 2
    share = NormalDist(0.3)
    truth = (1 - share.cdf(band) + 1 - share.cdf(-band)) / 2
    found = [win_rate(row, clusters=names.tolist()) for row in verdicts.tolist()]
    return float(np.mean([rate.low <= truth <= rate.high for rate in found]))


def test_clustered_intervals_cover_the_truth_about_95_times_in_100():
    generator = np.random.default_rng(0)
    assert 0.92 <= covered(500, clusters=60, size=4, correlation=0.5, band=0.4, generator=generator) <= 0.98


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clusters", "size", "correlation", "band"),
    [
        (200, 1, 0.0, 0.0),
        (200, 1, 0.0, 0.5),
        (40, 5, 0.4, 0.5),
        (100, 3, 0.6, 0.0),
        (60, 5, 0.0, 0.5),
        (30, 4, 0.3, 0.3),
    ],
)
def test_nominal_95_is_93_5_to_96_5_over_2000_draws(clusters, size, correlation, band):
    generator = np.random.default_rng(1)
    share = covered(2000, clusters=clusters, size=size, correlation=correlation, band=band, generator=generator)
    assert 0.935 <= share <= 0.965


@pytest.mark.slow
@pytest.mark.parametrize("soft", [False, True])
def test_nominal_95_holds_for_verdicts_of_two_orders_and_for_preferences(soft):
    """Both orders of an item agree, or one calls a tie: the merged verdict is a tie; no item is contradicted."""
    generator, hits, truth = np.random.default_rng(2), [], 0.7
    for _ in range(2000):
        if soft:
            merged = generator.beta(1.4, 0.6, 150).tolist()  # mean 0.7
        else:
            ours = generator.random(150) < truth
            tied = generator.random((2, 150)) < 0.15
            orders = [np.where(tie, 0.5, side) for tie, side in zip(tied, (ours, ~ours), strict=True)]
            merged = [v for v in merge_orders(*(order.tolist() for order in orders)).verdicts if v is not None]
        rate = win_rate(merged)
        tied_share = 0 if soft else 1 - 0.85**2
        hits.append(rate.low <= truth * (1 - tied_share) + tied_share / 2 <= rate.high)
    assert 0.935 <= np.mean(hits) <= 0.965

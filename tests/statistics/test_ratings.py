"""Ratings of several models: hand-worked fits, evalica's as an oracle, intervals, and what has no rating."""

import math

import evalica
import numpy as np
import pytest
from scipy.special import expit

from alignment.errors import UserError
from alignment.evaluation import Ratings, bradley_terry_ratings, elo_ratings, win_rate
from alignment.statistics.ratings import MEAN, POINTS
from alignment.statistics.winrate import Z_95

WINNERS = {1.0: evalica.Winner.X, 0.0: evalica.Winner.Y, 0.5: evalica.Winner.Draw}


def battles(generator, n, strengths, *, tie=0.0, repeats=1):
    """Rows of n pairs of models drawn at random, each judged `repeats` times in a row, half of them like the first time.

    `tie` is Rao and Kupper's width of the band of ties, log odds.
    """
    names = list(strengths)
    first = generator.integers(len(names), size=n)
    second = (first + generator.integers(1, len(names), size=n)) % len(names)
    eta = np.array(list(strengths.values()))[first] - np.array(list(strengths.values()))[second]
    noise = generator.logistic(size=(n, repeats))
    noise = np.where(generator.random(noise.shape) < 0.5, noise[:, :1], noise)
    leads = eta[:, None] + noise
    outcomes = (np.sign(leads) * (np.abs(leads) > tie) + 1) / 2
    return [(names[a], names[b], float(y)) for a, b, own in zip(first, second, outcomes, strict=True) for y in own]


STRENGTHS = {"a": 0.6, "b": 0.2, "c": -0.1, "d": -0.7}


def test_two_models_have_the_log_odds_of_their_wins():
    """By hand: 30 wins, 10 losses: log odds log 3, 400 log10(3) points, half above 1000 and half below."""
    ratings = bradley_terry_ratings([("a", "b", 1.0)] * 30 + [("b", "a", 1.0)] * 10)
    assert isinstance(ratings, Ratings) and list(ratings) == ["a", "b"] and len(ratings) == 2
    assert ratings["a"] == pytest.approx(1000 + 200 * math.log10(3)) and ratings["b"] == pytest.approx(
        2000 - ratings["a"]
    )
    assert ratings.strengths == pytest.approx({"a": 0.75, "b": 0.25})
    # the log odds vary by 1 / (40 * 3/16) with the 40/39 of the sandwich; each rating has half of them
    error = POINTS * math.sqrt(40 / 39 / 7.5)
    low, high = ratings.intervals["a"]
    assert (low, high) == pytest.approx((ratings["a"] - 0.98 * error, ratings["a"] + 0.98 * error), rel=1e-4)
    [difference] = ratings.differences()
    assert difference.points == pytest.approx(400 * math.log10(3))
    assert difference.high - difference.points == pytest.approx(1.96 * error, rel=1e-4)
    assert difference.p == difference.p_holm == pytest.approx(math.erfc(difference.points / error / math.sqrt(2)))


@pytest.mark.parametrize("tie", [0.0, 0.6])
def test_bradley_terry_and_elo_equal_evalicas(tie):
    rows = battles(np.random.default_rng(0), 400, STRENGTHS, tie=tie)
    columns = ([row[0] for row in rows], [row[1] for row in rows], [WINNERS[row[2]] for row in rows])
    golden = evalica.bradley_terry(*columns, tolerance=1e-14, limit=10_000).scores
    strengths = bradley_terry_ratings(rows).strengths
    assert strengths == pytest.approx((golden / golden.sum()).to_dict(), abs=1e-10)
    for k in (4.0, 32.0):
        elo = elo_ratings(rows, k=k, bootstraps=2)
        assert dict(elo) == pytest.approx(evalica.elo(*columns, k=k).scores.to_dict(), abs=1e-9)


def test_davidsons_ties_by_hand():
    """20 wins, 20 ties, 5 losses: the fit is exact, win : loss = 4 : 1 and tie : sqrt(win * loss) = 20 : 10, so nu = 2."""
    rows = [("a", "b", 1.0)] * 20 + [("b", "a", 0.5)] * 20 + [("a", "b", 0.0)] * 5
    ratings = bradley_terry_ratings(rows, ties="davidson")
    assert ratings["a"] - ratings["b"] == pytest.approx(400 * math.log10(4))
    assert ratings.tie is not None and ratings.tie.value == pytest.approx(2.0)
    assert ratings.tie.low < 2 < ratings.tie.high


def test_rao_and_kuppers_ties_by_hand():
    """20 wins, 20 ties, 5 losses of 45: win = p / (p + theta) = 4/9, loss = 1 / (1 + theta p) = 1/9.

    So theta = 5 p / 4 and theta p = 8: p = sqrt(32/5), theta = sqrt(10).
    """
    rows = [("a", "b", 1.0)] * 20 + [("b", "a", 0.5)] * 20 + [("a", "b", 0.0)] * 5
    ratings = bradley_terry_ratings(rows, ties="rao_kupper")
    assert ratings["a"] - ratings["b"] == pytest.approx(200 * math.log10(32 / 5))
    assert ratings.tie is not None and ratings.tie.value == pytest.approx(math.sqrt(10))


@pytest.mark.parametrize("ties", ["davidson", "rao_kupper"])
def test_without_differences_the_tie_parameter_is_the_tie_share(ties):
    """By hand: a third each: nu = 1; theta = 2, where win = 1 / (1 + theta)."""
    rows = [(*pair, outcome) for pair in (("a", "b"), ("b", "c"), ("c", "a")) for outcome in (1.0, 0.5, 0.0)]
    ratings = bradley_terry_ratings(rows, ties=ties)
    assert list(ratings.values()) == pytest.approx([MEAN] * 3)
    assert ratings.tie is not None and ratings.tie.value == pytest.approx({"davidson": 1.0, "rao_kupper": 2.0}[ties])


def test_a_planted_effect_of_length_is_found_and_taken_out():
    generator = np.random.default_rng(1)
    rows = battles(generator, 6000, STRENGTHS)
    # "d" is the weakest and the longest: outcomes drawn with an effect of 1.5 of each unit of length
    longer = np.array([generator.normal((a == "d") - (b == "d"), 0.5) for a, b, _ in rows])
    chances = expit([STRENGTHS[a] - STRENGTHS[b] for a, b, _ in rows] + 1.5 * longer)
    rows = [(a, b, float(won)) for (a, b, _), won in zip(rows, generator.random(len(rows)) < chances, strict=True)]
    assert next(iter(bradley_terry_ratings(rows))) == "d"
    held = bradley_terry_ratings(rows, covariates={"length": longer.tolist()})
    assert list(held) == ["a", "b", "c", "d"]
    assert held.effects["length"].low < 1.5 < held.effects["length"].high
    truth = {model: MEAN + POINTS * (strength - 0.0) for model, strength in STRENGTHS.items()}
    assert all(low < truth[model] < high for model, (low, high) in held.intervals.items())


def test_ones_are_the_advantage_of_being_shown_first():
    """By hand: a beats b in 3 of 4 when first and in 1 of 4 when second: no difference, odds of 3 for the first."""
    rows = [(x, y, outcome) for x, y in (("a", "b"), ("b", "a")) for outcome in (1.0, 1.0, 1.0, 0.0)]
    ratings = bradley_terry_ratings(rows, covariates={"first": [1.0] * 8})
    assert ratings["a"] == pytest.approx(1000) and ratings.effects["first"].value == pytest.approx(math.log(3))


def test_votes_counted_twice_say_no_more_than_once():
    rows = battles(np.random.default_rng(2), 300, STRENGTHS, tie=0.4)
    for ties in ("half", "davidson", "rao_kupper"):
        once = bradley_terry_ratings(rows, ties=ties)
        twice = bradley_terry_ratings(rows * 2, ties=ties, clusters=[*range(300)] * 2)
        assert dict(twice) == pytest.approx(dict(once))
        assert list(twice.intervals.values()) == [pytest.approx(bounds) for bounds in once.intervals.values()]
    elo = elo_ratings(rows, clusters=[i // 30 for i in range(300)], bootstraps=100)
    assert all(elo.intervals[model][0] < rating < elo.intervals[model][1] for model, rating in elo.items())


def test_all_pairs_of_models_are_adjusted_for():
    found = bradley_terry_ratings(battles(np.random.default_rng(3), 400, STRENGTHS)).differences()
    assert len(found) == 6 and all(row.points >= 0 and row.p <= row.p_holm <= 1 for row in found)
    assert min(found, key=lambda row: row.p).p_holm == pytest.approx(6 * min(row.p for row in found))


@pytest.mark.parametrize("clusters", [None, [*range(100)]])
def test_contradictions_count_half_and_narrow_no_rating(clusters):
    """[B-H2] 28 wins, 12 losses, 60 contradictions: the win rate's 58 % [42.7, 71.9], and no two ranks."""
    rows = [("a", "b", 1.0)] * 28 + [("a", "b", 0.0)] * 12 + [("a", "b", 0.5)] * 60
    found = bradley_terry_ratings(rows, contradictory=[False] * 40 + [True] * 60, clusters=clusters)
    [difference] = found.differences()
    assert dict(found) == dict(bradley_terry_ratings(rows)) and difference.p > 0.2
    rate = win_rate([outcome for *_, outcome in rows], inconsistent=60)
    bounds = [expit(bound / POINTS) for bound in (difference.low, difference.high)]
    assert bounds == pytest.approx([rate.low, rate.high], abs=0.01)
    assert found["a"] - MEAN == pytest.approx(POINTS * math.log(58 / 42) / 2)


@pytest.mark.parametrize("ties", ["half", "davidson"])
def test_contradictions_alone_tell_as_much_as_one_toss(ties):
    """The difference of two models varies by 1 / (1/4), however many there are; Davidson's ties tell no more of it."""
    rows = [("a", "b", 0.5)] * 30
    if ties == "half":
        [difference] = bradley_terry_ratings(rows, contradictory=[True] * 30).differences()
        assert difference.high == pytest.approx(2 * Z_95 * POINTS)
    rows = [*rows, ("a", "b", 1.0), ("a", "b", 0.0), ("a", "b", 0.5)]
    wide, narrow = (bradley_terry_ratings(rows, ties=ties, contradictory=[k] * 30 + [False] * 3) for k in (True, False))
    assert wide.intervals["a"][1] - MEAN > 1.5 * (narrow.intervals["a"][1] - MEAN)


def test_models_that_only_tie_keep_an_interval():
    for count in (1, 100):
        [difference] = bradley_terry_ratings([("a", "b", 0.5)] * count).differences()
        assert difference.high == -difference.low == pytest.approx(Z_95 * POINTS / math.sqrt(count / 4))
    # the same responses of a and b on 60 prompts: equal outcomes against c, ties with each other
    outcomes = np.random.default_rng(5).integers(0, 2, 60).tolist()
    rows = [(x, "c", float(y)) for x in "ab" for y in outcomes] + [("a", "b", 0.5)] * 60
    found = {row[:2]: row for row in bradley_terry_ratings(rows, clusters=[*range(60)] * 3).differences()}
    assert found["a", "b"].high > 50 and found["a", "b"].p == pytest.approx(1)


def test_elo_tosses_a_coin_for_a_contradiction_and_refuses_ties_alone():
    rows = [("a", "b", 0.5)] * 40
    low, high = elo_ratings(rows, contradictory=[True] * 40).intervals["a"]
    assert low < MEAN - 10 and high > MEAN + 10
    with pytest.raises(UserError, match="ties alone"):
        elo_ratings(rows)
    with pytest.raises(UserError, match="1 clusters are too few"):
        elo_ratings(CYCLE, clusters=["p"] * 3)


CYCLE = [("a", "b", 1.0), ("b", "c", 1.0), ("c", "a", 1.0)]


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], {}, "at least one battle"),
        ([("a", "b", 1.0), ("b", "a", 1.0), ("c", "d", 0.5)], {}, r"2 parts have none with each other: a, b; c, d"),
        ([*CYCLE, ("a", "d", 1.0)], {}, r"no finite rating: .*: d; a, b, c\. Leave models out"),
        ([("a", "a", 1.0), ("a", "b", 2.0)], {}, r"row 0: 'a' against itself(?s:.*)row 1: outcome is 2\.0"),
        ([("a", "b", 0.7), ("a", "b", 0.2)], {"ties": "davidson"}, r"row 0: outcome is 0\.7"),
        (CYCLE, {"ties": "rao_kupper"}, "needs wins and ties"),
        (CYCLE, {"covariates": {"length": [1.0, -1.0, 0.0]}}, "'length' follows from the models"),
        (CYCLE, {"covariates": {"length": [0.0] * 3}}, "'length' follows from .* or is 0"),
        (
            CYCLE * 9,
            {"covariates": {"x": [1.0] * 26 + [1.1], "y": [2.0] * 26 + [2.2]}},
            r"'x' follows(?s:.*)'y' follows",
        ),
        (CYCLE * 9, {"covariates": {"x": [1.0] * 27}}, "no finite fit"),  # the first always wins
        (CYCLE, {"covariates": {"x": [1.0]}}, "x has 1 values for 3 rows"),
        (CYCLE, {"covariates": {"x": [math.nan] * 3}}, "x has values that are not finite"),
        (CYCLE, {"clusters": [1, 1, 2]}, "2 clusters are too few for the intervals of 3 models"),
        (CYCLE, {"clusters": [1]}, "clusters has 1 values for 3 rows"),
    ],
)
def test_battles_without_ratings_are_refused(rows, options, message):
    with pytest.raises(UserError, match=message):
        bradley_terry_ratings(rows, **options)


def test_elo_rates_models_that_never_win():
    assert list(elo_ratings([*CYCLE, ("a", "d", 1.0)], bootstraps=10))[-1] == "d"


def shares_covered(draws, n, ties, seed, *, size=1):
    """Share of intervals that hold each model's true rating, and of pairs of models that hold their difference.

    Each of n battles is judged by `size` people, who agree more often than by chance: a cluster.
    """
    generator, ratings, pairs = np.random.default_rng(seed), [], []
    truth = {model: MEAN + POINTS * strength for model, strength in STRENGTHS.items()}
    clusters = [i for i in range(n) for _ in range(size)] if size > 1 else None
    for _ in range(draws):
        rows = battles(generator, n, STRENGTHS, tie=0.0 if ties == "half" else 0.5, repeats=size)
        found = bradley_terry_ratings(rows, ties=ties, clusters=clusters)
        ratings += [found.intervals[model][0] <= truth[model] <= found.intervals[model][1] for model in STRENGTHS]
        pairs += [row.low <= truth[row.first] - truth[row.second] <= row.high for row in found.differences()]
    return float(np.mean(ratings)), float(np.mean(pairs))


def test_intervals_cover_the_truth_about_95_times_in_100():
    assert all(0.92 <= share <= 0.98 for share in shares_covered(60, 300, "half", 0))


@pytest.mark.slow
@pytest.mark.parametrize(("ties", "size"), [("half", 1), ("rao_kupper", 1), ("half", 3)])
def test_nominal_95_is_93_5_to_96_5_over_2000_draws(ties, size):
    assert all(0.935 <= share <= 0.965 for share in shares_covered(2000, 400, ties, 1, size=size))

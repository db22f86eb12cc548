"""Win rates at equal length: what the regression finds, its interval, and what it refuses."""

import math

import numpy as np
import pytest
from scipy.special import expit

from alignment.errors import UserError
from alignment.evaluation import length_controlled_win_rate, win_rate

THETA, PHI, PSI = 0.4, 1.2, 0.8


def planted(generator, n, *, repeats=1, soft=False):
    """Preferences, lengths of ours and of the baseline, difficulties and clusters of a planted regression."""
    baseline = np.repeat(generator.integers(100, 900, n), repeats)
    ours = np.maximum(baseline + generator.normal(80, 120, n * repeats), 1)
    difficulty = np.repeat(generator.normal(0, 1, n), repeats)
    longer = np.tanh((ours - baseline) / np.std(ours - baseline, ddof=1))
    chances = expit(THETA + PHI * longer + PSI * difficulty)
    preferences = chances if soft else (generator.random(len(chances)) < chances).astype(float)
    return preferences, ours, baseline, difficulty, np.repeat(np.arange(n), repeats)


def test_probabilities_of_the_regression_give_its_coefficients_back():
    preferences, ours, baseline, difficulty, _ = planted(np.random.default_rng(0), 300, soft=True)
    found = length_controlled_win_rate(preferences, ours, baseline, difficulty=difficulty)
    assert found.length_effect.value == pytest.approx(PHI, abs=1e-7)
    assert found.rate == pytest.approx(expit(THETA + PSI * difficulty).mean(), abs=1e-8)
    assert found.low < found.rate < found.high and found.n == 300
    # without noise in the labels the rate varies by its instructions alone
    spread = expit(THETA + PSI * difficulty).std(ddof=1) / math.sqrt(300)
    assert found.standard_error == pytest.approx(spread, rel=1e-6)


def test_a_longer_model_loses_what_length_gave_it_and_both_sides_mirror():
    preferences, ours, baseline, _, _ = planted(np.random.default_rng(1), 400)
    found = length_controlled_win_rate(preferences, ours, baseline)
    assert found.rate < win_rate(preferences.tolist()).rate and found.length_effect.low > 0
    mirror = length_controlled_win_rate(1 - preferences, baseline, ours)
    assert (mirror.rate, mirror.low, mirror.high) == pytest.approx((1 - found.rate, 1 - found.high, 1 - found.low))


def test_a_length_that_the_judge_ignores_leaves_the_win_rate():
    """By hand: at lengths +1 and -1 the same 15 of 20 win, so that the coefficient is 0 and the rate 3/4."""
    preferences, lengths = ([1.0] * 15 + [0.0] * 5) * 2, [11] * 20 + [9] * 20
    found = length_controlled_win_rate(preferences, lengths, [10] * 40)
    assert found.rate == pytest.approx(0.75) and found.length_effect.value == pytest.approx(0, abs=1e-9)
    # by hand: the log odds vary by 1 / (40 * 3/16), with the 40/39 of the sandwich
    error = math.sqrt(40 / 39 / (40 * 3 / 16))
    assert found.high == pytest.approx(expit(math.log(3) + 1.959964 * error), abs=1e-6)


def test_rows_counted_twice_say_no_more_than_once():
    columns = planted(np.random.default_rng(2), 200)[:4]
    once = length_controlled_win_rate(*columns[:3], difficulty=columns[3])
    doubled = [np.tile(column, 2) for column in columns]
    twice = length_controlled_win_rate(*doubled[:3], difficulty=doubled[3], clusters=[*range(200)] * 2)
    assert (twice.rate, twice.standard_error) == pytest.approx((once.rate, once.standard_error), rel=1e-3)


def test_a_prior_holds_the_effect_of_length_where_all_responses_are_longer():
    generator = np.random.default_rng(3)
    baseline = generator.integers(100, 200, 60)
    ours = baseline + generator.integers(100, 400, 60)  # equal lengths are far from all that was seen
    preferences = (generator.random(60) < 0.7).astype(float)
    free = length_controlled_win_rate(preferences, ours, baseline)
    held = length_controlled_win_rate(preferences, ours, baseline, prior={"length": (0.0, 0.1)})
    assert free.high - free.low > 0.5 and held.high - held.low < 0.3
    assert held.rate == pytest.approx(preferences.mean(), abs=0.03) and abs(held.length_effect.value) < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lengths": [5] * 20, "baseline_lengths": [3] * 20}, "ours differ from the baseline's by 2 in every row"),
        ({"lengths": [*range(100, 120)], "baseline_lengths": [50] * 20}, "by 50 to 69 in every row"),
        ({"preferences": [0.5] * 20}, "all are ties"),
        ({"preferences": [0.0, 1.0, 1.0, 0.0] * 5, "clusters": ["p"] * 20}, "1 clusters are too few"),
        ({"preferences": [0.0, 1.0, 1.0, 0.0] * 5, "clusters": ["p", "q"] * 10}, "2 clusters are too few"),
        ({"difficulty": [2.0] * 20}, "'difficulty' follows from the models"),
        ({"difficulty": [0.0] * 20}, "'difficulty' follows from .* or is 0"),
        ({"preferences": [1.0] * 20}, "no finite fit"),
        ({"preferences": [0.5, 2.0] * 10}, r"must be in \[0, 1\]"),
        ({"lengths": [1.0] * 19}, "lengths has 19 rows where preferences has 20"),
        ({"difficulty": [math.nan] * 20}, "difficulty has values that are no numbers"),
        ({"preferences": [1.0], "lengths": [1], "baseline_lengths": [2]}, "at least 10 rows, and there are 1"),
    ],
)
def test_columns_without_an_answer_are_refused(changes, message):
    columns = {"preferences": [1.0, 0.0] * 10, "lengths": [*range(20)], "baseline_lengths": [10] * 20} | changes
    with pytest.raises(UserError, match=message):
        length_controlled_win_rate(**columns)


def test_contradictions_narrow_no_rate_at_equal_length():
    """Eight contradictions less, the interval is about that of the other rows; as ties they would narrow it."""
    preferences, ours, baseline, _, _ = planted(np.random.default_rng(4), 60)
    known = length_controlled_win_rate(preferences, ours, baseline)
    lengths = [*ours, *[500] * 20], [*baseline, *[450, 550] * 10]
    widths = []
    for contradictory in ([False] * 80, [False] * 60 + [True] * 20):
        found = length_controlled_win_rate([*preferences, *[0.5] * 20], *lengths, contradictory=contradictory)
        widths.append(found.high - found.low)
    assert widths[0] < 0.9 * (known.high - known.low) and widths[1] == pytest.approx(known.high - known.low, rel=0.1)


def share_covered(draws, n, repeats, seed):
    """Share of intervals that hold the rate of a planted regression, whose instructions are drawn again each time."""
    generator = np.random.default_rng(seed)
    truth = expit(THETA + PSI * generator.normal(0, 1, 1_000_000)).mean()
    hits = []
    for _ in range(draws):
        *columns, difficulty, clusters = planted(generator, n, repeats=repeats)
        found = length_controlled_win_rate(*columns, difficulty=difficulty, clusters=clusters.tolist())
        hits.append(found.low <= truth <= found.high)
    return float(np.mean(hits))


def test_the_interval_covers_the_truth_about_95_times_in_100():
    assert 0.89 <= share_covered(60, 100, 2, 0) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("n", "repeats"), [(200, 1), (100, 3)])
def test_nominal_95_is_93_5_to_96_5_over_2000_draws(n, repeats):
    assert 0.935 <= share_covered(2000, n, repeats, 1) <= 0.965

"""Win rates of several seeds: one interval over prompts and seeds."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import expit, logit
from scipy.stats import t

from alignment.errors import UserError
from alignment.evaluation import seeds_win_rate, win_rate

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from seeds_coverage import Cell, coverage, mean_squares

TABLE = [[1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]]


def test_a_table_of_two_seeds_and_four_prompts_by_hand():
    """Means: of all 1/2, of the seeds 3/4 and 1/4, of the prompts 1, 1/2, 0, 1/2; the squares about 1/2 sum to 8/4.

    MS_seeds = 4 (1/16 + 1/16) / 1 = 1/2; MS_prompts = 2 (1/4 + 1/4) / 3 = 1/3; residual = (2 - 1/2 - 1) / 3 = 1/6.
    v = (1/2 + 1/3 - 1/6) / 8 = 1/12; df = (2/3) / (1/2 / 1 + 1/3 / 3) = 12/11; the seeds' variance (1/2 - 1/6) / 4 = 1/12.
    """
    assert mean_squares(np.array(TABLE)) == pytest.approx([1 / 2, 1 / 3, 1 / 6])
    result = seeds_win_rate(TABLE)
    assert (result.rate, result.seeds, result.prompts, result.rates) == (0.5, 2, 4, [0.75, 0.25])
    assert (result.standard_error, result.seed_deviation) == pytest.approx((12**-0.5, 12**-0.5))
    assert result.degrees_of_freedom == pytest.approx(12 / 11)
    half = t.ppf(0.975, 12 / 11) * 12**-0.5 / (3 / 16)  # of the log odds, by the mean of 3/4 1/4 and 1/4 3/4
    assert (result.low, result.high) == pytest.approx((expit(-half), expit(half)))


def test_seeds_that_say_the_same_give_nearly_the_interval_over_prompts():
    verdicts = [1.0] * 180 + [0.0] * 120
    result = seeds_win_rate([verdicts] * 5)
    alone = win_rate(verdicts)
    assert result.seed_deviation == 0 and result.degrees_of_freedom == pytest.approx(299)
    assert (result.low, result.high) == pytest.approx((alone.low, alone.high), abs=0.002)


def test_of_many_prompts_the_interval_is_that_of_the_seeds_rates():
    """Each prompt of a seed is won with the seed's own chance: prompts add nearly nothing, and t has S - 1 degrees."""
    random = np.random.default_rng(0)
    chances = np.array([0.5, 0.55, 0.6, 0.65])
    result = seeds_win_rate(random.random((4, 20_000)) < chances[:, None])
    half = t.ppf(0.975, 3) * np.std(result.rates, ddof=1) / 2 / np.mean([rate * (1 - rate) for rate in result.rates])
    bounds = expit(logit(result.rate) - half), expit(logit(result.rate) + half)
    assert (result.low, result.high) == pytest.approx(bounds, abs=0.001)
    assert result.seed_deviation == pytest.approx(np.std(chances, ddof=1), abs=0.01)


def test_seeds_that_agree_by_chance_do_not_end_the_interval():
    """Each seed wins every second prompt, so v is below 0; 0.6 of the interval over prompts alone is left."""
    result = seeds_win_rate([[1, 0, 1, 0, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1, 0, 0]])
    assert result.rates == [0.5, 0.5] and result.standard_error > 0
    side = 0.6 * 1.96 * (2 * 4 * 0.25 / 7 / 16) ** 0.5 / 0.25
    assert (result.low, result.high) == pytest.approx((expit(-side), expit(side)), abs=1e-4)


def test_equal_prompts_count_as_one_and_contradictions_narrow_nothing():
    twice = seeds_win_rate(np.repeat(TABLE, 2, axis=1), clusters=list("aabbccdd"))
    once = seeds_win_rate(TABLE)
    assert (twice.low, twice.high, twice.prompts) == pytest.approx((once.low, once.high, 4))
    random = np.random.default_rng(0)
    table = random.integers(0, 2, (3, 200)).astype(float)
    tossed = np.where(np.arange(200) < 50, 0.5, table)
    plain, wider = seeds_win_rate(table[:, 50:]), seeds_win_rate(tossed, inconsistent=150)
    assert wider.high - wider.low > 0.95 * (plain.high - plain.low)
    nothing = seeds_win_rate(np.full((3, 20), 0.5), inconsistent=60)
    assert nothing.low < 0.001 and nothing.high > 0.999


def test_where_nothing_varies_the_interval_is_wilsons_of_the_prompts():
    result, alone = seeds_win_rate(np.ones((3, 50))), win_rate([1.0] * 50)
    assert (result.rate, result.low, result.high) == (1.0, pytest.approx(alone.low), 1.0)


@pytest.mark.parametrize("outcomes", [[[1.0, 0.0]], [1.0, 0.0], [[2.0, 0.0], [0.0, 0.0]], [[np.nan, 1], [1, 1]]])
def test_one_seed_and_values_that_are_no_outcomes_are_refused(outcomes):
    with pytest.raises(UserError, match="two or more seeds"):
        seeds_win_rate(outcomes)


def test_one_prompt_is_refused():
    with pytest.raises(UserError, match="two different"):
        seeds_win_rate([[1.0, 0.5], [0.0, 0.5]], clusters=["a", "a"])


@pytest.mark.parametrize("seeds", [3, 10])
def test_the_interval_covers_the_truth_about_95_times_in_100(seeds):
    cell = Cell(seeds, prompts=100, rate=0.7, deviation=0.05, strength=1.0)
    assert 0.93 <= coverage(cell, 1500, np.random.default_rng(0)) <= 0.97

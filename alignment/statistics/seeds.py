"""Win rates of several training runs that differ by their seed: one interval, with prompts and seeds both random.

An interval over prompts alone says how another set of prompts would judge the same checkpoints. Intervals of one
checkpoint are in winrate.py.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from alignment.errors import UserError
from alignment.statistics.winrate import Z_95, clustered_error, paired_interval

LEAST_WIDTH = 0.6  # of the interval over prompts alone, see `crossed_interval`


@dataclass(frozen=True)
class SeedsWinRate:
    """Mean win rate of several seeds with its 95 % interval over prompts and seeds."""

    rate: float  # mean over all seeds and prompts
    low: float
    high: float
    seeds: int
    prompts: int  # independent ones
    standard_error: float  # of the rate; 0 where nothing varies
    degrees_of_freedom: float  # of Student's t
    seed_deviation: float  # standard deviation of the seeds' true rates, without the noise of prompts
    rates: list[float]  # of each seed


def seeds_win_rate(
    outcomes: ArrayLike, *, inconsistent: int = 0, clusters: Sequence[Hashable] | None = None
) -> SeedsWinRate:
    """Mean win rate of several seeds on the same prompts, with the interval of `crossed_interval`.

    Where nothing varies, as in a rate of 1, the interval is Wilson's of as many items as there are prompts.

    Args:
        outcomes: 1.0 won, 0.5 tied, 0.0 lost, or probabilities, [S, P], a row for each seed.
        inconsistent: outcomes among the ties whose two orders contradict each other; they widen the interval as in
            `win_rate`.
        clusters: name of each column's cluster, such as its prompt, [P]; None: each column is its own.

    Raises:
        UserError: values outside [0, 1], fewer than two seeds or two different prompts.
    """
    table = np.atleast_2d(np.asarray(outcomes, float))
    if len(table) < 2 or not ((table >= 0) & (table <= 1)).all():
        raise UserError(
            f"outcomes: an array of shape {table.shape}; give values in [0, 1], a row for each of two or more seeds on "
            "the same prompts; the interval of a single seed is that of `win_rate`"
        )
    seeds, width = table.shape
    names = range(width) if clusters is None else clusters
    cells = [(seed, name) for seed in range(seeds) for name in names]
    (by_seed, _), (by_prompt, prompts), (by_cell, count) = (
        clustered_error(table.ravel(), groups, tosses=inconsistent) for groups in (*zip(*cells, strict=True), cells)
    )
    if prompts < 2:
        raise UserError("outcomes: of one prompt; an interval over prompts and seeds needs two different ones")
    rest = by_cell**2 * (count - 1) - by_seed**2 * (seeds - 1) - by_prompt**2 * (prompts - 1)
    parts = np.array([by_seed**2, by_prompt**2, rest / (seeds - 1) / (prompts - 1)])
    spread = max(float(parts[0] - parts[2]), 0.0) * seeds
    rate = float(table.mean())
    decided = max(table.size - inconsistent, 1) / table.size
    low, high, error, degrees = map(float, crossed_interval(rate, parts / decided, (seeds, prompts)))
    if error < 1e-9:
        low, high = paired_interval(rate * prompts, (1 - rate) * prompts, prompts)
    return SeedsWinRate(rate, low, high, seeds, prompts, error, degrees, spread**0.5, table.mean(1).tolist())


def crossed_interval(rate: ArrayLike, parts: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """95 % interval of a mean rate over S seeds and C prompts, both of them samples.

    The variance of the mean is sigma_seed^2 / S + sigma_prompt^2 / C + sigma_error^2 / (S C). Without bias it is

        v = (MS_seeds + MS_prompts - MS_residual) / (S C)

    with the mean squares of the two-way table without replication, m being the mean of all cells, m_s that of a seed
    and m_p that of a prompt:

        MS_seeds     C sum_s (m_s - m)^2 / (S - 1)
        MS_prompts   S sum_p (m_p - m)^2 / (C - 1)
        MS_residual  sum_sp (x_sp - m_s - m_p + m)^2 / ((S - 1) (C - 1))

    Student's t has df = (MS_seeds + MS_prompts - MS_residual) / (MS_seeds / (S - 1) + MS_prompts / (C - 1)), at least
    min(S, C) - 1. Satterthwaite's df has the squares of these sums and terms; of 3 seeds its intervals are too narrow,
    since three seeds hardly know their own spread. Seeds that agree by chance make v small, or below 0: the half width
    t sqrt(v) is at least 0.6 of that over prompts alone, 1.96 sqrt(MS_prompts / (S C)). The interval is that of the log
    odds, logit(rate) +- half / mean_s(m_s (1 - m_s)). `scripts/seeds_coverage.py` measures how often it holds.

    Args:
        rate: mean of the outcomes, a number or an array.
        parts: mean squares of seeds, prompts and residual, each divided by S C, [3, ...].
        shape: S and C.

    Returns:
        Low, high, standard error and df, [4, ...].

    Source: the variance: Cameron, Gelbach and Miller 2011, Journal of Business & Economic Statistics 29, 238-249
    (two-way clusters); t: Satterthwaite 1946, Biometrics Bulletin 2, 110-114, and Hillis 2007, Statistics in Medicine
    26, 596-619 (readers and cases, for seeds and prompts).
    """
    from scipy.special import expit, logit, stdtrit

    seeds, prompts, residual = parts
    variance = np.maximum(seeds + prompts - residual, 0.0)
    unknown = seeds / (shape[0] - 1) + prompts / (shape[1] - 1)
    degrees = np.maximum(variance / np.maximum(unknown, 1e-99), min(shape) - 1)
    t = stdtrit(degrees, 0.975)
    half = np.maximum(t * np.sqrt(variance), LEAST_WIDTH * Z_95 * np.sqrt(prompts))
    slope = rate * np.subtract(1, rate) - (shape[0] - 1) * seeds
    side = half / np.maximum(slope, 1e-99)
    return np.stack([expit(logit(rate) - side), expit(logit(rate) + side), half / t, degrees])

"""Win rates from verdicts: ties, failures, clusters, 95 % intervals, and tests. Judges are in judging/.

Rates at equal length are in length_control.py, ratings of several models in ratings.py.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np

from alignment.errors import UserError, raise_all

WIN = 1.0
TIE = 0.5
LOSS = 0.0
Verdict = float | None  # 1.0 / 0.5 / 0.0, or None where the judge failed
Z_95 = NormalDist().inv_cdf(0.975)  # 1.96


@dataclass(frozen=True)
class WinRate:
    """Share of items won, ties counting half, with its 95 % interval."""

    rate: float  # (wins + ties / 2) / n; of preferences in (0, 1) their mean
    low: float
    high: float
    n: int  # items with a verdict
    wins: int  # verdicts above one half
    losses: int  # verdicts below one half
    ties: int
    standard_error: float | None = None  # of the rate, cluster-robust; None of a single cluster
    clusters: int | None = None  # independent groups of items, n where each item is one
    effective: float | None = None  # independent items that would have the same variance, at most n

    def __str__(self) -> str:
        return f"{self.rate:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.n}"


class Merged(NamedTuple):
    """Verdicts of two orders put together: one per item, None where an order has no verdict; items whose two orders
    disagree, which are scored as ties; and items without a verdict in at least one order, which are in no rate."""

    verdicts: list[Verdict]
    inconsistent: int
    failures: int


def win_rate(
    verdicts: Sequence[float], *, inconsistent: int = 0, clusters: Sequence[Hashable] | None = None
) -> WinRate:
    """Win rate of one side over items that were judged, failures having been taken out and counted before.

    An item whose two orders contradict each other counts half in the rate and adds nothing to what is known: the
    interval takes it for a toss of a coin, not for a tie, and is that of n - `inconsistent` items with those shares. So
    a judge that always prefers the response shown first gives 50 % [0, 100], and no contradiction narrows an interval.

    Items of one cluster, such as responses to one prompt or prompts of one source, are not independent. The interval is
    then that of as many independent items as have the cluster-robust variance, at most n, see `clustered_error`; with
    `clusters` all different it is the same as without. Where that variance is not known each cluster is one item.

    Preferences in (0, 1), such as probabilities of a judge's labels, give their mean +- 1.96 standard errors.

    Args:
        verdicts: 1.0 won, 0.5 tied, 0.0 lost, or probabilities that ours is preferred, in [0, 1]; one per item, both
            orders already merged.
        inconsistent: items among the ties whose two orders contradict each other.
        clusters: name of each item's cluster, [n]; None: each item is its own.

    Source: interval: Tango 1998, Statistics in Medicine 17, 891-908, see `paired_interval`; clusters: Korn and Graubard
    1998, Survey Methodology 24, 193-201 (effective sample size).
    """
    raise_all(
        f"verdict {i} is {verdict!r}; a verdict is 1.0, 0.5, 0.0 or a probability in [0, 1] (take failures out before, "
        "and count them)"
        for i, verdict in enumerate(verdicts)
        if verdict is None or not 0 <= verdict <= 1
    )
    if len(verdicts) == 0:
        raise_all(["a win rate needs at least one verdict, and there is none"])
    n = len(verdicts)
    wins = sum(verdict > TIE for verdict in verdicts)
    losses = sum(verdict < TIE for verdict in verdicts)
    rate = sum(verdicts) / n
    values = np.asarray(verdicts, float)
    error, cluster_count = clustered_error(values, clusters, tosses=inconsistent)
    spread = float(((values - rate) ** 2).sum()) + inconsistent / 4  # a toss of a coin varies by 1/4
    effective = float(n)
    if cluster_count < n:
        apart = clustered_error(values, clusters)[0] > 0  # else each cluster counts as one item
        effective = min(spread / n / error**2, n) if apart else float(cluster_count)
    decided = (n - inconsistent) / n
    low = 0.0  # where nothing is known
    high = 1.0
    is_hard = all(verdict in (WIN, TIE, LOSS) for verdict in verdicts)
    if is_hard and decided:
        coins = inconsistent / 2
        share = decided * (effective / n)
        low, high = paired_interval((wins + coins) * share, (losses + coins) * share, n * share)
    elif error and not is_hard:
        low = max(rate - Z_95 * error, 0.0)
        high = min(rate + Z_95 * error, 1.0)
    ties = n - wins - losses
    standard_error = error if cluster_count > 1 else None
    return WinRate(rate, low, high, n, wins, losses, ties, standard_error, cluster_count, effective)


def clustered_error(
    values: np.ndarray, clusters: Sequence[Hashable] | None = None, *, tosses: float = 0
) -> tuple[float, int]:
    """Standard error of the mean of values [n] that are dependent within a cluster, and the number of clusters G.

    variance = [G/(G-1) sum_g (sum_i (v_i - mean))^2 + tosses / 4] / n^2, the i being the rows of cluster g; where each
    row is its own cluster that is the usual one. `tosses` is the number of values 1/2 that stand for an independent
    toss of a coin.

    The error is 0 where it is not known: of one cluster, and of clusters whose sums differ by rounding alone.
    """
    numbers = cluster_numbers(range(len(values)) if clusters is None else clusters)
    if len(numbers) != len(values):
        raise UserError(f"clusters has {len(numbers)} names for {len(values)} rows; give one for each row")
    cluster_count = int(numbers.max()) + 1
    if cluster_count == 1:
        return 0.0, 1
    deviations = values - values.mean()
    sums = np.bincount(numbers, deviations)
    squares = float(sums @ sums)
    if squares <= 1e-12 * (deviations @ deviations) + 1e-24 * (values @ values):
        squares = 0.0
    variance = cluster_count / (cluster_count - 1) * squares + tosses / 4
    return math.sqrt(variance) / len(values), cluster_count


def cluster_numbers(clusters: Sequence[Hashable]) -> np.ndarray:
    """Number of each row's cluster, 0 on in the order of their first rows, [n]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(cluster, len(numbers)) for cluster in clusters], int)


def sign_test(wins: int, losses: int) -> float:
    """Two-sided p-value of equally likely wins and losses, without ties: the exact binomial test; 1 of no items."""
    from scipy.stats import binomtest  # a second, which few need

    return float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0


def holm(p_values: Sequence[float]) -> list[float]:
    """The p-values of several tests adjusted so that one below 0.05 in any of them has a chance of at most 5 % in all.

    The i-th smallest of m is multiplied by m - i + 1; none is smaller than the one before it, or above 1.

    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70.
    """
    order = np.argsort(p_values)
    factors = np.arange(len(p_values), 0, -1)
    adjusted = np.maximum.accumulate(np.asarray(p_values, float)[order] * factors).clip(max=1.0)
    return adjusted[np.argsort(order)].tolist()


def detectable_difference(n: float, *, ties: float = 0.0, power: float = 0.8) -> float | None:
    """Smallest difference of a win rate from one half that n independent items show with this power; None where none.

    d sqrt(n) = 1.96 s + z sqrt(s^2 - d^2), solved for d: s^2 = (1 - ties) / 4 is the variance of a verdict at a rate of
    one half, s^2 - d^2 at 1/2 + d, and z the quantile of `power`. A rate is at most (1 - ties) / 2 from one half.

    Args:
        n: items with a verdict; of clustered ones `WinRate.effective`.
        ties: share of ties, in [0, 1).
        power: chance that the 95 % interval leaves one half out, in [0.5, 1).
    """
    z = NormalDist().inv_cdf(power)
    variance = (1 - ties) / 4
    discriminant = n * Z_95**2 - (n + z**2) * (Z_95**2 - z**2)
    if discriminant < 0:
        return None
    difference = math.sqrt(variance) * (Z_95 * math.sqrt(n) + math.sqrt(discriminant)) / (n + z**2)
    return difference if difference < 2 * variance else None


def paired_interval(wins: float, losses: float, n: float) -> tuple[float, float]:
    """95 % score interval of (wins + ties / 2) / n; counts may be fractions.

    The bounds are the rates that a score test would just not reject, the share of ties being fitted at each. Without
    ties it is Wilson's interval. With ties it is narrower, as it should be; at rates of 0 and 1, and where all are
    ties, it keeps a width, which the bootstrap and the mean +- 1.96 standard errors do not.

    Source: Tango 1998, Statistics in Medicine 17, 891-908, on d = 2 * rate - 1 (his b is wins, c is losses).
    """
    from scipy.optimize import brentq  # a third of a second, which a run's report does not need

    def root(z: float, low: float, high: float) -> float:  # the true difference at which the score is z
        return float(
            brentq(  # pyright: ignore[reportArgumentType]
                lambda difference: _score(wins, losses, n, difference) - z, low, high
            )
        )

    difference = (wins - losses) / n
    low = -1.0 if difference == -1 else root(Z_95, -1 + 1e-12, difference)
    high = 1.0 if difference == 1 else root(-Z_95, difference, 1 - 1e-12)
    return (low + 1) / 2, (high + 1) / 2


def _score(wins: float, losses: float, n: float, difference: float) -> float:
    """Standardized distance of the observed wins - losses from a true difference of shares in (-1, 1)."""
    b = (2 * n - wins + losses) * difference - wins - losses
    c = -losses * difference * (1 - difference)
    share_lost = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)  # the most likely one, given the difference
    variance = n * (2 * share_lost + difference * (1 - difference))
    distance = wins - losses - n * difference
    if variance <= 0:  # all ties, and a true difference of 0
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> list[float] | None:
    """95 % interval of a mean, +- 1.96 standard errors, see `clustered_error`; None where the error is not known."""
    error, cluster_count = clustered_error(np.asarray(values, float), clusters)
    if error == 0:
        return None
    if cluster_count == len(values):
        error = stdev(values) / math.sqrt(len(values))
    return [fmean(values) - Z_95 * error, fmean(values) + Z_95 * error]


def merge_orders(first: Sequence[Verdict], second: Sequence[Verdict]) -> Merged:
    """One verdict per item from both orders, so that a judge's position bias wins nothing.

    Both orders must agree on a winner; everything else is a tie.

    Args:
        first, second: verdicts for the response shown first, which is ours in `first`; those returned are for ours.

    Source: Zheng et al. 2023, arXiv:2306.05685, section 3.4.
    """
    merged: list[Verdict] = []
    inconsistent = 0
    for ours_first, other_first in zip(first, second, strict=True):
        if ours_first is None or other_first is None:
            merged.append(None)
            continue
        agree = ours_first == 1 - other_first
        inconsistent += not agree
        merged.append(ours_first if agree else TIE)
    return Merged(merged, inconsistent, merged.count(None))


def accuracy_gain(
    right: Sequence[float], baseline: Sequence[float], clusters: Sequence[Hashable] | None = None
) -> dict[str, float]:
    """Difference of two accuracies on the same items (1.0 for each right answer, else 0.0), with its 95 % interval.

    `clusters` are as of `win_rate`.
    """
    leads = [(1 + ours - theirs) / 2 for ours, theirs in zip(right, baseline, strict=True)]
    estimate = win_rate(leads, clusters=clusters)
    return {"difference": 2 * estimate.rate - 1, "low": 2 * estimate.low - 1, "high": 2 * estimate.high - 1}

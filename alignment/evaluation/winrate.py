"""Win rates from verdicts: ties, failures, a 95 % interval. Judges are in judges.py."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from alignment.errors import raise_all

WIN, TIE, LOSS = 1.0, 0.5, 0.0
Verdict = float | None  # 1.0 / 0.5 / 0.0, or None where the judge failed
Z_95 = NormalDist().inv_cdf(0.975)  # 1.96


@dataclass(frozen=True)
class WinRate:
    """Share of items won, ties counting half, with its 95 % interval."""

    rate: float  # (wins + ties / 2) / n
    low: float
    high: float
    n: int  # items with a verdict
    wins: int
    losses: int
    ties: int

    def __str__(self) -> str:
        return f"{self.rate:.1%} [{self.low:.1%}, {self.high:.1%}] of {self.n}"


class Merged(NamedTuple):
    """Verdicts of two orders put together: one per item, None where an order has no verdict; items whose two orders
    disagree, which are scored as ties; and items without a verdict in at least one order, which are in no rate."""

    verdicts: list[Verdict]
    inconsistent: int
    failures: int


def win_rate(verdicts: Sequence[float], *, inconsistent: int = 0) -> WinRate:
    """Win rate of one side over items that were judged, failures having been taken out and counted before.

    An item whose two orders contradict each other counts half in the rate and adds nothing to what is known: the interval
    takes it for a toss of a coin, not for a tie, and is that of n - `inconsistent` items with those shares. So a judge
    that always prefers the response shown first gives 50 % [0, 100], and no contradiction narrows an interval.

    Args:
        verdicts: 1.0 won, 0.5 tied, 0.0 lost; one per item, both orders already merged.
        inconsistent: items among the ties whose two orders contradict each other.

    Source: interval: Tango 1998, Statistics in Medicine 17, 891-908; see `paired_interval`.
    """
    raise_all(
        f"verdict {i} is {verdict!r}; a verdict is 1.0, 0.5 or 0.0 (take failures out before, and count them)"
        for i, verdict in enumerate(verdicts)
        if verdict not in (WIN, TIE, LOSS)
    )
    if len(verdicts) == 0:
        raise_all(["a win rate needs at least one verdict, and there is none"])
    n = len(verdicts)
    wins, losses = (sum(1 for verdict in verdicts if verdict == outcome) for outcome in (WIN, LOSS))
    coins, decided = inconsistent / 2, (n - inconsistent) / n
    low, high = (0.0, 1.0)
    if decided:
        low, high = paired_interval((wins + coins) * decided, (losses + coins) * decided, n * decided)
    return WinRate(sum(verdicts) / n, low, high, n, wins, losses, n - wins - losses)


def paired_interval(wins: float, losses: float, n: float) -> tuple[float, float]:
    """95 % score interval of (wins + ties / 2) / n; counts may be fractions.

    The bounds are the rates that a score test would just not reject, the share of ties being fitted at each. Without
    ties it is Wilson's interval. With ties it is narrower, as it should be; at rates of 0 and 1, and where all are
    ties, it keeps a width, which the bootstrap and the mean +- 1.96 standard errors do not.

    Source: Tango 1998, Statistics in Medicine 17, 891-908, on d = 2 * rate - 1 (his b is wins, c is losses).
    """
    from scipy.optimize import brentq  # a third of a second, which a run's report does not need

    def root(z: float, low: float, high: float) -> float:  # the true difference at which the score is z
        return float(brentq(lambda difference: _score(wins, losses, n, difference) - z, low, high))  # pyright: ignore[reportArgumentType]

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


def mean_interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval of a mean of independent values, +- 1.96 standard errors; None where they do not differ."""
    if len(values) < 2 or (error := stdev(values) / math.sqrt(len(values))) == 0:
        return None
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


def accuracy_gain(right: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """Difference of two accuracies on the same items (1.0 for each right answer, else 0.0), with its 95 % interval."""
    leads = [ours - theirs for ours, theirs in zip(right, baseline, strict=True)]
    low, high = paired_interval(leads.count(1.0), leads.count(-1.0), len(leads))
    return {"difference": sum(leads) / len(leads), "low": 2 * low - 1, "high": 2 * high - 1}

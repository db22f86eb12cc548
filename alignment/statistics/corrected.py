"""Win rates that a judge's errors are taken out of by labels of people on some of the items.

Two corrections, with what each takes for granted:

    prediction-powered   labeled items are drawn at random from all: labels alone give the rate, the judge narrows it
    Rogan-Gladen         the judge errs alike on labeled and other items, however these were chosen or whoever wins them

Neither replaces labels: see `label_worth`. Agreement of judge and people is in agreement.py.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from alignment.errors import UserError
from alignment.statistics.agreement import Figures
from alignment.statistics.winrate import LOSS, WIN, Z_95, Verdict, cluster_numbers

MIN_LABELS = 5  # fewer say nothing about their own spread


def corrected_win_rate(
    verdicts: Sequence[Verdict], labels: Sequence[Verdict], clusters: Sequence[Hashable] | None = None
) -> Figures:
    """Win rate by people, from a judge's verdicts on all items and labels of people on some.

    rate = mean of labels + lambda * (mean verdict on the other items - mean verdict on the labeled items)

    with the lambda in [0, 1] of the least variance. The interval is Student's, of labeled clusters less two; its
    variance takes half an item's disagreement more than was seen: a judge right on all of ten labels is not certain.

    Args:
        verdicts: of the judge for one side, 1, 0.5, 0 or a probability; None where it failed: the item is left out.
        labels: of people for the same side, 1, 0.5, 0 or the mean of several votes; None of an item without one.
        clusters: equal for items that are not independent, such as those on one prompt; None: all are.

    Returns:
        `items` with a verdict, and `labels` of them; the rates `judge` (its verdicts alone: what the interval does not
        hold is bias), `people` (the labels alone), `corrected`, and `rogan_gladen`, None where the judge's verdicts on
        won and on lost items differ too little or all clusters but one are labeled: each with `rate`, `low` and `high`,
        95 %. `bias`: the judge's mean verdict less people's on the labeled items. `correlation` of both there, 0 where
        either does not vary. `label_worth`: labels alone that one label with the judge is worth, a ratio of variances.

    Raises:
        UserError: there are fewer than five labels, or clusters with one, on items that the judge has judged.

    Source: Angelopoulos et al. 2023, PPI++, arXiv:2311.01453, section 6 (their f is the judge); Rogan and Gladen 1978,
    American Journal of Epidemiology 107, 71-76, with Fieller's interval.
    """
    names = range(len(verdicts)) if clusters is None else clusters
    rows = [row for row in zip(verdicts, labels, names, strict=True) if row[0] is not None]
    judge, people = (np.array([row[k] for row in rows], float) for k in (0, 1))  # people: NaN without a label
    cluster = cluster_numbers([row[2] for row in rows])
    known = ~np.isnan(people)
    n = int(known.sum())
    others = int((~known).sum())
    apart = len(np.unique(cluster[~known])) > 1  # of one cluster no spread is known
    if len(np.unique(cluster[known])) < MIN_LABELS:
        raise UserError(
            f"a corrected win rate needs at least {MIN_LABELS} labels of people on items that the judge has judged, in "
            f"as many clusters; found {n} among {len(rows)} items, in {len(np.unique(cluster[known]))} clusters"
        )
    y = people[known]
    f = judge[known]
    variance = judge.var(ddof=1)
    covariance = float(((y - y.mean()) * (f - f.mean())).mean())
    weight = float(np.clip(covariance / variance / (1 + n / others), 0, 1)) if apart and variance > 0 else 0.0
    alone, wide = _powered(judge, people, 0.0, cluster)
    powered, narrow = _powered(judge, people, weight, cluster)
    spread = math.sqrt(float(y.var() * f.var()))
    return {
        "items": len(rows),
        "labels": n,
        "judge": _powered(judge, judge, 0.0, cluster)[0],
        "people": alone,
        "corrected": powered,
        "rogan_gladen": _rogan_gladen(judge, people, cluster) if apart else None,
        "bias": float((f - y).mean()),
        "correlation": covariance / spread if spread else 0.0,
        "label_worth": max(1.0, wide / narrow) if narrow else 1.0,
    }


def labels_needed(
    width: float, *, items: float = math.inf, correlation: float = 0.0, variance: float = 0.25
) -> int | None:
    """Labels of people that a corrected win rate takes for a 95 % interval of this width (high - low).

    width = 2 * 1.96 * sqrt(variance * ((1 - correlation^2) / n + correlation^2 / items)), solved for n

    Args:
        width: as a share: 0.1 for +- 5 points.
        items: that the judge judges, the labeled ones among them.
        correlation: of judge and people within a pair of models; 0: of labels alone.
        variance: of the labels; 0.25 is the largest, of a rate of one half without ties.

    Returns:
        n; None where no number will do: there are too few items.
    """
    share = correlation**2
    left = (width / (2 * Z_95)) ** 2 / variance - (share / items if share else 0.0)
    needed = math.ceil((1 - share) / left) if left > 0 else math.inf
    return int(needed) if needed <= items else None


def _powered(judge: np.ndarray, people: np.ndarray, weight: float, cluster: np.ndarray) -> tuple[Figures, float]:
    """The prediction-powered mean with `weight` on the judge, and its variance; `people` is NaN without a label."""
    from scipy.special import stdtrit  # Student's quantiles, without the two seconds of scipy.stats

    known = ~np.isnan(people)
    rest = people[known] - weight * judge[known]
    others = weight * judge[~known]
    # the mean, and the weight
    n = len(rest)
    fitted = 1 + (weight > 0)
    parts = np.zeros(len(judge))
    parts[known] = (rest - rest.mean()) / math.sqrt(n * (n - fitted))
    if weight:
        parts[~known] = (others - others.mean()) / len(others)
    mean = float(rest.mean() + others.mean()) if weight else float(rest.mean())
    mean = min(max(mean, 0.0), 1.0)
    variance = float((np.bincount(cluster, parts) ** 2).sum())
    degrees = max(len(np.unique(cluster[known])) - 2, 1)
    half = float(stdtrit(degrees, 0.975)) * math.sqrt(variance + 0.5 / n**2)
    return {"rate": mean, "low": max(mean - half, 0.0), "high": min(mean + half, 1.0)}, variance


def _rogan_gladen(judge: np.ndarray, people: np.ndarray, cluster: np.ndarray) -> Figures | None:
    """The rate at which the judge's errors on labeled items would give its mean verdict on the others.

    mean = lost + rate * (won - lost) + between,   rate = (mean - lost - between) / (won - lost)

    `won` and `lost` are the judge's mean verdicts on items that people decided so (sensitivity and 1 - specificity of a
    judge without ties), `between` what its verdicts on the others, such as people's ties, are above the line through
    the two. Fieller's interval, of the rates at which (mean - lost - between) - rate * (won - lost) would just not be
    told from 0, holds the variance of both the mean and the errors, and widens without end where won - lost is small.
    It is Student's, of labeled clusters less three, and takes half an item's disagreement more than was seen for won
    and for lost items.
    """
    from scipy.special import stdtrit

    known = ~np.isnan(people)
    y = people[known]
    f = judge[known]
    others = judge[~known]
    won = y == WIN
    lost = y == LOSS
    middle = (y != WIN) & (y != LOSS)
    if not won.any() or not lost.any():
        return None
    bottom = f[lost].mean()
    slope = f[won].mean() - f[lost].mean()
    between = middle * (f - bottom - slope * y)
    level = others.mean() - bottom - between.mean()
    tops = won * (f - bottom - slope) / won.mean()
    bottoms = lost * (f - bottom) / lost.mean()
    # what `level` and `slope` owe to each item
    parts = np.zeros((2, len(judge)))
    n = len(y)
    errors = (middle * y).mean() * tops + (middle * (1 - y)).mean() * bottoms - bottoms - between + between.mean()
    parts[:, known] = np.array([errors, bottoms - tops]) / math.sqrt(n * max(n - 3, 1))
    parts[0, ~known] = (others - others.mean()) / len(others)
    sums = np.array([np.bincount(cluster, part) for part in parts])
    half_won = 0.5 / won.sum() ** 2
    half_lost = 0.5 / lost.sum() ** 2
    covariance = sums @ sums.T + np.array([[half_lost, -half_lost], [-half_lost, half_lost + half_won]])
    quantile = float(stdtrit(max(len(np.unique(cluster[known])) - 3, 1), 0.975))
    (level_level, cross), (_, slope_slope) = quantile**2 * covariance
    square = slope**2 - slope_slope
    linear = -(level * slope + cross)
    constant = level**2 - level_level
    if slope <= 0 or square <= 0:
        return None
    root = math.sqrt(max(linear**2 - square * constant, 0.0))
    rates = {"rate": level / slope, "low": (-linear - root) / square, "high": (root - linear) / square}
    return {name: min(max(float(rate), 0.0), 1.0) for name, rate in rates.items()}

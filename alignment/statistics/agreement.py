"""Agreement of judges and people on the same items: shares, Cohen's and Fleiss' kappa, Krippendorff's alpha, intervals.

Labels are the verdicts of winrate.py or the points of a Likert scale, None where a rater gave none. The intervals of
shares are analytic (`win_rate`), those of coefficients percentiles of a bootstrap; both take items of one cluster, such
as all items on one prompt, for dependent. Win rates that a judge's errors are taken out of are in corrected.py.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any, Literal

import numpy as np

from alignment.errors import raise_all
from alignment.statistics.winrate import TIE, Z_95, Verdict, cluster_numbers, clustered_error, win_rate

Label = float | None
Level = Literal["nominal", "ordinal"]
Figures = dict[str, Any]
DRAWS = 1000  # of the bootstrap


def agreement(first: Sequence[Verdict], second: Sequence[Verdict]) -> float:
    """Share of items on which two judges agree, half where just one of them calls a tie.

    Items that either failed on are left out.
    """
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        raise_all(["agreement needs at least one item that both have judged, and there is none"])
    return sum(1 - abs(a - b) for a, b in pairs) / len(pairs)


def majority_label(votes: Sequence[Label]) -> Label:
    """The label of more than half of the votes; None where no label has that many."""
    given = [vote for vote in votes if vote is not None]
    label, count = Counter(given).most_common(1)[0] if given else (None, 0)
    return label if 2 * count > len(given) else None


def vote_agreement(votes: Sequence[tuple[Label, Label]], clusters: Sequence[Hashable]) -> dict[str, Figures | None]:
    """Share of pairs of votes that are equal: `with_ties`, a third answer, and `without_ties`, of pairs without ties.

    Args:
        votes: two votes on one item each; an item with several people makes as many pairs as there are.
        clusters: equal for pairs that are not independent, one per pair.

    Returns:
        Rate, low, high (95 %), n pairs, and how many of them agree; None of a set-up without pairs.

    Source: Zheng et al. 2023, arXiv:2306.05685, table 5 (set-ups S1 and S2).
    """
    rows = list(zip(votes, clusters, strict=True))
    figures: dict[str, Figures | None] = {"with_ties": None, "without_ties": None}
    for name, kept in (("with_ties", rows), ("without_ties", [row for row in rows if TIE not in row[0]])):
        if kept:
            rate = win_rate([float(a == b) for (a, b), _ in kept], clusters=[cluster for _, cluster in kept])
            figures[name] = {"rate": rate.rate, "low": rate.low, "high": rate.high, "n": rate.n, "agreed": rate.wins}
    return figures


def mean_figures(values: np.ndarray, clusters: Sequence[Hashable]) -> Figures:
    """Mean of values [n] +- 1.96 cluster-robust standard errors, None where unknown: `value`, `low`, `high`, `n`."""
    mean = float(values.mean())
    error, _ = clustered_error(values, clusters)
    low, high = (mean - Z_95 * error, mean + Z_95 * error) if error else (None, None)
    return {"value": mean, "low": low, "high": high, "n": len(values)}


# Coefficients corrected for chance: 1 - observed / expected disagreement, of a sum over items of tables [labels,
# labels]


def cohen_kappa(first: Sequence[Label], second: Sequence[Label], clusters: Sequence[Hashable] | None = None) -> Figures:
    """Cohen's kappa of two raters, 1 - (share of unequal labels) / (that of independent raters with the same habits).

    Returns:
        Value, low, high (95 %) and n, the items with both labels; None for what there is not, such as a value where
        both raters give one and the same label throughout.

    Source: Cohen 1960, Educational and Psychological Measurement 20, 37-46.
    """
    hot = _one_hot(list(zip(first, second, strict=True)))
    return _with_interval(hot[:, 0, :, None] * hot[:, 1, None, :], clusters)


def fleiss_kappa(labels: Sequence[Sequence[Label]], clusters: Sequence[Hashable] | None = None) -> Figures:
    """Fleiss' kappa of as many labels for every item, of whichever raters; as `cohen_kappa`.

    Source: Fleiss 1971, Psychological Bulletin 76, 378-382.
    """
    counts = {sum(label is not None for label in row) for row in labels}
    raise_all([f"Fleiss' kappa needs as many labels for each item, found {sorted(counts)}"] if len(counts) > 1 else [])
    return _with_interval(_coincidences(labels), clusters)


def krippendorff_alpha(
    labels: Sequence[Sequence[Label]], *, level: Level = "nominal", clusters: Sequence[Hashable] | None = None
) -> Figures:
    """Krippendorff's alpha of any number of raters, 1 - (observed disagreement) / (that of labels drawn from all).

    Args:
        labels: of each item those that it was given, in any order; items with fewer than two are left out.
        level: nominal: two unequal labels disagree, whichever they are. ordinal: by the number of labels that lie
            between them, as the points of a Likert scale, or a verdict with its ties in the middle.
        clusters: equal for items that are not independent; None: all are.

    Returns:
        As `cohen_kappa`.

    Source: Krippendorff 2011, "Computing Krippendorff's alpha-reliability".
    """
    return _with_interval(_coincidences(labels), clusters, drawn=1, level=level)


def _one_hot(labels: Sequence[Sequence[Label]]) -> np.ndarray:
    """1 at each rater's label, else 0, [items, raters, labels], the labels in order."""
    width = max((len(row) for row in labels), default=2)
    padded = [[*row, *[None] * (width - len(row))] for row in labels]
    values = np.array(padded, float).reshape(len(labels), width)  # None becomes NaN, which equals nothing
    return (values[..., None] == np.unique(values[~np.isnan(values)])).astype(float)


def _coincidences(labels: Sequence[Sequence[Label]]) -> np.ndarray:
    """Ordered pairs of labels of two raters, each over the item's labels less one, [items, labels, labels]."""
    counts = _one_hot(labels).sum(1)
    pairs = counts[:, :, None] * counts[:, None, :] - counts[:, :, None] * np.eye(counts.shape[1])
    return pairs / np.maximum(counts.sum(1) - 1, 1)[:, None, None]


def _chance_corrected(tables: np.ndarray, drawn: int, level: Level) -> np.ndarray:
    """1 - observed / expected disagreement of tables [..., labels, labels]; `drawn` 1: labels without replacement."""
    rows = tables.sum(-1)[..., :, None]
    columns = tables.sum(-2)[..., None, :]
    n = tables.sum((-2, -1))
    distance = 1 - np.eye(tables.shape[-1])
    if level == "ordinal":  # labels between two, both ends counting half
        middle = rows.cumsum(-2) - rows / 2
        distance = (middle - middle.swapaxes(-2, -1)) ** 2
    return 1 - (tables * distance).sum((-2, -1)) * (n - drawn) / (rows * columns * distance).sum((-2, -1))


def _with_interval(
    tables: np.ndarray, clusters: Sequence[Hashable] | None, *, drawn: int = 0, level: Level = "nominal"
) -> Figures:
    """The coefficient of the sum of tables [items, labels, labels], with percentiles of a bootstrap over clusters."""
    if clusters is not None and len(clusters) != len(tables):
        raise_all([f"clusters: {len(clusters)} for {len(tables)} items; give one for each item"])
    kept = [i for i, table in enumerate(tables) if table.any()]  # the others lack a label
    if not kept:
        return {"value": None, "low": None, "high": None, "n": 0}
    cluster_of = cluster_numbers(kept if clusters is None else [clusters[i] for i in kept])
    # [cells, clusters]
    sums = np.array([np.bincount(cluster_of, cell) for cell in tables[kept].reshape(len(kept), -1).T])
    rng = np.random.default_rng(0)
    count = sums.shape[-1]
    draws = [sums @ np.bincount(rng.integers(count, size=count), minlength=count) for _ in range(DRAWS) if count > 1]
    with np.errstate(divide="ignore", invalid="ignore"):  # no disagreement is expected of a single label
        totals = np.array([tables.sum(0).ravel(), *draws]).reshape(-1, *tables.shape[1:])
        value, *spread = _chance_corrected(totals, drawn, level).tolist()
    known = [coefficient for coefficient in spread if math.isfinite(coefficient)]
    low, high = np.quantile(known, [0.025, 0.975]).tolist() if known else (None, None)
    return {"value": value if math.isfinite(value) else None, "low": low, "high": high, "n": len(kept)}

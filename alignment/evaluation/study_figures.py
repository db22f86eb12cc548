"""Figures of a study: moving averages, peaks of a true score, and how much of a cost is taken back. Reading is in study.py."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alignment.evaluation.overoptimization import GoldFit


@dataclass(frozen=True)
class Point:
    """One point of a series: its quantities by name, and what it is called (a model, or an update's number)."""

    values: Mapping[str, float]
    name: str = ""

    def __getitem__(self, quantity: str) -> float:
        return self.values[quantity]


@dataclass(frozen=True)
class ScorePeak:
    """The highest point of a quantity in a series, and what comes after it.

    Attributes:
        index: of the highest point, from 0.
        highest: its quantities.
        first, last: quantities of the first and of the last point.
        fall: the quantity at the peak less that at the end.
        rise: the other quantity at the end less that at the peak.
        kept: quantities of the point that was kept; None where none is named.
        kept_share: (kept - first) / (highest - first): how much of what could be gained was kept.
        kept_of_peak: kept / highest; None where the highest is not above 0.
    """

    index: int
    highest: Mapping[str, float]
    first: Mapping[str, float]
    last: Mapping[str, float]
    fall: float
    rise: float
    kept: Mapping[str, float] | None = None
    kept_share: float | None = None
    kept_of_peak: float | None = None


@dataclass(frozen=True)
class Saving:
    """What a series takes back of a cost at no loss of gain.

    Attributes:
        increase: of the cost from the start to the base.
        removed: largest share of the increase that a point of equal gain removes; 0: as costly as the base, 1: no increase
            at all. None where no point has equal gain, or where there is no increase.
        best: that point's name.
        costs: cost and gain of each point less the start's, by the point's name.
    """

    increase: float
    removed: float | None
    best: str
    costs: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Study:
    """What was gathered: points of each series, and the figures made of them by the series' name."""

    points: Mapping[str, list[Point]]
    laws: Mapping[str, GoldFit]
    peaks: Mapping[str, ScorePeak]
    savings: Mapping[str, Saving]


def smoothed(points: Sequence[Point], width: int) -> list[Point]:
    """Each point with the mean of the `width` points around it, of fewer at the ends.

    Args:
        width: odd; 1 changes nothing.
    """
    half = width // 2
    found = []
    for i, point in enumerate(points):
        near = points[max(0, i - half) : i + half + 1]
        found.append(replace(point, values={key: float(np.mean([one[key] for one in near])) for key in point.values}))
    return found


def find_peak(points: Sequence[Point], *, of: str, against: str, kept: int | None = None) -> ScorePeak:
    """Where `of` is highest, how far it falls to the end, and how far `against` still rises.

    Args:
        points: in order.
        of: the true score.
        against: the proxy.
        kept: index of the point that was kept.
    """
    heights = [point[of] for point in points]
    index = int(np.argmax(heights))
    first, highest, last = points[0], points[index], points[-1]
    peak = ScorePeak(
        index,
        highest.values,
        first.values,
        last.values,
        fall=highest[of] - last[of],
        rise=last[against] - highest[against],
    )
    if kept is None:
        return peak
    gain = highest[of] - first[of]
    return replace(
        peak,
        kept=points[kept].values,
        kept_share=(points[kept][of] - first[of]) / gain if gain > 0 else None,
        kept_of_peak=points[kept][of] / highest[of] if highest[of] > 0 else None,
    )


def find_saving(
    points: Sequence[Point], start: Point, base: Point, *, cost: str, gain: str, tolerance: float = 0.0
) -> Saving:
    """The largest share of the cost's increase from `start` to `base` that a point removes while its gain is the base's.

    removed = 1 - (cost - cost of start) / (cost of base - cost of start), where gain >= gain of base - tolerance

    Args:
        points: of the series.
        start: before anything was learned.
        base: with the whole increase.
        tolerance: how much less gain is still equal.
    """
    increase = base[cost] - start[cost]
    costs = {point.name: {key: point[key] - start[key] for key in (cost, gain)} for point in points}
    equal = [point for point in points if point[gain] >= base[gain] - tolerance]
    if increase <= 0 or not equal:
        return Saving(increase, None, "", costs)
    best = min(equal, key=lambda point: point[cost])
    return Saving(increase, 1 - (best[cost] - start[cost]) / increase, best.name, costs)

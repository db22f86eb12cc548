"""Ratings of several models from battles of two: Bradley-Terry, with ties and covariates, and Elo.

Both are in points: 400 points more are odds of 10 to 1, and the mean of the models is 1000. The command is in
ratings_run.py.
"""

import itertools
import math
from collections import UserDict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from alignment.errors import UserError, raise_all
from alignment.statistics.regression import Estimate, Ties, check_clusters, fit_outcomes, refuse_collinear
from alignment.statistics.winrate import LOSS, TIE, WIN, Z_95, cluster_numbers, holm

Battle = tuple[str, str, float]  # model_a, model_b, outcome: 1 where model_a won, 0.5 a tie, 0 where it lost
POINTS = 400 / math.log(10)  # of one unit of log odds
MEAN = 1000.0


class Difference(NamedTuple):
    """Two models' difference of ratings, first minus second, in points."""

    first: str
    second: str
    points: float
    low: float  # 95 % interval of this difference alone
    high: float
    p: float
    p_holm: float  # adjusted for all pairs of models


@dataclass(frozen=True, eq=False)
class Ratings(UserDict[str, float]):
    """`{model: rating}`, the best model first, and intervals.

    Attributes:
        data: points of each model.
        intervals: 95 % interval of each, of its distance from the mean of the models.
        battles: number of battles of each.
        covariance: of the ratings in this order, [K, K].
        effects: log odds of one unit of each covariate.
        tie: tie parameter: Davidson's nu, Rao and Kupper's theta; None where a tie is half a win.
    """

    data: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    battles: dict[str, int]
    covariance: np.ndarray
    effects: dict[str, Estimate] = field(default_factory=dict)
    tie: Estimate | None = None

    @property
    def strengths(self) -> dict[str, float]:
        """Share of each model in the sum of exp(log odds); of two, the first wins with probability s / (s + t)."""
        weights = {model: math.exp((rating - MEAN) / POINTS) for model, rating in self.items()}
        return {model: weight / sum(weights.values()) for model, weight in weights.items()}

    def differences(self) -> list[Difference]:
        """Every pair of models, the better one first, with p-values of equal ratings and their Holm adjustment."""
        pairs = []
        for (i, first), (j, second) in itertools.combinations(enumerate(self), 2):
            points = self[first] - self[second]
            variance = self.covariance[i, i] + self.covariance[j, j] - 2 * self.covariance[i, j]
            error = math.sqrt(max(float(variance), 1e-12))
            p = math.erfc(abs(points) / error / math.sqrt(2))
            pairs.append(Difference(first, second, points, points - Z_95 * error, points + Z_95 * error, p, p))
        adjusted = holm([row.p for row in pairs])
        return [row._replace(p_holm=p) for row, p in zip(pairs, adjusted, strict=True)]


def bradley_terry_ratings(
    rows: Iterable[Battle],
    *,
    ties: Ties = "half",
    covariates: Mapping[str, Sequence[float]] | None = None,
    clusters: Sequence[Hashable] | None = None,
    contradictory: Sequence[bool] = (),
) -> Ratings:
    """Ratings that make the outcomes most likely: log odds of model_a = beta_a - beta_b + covariates @ effects.

    Intervals take the cluster-robust sandwich covariance.

    Args:
        rows: (model_a, model_b, outcome), outcome 1 / 0.5 / 0 for model_a; with ties="half" also a probability.
        ties: half (half a win for each), davidson, rao_kupper: the probability of a tie is part of the model.
        covariates: name -> what model_a's response has more of than model_b's, [n], such as length. Ratings are then
            those at equal covariates; a column of ones is an advantage of being shown first.
        clusters: name of each row's cluster, such as its prompt, [n]; None: rows are independent.
        contradictory: True of ties that stand for two orders of a judge that contradict each other, [n]: they count
            half, and narrow no interval, see `fit_outcomes`.

    Raises:
        UserError: rows that are no battles; models that the battles do not connect; models without a finite rating,
            such as one that never wins; collinear covariates; fewer clusters than models; ties="davidson" or
            "rao_kupper" without a tie.

    Source: Bradley and Terry 1952, Biometrika 39, 324-345; ties: see regression.py.
    """
    from scipy.sparse import csr_array, hstack

    battles = list(rows)
    models, sides, outcomes = _read_battles(battles, hard=ties != "half")
    refuse_unconnected(models, sides, outcomes)
    if ties != "half" and len(set(outcomes.tolist())) < 3:
        raise UserError(f"ties={ties} needs wins and ties among the outcomes; take ties=half")
    n = len(battles)
    size = len(models)
    effects = dict(covariates or {})
    tossed = list(contradictory) or [False] * n
    _check_rows(n, effects | {"contradictory": tossed} | ({} if clusters is None else {"clusters": clusters}))
    design = csr_array((np.repeat([1.0, -1.0], n), (np.tile(np.arange(n), 2), sides.T.ravel())), shape=(n, size))
    if effects:
        design = csr_array(hstack([design, np.array(list(effects.values()), float).T]))
        refuse_collinear(design, list(effects))
    check_clusters(clusters, len(effects) + size - 1 + (ties != "half"), f"{size} models")
    penalty = np.zeros([size + len(effects)] * 2)
    penalty[:size, :size] = 1 / size  # the ratings' sum is 0, which the outcomes leave open
    fit = fit_outcomes(design, outcomes, penalty, ties=ties, contradictory=tossed)

    *strengths, tie = fit.estimates(clusters)
    return _ranked(
        models,
        sides,
        POINTS * np.array(strengths[:size]) + MEAN,
        POINTS**2 * fit.covariance(clusters)[:size, :size],
        effects=dict(zip(effects, strengths[size:], strict=True)),
        tie=Estimate(*map(math.exp, tie)) if ties != "half" else None,
    )


def elo_ratings(
    rows: Iterable[Battle],
    *,
    k: float = 4.0,
    clusters: Sequence[Hashable] | None = None,
    contradictory: Sequence[bool] = (),
    bootstraps: int = 200,
    seed: int = 0,
) -> Ratings:
    """Elo's ratings after the battles in their order: each moves both models by k (outcome - expected outcome).

    expected outcome of model_a = 1 / (1 + 10^((R_b - R_a) / 400)); all start at 1000. The order of the rows matters,
    unlike in `bradley_terry_ratings`, and the last ones count most, the more so the larger k is. Intervals are the 2.5
    % and 97.5 % quantiles of the ratings with rows (or clusters) drawn again, each as often as a Poisson variable of
    mean 1 says, in the same order; contradictory rows are tosses of a coin there.

    Args:
        rows, clusters, contradictory: as of `bradley_terry_ratings`.
        k: points that a battle moves at most.
        bootstraps: number of draws.

    Raises:
        UserError: rows that are no battles; one cluster, or models that only tie: no draw differs from another.

    Source: Elo 1978, The Rating of Chessplayers; Poisson bootstrap: Oza and Russell 2001, AISTATS.
    """
    battles = list(rows)
    models, sides, outcomes = _read_battles(battles)
    numbers = cluster_numbers(range(len(battles)) if clusters is None else clusters)
    tossed = list(contradictory) or [False] * len(battles)
    _check_rows(len(battles), {"clusters": numbers.tolist(), "contradictory": tossed})
    check_clusters(clusters, 1, f"{len(models)} models")
    generator = np.random.default_rng(seed)
    weights = [generator.poisson(1.0, bootstraps + 1).astype(np.uint8) for _ in range(int(numbers.max()) + 1)]
    ratings = np.full((len(models), bootstraps + 1), MEAN)  # the first column is that of the rows themselves
    for (a, b), outcome, cluster, is_toss in zip(sides.tolist(), outcomes, numbers.tolist(), tossed, strict=True):
        expected = 1 / (1 + 10 ** ((ratings[b] - ratings[a]) / 400))
        weights[cluster][0] = 1
        if is_toss:
            outcome = np.append(outcome, generator.integers(2, size=bootstraps))
        change = k * weights[cluster] * (outcome - expected)
        ratings[a] += change
        ratings[b] -= change
    drawn = ratings[:, 1:]
    raise_all(
        f"{model}: its battles are ties alone, so that no draw of Elo's bootstrap differs; take method=bradley_terry"
        for model, row in zip(models, ratings, strict=True)
        if (row == MEAN).all()
    )
    figures = np.column_stack([ratings[:, 0], *np.quantile(drawn, [0.025, 0.975], axis=1)])
    return _ranked(models, sides, figures, np.atleast_2d(np.cov(drawn)))


def refuse_unconnected(models: Sequence[str], sides: np.ndarray, outcomes: np.ndarray) -> None:
    """Refuse battles [n, 2] without finite ratings: each part of the models must beat, or tie, each other part.

    Source: Ford 1957, American Mathematical Monthly 64, 28-33.
    """
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import connected_components

    won = outcomes > LOSS
    lost = outcomes < WIN
    edges = np.concatenate([sides[won], sides[lost][:, ::-1]])  # from a model to one that it won against, or tied with
    graph = csr_array((np.ones(len(edges)), edges.T), shape=(len(models),) * 2)
    advice = "add battles between the parts, or rate each part alone"
    count, parts = connected_components(graph, directed=False)
    reason = f"the battles do not connect the models: {count} parts have none with each other"
    if count == 1:
        count, parts = connected_components(graph, connection="strong")
        reason = (
            "some models have no finite rating: these parts win, or lose, every battle with some other part, "
            "without a tie"
        )
        advice = "leave models out that never win or never lose, add battles, or take Elo's ratings"
    if count > 1:
        names = [
            [model for model, component in zip(models, parts, strict=True) if component == part]
            for part in range(count)
        ]
        listed = "; ".join(
            ", ".join(part[:8]) + (" ..." if len(part) > 8 else "") for part in sorted(names, key=len)[:8]
        )
        raise UserError(f"{reason}: {listed}{'; ...' if count > 8 else ''}. {advice[0].upper()}{advice[1:]}")


def _read_battles(rows: Sequence[Battle], *, hard: bool = False) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Model names, numbers of both models of each row [n, 2] and outcomes [n]; rows that are no battles are refused."""
    if not rows:
        raise UserError("ratings need at least one battle, and there is none")
    problems = []
    for i, (first, second, outcome) in enumerate(rows):
        if first == second:
            problems.append(f"row {i}: {first!r} against itself")
        if outcome is None or not 0 <= outcome <= 1 or (hard and outcome not in (WIN, TIE, LOSS)):
            problems.append(f"row {i}: outcome is {outcome!r}; it is 1, 0.5 or 0 for the first model")
    raise_all(problems)
    names = [model for first, second, _ in rows for model in (first, second)]
    return list(dict.fromkeys(names)), cluster_numbers(names).reshape(-1, 2), np.array([row[2] for row in rows], float)


def _check_rows(n: int, columns: Mapping[str, Sequence[Hashable]]) -> None:
    """Refuse covariates and clusters of another length than the rows', and numbers that are none."""
    problems = []
    for name, values in columns.items():
        if len(values) != n:
            problems.append(f"{name} has {len(values)} values for {n} rows")
        elif not all(math.isfinite(value) for value in values if isinstance(value, float)):
            problems.append(f"{name} has values that are not finite numbers")
    raise_all(problems)


def _ranked(
    models: list[str],
    sides: np.ndarray,
    figures: np.ndarray,
    covariance: np.ndarray,
    *,
    effects: dict[str, Estimate] | None = None,
    tie: Estimate | None = None,
) -> Ratings:
    """The ratings, best model first; `figures` [K, 3] are each model's points and the bounds of their interval."""
    order = np.argsort(-figures[:, 0], kind="stable").tolist()
    names = [models[i] for i in order]
    counts = np.bincount(sides.ravel(), minlength=len(models))
    ranked = dict(zip(names, figures[order].tolist(), strict=True))
    return Ratings(
        {name: points for name, (points, _, _) in ranked.items()},
        {name: (low, high) for name, (_, low, high) in ranked.items()},
        dict(zip(names, counts[order].tolist(), strict=True)),
        covariance[np.ix_(order, order)],
        effects or {},
        tie,
    )

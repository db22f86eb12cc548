"""Win rates at equal length: preferences regressed on model, length difference and the instruction's difficulty."""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alignment.errors import UserError, raise_all
from alignment.statistics.regression import Estimate, Fit, check_clusters, fit_outcomes, refuse_collinear
from alignment.statistics.winrate import Z_95, clustered_error

FEWEST_ROWS = 10


@dataclass(frozen=True)
class LengthControlledRate:
    """The win rate that ours would have if its responses were as long as the baseline's, with its 95 % interval."""

    rate: float
    low: float
    high: float
    n: int
    standard_error: float
    length_effect: Estimate  # log odds of a response that is one unit of tanh longer; above 0: the judge prefers it


def length_controlled_win_rate(
    preferences: Sequence[float],
    lengths: Sequence[float],
    baseline_lengths: Sequence[float],
    *,
    difficulty: Sequence[float] | None = None,
    clusters: Sequence[Hashable] | None = None,
    prior: Mapping[str, tuple[float, float]] | None = None,
    contradictory: Sequence[bool] = (),
) -> LengthControlledRate:
    """Mean preference for ours that a logistic regression predicts at equal lengths.

    P(ours) = sigmoid(theta + phi tanh(d_i / sd(d)) + psi g_i), rate = mean of sigmoid(theta + psi g_i), where d is the
    difference of lengths and g the difficulty.

    The interval is that of the rate's log odds, cluster-robust, the rows being a sample. It widens where nearly all
    responses are longer, or shorter, than the baseline's: the rate is then an extrapolation, which a `prior` holds.

    Args:
        preferences: 1.0 won, 0.5 tied, 0.0 lost, or a probability that ours is preferred, [n].
        lengths: of our responses, in characters or tokens, [n].
        baseline_lengths: of the baseline's responses, [n].
        difficulty: of each instruction for any model, such as from a joint regression of many models, log odds, [n];
            None: left out, and a difficulty that goes with length remains in the rate.
        clusters: name of each row's cluster, as in `win_rate`, [n].
        prior: mean and standard deviation of a normal prior of the coefficient of "length" or "difficulty".
        contradictory: True of rows whose two orders contradict each other, see `fit_outcomes`, [n].

    Raises:
        UserError: columns that do not fit together, collinear ones, a separation, too few clusters, ties alone.

    Source: Dubois et al. 2024, arXiv:2404.04475, eq. 1 (their lengths are baseline minus model, so that phi has the
    other sign; they hold phi and psi by rows of the baseline against its longer and shorter versions, here by the
    prior).
    """
    from scipy.sparse import csr_array
    from scipy.special import expit, logit

    optional = {} if difficulty is None else {"difficulty": difficulty}
    sides = {"lengths": lengths, "baseline_lengths": baseline_lengths}
    columns = _read_columns({"preferences": preferences, **sides, **optional})
    outcomes = columns["preferences"]
    longer = columns["lengths"] - columns["baseline_lengths"]
    features = {"length": _relative_lengths(longer)} | {key: columns[key] for key in columns if key == "difficulty"}
    design = np.column_stack([np.ones(len(outcomes)), *features.values()])
    check_clusters(clusters, design.shape[1], "a rate at equal length")
    refuse_collinear(csr_array(design), list(features))
    beliefs = np.array([(0.0, math.inf), *((prior or {}).get(name, (0.0, math.inf)) for name in features)])
    precision = np.diag(beliefs[:, 1] ** -2)
    fit = fit_outcomes(csr_array(design), outcomes, precision, center=beliefs[:, 0], contradictory=contradictory)
    rate, error = _rate_and_error(design, fit, clusters)
    if error == 0:
        raise UserError("preferences: all are ties, or the clusters do not differ: the error of a rate is not known")
    half = Z_95 * error / (rate * (1 - rate))
    low, high = (float(expit(logit(rate) + side)) for side in (-half, half))
    return LengthControlledRate(rate, low, high, len(outcomes), error, fit.estimates(clusters)[1])


def _rate_and_error(design: np.ndarray, fit: Fit, clusters: Sequence[Hashable] | None) -> tuple[float, float]:
    """The mean chance with the lengths, the second column of the design, at 0; its cluster-robust standard error."""
    from scipy.special import expit

    equal = design * (np.arange(design.shape[1]) != 1)
    chances = expit(equal @ fit.coefficients[:-1])
    slope = np.append(equal.T @ (chances * (1 - chances)), 0.0)  # n times the derivative of the rate
    share = fit.inverse @ slope
    tosses = 4 * float(((fit.coins @ share) ** 2).sum())
    error, _ = clustered_error(chances + fit.scores @ share, clusters, tosses=tosses)
    return float(chances.mean()), error


def _relative_lengths(longer: np.ndarray) -> np.ndarray:
    """tanh(d / sd(d)) of differences of lengths d, [n]; refused where it is the same in all rows."""
    relative = np.tanh(longer / max(longer.std(ddof=1), 1e-12))
    if np.ptp(relative) < 1e-6:
        differences = " to ".join(f"{edge:g}" for edge in dict.fromkeys([longer.min(), longer.max()]))
        raise UserError(
            f"lengths: ours differ from the baseline's by {differences} in every row: nothing to control for, and "
            "equal lengths are too far from all that was seen"
        )
    return relative


def _read_columns(given: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """The columns as arrays; refused are unequal lengths, non-numbers, preferences outside [0, 1], and too few rows."""
    columns = {name: np.asarray(values, float) for name, values in given.items()}
    n = len(columns["preferences"])
    outside = (np.abs(columns["preferences"] - 0.5) > 0.5).any()
    raise_all(
        [
            *(
                f"{name} has {len(row)} rows where preferences has {n}"
                for name, row in columns.items()
                if len(row) != n
            ),
            *(f"{name} has values that are no numbers" for name, row in columns.items() if not np.isfinite(row).all()),
            *(["preferences must be in [0, 1]: 1 where ours is preferred, 0 where the baseline is"] if outside else []),
            *(
                [f"a rate at equal length needs at least {FEWEST_ROWS} rows, and there are {n}"]
                if n < FEWEST_ROWS
                else []
            ),
        ]
    )
    return columns

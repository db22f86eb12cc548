"""Regressions of the outcomes of pairs on what differs between their two sides, with cluster-robust covariance.

For length_control.py, whose columns are those of one model against a baseline, and ratings.py, whose columns are
models.
"""

import math
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignment.errors import UserError, raise_all
from alignment.statistics.winrate import TIE, Z_95, cluster_numbers

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ties = Literal["half", "davidson", "rao_kupper"]
LARGEST_LOG_ODDS = 30.0  # of a pair; a fit that goes there has no maximum
STEPS = 100
FLAT = 1e-9  # of a variance that outcomes have by rounding alone, beside the one of their model


class Estimate(NamedTuple):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


class Fit(NamedTuple):
    """The most likely coefficients, and what their errors follow from; the tie parameter comes last."""

    coefficients: np.ndarray  # [P + 1]
    inverse: np.ndarray  # inverse of minus the second derivative of the log-likelihood, [P + 1, P + 1]
    rows: int  # n
    scores: "csr_array"  # derivative of each row's log-likelihood, 0 of a contradictory row, [n, P + 1]
    coins: "csr_array"  # standard deviation of the derivative of each contradictory row, [c, P + 1]
    information: np.ndarray  # minus the second derivative without the penalty, [P + 1, P + 1]

    def covariance(self, clusters: Sequence[Hashable] | None) -> np.ndarray:
        """Sandwich covariance A^-1 B A^-1 of the coefficients.

        B = G/(G-1) sum_g s_g s_g^T over sums s of scores by cluster. Contradictory rows add one toss of a coin to B. In
        directions in which B is 0, such as between models that only tie, the spread of the outcomes is not known: B is
        there the information, as if each tie were a toss.

        Source: Liang and Zeger 1986, Biometrika 73, 13-22.
        """
        from scipy.sparse import csr_array

        numbers = cluster_numbers(range(self.rows) if clusters is None else clusters)
        count = int(numbers.max()) + 1
        sums = csr_array((np.ones(self.rows), (numbers, np.arange(self.rows)))) @ self.scores
        covariance = count / max(count - 1, 1) * self.inverse @ (sums.T @ sums).toarray() @ self.inverse
        covariance += self.inverse @ (self.coins.T @ self.coins).toarray() @ self.inverse
        root = np.linalg.cholesky(self.inverse)
        whiten = np.linalg.inv(root)
        ratios, axes = np.linalg.eigh(whiten @ covariance @ whiten.T)  # to the covariance by the information
        flat = root @ axes[:, ratios < FLAT]
        unknown = flat.T @ self.information @ flat
        if np.trace(unknown) > FLAT:
            covariance += flat @ unknown @ flat.T
        return covariance

    def estimates(self, clusters: Sequence[Hashable] | None) -> list[Estimate]:
        """Each coefficient +- 1.96 standard errors."""
        errors = Z_95 * np.sqrt(np.diag(self.covariance(clusters)))
        return [Estimate(b, b - e, b + e) for b, e in zip(self.coefficients.tolist(), errors.tolist(), strict=True)]


def outcome_log_probs(eta: Tensor, tau: Tensor, outcomes: Tensor, ties: Ties) -> Tensor:
    """Log-probability of each outcome, [n], given the log odds eta of the pair and the tie parameter tau.

    half:        P(win) = sigmoid(eta); an outcome in (0, 1), such as a tie's 1/2, is that share of a win.
    davidson:    P(win) : P(tie) : P(loss) = exp(eta / 2) : exp(tau) : exp(-eta / 2).
    rao_kupper:  P(win) = sigmoid(eta - tau), P(loss) = sigmoid(-eta - tau), and P(tie) = (exp(2 tau) - 1) P(win)
    P(loss).

    Source: Davidson 1970, JASA 65, 317-328 (nu is exp(tau), pi_i / pi_j is exp(eta)); Rao and Kupper 1967, JASA 62,
    194-204 (theta is exp(tau), above 1).
    """
    if ties == "half":
        return outcomes * eta - torch.logaddexp(eta, torch.zeros_like(eta))
    tied = outcomes == TIE
    if ties == "davidson":
        return torch.where(tied, tau, (outcomes - TIE) * eta) - torch.stack([eta / 2, tau, -eta / 2]).logsumexp(0)
    win = -torch.logaddexp(tau - eta, torch.zeros_like(eta))
    loss = -torch.logaddexp(tau + eta, torch.zeros_like(eta))
    return (outcomes >= TIE) * win + (outcomes <= TIE) * loss + tied * torch.expm1(2 * tau).log()


def fit_outcomes(
    design: "csr_array",
    outcomes: np.ndarray,
    penalty: np.ndarray,
    *,
    center: np.ndarray | float = 0.0,
    ties: Ties = "half",
    contradictory: Sequence[bool] = (),
) -> Fit:
    """The most likely coefficients b of eta = design @ b and the tie parameter, found by Newton's method.

    Maximized is log-likelihood - (b - center)^T penalty (b - center) / 2. No finite maximum is a UserError.

    Args:
        design: what differs between the sides of each pair, [n, P].
        outcomes: 1 where the first side won, 0 where it lost, 1/2 a tie; with ties="half" any share of a win, [n].
        penalty: precision of a prior, or what makes the fit unique, [P, P].
        center: mean of the prior, [P].
        contradictory: True of outcomes 1/2 of two orders that contradict each other, [n]; (): none. They count half in
            the coefficients, and in the errors all together as one toss of a coin: more of them tell no more.
    """
    from scipy.linalg import block_diag
    from scipy.sparse import block_array, csr_array, diags_array

    n = len(outcomes)
    fixed = float(ties == "half")  # ties="half" holds the tie parameter, the last one, at 0
    columns = csr_array(block_array([[design, None], [None, np.full((n, 1), 1 - fixed)]]))  # of eta, then of tau
    precision = np.asarray(block_diag(penalty, fixed))
    middle = np.append(np.zeros(len(penalty)) + center, 0.0)
    labels = torch.tensor(outcomes)

    def evaluate(b: np.ndarray) -> tuple[float, Tensor, Tensor]:
        points = torch.tensor((columns @ b).reshape(2, n), requires_grad=True)
        log_probs = outcome_log_probs(points[0], points[1], labels, ties)
        return log_probs.detach().sum().item() - float((b - middle) @ precision @ (b - middle)) / 2, log_probs, points

    coefficients = np.append(middle[:-1], 1 - fixed)
    height, log_probs, points = evaluate(coefficients)
    for _ in range(STEPS):
        [slopes] = torch.autograd.grad(log_probs.sum(), points, create_graph=True)
        curves = [torch.autograd.grad(slope.sum(), points, retain_graph=True)[0].numpy() for slope in slopes]
        weights = csr_array(block_array([[diags_array(curve) for curve in row] for row in curves]))
        information = precision - (columns.T @ (weights @ columns)).toarray()
        ascent = slopes.detach().numpy().ravel()
        step = np.linalg.solve(information, columns.T @ ascent - precision @ (coefficients - middle))
        if np.abs(step).max() < 1e-9:
            tossed = np.array(list(contradictory) or [False] * n)
            return _fit_at(coefficients, precision, columns, weights, ascent=ascent, tossed=tossed)
        while not (nearer := evaluate(coefficients + step))[0] >= height - 1e-9:
            step = step / 2
        coefficients = coefficients + step
        height, log_probs, points = nearer
        if points[0].abs().max() > LARGEST_LOG_ODDS:
            break
    raise UserError(
        "the outcomes have no finite fit: some of them follow without an error from the columns of the regression; "
        "take more rows, or leave a covariate out"
    )


def _fit_at(
    coefficients: np.ndarray,
    precision: np.ndarray,
    columns: "csr_array",
    weights: "csr_array",
    *,
    ascent: np.ndarray,
    tossed: np.ndarray,
) -> Fit:
    """The fit at the maximum, from the derivatives of the rows' log-probabilities there.

    `tossed` [n] is True of the rows whose outcome is a toss of a coin.
    """
    from scipy.sparse import csr_array, diags_array

    n = len(tossed)
    share = 1 / max(tossed.sum(), 1)
    counted = diags_array(np.tile(np.where(tossed, share, 1.0), 2))
    known = -(columns.T @ (counted @ weights @ columns)).toarray()
    rows = csr_array((ascent * np.tile(~tossed, 2), (np.tile(np.arange(n), 2), np.arange(2 * n))))
    coins = columns[:n][tossed] * (math.sqrt(share) / 2)  # half of what lies between a win and a loss
    return Fit(coefficients, np.linalg.inv(precision + known), n, rows @ columns, coins, known)


def check_clusters(clusters: Sequence[Hashable] | None, columns: int, what: str) -> None:
    """Refuse as few clusters as a regression has `columns`, or fewer: its errors follow from the sums of clusters."""
    if clusters is not None and len(set(clusters)) <= columns:
        raise UserError(
            f"{len(set(clusters))} clusters are too few for the intervals of {what}; take more or smaller clusters, "
            "such as prompts, or fewer models or covariates"
        )


def refuse_collinear(design: "csr_array", names: Sequence[str]) -> None:
    """Refuse a design [n, P] in which one of the last columns, those that have `names`, follows from all the others."""
    gram = (design.T @ design).toarray()
    sizes = np.maximum(np.sqrt(np.diag(gram)), 1e-12)
    gram = gram / np.outer(sizes, sizes)

    def rank(kept: np.ndarray) -> int:
        return int(np.linalg.matrix_rank(gram[np.ix_(kept, kept)], tol=1e-9, hermitian=True))

    every = np.arange(len(gram))
    raise_all(
        f"{name!r} follows from the models and the other columns, or is 0: its effect cannot be separated from theirs; "
        "leave it out"
        for column, name in zip(every[-len(names) :], names, strict=True)
        if rank(np.delete(every, column)) == rank(every)
    )

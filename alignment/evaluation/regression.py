"""Regressions of the outcomes of pairs on what differs between their two sides, with cluster-robust covariance.

For length_control.py, whose columns are those of one model against a baseline, and ratings.py, whose columns are models.
"""

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from alignment.errors import UserError, raise_all
from alignment.evaluation.winrate import TIE, Z_95, cluster_numbers

if TYPE_CHECKING:
    from scipy.sparse import csr_array

Ties = Literal["half", "davidson", "rao_kupper"]
LARGEST_LOG_ODDS = 30.0  # of a pair; a fit that goes there has no maximum
STEPS = 100


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
    scores: "csr_array"  # derivative of each row's log-likelihood, [n, P + 1]

    def covariance(self, clusters: Sequence[Hashable] | None) -> np.ndarray:
        """Sandwich covariance A^-1 B A^-1 of the coefficients: B = G/(G-1) sum_g s_g s_g^T over sums s of scores by cluster.

        Source: Liang and Zeger 1986, Biometrika 73, 13-22.
        """
        from scipy.sparse import csr_array

        numbers = cluster_numbers(range(self.rows) if clusters is None else clusters)
        count = int(numbers.max()) + 1
        sums = csr_array((np.ones(self.rows), (numbers, np.arange(self.rows)))) @ self.scores
        return count / max(count - 1, 1) * self.inverse @ (sums.T @ sums).toarray() @ self.inverse

    def estimates(self, clusters: Sequence[Hashable] | None) -> list[Estimate]:
        """Each coefficient +- 1.96 standard errors."""
        errors = Z_95 * np.sqrt(np.diag(self.covariance(clusters)))
        return [Estimate(b, b - e, b + e) for b, e in zip(self.coefficients.tolist(), errors.tolist(), strict=True)]


def outcome_log_probs(eta: Tensor, tau: Tensor, outcomes: Tensor, ties: Ties) -> Tensor:
    """Log-probability of each outcome, [n], given the log odds eta of the pair and the tie parameter tau.

    half:        P(win) = sigmoid(eta); an outcome in (0, 1), such as a tie's 1/2, is that share of a win.
    davidson:    P(win) : P(tie) : P(loss) = exp(eta / 2) : exp(tau) : exp(-eta / 2).
    rao_kupper:  P(win) = sigmoid(eta - tau), P(loss) = sigmoid(-eta - tau), and P(tie) = (exp(2 tau) - 1) P(win) P(loss).

    Source: Davidson 1970, JASA 65, 317-328 (nu is exp(tau), pi_i / pi_j is exp(eta)); Rao and Kupper 1967, JASA 62, 194-204
    (theta is exp(tau), above 1).
    """
    if ties == "half":
        return outcomes * eta - torch.logaddexp(eta, torch.zeros_like(eta))
    tied = outcomes == TIE
    if ties == "davidson":
        return torch.where(tied, tau, (outcomes - TIE) * eta) - torch.stack([eta / 2, tau, -eta / 2]).logsumexp(0)
    win, loss = -torch.logaddexp(tau - eta, torch.zeros_like(eta)), -torch.logaddexp(tau + eta, torch.zeros_like(eta))
    return (outcomes >= TIE) * win + (outcomes <= TIE) * loss + tied * torch.expm1(2 * tau).log()


def fit_outcomes(
    design: "csr_array",
    outcomes: np.ndarray,
    penalty: np.ndarray,
    *,
    center: np.ndarray | float = 0.0,
    ties: Ties = "half",
) -> Fit:
    """The most likely coefficients b of eta = design @ b and the tie parameter, found by Newton's method.

    Maximized is log-likelihood - (b - center)^T penalty (b - center) / 2.

    Args:
        design: what differs between the sides of each pair, [n, P].
        outcomes: 1 where the first side won, 0 where it lost, 1/2 a tie; with ties="half" any share of a win, [n].
        penalty: precision of a prior, or what makes the fit unique, [P, P].
        center: mean of the prior, [P].

    Raises:
        UserError: there is no finite maximum: the columns tell some outcomes without an error.
    """
    from scipy.linalg import block_diag
    from scipy.sparse import csr_array, hstack

    size, n = len(penalty), len(outcomes)
    # Both have a last column for the tie parameter, which ties="half" holds at 0.
    band = np.full((n, 1), float(ties != "half"))
    eta_columns = csr_array(hstack([design, csr_array(np.zeros((n, 1)))]))
    tau_columns = csr_array(hstack([csr_array(np.zeros((n, size))), csr_array(band)]))
    precision, middle = block_diag(penalty, float(ties == "half")), np.append(np.zeros(size) + center, 0.0)
    labels = torch.tensor(outcomes)

    def evaluate(b: np.ndarray) -> tuple[float, Tensor, Tensor]:
        points = torch.tensor(np.stack([eta_columns @ b, tau_columns @ b]), requires_grad=True)
        each = outcome_log_probs(points[0], points[1], labels, ties)
        return each.detach().sum().item() - float((b - middle) @ precision @ (b - middle)) / 2, each, points

    found = np.append(middle[:-1], float(ties != "half"))
    height, each, points = evaluate(found)
    for _ in range(STEPS):
        [slopes] = torch.autograd.grad(each.sum(), points, create_graph=True)
        by_eta, by_tau = (-torch.autograd.grad(slope.sum(), points, retain_graph=True)[0].numpy() for slope in slopes)
        on_eta, on_tau = slopes.detach().numpy()[:, :, None]
        scores = csr_array(eta_columns.multiply(on_eta) + tau_columns.multiply(on_tau))
        information = (
            eta_columns.T @ (eta_columns.multiply(by_eta[0][:, None]) + tau_columns.multiply(by_eta[1][:, None]))
            + tau_columns.T @ (eta_columns.multiply(by_tau[0][:, None]) + tau_columns.multiply(by_tau[1][:, None]))
        ).toarray() + precision  # fmt: skip
        step = np.linalg.solve(information, scores.sum(0) - precision @ (found - middle))
        if np.abs(step).max() < 1e-9:
            return Fit(found, np.linalg.inv(information), n, scores)
        while not (nearer := evaluate(found + step))[0] >= height - 1e-9:
            step = step / 2
        found, (height, each, points) = found + step, nearer
        if points[0].abs().max() > LARGEST_LOG_ODDS:
            break
    raise UserError(
        "the outcomes have no finite fit: some of them follow without an error from the columns of the regression; take "
        "more rows, or leave a covariate out"
    )


def refuse_collinear(design: "csr_array", names: Sequence[str]) -> None:
    """Refuse a design [n, P] in which one of the last columns, those that have `names`, follows from all the others."""
    gram = (design.T @ design).toarray()
    sizes = np.sqrt(np.diag(gram))
    gram, first = gram / np.outer(*[np.where(sizes, sizes, 1)] * 2), len(gram) - len(names)
    problems = []
    for column, name in enumerate(names, start=first):
        others = np.delete(np.arange(len(gram)), column)
        part = gram[others, column]
        known = part @ np.linalg.pinv(gram[np.ix_(others, others)], rcond=1e-10, hermitian=True) @ part
        if gram[column, column] - known < 1e-8:
            why = "follows from the models and the other columns" if sizes[column] else "is 0 in every row"
            problems.append(f"{name!r} {why}: its effect cannot be told from theirs; leave it out")
    raise_all(problems)

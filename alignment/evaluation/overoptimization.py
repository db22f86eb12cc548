"""Laws of over-optimization: the true score as a function of the distance that an optimization of its proxy has gone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Law = Literal["best_of_n", "rl"]


@dataclass(frozen=True)
class GoldFit:
    """A law fitted to (KL, gold) points by least squares, with d = sqrt(KL).

    best_of_n: gold = start + d * (alpha - beta * d);  rl: gold = start + d * (alpha - beta * log d)

    Attributes:
        law: which of the two.
        start: gold score at d = 0.
        alpha, beta: the law's coefficients, per sqrt(nat).
        peak_kl: KL at which the law is highest, nats; None where it has no peak (beta <= 0 or alpha <= 0).
        explained: share of the points' variance, 1: all of it.
    """

    law: Law
    start: float
    alpha: float
    beta: float
    peak_kl: float | None
    explained: float

    def gold(self, kl: Sequence[float]) -> list[float]:
        """The law's gold score at each KL."""
        return (np.column_stack(_terms(self.law, kl)) @ np.array([self.start, self.alpha, self.beta])).tolist()


def fit_gold(law: Law, kl: Sequence[float], gold: Sequence[float]) -> GoldFit:
    """Fit a law of over-optimization; both are linear in their coefficients.

    Args:
        law: of best-of-n sampling, or of reinforcement learning.
        kl: from the starting policy, nats; measured values below 0 count as 0.
        gold: true scores, as many.

    Raises:
        ValueError: fewer than three different values of the KL.

    Source: Gao et al. 2022, arXiv:2210.10760, equations 1 and 2 (alpha and beta as there), with a free start.
    """
    if len({max(0.0, each) for each in kl}) < 3:
        raise ValueError("a law with three coefficients needs points at three different values of the KL")
    terms, heights = np.column_stack(_terms(law, kl)), np.asarray(gold, float)
    start, alpha, beta = np.linalg.lstsq(terms, heights, rcond=None)[0].tolist()
    left = heights - terms @ np.array([start, alpha, beta])
    variation = float(((heights - heights.mean()) ** 2).sum())
    explained = 1 - float((left**2).sum()) / variation if variation > 0 else 0.0
    return GoldFit(law, start, alpha, beta, _peak_kl(law, alpha, beta), explained)


def _terms(law: Law, kl: Sequence[float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Factors of start, alpha and beta at each KL, [n] each."""
    distance = np.sqrt(np.maximum(np.asarray(kl, float), 0.0))
    if law == "best_of_n":
        return np.ones_like(distance), distance, -(distance**2)
    safe = np.where(distance > 0, distance, 1.0)  # d log d goes to 0 at 0, as 1 log 1 is
    return np.ones_like(distance), distance, -distance * np.log(safe)


def _peak_kl(law: Law, alpha: float, beta: float) -> float | None:
    """Where the derivative is 0: d = alpha / (2 beta), or d = exp(alpha / beta - 1)."""
    if beta <= 0 or (law == "best_of_n" and alpha <= 0):
        return None
    distance = alpha / (2 * beta) if law == "best_of_n" else float(np.exp(min(alpha / beta - 1, 300.0)))
    return distance**2

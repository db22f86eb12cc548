"""Best-of-n: the choice among the responses to one prompt by their scores, and the expected score of the best one."""

import math
from collections.abc import Sequence

import numpy as np


def choose_best(
    scores: Sequence[float],
    texts: Sequence[str],
    *,
    keep: int | None = 1,
    threshold: float | None = None,
    distinct: bool = True,
) -> list[int]:
    """Numbers of the responses to a prompt that are kept, the best one first; of equal scores the first comes first.

    Args:
        scores: of the responses to one prompt; not a number: a response that is not to be kept.
        texts: the responses.
        keep: largest number of responses, the best ones; None: all that are left.
        threshold: keep only responses with at least this score; None: any score.
        distinct: of equal texts only the one with the highest score.

    Source: keep=1: Stiennon et al. 2020, arXiv:2009.01325, appendix G.3; the best ones as demonstrations: Dong et al.
    2023, arXiv:2304.06767, algorithm 1 (RAFT); a threshold: Zelikman et al. 2022, arXiv:2203.14465, algorithm 1
    (STaR), Gulcehre et al. 2023, arXiv:2308.08998, section 3 (ReST).
    """
    able = [i for i, score in enumerate(scores) if not math.isnan(score)]
    order = sorted((i for i in able if threshold is None or scores[i] >= threshold), key=lambda i: -scores[i])
    if distinct:
        first: dict[str, int] = {}
        for i in order:
            first.setdefault(texts[i], i)
        order = list(first.values())
    return order[:keep]


def choose_pair(
    scores: Sequence[float], texts: Sequence[str], *, threshold: float | None = None
) -> tuple[int, int] | None:
    """Numbers of the best and the worst response to a prompt, the first ones of equal scores.

    None where there is nothing to prefer: fewer than two responses that count, equal scores or equal texts, or a best
    response below the threshold.
    """
    able = [i for i, score in enumerate(scores) if not math.isnan(score)]
    if not able:
        return None
    best = max(able, key=lambda i: scores[i])
    worst = min(able, key=lambda i: scores[i])
    if scores[best] == scores[worst] or texts[best] == texts[worst]:
        return None
    return None if threshold is not None and scores[best] < threshold else (best, worst)


def best_of_n(scores: Sequence[float], gold: Sequence[float], n: int) -> float:
    """Expected gold score of the best of n by `scores`, over all subsets of n of the N responses.

    With the responses sorted by score, sum_{i=n}^{N} C(i-1, n-1) / C(N, n) gold_(i). Responses of equal scores count as
    in a random order, that is with their mean gold score.

    Source: Nakano et al. 2021, arXiv:2112.09332, appendix I; Gao et al. 2022, arXiv:2210.10760, section 2.
    """
    total = len(scores)
    if not 1 <= n <= total:
        raise ValueError(f"n must lie between 1 and the {total} responses, got {n}")
    _, position = np.unique(np.asarray(scores, float), return_inverse=True)
    values = (np.bincount(position, np.asarray(gold, float)) / np.bincount(position))[position]
    weights = [math.comb(i - 1, n - 1) / math.comb(total, n) for i in range(1, total + 1)]
    return float(np.dot(weights, values[np.argsort(position, kind="stable")]))


def kl_bound(n: int) -> float:
    """KL from the policy to its best of n, nats: log n - (n - 1) / n; an upper bound, exact where no two responses tie.

    Source: Stiennon et al. 2020, arXiv:2009.01325, appendix G.3; bound: Beirami et al. 2024, arXiv:2401.01879.
    """
    return math.log(n) - (n - 1) / n


def powers_of_two(largest: int) -> list[int]:
    """1, 2, 4, ... up to `largest`."""
    return [2**i for i in range(largest.bit_length())] if largest else []

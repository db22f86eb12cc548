"""Best-of-n curves: the gold score of the response that a reward model picks among n, without bias and with intervals."""

import math
from collections.abc import Sequence

import numpy as np

BOOTSTRAPS = 1000


def best_of_n(scores: Sequence[float], gold: Sequence[float], n: int) -> float:
    """Expected gold score of the best of n by `scores`, over all subsets of n of the N responses.

    With the responses sorted by score, sum_{i=n}^{N} C(i-1, n-1) / C(N, n) gold_(i). Responses of equal scores count as in a
    random order, that is with their mean gold score.

    Args:
        scores: of the reward model, [N].
        gold: the true scores, [N].
        n: at most N.

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


def best_of_n_curve(
    scores: Sequence[Sequence[float]], gold: Sequence[Sequence[float]], sizes: Sequence[int], *, seed: int = 0
) -> list[dict[str, float]]:
    """A point for each n: mean over prompts of the expected gold score of the best of n, with its 95 % interval.

    The interval is the percentile bootstrap over prompts. `gain` is that over one response of the same prompts, which are
    those with at least n responses.

    Args:
        scores: of the reward model, a list of responses for each prompt.
        gold: true scores, likewise.
        sizes: values of n.
        seed: of the bootstrap.
    """
    rows = [(one, two) for one, two in zip(scores, gold, strict=True)]
    curve = []
    for n in sizes:
        known = [(one, two) for one, two in rows if len(one) >= n]
        if not known:
            continue
        best = np.array([best_of_n(one, two, n) for one, two in known])
        first = np.array([float(np.mean(two)) for _, two in known])
        proxy = np.array([best_of_n(one, one, n) for one, _ in known])
        drawn = np.random.default_rng(seed).integers(len(best), size=(BOOTSTRAPS, len(best)))
        low, high = np.quantile(best[drawn].mean(1), [0.025, 0.975])
        gain_low, gain_high = np.quantile((best - first)[drawn].mean(1), [0.025, 0.975])
        curve.append(
            {
                "n": n,
                "kl": kl_bound(n),
                "gold": float(best.mean()),
                "low": float(low),
                "high": float(high),
                "proxy": float(proxy.mean()),
                "gain": float((best - first).mean()),
                "gain_low": float(gain_low),
                "gain_high": float(gain_high),
                "prompts": len(known),
            }
        )
    return curve

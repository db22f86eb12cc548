"""Best-of-n curves: the gold score of the response that a reward model picks among n, with intervals."""

from collections.abc import Sequence

import numpy as np

from alignment.rewards.selection import best_of_n, kl_bound

BOOTSTRAPS = 1000


def best_of_n_curve(
    scores: Sequence[Sequence[float]], gold: Sequence[Sequence[float]], sizes: Sequence[int], *, seed: int = 0
) -> list[dict[str, float | None]]:
    """A point for each n: mean over prompts of the expected gold score of the best of n, with its 95 % interval.

    The interval is the percentile bootstrap over prompts; None of a single prompt, all of whose resamples are equal. `gain`
    is that over one response of the same prompts, which are those with at least n responses.

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
        low, high = _percentiles(best[drawn].mean(1), len(known))
        gain_low, gain_high = _percentiles((best - first)[drawn].mean(1), len(known))
        curve.append(
            {
                "n": n,
                "kl": kl_bound(n),
                "gold": float(best.mean()),
                "low": low,
                "high": high,
                "proxy": float(proxy.mean()),
                "gain": float((best - first).mean()),
                "gain_low": gain_low,
                "gain_high": gain_high,
                "prompts": len(known),
            }
        )
    return curve


def _percentiles(means: np.ndarray, prompts: int) -> tuple[float, float] | tuple[None, None]:
    """The middle 95 % of bootstrapped means."""
    if prompts < 2:
        return None, None
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)

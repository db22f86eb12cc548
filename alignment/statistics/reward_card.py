"""Figures of a reward model's card, as pure functions of scores; see reward_accuracy.py and reports/reward_page.py."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from alignment.rewards.selection import best_of_n, kl_bound
from alignment.statistics.winrate import Z_95, clustered_error, paired_interval, win_rate

Figures = dict[str, Any]  # names and numbers as they stand in card.json
HISTOGRAM_BINS = 20
BOOTSTRAPS = 1000


class ScoredGroup(NamedTuple):
    """The scores of the K responses to one prompt."""

    source: str  # name of the row's source
    prompt: str  # equal for equal prompts
    scores: Sequence[float]  # of the reward model, [K]
    ranks: Sequence[int]  # place of each response by the annotators, 0 is best, [K]
    lengths: Sequence[int]  # tokens of each response as the model reads it, cut where it did not fit, [K]


class Pairs(NamedTuple):
    """The n ordered pairs among groups: a response and a worse one by the annotators."""

    chosen: np.ndarray  # score(chosen), [n]
    margins: np.ndarray  # score(chosen) - score(rejected), [n]
    longer: np.ndarray  # tokens of the chosen minus tokens of the rejected response, [n]
    prompts: np.ndarray  # number of each pair's prompt, [n]


def pairs_of(groups: Sequence[ScoredGroup]) -> Pairs:
    """All ordered pairs of the groups; responses that the annotators tied make none."""
    numbers = {key: index for index, key in enumerate(dict.fromkeys(group.prompt for group in groups))}
    rows = [
        (group.scores[i], group.scores[i] - group.scores[j], group.lengths[i] - group.lengths[j], numbers[group.prompt])
        for group in groups
        for i, first in enumerate(group.ranks)
        for j, second in enumerate(group.ranks)
        if first < second
    ]
    chosen, margins, longer, prompts = np.array(rows, float).reshape(len(rows), 4).T
    return Pairs(chosen, margins, longer, prompts.astype(int))


def outcomes(margins: np.ndarray) -> np.ndarray:
    """1 where a margin is positive, 1/2 where it is 0, else 0; of the same shape."""
    return (np.sign(margins) + 1) / 2


def clustered_rate(verdicts: np.ndarray, prompts: np.ndarray) -> Figures | None:
    """Figures of `win_rate`, pairs of a prompt being one cluster, and the name of the interval; None of no verdicts.

    `verdicts` are 1, 0.5 or 0 of each pair, [n], `prompts` the number of its prompt, [n].
    """
    if not len(verdicts):
        return None
    estimate = win_rate(verdicts.tolist(), clusters=prompts.tolist())
    clustered = f"Tango's of {estimate.effective:.1f} effective pairs, clustered by prompt"
    name = "Tango's score interval, pairs independent" if estimate.clusters == estimate.n else clustered
    return {
        "rate": estimate.rate,
        "low": estimate.low,
        "high": estimate.high,
        "n": estimate.n,
        "wins": estimate.wins,
        "losses": estimate.losses,
        "ties": estimate.ties,
        "prompts": estimate.clusters,
        "interval": name,
    }


def accuracy_figures(groups: Sequence[ScoredGroup]) -> Figures:
    """Accuracy over ordered pairs with its interval, the distribution of margins, and the picks among K responses."""
    pairs = pairs_of(groups)
    counts, edges = np.histogram(pairs.margins, HISTOGRAM_BINS)
    return {
        "accuracy": clustered_rate(outcomes(pairs.margins), pairs.prompts),
        "always_longer": clustered_rate(outcomes(pairs.longer), pairs.prompts),
        "rows": len(groups),
        "margin": {
            "mean": float(pairs.margins.mean()),
            "deviation": float(pairs.margins.std()),
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        },
        "k_way": k_way_figures([group for group in groups if len(group.ranks) > 2]),
    }


def k_way_figures(groups: Sequence[ScoredGroup]) -> Figures | None:
    """Share of groups of K > 2 whose highest score is (among) the annotators' best, and the correlation of the orders.

    Of several highest scores the share that is among the best counts. Chance is the share of best ones among the K. The
    interval is Wilson's, of as many trials as there are prompts, since groups of a prompt are not independent.
    """
    if not groups:
        return None
    from scipy.stats import kendalltau

    rows = []
    for group in groups:
        scores = np.asarray(group.scores)
        best = np.asarray(group.ranks) == min(group.ranks)
        tau = float(kendalltau(scores, [-rank for rank in group.ranks]).statistic)  # pyright: ignore
        # all scores equal: the order says nothing
        rows.append((best[scores == scores.max()].mean(), best.mean(), 0.0 if math.isnan(tau) else tau))
    hits, chance, tau = (float(np.mean(column)) for column in zip(*rows, strict=True))
    prompts = len({group.prompt for group in groups})
    low, high = paired_interval(hits * prompts, (1 - hits) * prompts, prompts)  # without ties it is Wilson's
    return {
        "groups": len(groups),
        "low": low,
        "high": high,
        "top_1": hits,
        "top_1_by_chance": chance,
        "kendall_tau_b": tau,
    }


def reliability(margins: np.ndarray, *, bins: int = 10) -> Figures:
    """Predicted probabilities of a preference against the observed share, expected calibration error and Brier score.

    The prediction is sigmoid(|margin|), in [1/2, 1], that the higher score is the chosen one: both orders of a pair say
    the same. ECE is the mean over pairs of |observed share - mean prediction| of their bin, Brier's score the mean of
    (1 - sigmoid(margin))^2. The margins [n] are score(chosen) - score(rejected) on the scale of training, the bins of
    equal width between 1/2 and 1.

    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    from scipy.special import expit

    confidence = expit(np.abs(margins))
    right = outcomes(margins)
    bin_indices = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    table = []
    for index in range(bins):
        inside = bin_indices == index
        table.append(
            {
                "low": 0.5 + index / (2 * bins),
                "high": 0.5 + (index + 1) / (2 * bins),
                "pairs": int(inside.sum()),
                "predicted": float(confidence[inside].mean()) if inside.any() else None,
                "observed": float(right[inside].mean()) if inside.any() else None,
            }
        )
    error = sum(row["pairs"] * abs(row["observed"] - row["predicted"]) for row in table if row["pairs"]) / len(margins)
    return {"bins": table, "ece": error, "brier": float(((1 - expit(margins)) ** 2).mean())}


def length_figures(pairs: Pairs) -> Figures:
    """Effect of length on scores: slope per 100 tokens within prompts, correlation, accuracy if the chosen is longer.

    Slope of score differences on differences of length through the origin, b = sum(x y) / sum(x^2) with x in 100
    tokens; its interval takes the cluster-robust error of prompts, and is None where fewer than two of them have pairs
    of unequal length: one prompt has no spread to measure, nor have scores that follow from length. The correlation is
    that of both orders of every pair.
    """
    x = pairs.longer / 100
    y = pairs.margins
    size = float((x * x).sum())
    energy = float((y * y).sum())
    figures: Figures = {
        "chosen_longer": clustered_rate(outcomes(y[x > 0]), pairs.prompts[x > 0]),
        "chosen_shorter": clustered_rate(outcomes(y[x < 0]), pairs.prompts[x < 0]),
        "always_longer": clustered_rate(outcomes(x), pairs.prompts),
    }
    if size == 0:
        return {**figures, "slope_missing": "the responses of every pair are equally long"}
    slope = float((x * y).sum()) / size
    error, _ = clustered_error(x * (y - slope * x) * len(x) / size, pairs.prompts.tolist())  # of the slope as a mean
    known = error > 1e-9 * abs(slope) and len(np.unique(pairs.prompts[x != 0])) > 1
    return {
        **figures,
        "slope_per_100_tokens": slope,
        "low": slope - Z_95 * error if known else None,
        "high": slope + Z_95 * error if known else None,
        "correlation": float((x * y).sum()) / math.sqrt(size * energy) if energy else 0.0,
    }


def best_of_n_curve(
    scores: Sequence[Sequence[float]], gold: Sequence[Sequence[float]], sizes: Sequence[int], *, seed: int = 0
) -> list[Figures]:
    """A point for each n: mean over prompts of the expected gold score of the best of n, with its 95 % interval.

    The interval is the percentile bootstrap over prompts; None of a single prompt, all of whose resamples are equal.
    `gain` is that over one response of the same prompts. `scores` are the reward model's, `gold` the true ones, each a
    list for each prompt; `sizes` are the values of n.
    """
    curve = []
    for n in sizes:
        best = np.array([best_of_n(one, two, n) for one, two in zip(scores, gold, strict=True)])
        gain = best - np.array([float(np.mean(one)) for one in gold])
        proxy = np.array([best_of_n(one, one, n) for one in scores])
        drawn = np.random.default_rng(seed).integers(len(best), size=(BOOTSTRAPS, len(best)))
        point: Figures = {"n": n, "kl": kl_bound(n), "proxy": float(proxy.mean()), "prompts": len(best)}
        for name, low, high, values in (("gold", "low", "high", best), ("gain", "gain_low", "gain_high", gain)):
            bounds = np.quantile(values[drawn].mean(1), [0.025, 0.975]).tolist() if len(best) > 1 else (None, None)
            point |= {name: float(values.mean()), low: bounds[0], high: bounds[1]}
        curve.append(point)
    return curve


def score_changes(base: Tensor, other: Tensor, pairs: Sequence[tuple[int, int]]) -> Figures:
    """Largest and mean change of scores [n] of the same texts, and share of text pairs (indices) that change order."""
    change = (other.double() - base.double()).abs()
    deviation = float(base.double().std(correction=0))
    first, second = np.array(pairs, int).reshape(-1, 2).T
    orders = [np.sign(scores.numpy()[first] - scores.numpy()[second]) for scores in (base, other)]
    return {
        "largest": float(change.max()),
        "mean": float(change.mean()),
        "largest_in_deviations": float(change.max()) / deviation if deviation else 0.0,
        "order_changes": float((orders[0] != orders[1]).mean()) if len(pairs) else 0.0,
    }

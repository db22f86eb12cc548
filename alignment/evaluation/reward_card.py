"""The figures of a reward model's card, as pure functions of scores.

Reading and scoring is in reward_inputs.py, the page in report/reward_page.py.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from alignment.evaluation.winrate import TIE, Z_95, paired_interval
from alignment.rewards.selection import best_of_n, kl_bound

Figures = dict[str, Any]  # names and numbers as they stand in card.json
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM_BINS = 20
STRENGTHS = 4  # bins of the strength of human preferences
BOOTSTRAPS = 1000


class ScoredGroup(NamedTuple):
    """The scores of the K responses to one prompt.

    Attributes:
        source: name of the row's source.
        prompt: equal for equal prompts.
        scores: of the reward model, [K].
        ranks: place of each response by the annotators, 0 is best, [K].
        lengths: tokens of each response as the model reads it, cut where it did not fit, [K].
        human: what annotators rated each response, where the row says, [K].
        strength: by how much the better of two leads, where the row says.
        members: scores by each member of an ensemble, [K, k].
    """

    source: str
    prompt: str
    scores: Sequence[float]
    ranks: Sequence[int]
    lengths: Sequence[int]
    human: Sequence[float] | None = None
    strength: float | None = None
    members: Sequence[Sequence[float]] | None = None


class Pairs(NamedTuple):
    """The n ordered pairs among groups: a response and a worse one by the annotators.

    Attributes:
        margins: score(chosen) - score(rejected), [n].
        longer: tokens of the chosen minus tokens of the rejected response, [n].
        strength: of the human preference: margin, or gap of ratings; NaN where the row has none, [n].
        prompts: number of each pair's prompt, [n].
        deviations: deviation of the margin over the members of an ensemble; 0 for a single model, [n].
    """

    margins: np.ndarray
    longer: np.ndarray
    strength: np.ndarray
    prompts: np.ndarray
    deviations: np.ndarray


def pairs_of(groups: Sequence[ScoredGroup]) -> Pairs:
    """All ordered pairs of the groups; responses that the annotators tied make none."""
    numbers = {key: number for number, key in enumerate(dict.fromkeys(group.prompt for group in groups))}
    rows = [
        (
            group.scores[i] - group.scores[j],
            group.lengths[i] - group.lengths[j],
            _strength(group, i, j),
            numbers[group.prompt],
            0.0 if group.members is None else float(np.std(np.subtract(group.members[i], group.members[j]))),
        )
        for group in groups
        for i, first in enumerate(group.ranks)
        for j, second in enumerate(group.ranks)
        if first < second
    ]
    margins, longer, strength, prompts, deviations = np.array(rows, float).reshape(len(rows), 5).T
    return Pairs(margins, longer, strength, prompts.astype(int), deviations)


def _strength(group: ScoredGroup, i: int, j: int) -> float:
    if group.human is not None:
        return group.human[i] - group.human[j]
    return math.nan if group.strength is None else group.strength


def outcomes(margins: np.ndarray) -> np.ndarray:
    """1 where a margin is positive, 1/2 where it is 0, else 0; of the same shape."""
    return (np.sign(margins) + 1) / 2


def clustered_rate(verdicts: np.ndarray, prompts: np.ndarray) -> Figures | None:
    """Share of wins, ties counting half, with its 95 % interval; None of no verdicts.

    With one pair per prompt the interval is Tango's score interval. Else pairs of a prompt are not independent: the variance
    is the cluster-robust one, G/(G-1) sum_g (sum_i (v_i - rate))^2 / n^2, and the interval Wilson's of as many pairs as would
    have that variance if they were independent (at most n; the number of prompts where all pairs agree).

    Args:
        verdicts: 1, 0.5 or 0 of each pair, [n].
        prompts: number of each pair's prompt, [n].

    Source: Korn and Graubard 1998, Survey Methodology 24, 193-201 (effective sample size).
    """
    n = len(verdicts)
    if not n:
        return None
    rate = float(verdicts.mean())
    wins, losses, ties = (int((verdicts == value).sum()) for value in (1, 0, TIE))
    _, cluster = np.unique(prompts, return_inverse=True)
    number = int(cluster.max()) + 1
    if number == n:
        low, high = paired_interval(wins, losses, n)
        name = "Tango's score interval, pairs independent"
    else:
        deviations = np.bincount(cluster, verdicts - rate)
        variance = number / max(number - 1, 1) * float((deviations**2).sum()) / n**2
        effective = min(rate * (1 - rate) / variance, n) if variance > 0 else float(number)
        low, high = wilson_interval(rate, effective)
        name = f"Wilson's of {effective:.1f} effective pairs, clustered by prompt"
    counts = {"n": n, "wins": wins, "losses": losses, "ties": ties, "prompts": number}
    return {"rate": rate, "low": low, "high": high, **counts, "interval": name}


def wilson_interval(rate: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n independent trials."""
    center = (rate + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 * math.sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2)) / (1 + Z_95**2 / n)
    return max(center - half, 0.0), min(center + half, 1.0)


def accuracy_figures(groups: Sequence[ScoredGroup]) -> Figures:
    """Accuracy over ordered pairs with its interval, the distribution of margins, and the picks among K responses."""
    pairs = pairs_of(groups)
    counts, edges = np.histogram(pairs.margins, HISTOGRAM_BINS)
    better = [score for group in groups for score, rank in zip(group.scores, group.ranks, strict=True) if rank == 0]
    return {
        "accuracy": clustered_rate(outcomes(pairs.margins), pairs.prompts),
        "always_longer": clustered_rate(outcomes(pairs.longer), pairs.prompts),
        "rows": len(groups),
        "margin": {
            "mean": float(pairs.margins.mean()),
            "deviation": float(pairs.margins.std()),
            "quantiles": {f"{q:g}": float(np.quantile(pairs.margins, q)) for q in QUANTILES},
            "histogram": {"edges": edges.tolist(), "counts": counts.tolist()},
        },
        "score_of_best": float(np.mean(better)),
        "k_way": k_way_figures([group for group in groups if len(group.ranks) > 2]),
    }


def k_way_figures(groups: Sequence[ScoredGroup]) -> Figures | None:
    """Of groups of K > 2: how often the highest score is (among) the annotators' best, and the correlation of the orders.

    Of several highest scores the share that is among the best counts. Chance is the share of best ones among the K. The
    interval is Wilson's, of as many trials as there are prompts.
    """
    if not groups:
        return None
    from scipy.stats import kendalltau

    hits, chance, taus = [], [], []
    for group in groups:
        scores, best = np.asarray(group.scores), np.asarray(group.ranks) == min(group.ranks)
        hits.append(float(best[scores == scores.max()].mean()))
        chance.append(float(best.mean()))
        tau = float(kendalltau(scores, [-rank for rank in group.ranks]).statistic)  # pyright: ignore
        taus.append(0.0 if math.isnan(tau) else tau)  # all scores equal: the order says nothing
    mean = float(np.mean(hits))
    low, high = wilson_interval(mean, len({group.prompt for group in groups}))  # groups of a prompt are not independent
    return {
        "groups": len(groups),
        "top_1": mean,
        "low": low,
        "high": high,
        "top_1_by_chance": float(np.mean(chance)),
        "kendall_tau_b": float(np.mean(taus)),
    }


def reliability(margins: np.ndarray, prompts: np.ndarray | None = None, *, bins: int = 10) -> Figures:
    """Predicted probabilities of a preference against the observed share, expected calibration error and Brier score.

    The prediction is sigmoid(|margin|), in [1/2, 1], that the higher score is the chosen one: both orders of a pair say the
    same. ECE is the mean over pairs of |observed share - mean prediction| of their bin, Brier's score the mean of
    (1 - sigmoid(margin))^2.

    Args:
        margins: score(chosen) - score(rejected) on the scale of training, [n].
        prompts: number of each pair's prompt, by which a bin's interval is clustered, [n]; None: each pair has its own.
        bins: of equal width between 1/2 and 1.

    Source: Guo et al. 2017, arXiv:1706.04599, eq. 3.
    """
    from scipy.special import expit

    confidence, right = expit(np.abs(margins)), outcomes(margins)
    prompts = np.arange(len(margins)) if prompts is None else prompts
    number = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    table, error = [], 0.0
    for index in range(bins):
        inside, row = number == index, {"low": 0.5 + index / (2 * bins), "high": 0.5 + (index + 1) / (2 * bins)}
        rate = clustered_rate(right[inside], prompts[inside])
        predicted = None if rate is None else float(confidence[inside].mean())
        if rate is not None and predicted is not None:
            error += inside.mean() * abs(rate["rate"] - predicted)
        found = {
            "predicted": predicted,
            "observed": rate and rate["rate"],
            "interval": rate and [rate["low"], rate["high"]],
        }
        table.append({**row, "pairs": int(inside.sum()), **found})
    brier = float(((1 - expit(margins)) ** 2).mean())
    return {"bins": table, "ece": float(error), "brier": brier, "accuracy": float(right.mean())}


def calibrating_temperature(margins: np.ndarray) -> float | None:
    """The T > 0 for which sigmoid(margin / T) makes the preferences likeliest; None where no T does.

    None: every margin is at least 0 (T would be 0), or their mean is not above 0 (T would be infinite).

    Source: Guo et al. 2017, arXiv:1706.04599, section 4.2.
    """
    if not (margins < 0).any() or not margins.mean() > 0:
        return None
    from scipy.optimize import brentq
    from scipy.special import expit

    scale = float(np.abs(margins).max())
    unit = margins / scale

    def slope(inverse: float) -> float:  # of the log-likelihood
        return float((unit * expit(-inverse * unit)).mean())

    high = 1.0
    while slope(high) > 0:
        high *= 2
    return scale / float(brentq(slope, 0.0, high))  # pyright: ignore[reportArgumentType]


def calibration_figures(margins: np.ndarray, prompts: np.ndarray | None = None, *, bins: int = 10) -> Figures:
    """Reliability as it is and at the temperature that would calibrate it, which is fitted on the very same pairs."""
    temperature = calibrating_temperature(margins)
    figures = {**reliability(margins, prompts, bins=bins), "temperature": temperature}
    if temperature is None:
        why = "no temperature calibrates: no pair is ordered wrong, or the mean margin is not above 0"
        return {**figures, "temperature_missing": why}
    calm = reliability(margins / temperature, prompts, bins=bins)
    return {**figures, "calibrated": {"ece": calm["ece"], "brier": calm["brier"]}}


def length_figures(pairs: Pairs) -> Figures:
    """Effect of length on scores: slope per 100 tokens within prompts, correlation, accuracy where the chosen is longer.

    Slope of score differences on differences of length through the origin, b = sum(x y) / sum(x^2) with x in 100 tokens;
    its interval takes the cluster-robust error of prompts, and is None where fewer than two of them have pairs of unequal
    length: one prompt has no spread to measure. The correlation is that of both orders of every pair.
    """
    x, y = pairs.longer / 100, pairs.margins
    size, deviation = float((x * x).sum()), math.sqrt(float((y * y).mean()))
    figures = {
        "chosen_longer": clustered_rate(outcomes(y[x > 0]), pairs.prompts[x > 0]),
        "chosen_shorter": clustered_rate(outcomes(y[x < 0]), pairs.prompts[x < 0]),
        "always_longer": clustered_rate(outcomes(x), pairs.prompts),
        "mean_lead_of_chosen": float(pairs.longer.mean()),
    }
    if size == 0:
        return {**figures, "slope_missing": "the responses of every pair are equally long"}
    slope = float((x * y).sum()) / size
    _, cluster = np.unique(pairs.prompts, return_inverse=True)
    number = int(cluster.max()) + 1
    sums = np.bincount(cluster, x * (y - slope * x))
    error = math.sqrt(number / max(number - 1, 1) * float((sums**2).sum())) / size
    known = len(np.unique(cluster[x != 0])) > 1
    prefers_longer = outcomes(y * np.sign(x))[x != 0]
    return {
        **figures,
        "slope_per_100_tokens": slope,
        "low": slope - Z_95 * error if known else None,
        "high": slope + Z_95 * error if known else None,
        "slope_in_deviations": slope / deviation if deviation else 0.0,
        "correlation": float((x * y).sum()) / math.sqrt(size * float((y * y).sum())) if deviation else 0.0,
        "prefers_longer": float(prefers_longer.mean()),
    }


def strength_figures(pairs: Pairs, bins: int = STRENGTHS) -> list[Figures]:
    """Share of agreement by the strength of the human preference, from weak to strong; [] where no row has a strength.

    Each distinct strength is a bin where there are at most `bins` of them, else bins hold about as many pairs each.
    """
    known = ~np.isnan(pairs.strength)
    strength, right, prompts = pairs.strength[known], outcomes(pairs.margins)[known], pairs.prompts[known]
    values = np.unique(strength)
    if len(values) > bins:
        values = np.unique(np.quantile(strength, np.arange(bins) / bins, method="higher"))
    number = np.searchsorted(values, strength, side="right") - 1
    return [
        {
            "from": float(strength[number == index].min()),
            "to": float(strength[number == index].max()),
            "agreement": clustered_rate(right[number == index], prompts[number == index]),
        }
        for index in range(len(values))
        if (number == index).any()
    ]


def ensemble_figures(pairs: Pairs) -> Figures:
    """An ensemble's deviation of the margin, and its accuracy where that is below and above the median."""
    middle = float(np.median(pairs.deviations))
    low = pairs.deviations <= middle
    right = outcomes(pairs.margins)
    return {
        "mean": float(pairs.deviations.mean()),
        "median": middle,
        "accuracy_where_low": clustered_rate(right[low], pairs.prompts[low]),
        "accuracy_where_high": clustered_rate(right[~low], pairs.prompts[~low]),
    }


def best_of_n_curve(
    scores: Sequence[Sequence[float]], gold: Sequence[Sequence[float]], sizes: Sequence[int], *, seed: int = 0
) -> list[Figures]:
    """A point for each n: mean over prompts of the expected gold score of the best of n, with its 95 % interval.

    The interval is the percentile bootstrap over prompts; None of a single prompt, all of whose resamples are equal. `gain`
    is that over one response of the same prompts, which are those with at least n responses.

    Args:
        scores: of the reward model, a list of responses for each prompt.
        gold: true scores, likewise.
        sizes: values of n.
        seed: of the bootstrap.
    """
    curve = []
    for n in sizes:
        known = [(one, two) for one, two in zip(scores, gold, strict=True) if len(one) >= n]
        if not known:
            continue
        best = np.array([best_of_n(one, two, n) for one, two in known])
        gain = best - np.array([float(np.mean(two)) for _, two in known])
        proxy = np.array([best_of_n(one, one, n) for one, _ in known])
        drawn = np.random.default_rng(seed).integers(len(best), size=(BOOTSTRAPS, len(best)))
        point = {"n": n, "kl": kl_bound(n), "proxy": float(proxy.mean()), "prompts": len(known)}
        for name, low, high, values in (("gold", "low", "high", best), ("gain", "gain_low", "gain_high", gain)):
            bounds = np.quantile(values[drawn].mean(1), [0.025, 0.975]).tolist() if len(known) > 1 else (None, None)
            point |= {name: float(values.mean()), low: bounds[0], high: bounds[1]}
        curve.append(point)
    return curve


def score_changes(base: Tensor, other: Tensor, pairs: Sequence[tuple[int, int]]) -> Figures:
    """Largest and mean change of scores, and the share of pairs that change their order.

    Args:
        base: scores, [n].
        other: of the same texts in another way, [n].
        pairs: indices of two texts each.
    """
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

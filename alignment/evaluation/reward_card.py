"""The figures of a reward model's card, as pure functions of scores: accuracy, reliability, agreement, length, ensembles.

Reading and scoring is in reward_inputs.py, the page in report/reward_page.py. Scores in other batches and types are in
reward_robustness.py, best of n in best_of_n.py.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

import numpy as np

from alignment.evaluation.winrate import TIE, Z_95, paired_interval

Figures = Mapping[str, object]  # names and numbers as they stand in card.json
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
HISTOGRAM_BINS = 20
STRENGTHS = 4  # bins of the strength of human preferences


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """The scores of the K responses to one prompt.

    Attributes:
        row_id: name of the data row.
        source: name of its source.
        prompt: equal for equal prompts.
        scores: of the reward model, [K].
        ranks: place of each response by the annotators, 0 is best, [K].
        lengths: tokens of each response as the model reads it, cut where it did not fit, [K].
        human: what annotators rated each response, where the row says, [K].
        strength: by how much the better of two leads, or the share of annotators who say so, where the row says.
        members: scores by each member of an ensemble, [K, k].
    """

    row_id: str
    source: str
    prompt: str
    scores: Sequence[float]
    ranks: Sequence[int]
    lengths: Sequence[int]
    human: Sequence[float] | None = None
    strength: float | None = None
    members: Sequence[Sequence[float]] | None = None


@dataclass(frozen=True, eq=False)
class Pairs:
    """The n ordered pairs among groups: a response and a worse one by the annotators.

    Attributes:
        margins: score(chosen) - score(rejected), [n].
        longer: tokens of the chosen minus tokens of the rejected response, [n].
        strength: of the human preference: margin, gap of ratings or share of annotators; NaN where the row has none, [n].
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
    rows: list[tuple[float, int, float, int, float]] = []
    for group in groups:
        for one, first in enumerate(group.ranks):
            for two, second in enumerate(group.ranks):
                if first < second:
                    strength = math.nan if group.strength is None else group.strength
                    if group.human is not None:
                        strength = group.human[one] - group.human[two]
                    deviation = 0.0
                    if group.members is not None:
                        deviation = float(np.std(np.subtract(group.members[one], group.members[two])))
                    rows.append(
                        (
                            group.scores[one] - group.scores[two],
                            group.lengths[one] - group.lengths[two],
                            strength,
                            numbers[group.prompt],
                            deviation,
                        )
                    )
    columns = np.array(rows, float).reshape(len(rows), 5).T
    return Pairs(columns[0], columns[1], columns[2], columns[3].astype(int), columns[4])


def outcomes(margins: np.ndarray) -> np.ndarray:
    """1 where a margin is positive, 1/2 where it is 0, else 0; of the same shape."""
    return (np.sign(margins) + 1) / 2


class Rate(TypedDict):
    """A share with its 95 % interval, ties counting half; wins, losses and ties add up to n."""

    rate: float
    low: float
    high: float
    n: int
    wins: int
    losses: int
    ties: int
    prompts: int
    interval: str


def clustered_rate(verdicts: np.ndarray, prompts: np.ndarray) -> Rate | None:
    """Share of wins with its 95 % interval; None of no verdicts.

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
    rate, counts = float(verdicts.mean()), [int((verdicts == value).sum()) for value in (1, 0, TIE)]
    wins, losses, ties = counts
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
    return Rate(
        rate=rate, low=low, high=high, n=n, wins=wins, losses=losses, ties=ties, prompts=number, interval=name
    )  # fmt: skip


def wilson_interval(rate: float, n: float) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n independent trials."""
    center = (rate + Z_95**2 / (2 * n)) / (1 + Z_95**2 / n)
    half = Z_95 * math.sqrt(rate * (1 - rate) / n + Z_95**2 / (4 * n**2)) / (1 + Z_95**2 / n)
    return max(center - half, 0.0), min(center + half, 1.0)


def accuracy_figures(groups: Sequence[ScoredGroup]) -> Figures:
    """Accuracy over ordered pairs with its interval, the distribution of margins, and of K-way groups what is picked."""
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
    confidence, right = _sigmoid(np.abs(margins)), outcomes(margins)
    prompts = np.arange(len(margins)) if prompts is None else prompts
    number = np.minimum(((confidence - 0.5) * 2 * bins).astype(int), bins - 1)
    table, error = [], 0.0
    for index in range(bins):
        inside = number == index
        row: dict[str, object] = {"low": 0.5 + index / (2 * bins), "high": 0.5 + (index + 1) / (2 * bins)}
        row |= {"pairs": int(inside.sum()), "predicted": None, "observed": None, "interval": None}
        if inside.any():
            predicted, observed = float(confidence[inside].mean()), float(right[inside].mean())
            error += inside.mean() * abs(observed - predicted)
            rate = clustered_rate(right[inside], prompts[inside])
            interval = None if rate is None else [rate["low"], rate["high"]]
            row |= {"predicted": predicted, "observed": observed, "interval": interval}
        table.append(row)
    return {
        "bins": table,
        "ece": float(error),
        "brier": float(((1 - _sigmoid(margins)) ** 2).mean()),
        "accuracy": float(right.mean()),
    }


def calibrating_temperature(margins: np.ndarray) -> float | None:
    """The T > 0 for which sigmoid(margin / T) makes the preferences likeliest; None where no T does.

    None: every margin is at least 0 (T would be 0), or their mean is not above 0 (T would be infinite).

    Source: Guo et al. 2017, arXiv:1706.04599, section 4.2.
    """
    if not (margins < 0).any() or not margins.mean() > 0:
        return None
    from scipy.optimize import brentq

    scale = float(np.abs(margins).max())
    unit = margins / scale

    def slope(inverse: float) -> float:  # of the log-likelihood
        return float((unit * _sigmoid(-inverse * unit)).mean())

    high = 1.0
    while slope(high) > 0:
        high *= 2
    return scale / float(brentq(slope, 0.0, high))  # pyright: ignore[reportArgumentType]


def calibration_figures(margins: np.ndarray, prompts: np.ndarray | None = None, *, bins: int = 10) -> Figures:
    """Reliability as it is and at the temperature that would calibrate it, which is fitted on the very same pairs."""
    temperature = calibrating_temperature(margins)
    figures = {**reliability(margins, prompts, bins=bins), "temperature": temperature}
    if temperature is None:
        return {
            **figures,
            "temperature_missing": "no temperature calibrates: no pair is ordered wrong, or the mean margin is not above 0",
        }
    calm = reliability(margins / temperature, prompts, bins=bins)
    return {**figures, "calibrated": {"ece": calm["ece"], "brier": calm["brier"]}}


def _sigmoid(x: np.ndarray) -> np.ndarray:
    from scipy.special import expit

    return expit(x)


def length_figures(pairs: Pairs) -> Figures:
    """What length does to scores: slope per 100 tokens within prompts, correlation, accuracy where the chosen is longer.

    Slope of score differences on differences of length through the origin, b = sum(x y) / sum(x^2) with x in 100 tokens;
    its interval takes the cluster-robust error of prompts, and is None where fewer than two of them have pairs of unequal
    length: one prompt has no spread to measure. The correlation is that of both orders of every pair.
    """
    x, y = pairs.longer / 100, pairs.margins
    size, deviation = float((x * x).sum()), math.sqrt(float((y * y).mean()))
    figures: dict[str, object] = {
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


def vote_figures(verdicts: Sequence[float], votes: Sequence[Sequence[float]]) -> Figures | None:
    """Agreement of a model and of the annotators among themselves on pairs that several annotators judged.

    Agreement of two verdicts is 1 - |a - b|, half where just one is a tie. Cohen's kappa takes every pair in both orders, so
    that which response stands first says nothing: (p_o - p_e) / (1 - p_e), p_o exact agreement, p_e that of the marginals.

    Args:
        verdicts: the model's for each pair, 1 / 0.5 / 0.
        votes: each pair's votes, one per annotator, for the same response.

    Returns:
        None where no pair has a vote.

    Source: Cohen 1960, Educational and Psychological Measurement 20, 37-46.
    """
    by_model = [(verdict, vote) for verdict, each in zip(verdicts, votes, strict=True) for vote in each]
    if not by_model:
        return None
    by_people = [(a, b) for each in votes for i, a in enumerate(each) for b in each[i + 1 :]]
    majorities = [float(np.sign(sum(each) - len(each) / 2) + 1) / 2 for each in votes if each]
    judged = [verdict for verdict, each in zip(verdicts, votes, strict=True) if each]
    with_majority = list(zip(judged, majorities, strict=True))
    return {
        "pairs": len(judged),
        "votes": len(by_model),
        "model_with_a_vote": _agreement(by_model),
        "model_with_majority": _agreement(with_majority),
        "people_with_each_other": _agreement(by_people) if by_people else None,
        "kappa_model_with_majority": symmetric_kappa(with_majority),
        "kappa_people": symmetric_kappa(by_people),
    }


def _agreement(pairs: Sequence[tuple[float, float]]) -> float:
    return sum(1 - abs(a - b) for a, b in pairs) / len(pairs)


def symmetric_kappa(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Cohen's kappa of two raters' verdicts with every item in both orders; None where it is not defined."""
    both = [*pairs, *((1 - a, 1 - b) for a, b in pairs)]
    if not both:
        return None
    observed = sum(a == b for a, b in both) / len(both)
    chance = sum(
        sum(a == value for a, _ in both) * sum(b == value for _, b in both) for value in (0, TIE, 1)
    ) / len(both) ** 2  # fmt: skip
    return None if chance == 1 else (observed - chance) / (1 - chance)


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

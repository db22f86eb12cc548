"""Faults of a judge in figures and words: preference for a place or for length, contradictions, failures, kinship."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.files import hash_of, read_json_object
from alignment.judging.config import JudgeConfig, WinRateConfig
from alignment.judging.judges import JudgeResult, judged_prompts
from alignment.statistics.agreement import Figures
from alignment.statistics.length_control import length_controlled_win_rate
from alignment.statistics.seeds import seeds_win_rate
from alignment.statistics.winrate import TIE, cluster_numbers, detectable_difference, sign_test

COIN = 1 / 3  # share of items with contradictory orders from which a judge is called a coin, whose share is a half
BY_LENGTH = 0.6  # share of the items that the longer response wins beyond which it is told

KINSHIP = (  # of a language model, and of a reward model
    "the model of {kin}, or one that it was trained from, and may prefer its own kind",
    "the reward model that {kin} was trained against or chosen by: its verdicts show what it was optimized for, not "
    "what people prefer",
)


def judgment_figures(result: JudgeResult) -> Figures:
    """Figures of one comparison for `results.json`."""
    return {name: value for name, value in asdict(result).items() if name not in ("verdicts", "contradictory")}


def rate_over_seeds(result: JudgeResult, prompts: Sequence[Prompt]) -> Figures:
    """The win rate; of several seeds, whose verdicts on `prompts` stand one after another, that over prompts and seeds.

    A prompt on which a seed has no verdict is left out of it: `n` counts all verdicts, `prompts` the prompts that are
    left. The contradictions of all prompts widen it.
    """
    figures = asdict(result.win_rate)
    table = np.array(result.verdicts, float).reshape(-1, len(prompts))
    if len(table) > 1:
        judged = ~np.isnan(table).any(0)
        clusters = [hash_of(prompts[i].prompt) for i in np.flatnonzero(judged).tolist()]
        tosses = sum(result.contradictory)
        figures |= asdict(seeds_win_rate(table[:, judged], inconsistent=tosses, clusters=clusters))
    return figures


def comparison_figures(
    prompts: Sequence[Prompt], ours: Sequence[str], baseline: Sequence[str], result: JudgeResult
) -> Figures:
    """Statistics beyond the rate: at equal length, by a sign test, and the difference that so many prompts can show."""
    rate = result.win_rate
    contradictory = int(result.inconsistent["count"])  # these say nothing
    columns = zip(ours, baseline, result.verdicts, result.contradictory, strict=True)
    judged = [(verdict, len(a), len(b), toss) for a, b, verdict, toss in columns if verdict is not None]
    *sides, tossed = zip(*judged, strict=True)
    clusters = judged_prompts(prompts, result.verdicts)
    equal = None
    why = "the judge's two orders contradict each other too often"
    if result.inconsistent["rate"] <= COIN:
        try:
            equal = length_controlled_win_rate(*sides, clusters=clusters, contradictory=tossed)
            why = None
        except UserError as error:  # such as responses of one length, or too few of them
            why = str(error)
    leads = np.bincount(cluster_numbers(clusters), np.subtract(sides[0], TIE))  # each prompt votes once
    known = rate.n - contradictory
    ties = max(rate.ties - contradictory, 0)
    share = (rate.effective or rate.n) / rate.n  # of independent items
    return {
        "length_controlled": equal and asdict(equal),
        "length_controlled_why_not": why,
        "sign_test": {"p": sign_test(int((leads > 0).sum()), int((leads < 0).sum()))},
        "detectable_difference": detectable_difference(share * known, ties=ties / known) if known > ties else None,
    }


def judgment_warnings(config: JudgeConfig, name: str, result: JudgeResult) -> list[str]:
    """Warnings of both kinds on one comparison; judge=longer, which goes by length alone, has none of length."""
    return [*position_warnings(name, result), *(length_warnings(name, result) if config.judge != "longer" else ())]


def position_warnings(name: str, result: JudgeResult) -> list[str]:
    """A warning where the judge prefers a position and not a response, or its verdicts are tosses of a coin."""
    first = result.position_bias
    contradictory = result.inconsistent
    both = (
        f"its two orders contradict each other on {contradictory['count']} of {contradictory['n']} items, which decide "
        "nothing"
    )
    if not first["low"] <= TIE <= first["high"]:
        place = "first" if first["rate"] > TIE else "second"
        shares = f"{first['rate']:.1%} [{first['low']:.1%}, {first['high']:.1%}] where 50% is no bias"
        text = f"prefers the response shown {place}, whichever it is: the first in {shares}"
        text += f", and {both}" if contradictory["n"] else ""
    elif contradictory["n"] and contradictory["low"] > COIN:
        text = f"answers like a toss of a coin, which contradicts itself on half of the items: {both}"
    else:
        return []
    return [f"{name}: the judge {text}"]


def length_warnings(name: str, result: JudgeResult) -> list[str]:
    """A warning where the longer or the shorter response wins nearly always, which may be the judge's taste."""
    longer = result.longer_preferred
    slope = result.length_slope
    if longer is None or (longer["high"] >= 1 - BY_LENGTH and longer["low"] <= BY_LENGTH):
        return []
    side, share = ("longer", longer["rate"]) if longer["rate"] > TIE else ("shorter", 1 - longer["rate"])
    text = (
        f"{name}: the {side} response wins {share:.1%} of {longer['n']} items: it is better, or the judge prefers "
        "length"
    )
    if slope is not None:
        text += f"; a response twice as long wins {slope['slope']:+.1%} [{slope['low']:+.1%}, {slope['high']:+.1%}]"
    return [text]


def parent_warnings(config: WinRateConfig, hashes: Mapping[str, str | None]) -> list[str]:
    """A warning for each judging model that a contestant is, was trained from or against, or was chosen by."""
    kinship = KINSHIP[config.judge == "reward_model"]
    warnings = list[str]()
    for source in config.judging_models:
        kin = [name for name in [*config.models, *config.best_of] if hashes[source] in _origins(config, name, hashes)]
        if hashes[source] is not None and kin:
            warnings.append(
                f"the judge {source} is {kinship.format(kin=', '.join(kin))}; judge with a model of other origin"
            )
    return warnings


def _origins(config: WinRateConfig, name: str, hashes: Mapping[str, str | None]) -> set[str | None]:
    """Hashes of a contestant's model, of all its ancestors by lineage.json, and of what chose its responses."""
    models = [str(config.policy_of(name))]
    origins = {
        hashes[models[0]],
        *(hashes[best_of.reward_model] for best_of in [config.best_of.get(name)] if best_of is not None),
    }
    for model in models:  # which grows by the parents of each
        record = Path(model).expanduser().parent / "lineage.json"
        parents = read_json_object(record)["parents"] if record.is_file() else {}
        origins |= set(parents.values())
        models += [parent for parent in parents if parent not in models]
    return origins

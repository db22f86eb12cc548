"""The faults of a judge in figures and words: a preference for a place or for length, contradictions, failures, kinship."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.evaluation.judges import JudgeResult, judged_prompts
from alignment.evaluation.length_control import length_controlled_win_rate
from alignment.evaluation.win_rate_config import WinRateConfig
from alignment.evaluation.winrate import TIE, detectable_difference, sign_test
from alignment.files import read_json_object

COIN = (
    1 / 3
)  # share of items with two contradictory orders beyond which a judge is called a coin, whose share is a half
BY_LENGTH = 0.6  # share of the items that the longer response wins beyond which it is told


def judgment_figures(result: JudgeResult) -> dict[str, Any]:
    """Figures of one comparison for `results.json`."""

    def share(rate: float, interval: tuple[float, float], n: int) -> dict[str, float]:
        return {"rate": rate, "low": interval[0], "high": interval[1], "n": n}

    count, both = result.inconsistent, result.both_orders
    return {
        "win_rate": asdict(result.win_rate),
        "inconsistent": {"count": count, **share(count / both if both else 0.0, result.inconsistent_interval, both)},
        "position_bias": share(result.position_bias, result.position_bias_interval, result.shown),
        **result.length,
        "failures": result.failures,
    }


def comparison_figures(
    prompts: Sequence[Prompt], ours: Sequence[str], baseline: Sequence[str], result: JudgeResult
) -> dict[str, Any]:
    """Statistics beyond the rate: at equal length, by a sign test, and the difference that so many prompts can show."""
    rate, known = result.win_rate, result.win_rate.n - result.inconsistent  # a contradiction says nothing
    judged = [(a, b, v) for a, b, v in zip(ours, baseline, result.verdicts, strict=True) if v is not None]
    lengths, verdicts = ([len(a) for a, _, _ in judged], [len(b) for _, b, _ in judged]), [v for *_, v in judged]
    equal, why = None, "the judge's two orders contradict each other too often"
    if result.inconsistent <= COIN * result.both_orders:
        try:
            clusters = judged_prompts(prompts, result.verdicts)
            equal, why = asdict(length_controlled_win_rate(verdicts, *lengths, clusters=clusters)), None
        except UserError as error:  # such as responses of one length, or too few of them
            why = str(error)
    share, ties = (rate.effective or rate.n) / rate.n, max(rate.ties - result.inconsistent, 0)
    return {
        "length_controlled": equal,
        "length_controlled_why_not": why,
        "sign_test": {"p": sign_test(rate.wins, rate.losses)},
        "detectable_difference": detectable_difference(share * known, ties=ties / known) if known > ties else None,
    }


def position_warnings(name: str, result: JudgeResult) -> list[str]:
    """A warning where the judge prefers a position and not a response, or its verdicts are tosses of a coin."""
    share, (low, high) = result.position_bias, result.position_bias_interval
    count, both = result.inconsistent, result.both_orders
    contradictions = f"its two orders contradict each other on {count} of {both} items, which decide nothing"
    if not low <= TIE <= high:
        return [
            f"{name}: the judge prefers the response shown {'first' if share > TIE else 'second'}, whichever it is: the first "
            f"in {share:.1%} [{low:.1%}, {high:.1%}] where 50% is no bias" + (f", and {contradictions}" if both else "")
        ]
    if both and result.inconsistent_interval[0] > COIN:
        return [
            f"{name}: the judge answers like a toss of a coin, which contradicts itself on half of the items: {contradictions}"
        ]
    return []


def length_warnings(name: str, result: JudgeResult) -> list[str]:
    """A warning where the longer or the shorter response wins nearly always, which may be the judge's taste."""
    longer, slope = result.length["longer_preferred"], result.length["length_slope"]
    if longer is None or (longer["high"] >= 1 - BY_LENGTH and longer["low"] <= BY_LENGTH):
        return []
    side, share = ("longer", longer["rate"]) if longer["rate"] > TIE else ("shorter", 1 - longer["rate"])
    text = f"{name}: the {side} response wins {share:.1%} of {longer['n']} items: it is better, or the judge prefers length"
    if slope is not None:
        text += f"; a response twice as long wins {slope['slope']:+.1%} [{slope['low']:+.1%}, {slope['high']:+.1%}]"
    return [text]


def parent_warnings(config: WinRateConfig, hashes: Mapping[str, str | None]) -> list[str]:
    """A warning for each judging model that a contestant is, was trained from or against, or was chosen by."""
    sources = config.judging_models if config.judge == "reward_model" else ()
    sources = (config.judge_model,) if config.judge == "model" and config.judge_model is not None else sources
    warnings = []
    for source in sources:
        kin = [name for name in [*config.models, *config.best_of] if hashes[source] in _origins(config, name, hashes)]
        if hashes[source] is not None and kin:
            names = ", ".join(kin)
            text = f"the judge {source} is the model of {names}, or one that it was trained from, and may prefer its own kind"
            if config.judge == "reward_model":
                text = (
                    f"the judge {source} is the reward model that {names} was trained against or chosen by: its verdicts show "
                    "what it was optimized for, not what people prefer"
                )
            warnings.append(f"{text}; judge with a model of other origin")
    return warnings


def _origins(config: WinRateConfig, name: str, hashes: Mapping[str, str | None]) -> set[str | None]:
    """Hashes of a contestant's model, of all checkpoints that it comes from by lineage.json, and of what chose its responses."""
    found = {hashes[config.best_of[name].reward_model]} if name in config.best_of else set()
    queue, seen = [str(config.policy_of(name))], set[str]()
    found.add(hashes[queue[0]])
    while queue:
        folder = Path(queue.pop()).expanduser().parent
        if str(folder) in seen or not (folder / "lineage.json").is_file():
            continue
        seen.add(str(folder))
        parents = read_json_object(folder / "lineage.json")["parents"]
        found |= set(parents.values())
        queue += parents
    return found

"""The faults of a judge in figures and words: a preference for a place or for length, contradictions, failures, kinship."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from alignment.evaluation.judge_config import EndpointConfig
from alignment.evaluation.judges import JudgeResult
from alignment.evaluation.win_rate_config import WinRateConfig
from alignment.evaluation.winrate import TIE
from alignment.files import read_json_object

COIN = (
    1 / 3
)  # share of items with two contradictory orders beyond which a judge is called a coin, whose share is a half
BY_LENGTH = 0.6  # share of the items that the longer response wins beyond which it is told
SLOW = 0.5  # of the time-out


def judgment_figures(result: JudgeResult) -> dict[str, Any]:
    """Figures of one comparison for `results.json`."""

    def share(rate: float, interval: tuple[float, float], n: int) -> dict[str, float]:
        return {"rate": rate, "low": interval[0], "high": interval[1], "n": n}

    count, both = result.inconsistent, result.both_orders
    return {
        "win_rate": asdict(result.win_rate),
        "inconsistent": {"count": count, **share(count / both if both else 0.0, result.inconsistent_interval, both)},
        "position_bias": share(result.position_bias, result.position_bias_interval, result.shown),
        "length": None if result.length is None else asdict(result.length),
        "failures": result.failures,
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
    length = result.length
    if length is None or (length.longer_high >= 1 - BY_LENGTH and length.longer_low <= BY_LENGTH):
        return []
    side, share = ("longer", length.longer) if length.longer > TIE else ("shorter", 1 - length.longer)
    text = (
        f"{name}: the {side} response wins {share:.1%} of {length.n} items: it is better, or the judge prefers length"
    )
    if length.slope is None:
        return [text]
    return [
        f"{text}; a response twice as long wins {length.slope:+.1%} [{length.slope_low:+.1%}, {length.slope_high:+.1%}]"
    ]


def call_warnings(usage: Mapping[str, Any], service: EndpointConfig | None) -> list[str]:
    """Warnings of a judge that was asked call by call: answers that cannot be read, calls without one, slow answers."""
    warnings, who, calls = [], usage["judge"], usage["calls"]
    if usage["unread"]:
        example = f", such as {usage['unread_example']!r}" if usage.get("unread_example") else ""
        warnings.append(
            f"{who}: {usage['unread']} of {calls} answers cannot be read{example}; their items have no verdict"
        )
    if usage["unanswered"]:
        why = ", ".join(f"{reason} ({number} times)" for reason, number in usage["unanswered"].items())
        warnings.append(f"{who}: calls without an answer: {why}; the next start makes them again")
    if service is not None and usage.get("median_seconds", 0) > SLOW * service.timeout_seconds:
        seconds = f"{usage['median_seconds']:.1f} s in the median of a time-out of {service.timeout_seconds:g} s"
        warnings.append(
            f"{who}: the judge is slow, {seconds}; raise endpoint.timeout_seconds or lower endpoint.requests"
        )
    return warnings


def parent_warnings(config: WinRateConfig, hashes: Mapping[str, str | None]) -> list[str]:
    """A warning for each judging model that a contestant is, was trained from or against, or was chosen by."""
    sources = config.judging_models if config.judge == "reward_model" else ()
    sources = (config.judge_model,) if config.judge == "model" and config.judge_model is not None else sources
    warnings = []
    for source in sources:
        kin = [name for name in [*config.models, *config.best_of] if hashes[source] in _origins(config, name, hashes)]
        if hashes[source] is not None and kin:
            what = "reward model" if config.judge == "reward_model" else "model"
            how = "was trained against or chosen by" if what == "reward model" else "is, or was trained from,"
            warnings.append(
                f"the judge {source} is the {what} that {', '.join(kin)} {how}: its verdicts show what it was optimized for, "
                f"not what people prefer; judge with a {what} of other comparisons"
            )
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

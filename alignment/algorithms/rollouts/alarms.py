"""Alarms of a run that collapses: they are noted, and stop nothing."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alignment.training.loop import DISTINCT_LEFT, ENDED, ENTROPY_LEFT, all_equal, least_kl, repeats

# Of alarms; their other bounds are those of `doctor --run`, see training/loop.py.
# iterations that are the start of a run, newest iterations that alarms read
BASELINE = 3
WINDOW = 5
# share that is too little from the start on, for responses of so many tokens
LEAST_DISTINCT = 0.25
LONG_RESPONSE = 4.0
WATCHED = {
    "entropy",
    "repetition",
    "distinct_share",
    "response_tokens",
    "ended_share",
    "kl",
    "kl_k3",
    "responses",
    "score",
}


@dataclass
class Alarms:
    """First and latest metrics, and the alarms still raised."""

    start: list[dict[str, float]] = field(default_factory=list)
    recent: list[dict[str, float]] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)


def new_alarms(alarms: Alarms, step: int, metrics: Mapping[str, float]) -> list[str]:
    """Take in the metrics of an iteration, and return the alarms that it gives, as lines to note.

    An alarm is given once, and again only after it has been quiet for an iteration.
    """
    line = {name: value for name, value in metrics.items() if name.split("/")[0] in WATCHED}
    alarms.start = [*alarms.start, line][:BASELINE]
    alarms.recent = [*alarms.recent, line][-WINDOW:]
    alarm_texts = dict(_alarms(alarms))
    new = [
        f"alarm in iteration {step} ({name}): {text}" for name, text in alarm_texts.items() if name not in alarms.raised
    ]
    alarms.raised = list(alarm_texts)
    return new


def _alarms(alarms: Alarms) -> Iterator[tuple[str, str]]:
    """Name and text of each alarm of the newest iterations; what was not logged is not a number, and gives none."""
    now = defaultdict(lambda: math.nan, alarms.recent[-1])
    start = {name: sum(values) / BASELINE for name, values in _columns(alarms.start, BASELINE).items()}
    start = defaultdict(lambda: math.nan, start)
    last = _columns(alarms.recent, WINDOW)
    if now["entropy"] < ENTROPY_LEFT * start["entropy"]:
        yield (
            "entropy",
            f"entropy fell to {now['entropy']:.3g} nats per token from {start['entropy']:.3g} at the start; raise "
            "kl_coef, or set entropy_coef",
        )
    if start["repetition"] >= 0 and repeats(now["repetition"], start["repetition"]):
        yield (
            "repetition",
            f"{now['repetition']:.0%} of the n-grams of a response repeat earlier ones, {start['repetition']:.0%} at "
            "the start; look at samples.jsonl",
        )
    distinct = now["distinct_share"]
    if distinct < DISTINCT_LEFT * start["distinct_share"]:
        yield (
            "distinct responses",
            f"{distinct:.0%} of the responses are distinct, {start['distinct_share']:.0%} at the start; raise kl_coef, "
            "or lower the learning rate",
        )
    elif distinct < LEAST_DISTINCT and now["response_tokens"] >= LONG_RESPONSE:
        yield (
            "distinct responses",
            f"{distinct:.0%} of the responses are distinct; temperature, top_k, top_p or min_p leave the sampler no "
            "choice",
        )
    before = start["ended_share"]
    ended = sum(last.get("ended_share", [WINDOW])) / WINDOW
    if before >= 0 and ended < ENDED:
        long = "max_new_tokens, or train the policy to end its responses"
        yield (
            "missing ends",
            f"{ended:.0%} of the last responses end by themselves, {before:.0%} at the start; raise "
            f"{'missing_end_penalty' if before >= ENDED else long}",
        )
    kl = last.get("kl", [0.0])
    mean = sum(kl) / WINDOW
    responses = WINDOW * alarms.recent[-1].get("responses", 1.0)
    if max(kl) < 0 and mean < least_kl(sum(last["kl_k3"]) / WINDOW if "kl_k3" in last else abs(mean), responses):
        yield (
            "KL negative",
            f"kl was below 0 in the last {WINDOW} iterations, {mean:.3g} nats on average: the responses do not come "
            "from the policy that is scored; see sampling_error and sampling_kl",
        )
    scores = {name: values for name, values in last.items() if name.startswith("score") and all_equal(values)}
    if flat := ", ".join(f"{name} = {values[-1]:.4g}" for name, values in scores.items()):
        yield "score flat", f"the same in the last {WINDOW} iterations: {flat}; nothing is learned from it"


def _columns(lines: Sequence[Mapping[str, float]], count: int) -> dict[str, list[float]]:
    """The values of each metric in `count` iterations; nothing before there are as many."""
    return (
        {name: [line[name] for line in lines] for name in lines[0] if all(name in line for line in lines)}
        if len(lines) == count
        else {}
    )

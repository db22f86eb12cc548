"""Alarms of a run that collapses: pure rules over the metrics of its last iterations. They note, and stop nothing.

A rule compares either with fixed limits or with the start of the run, the mean of its first `BASELINE` iterations. The
limits are those of `doctor --run`, see training/collapse.py. An alarm is given once, and again only after its rule has been
quiet for an iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from alignment.training.collapse import DISTINCT_LEFT, ENDED, ENTROPY_LEFT, all_equal, least_kl, repeats

BASELINE = 3  # iterations that are the start of a run
WINDOW = 5  # newest iterations that rules read
LEAST_DISTINCT, LONG_RESPONSE = 0.25, 4.0  # share that is too little from the start on, for responses of so many tokens


class SavedAlarms(TypedDict):
    """What `Alarms.restore` needs."""

    start: list[dict[str, float]]
    recent: list[dict[str, float]]
    raised: list[str]


@dataclass(frozen=True)
class History:
    """Metrics of the first and of the newest iterations.

    Attributes:
        start: of the first `BASELINE` iterations.
        recent: of the newest, at most `WINDOW`, the last one last.
    """

    start: Sequence[Mapping[str, float]]
    recent: Sequence[Mapping[str, float]]

    def now(self, name: str) -> float | None:
        """The newest value; None where it was not logged."""
        return self.recent[-1].get(name)

    def before(self, name: str) -> float | None:
        """The mean at the start; None before the start is over, or where it was not logged."""
        values = [line[name] for line in self.start if name in line]
        return sum(values) / BASELINE if len(values) == BASELINE else None

    def window(self, name: str) -> list[float]:
        """The newest `WINDOW` values; none before there are so many."""
        values = [line[name] for line in self.recent if name in line]
        return values if len(values) == WINDOW else []


def entropy_fell(history: History) -> str:
    """The policy has become nearly deterministic."""
    now, before = history.now("entropy"), history.before("entropy")
    if now is None or before is None or before <= 0 or now >= ENTROPY_LEFT * before:
        return ""
    return (
        f"entropy fell to {now:.3g} nats per token from {before:.3g} at the start; raise kl_coef, or set entropy_coef"
    )


def repetition_rose(history: History) -> str:
    """Responses say the same again and again."""
    now, before = history.now("repetition"), history.before("repetition")
    if now is None or before is None or not repeats(now, before):
        return ""
    return (
        f"{now:.0%} of the n-grams of a response repeat earlier ones, {before:.0%} at the start; look at samples.jsonl"
    )


def responses_equal(history: History) -> str:
    """Different random numbers give the same responses."""
    now, before, length = (
        history.now("distinct_share"), history.before("distinct_share"), history.now("response_tokens")
    )  # fmt: skip
    if now is None:
        return ""
    if before is not None and now < DISTINCT_LEFT * before:
        return f"{now:.0%} of the responses are distinct, {before:.0%} at the start; raise kl_coef, or lower the learning rate"
    if now < LEAST_DISTINCT and length is not None and length >= LONG_RESPONSE:
        return (
            f"{now:.0%} of the responses are distinct; temperature, top_k, top_p or min_p leave the sampler no choice"
        )
    return ""


def ends_missing(history: History) -> str:
    """Many responses are cut off at the limit."""
    values, before = history.window("ended_share"), history.before("ended_share")
    if not values or before is None or (share := sum(values) / len(values)) >= ENDED:
        return ""
    advice = "missing_end_penalty" if before >= ENDED else "max_new_tokens, or train the policy to end its responses"
    return f"{share:.0%} of the last responses end by themselves, {before:.0%} at the start; raise {advice}"


def kl_below_zero(history: History) -> str:
    """The signed KL estimate stays further below zero than its noise, which the policy's own samples do not give."""
    values, k3, responses = history.window("kl"), history.window("kl_k3"), history.now("responses") or 1.0
    if not values or max(values) >= 0:
        return ""
    mean = sum(values) / len(values)
    if mean >= least_kl(sum(k3) / len(k3) if k3 else abs(mean), responses * len(values)):
        return ""
    return (
        f"kl was below 0 in the last {len(values)} iterations, {mean:.3g} nats on average: the responses do not come from "
        "the policy that is scored; see sampling_error and sampling_kl"
    )


def scores_flat(history: History) -> str:
    """A score, or a part of it, is the same in every iteration, so that nothing is learned from it."""
    names = [name for name in history.recent[-1] if name == "score" or name.startswith("score/")]
    windows = {name: history.window(name) for name in names}
    flat = {name: values[-1] for name, values in windows.items() if values and all_equal(values)}
    if not flat:
        return ""
    said = ", ".join(f"{name} = {value:.4g}" for name, value in flat.items())
    return f"the same in the last {WINDOW} iterations: {said}; nothing is learned from it"


RULES: dict[str, Callable[[History], str]] = {
    "entropy": entropy_fell,
    "repetition": repetition_rose,
    "distinct responses": responses_equal,
    "missing ends": ends_missing,
    "KL negative": kl_below_zero,
    "score flat": scores_flat,
}


@dataclass
class Alarms:
    """The alarms of a run, and the metrics that they read.

    Attributes:
        start, recent: as in `History`.
        raised: rules that have given their alarm and not been quiet since.
    """

    start: list[dict[str, float]] = field(default_factory=list)
    recent: list[dict[str, float]] = field(default_factory=list)
    raised: list[str] = field(default_factory=list)

    def add(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        """Take in the metrics of an iteration, and return the alarms that it gives, as lines to note.

        Args:
            metrics: as logged, and the number of `responses` of all ranks.
        """
        line = {name: value for name, value in metrics.items() if name.split("/")[0] in WATCHED}
        if len(self.start) < BASELINE:
            self.start.append(line)
        self.recent = [*self.recent, line][-WINDOW:]
        history = History(self.start, self.recent)
        found = {name: text for name, rule in RULES.items() if (text := rule(history))}
        new = [f"alarm in iteration {step} ({name}): {text}" for name, text in found.items() if name not in self.raised]
        self.raised = list(found)
        return new

    def state(self) -> SavedAlarms:
        """What `restore` needs, JSON-like."""
        return {"start": self.start, "recent": self.recent, "raised": self.raised}

    def restore(self, saved: SavedAlarms) -> None:
        """Go on from what `state` returned."""
        self.start, self.recent, self.raised = saved["start"], saved["recent"], saved["raised"]


WATCHED = {
    "entropy", "repetition", "distinct_share", "response_tokens", "ended_share", "kl", "kl_k3", "responses", "score",
}  # fmt: skip

"""A judge whose answers are rows of a log, so that no call is made twice. The judges that are asked are in language_judges.py.

Every answer is a row as soon as it is there (see judgments.py), under a key of its content: the judge, the question and the
texts in their order. An answer that cannot be read is kept with `verdict: null`; a call without an answer (no connection,
status 500 after the retries) is not written, and the next start makes it again.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, cast

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.evaluation.judge_config import EndpointConfig
from alignment.evaluation.judgments import RowLog, judgment_key
from alignment.evaluation.winrate import TIE, Verdict

COLUMNS = (("response", ()), ("rating", ("response",)), ("verdict", ("first", "second")))  # of the answer, of the texts
MODELS = ("first_model", "second_model")
SECONDS_PER_CALL = 1.0  # foretold before the first call of a service
SLOW = 0.5  # of the time-out


class Call(NamedTuple):
    """One question about a prompt: what to respond, how good the one response is, or which of two is better, in this order."""

    prompt: Prompt
    responses: tuple[str, ...] = ()
    models: tuple[str, ...] = ()  # whose responses they are; no part of the question


class JudgeAnswer(NamedTuple):
    """A response, a rating, or a verdict for the first response; None where what was answered cannot be read.

    Attributes:
        more: further columns of its row.
        failure: the reason why no answer came; empty where one did.
    """

    value: float | str | None
    more: Mapping[str, object] = {}
    failure: str = ""


# Makes calls, and hands each answer on at once; it makes no more of them once False comes back.
Ask = Callable[[Sequence[Call], Callable[[Call, JudgeAnswer], bool]], None]


@dataclass
class LoggedJudge:
    """A judge of two responses, or a scorer of one, whose answers are rows of a log.

    Attributes:
        name: who judges, in the rows and on the screen.
        identity: everything but the texts that decides an answer: settings, hashes of weights.
        ask: makes the calls that the log does not hold.
        log: of the answers.
        max_failed_share: of calls without an answer; beyond it no further call is made, and the run ends.
        remembers: False for judges that cost nothing: they judge anew, and their log is a record alone.
        service: that the calls go to, for its prices and time-out; None: to none.
        rater: the scorer of single responses that the verdicts are made of; None: there is none.
    """

    name: str
    identity: str
    ask: Ask
    log: RowLog
    max_failed_share: float = 0.1
    remembers: bool = True
    service: EndpointConfig | None = None
    rater: "LoggedJudge | None" = None
    failures: Counter[str] = field(default_factory=Counter)  # calls without an answer, by their reason
    made: int = 0  # calls of this start
    used: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # rows of the calls that were looked up, by key

    def __post_init__(self) -> None:
        rows: list[Mapping[str, Any]] = [row for row in self.log.rows if "key" in row]
        self._known = {row["key"]: row for row in rows}
        self._places = {(row["key"], *(row[name] for name in MODELS if name in row)): row for row in rows}

    def __call__(
        self,
        prompts: Sequence[Prompt],
        first: Sequence[str],
        second: Sequence[str],
        models: Sequence[tuple[str, str]] = (),
    ) -> list[Verdict]:
        """Verdicts for the responses shown first; equal responses tie without a call."""
        sides, named = zip(first, second, strict=True), models or [()] * len(prompts)
        return cast("list[Verdict]", self.values([Call(*each) for each in zip(prompts, sides, named, strict=True)]))

    def values(self, calls: Sequence[Call]) -> list[float | str | None]:
        """The answer to each call; None where it has none that can be read.

        Raises:
            UserError: more calls without an answer than `max_failed_share`.
        """
        keys = [judgment_key(self.identity, call.prompt.prompt, *call.responses) for call in calls]
        missing: dict[str, Call] = {}
        for key, call in zip(keys, calls, strict=True):
            if self.remembers and key in self._known:
                self._keep(key, call, self._known[key] if call.models else {})  # other models may have said the same
            elif len(set(call.responses)) < len(call.responses):
                self._keep(key, call, {"verdict": TIE, "identical": True})
            else:
                missing.setdefault(key, call)
        if missing:
            self._make(missing, len(calls))
        self.used |= {key: self._known[key] for key in keys if key in self._known}
        return [self._known[key][COLUMNS[len(call.responses)][0]] if key in self._known else None
                for key, call in zip(keys, calls, strict=True)]  # fmt: skip

    def _make(self, missing: Mapping[str, Call], count: int) -> None:
        keys, before = {id(call): key for key, call in missing.items()}, self.failures.total()
        allowed, lock = before + self.max_failed_share * count, threading.Lock()

        def done(call: Call, answer: JudgeAnswer) -> bool:
            if answer.failure:
                with lock:
                    self.failures[answer.failure] += 1
            else:
                self._keep(keys[id(call)], call, {COLUMNS[len(call.responses)][0]: answer.value, **answer.more})
            return self.failures.total() <= allowed

        if self.remembers:
            print(self._forecast(list(missing.values()), count), file=sys.stderr)
        self.ask(list(missing.values()), done)
        self.made += len(missing)
        if self.failures.total() > allowed:
            limit = (
                f", and at most {self.max_failed_share:.0%} may fail (max_failed_share)"
                if self.max_failed_share
                else ""
            )
            raise UserError(
                f"{self.name}: no answer to {self.failures.total() - before} of {count} calls{limit}: {_counts(self.failures)}. "
                f"What was answered is kept in {self.log.path}: the next start asks the rest"
            )

    def _keep(self, key: str, call: Call, columns: Mapping[str, object]) -> None:
        """Append the row of an answer to the log, unless it stands there for these models."""
        value, texts = COLUMNS[len(call.responses)]
        own = {"id": call.prompt.row_id, "prompt": call.prompt.prompt, **dict(zip(texts, call.responses, strict=True))}
        own |= {value: columns.get(value), "judge": self.name, **dict(zip(MODELS, call.models, strict=False))}
        own["key"] = key
        row = {**own, **columns, **own}  # in the order of `own`
        place = (key, *call.models)
        if columns and (place not in self._places or self._places[place].get(value) != row.get(value)):
            self.log.append(row)
            self._known[key] = self._places[place] = row

    def _forecast(self, calls: Sequence[Call], count: int) -> str:
        """The calls to come in words: how many, their tokens, and time and cost where they can be known."""
        size = sum(len(text) for call in calls for text in (str(call.prompt.prompt), *call.responses))
        tokens = size // 4 + 250 * len(calls)  # the template's own
        text = f"{self.name}: {len(calls)} calls to make ({count - len(calls)} need none), about {tokens:,} tokens"
        if self.service is not None:
            seconds = self.usage().get("median_seconds", SECONDS_PER_CALL)
            minutes = len(calls) * seconds / self.service.requests / 60
            text += f", {minutes:.1f} minutes at {seconds:.1f} s each, {self.service.requests} at the same time"
            cost = self.service.cost(tokens, self.service.max_tokens * len(calls))
            text += "" if cost is None else f", a cost of at most about {cost:.2f}"
        return text

    def usage(self) -> dict[str, Any]:
        """The calls behind the verdicts, and how many this start has made; their failures, tokens, time and cost: for results."""
        if self.rater is not None:
            return self.rater.usage()
        rows = self.used.values()
        seconds = [float(row["seconds"]) for row in rows if "seconds" in row]
        tokens = [sum(int(row.get(name, 0)) for row in rows) for name in ("prompt_tokens", "answer_tokens")]
        unread = [row.get("unread") for row in rows if row.get("verdict", row.get("rating")) is None]
        found = {"judge": self.name, "calls": len(rows), "made_now": self.made, "unread": len(unread)}
        found |= {"unanswered": dict(self.failures)} | ({"unread_example": unread[0]} if unread else {})
        found |= {"median_seconds": median(seconds)} if seconds else {}
        cost = None if self.service is None else self.service.cost(*tokens)
        return (
            found | {"prompt_tokens": tokens[0], "answer_tokens": tokens[1]} | ({} if cost is None else {"cost": cost})
        )

    def faults(self) -> list[str]:
        """In words: answers that cannot be read, calls without one, slow answers."""
        usage, found = self.usage(), []
        if usage["unread"]:
            example = (
                f"{usage['unread']} of {usage['calls']} answers cannot be read, such as {usage['unread_example']!r}"
            )
            found.append(f"{self.name}: {example}; their items have no verdict")
        if usage["unanswered"]:
            again = "the next start makes them again"
            found.append(f"{self.name}: calls without an answer: {_counts(usage['unanswered'])}; {again}")
        if self.service is not None and usage.get("median_seconds", 0) > SLOW * self.service.timeout_seconds:
            seconds = (
                f"{usage['median_seconds']:.1f} s in the median, of a time-out of {self.service.timeout_seconds:g} s"
            )
            found.append(
                f"{self.name}: the judge is slow, {seconds}; raise endpoint.timeout_seconds or lower endpoint.requests"
            )
        return found


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} ({count} times)" for reason, count in reasons.items())

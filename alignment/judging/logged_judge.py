"""A judge whose answers are rows of a log, so that no call is made twice.

Every answer is a row as soon as it is there (see judgments.py), under a key of its content: the judge, the question and
the texts in their order. An answer that cannot be read is kept with `verdict: null`; a call without an answer (no
connection, status 500 after the retries) is not written, and the next start makes it again. The judges that are asked
are in language_judges.py.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple, cast

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.files import hash_of
from alignment.judging.config import EndpointConfig
from alignment.judging.judgments import RowLog, judgment_key
from alignment.statistics.agreement import Figures
from alignment.statistics.winrate import TIE, Verdict

COLUMNS = (("response", ()), ("rating", ("response",)), ("verdict", ("first", "second")))  # of the answer, of the texts
MODELS = ("first_model", "second_model")
SECONDS_PER_CALL = 1.0  # foretold before the first call of a service
TEMPLATE_TOKENS = 250
SLOW = 0.5  # of the time-out


class Call(NamedTuple):
    """One question about a prompt: what to respond, how good the one response is, or which of two is better.

    Two responses are asked about in this order.
    """

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


Done = Callable[[Call, JudgeAnswer], bool]  # takes an answer; False: no further call is to be made
Ask = Callable[[Sequence[Call], Done], None]  # makes calls, and hands each answer on at once


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
    made: int = 0  # calls of this start
    failures: list[str] = field(default_factory=list)  # reasons of those without an answer
    used: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # rows of the calls that were looked up, by key

    def __post_init__(self) -> None:
        self._known: dict[str, Mapping[str, Any]] = {str(row["key"]): row for row in self.log.rows if "key" in row}
        self._written = set(map(hash_of, self.log.rows))

    def __call__(
        self,
        prompts: Sequence[Prompt],
        first: Sequence[str],
        second: Sequence[str],
        models: Sequence[tuple[str, str]] = (),
    ) -> list[Verdict]:
        """Verdicts for the responses shown first; equal responses tie without a call."""
        sides = zip(first, second, strict=True)
        named = models or [()] * len(prompts)
        return cast("list[Verdict]", self.values([Call(*fields) for fields in zip(prompts, sides, named, strict=True)]))

    def values(self, calls: Sequence[Call]) -> list[float | str | None]:
        """The answer to each call; None where it has none that can be read.

        Raises:
            UserError: more calls without an answer than `max_failed_share`.
        """
        keys = [judgment_key(self.identity, call.prompt.prompt, *call.responses) for call in calls]
        missing: dict[str, Call] = {}
        for key, call in zip(keys, calls, strict=True):
            if self.remembers and key in self._known:
                continue
            if len(set(call.responses)) < len(call.responses):
                self._keep(self._row(key, call, TIE, {"identical": True}))
            else:
                missing.setdefault(key, call)
        if missing:
            self._make(missing, len(calls))
        for key, call in zip(keys, calls, strict=True):
            if key in self._known:  # perhaps of other models that said the same
                self._keep({**self._known[key], **dict(zip(MODELS, call.models, strict=False))})
        self.used |= {key: self._known[key] for key in keys if key in self._known}
        columns = [COLUMNS[len(call.responses)][0] for call in calls]
        return [self._known.get(key, {}).get(column) for key, column in zip(keys, columns, strict=True)]

    def _make(self, missing: Mapping[str, Call], count: int) -> None:
        """Make the calls by their keys, of `count` that were looked up."""
        calls = list(missing.values())
        keys = {id(call): key for key, call in missing.items()}
        before = len(self.failures)
        allowed = before + self.max_failed_share * count

        def done(call: Call, answer: JudgeAnswer) -> bool:
            if answer.failure:
                self.failures.append(answer.failure)
            else:
                self._keep(self._row(keys[id(call)], call, answer.value, answer.more))
            return len(self.failures) <= allowed

        if self.remembers:
            print(self._forecast(calls, count), file=sys.stderr)
        self.ask(calls, done)
        self.made += len(calls)
        if len(self.failures) > allowed:
            failures = self.failures[before:]
            raise UserError(
                f"{self.name}: no answer to {len(failures)} of {count} calls: {_counts(Counter(failures))}; at most "
                f"{self.max_failed_share:.0%} may fail. What was answered is kept in {self.log.path}: the next start "
                "asks the rest"
            )

    def _row(self, key: str, call: Call, value: float | str | None, more: Mapping[str, object]) -> Mapping[str, object]:
        column, names = COLUMNS[len(call.responses)]
        return {
            "id": call.prompt.row_id,
            "prompt": call.prompt.prompt,
            **dict(zip(names, call.responses, strict=True)),
            column: value,
            "judge": self.name,
            **dict(zip(MODELS, call.models, strict=False)),
            "key": key,
            **more,
        }

    def _keep(self, row: Mapping[str, object]) -> None:
        """Take over an answer, and append its row to the log unless it stands there."""
        self._known[str(row["key"])] = row
        if (content := hash_of(row)) not in self._written:
            self._written.add(content)
            self.log.append(row)

    def _forecast(self, calls: Sequence[Call], count: int) -> str:
        """The calls to come in words: how many, their tokens, and time and cost where they can be known."""
        size = sum(len(text) for call in calls for text in (str(call.prompt.prompt), *call.responses))
        tokens = size // 4 + TEMPLATE_TOKENS * len(calls)
        text = f"{self.name}: {len(calls)} calls to make ({count - len(calls)} need none), about {tokens:,} tokens"
        if self.service is None:
            return text
        seconds = self.usage().get("median_seconds", SECONDS_PER_CALL)
        cost = self.service.cost(tokens, self.service.max_tokens * len(calls))
        minutes = len(calls) * seconds / self.service.requests / 60
        text += f", {minutes:.1f} minutes at {seconds:.1f} s each, {self.service.requests} at the same time"
        return text if cost is None else f"{text}, a cost of at most about {cost:.2f}"

    def usage(self) -> Figures:
        """Figures for results on the calls behind the verdicts: their number, failures, tokens, time and cost.

        `made_now` counts the calls that this start has made.
        """
        if self.rater is not None:
            return self.rater.usage()
        rows = list(self.used.values())
        unread = [row.get("unread") for row in rows if row.get("verdict", row.get("rating")) is None]
        tokens = {name: sum(row.get(name, 0) for row in rows) for name in ("prompt_tokens", "answer_tokens")}
        seconds = [row["seconds"] for row in rows if "seconds" in row]
        figures = {
            "judge": self.name,
            "calls": len(rows),
            "made_now": self.made,
            "unread": len(unread),
            "unanswered": dict(Counter(self.failures)),
            "unread_example": unread[0] if unread else None,
            "median_seconds": median(seconds) if seconds else None,
            **tokens,
            "cost": self.service and self.service.cost(*tokens.values()),
        }
        return {name: value for name, value in figures.items() if value is not None}

    def faults(self) -> list[str]:
        """In words: answers that cannot be read, calls without one, slow answers."""
        usage = self.usage()
        limit = self.service.timeout_seconds if self.service else 0.0
        seconds = usage.get("median_seconds", 0.0)
        example = repr(usage.get("unread_example"))
        checks = [
            (
                usage["unread"],
                f"{usage['unread']} of {usage['calls']} answers cannot be read, such as {example}; their items "
                "have no verdict",
            ),
            (
                usage["unanswered"],
                f"calls without an answer: {_counts(usage['unanswered'])}; the next start makes them again",
            ),
            (
                seconds > SLOW * limit,
                f"the judge is slow, {seconds:.1f} s in the median, of a time-out of {limit:g} s; raise "
                "endpoint.timeout_seconds or lower endpoint.requests",
            ),
        ]
        return [f"{self.name}: {text}" for holds, text in checks if holds]


def _counts(reasons: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} ({count} times)" for reason, count in reasons.items())

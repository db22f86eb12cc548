"""A judge whose answers are rows of a log, so that no call is made twice. The judges that are asked are in language_judges.py.

Every answer is a row as soon as it is there (see judgments.py), under a key of its content: the judge, the question and the
texts in their order. An answer that cannot be read is kept with `verdict: null`; a call without an answer (no connection,
status 500 after the retries) is not written, and the next start makes it again.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.evaluation.judgments import RowLog, judgment_key
from alignment.evaluation.winrate import TIE, Verdict

SECONDS_PER_CALL = 1.0  # foretold before the first call of a service


class Call(NamedTuple):
    """One question: a prompt and the one response to rate, or the two to compare in the order in which they are shown."""

    prompt: Prompt
    responses: tuple[str, ...]
    models: tuple[str, ...] = ()  # whose responses they are; no part of the question


class Answer(NamedTuple):
    """A verdict for the first response, or a rating; None where what was answered cannot be read.

    Attributes:
        more: further columns of its row.
        failure: the reason why no answer came; empty where one did.
    """

    value: float | None
    more: Mapping[str, object] = {}
    failure: str = ""


# Makes calls, and hands each answer on at once; it makes no more of them once False comes back.
Ask = Callable[[Sequence[Call], Callable[[Call, Answer], bool]], None]


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
        prices: of a million tokens of questions and of answers; None: calls go to no service.
        rater: the scorer of single responses that the verdicts are made of; None: there is none.
    """

    name: str
    identity: str
    ask: Ask
    log: RowLog
    max_failed_share: float = 0.1
    remembers: bool = True
    prices: tuple[float, float] | None = None
    rater: "LoggedJudge | None" = None
    failures: Counter[str] = field(default_factory=Counter)  # calls without an answer, by their reason
    asked: int = 0  # calls that this start has made
    used: dict[str, Mapping[str, Any]] = field(default_factory=dict)  # rows of the calls that were looked up, by key

    def __post_init__(self) -> None:
        self._known: dict[str, Mapping[str, Any]] = {str(row["key"]): row for row in self.log.rows if "key" in row}
        self._written = {(str(row["key"]), *_models_of(row)) for row in self.log.rows if "key" in row}

    def __call__(
        self,
        prompts: Sequence[Prompt],
        first: Sequence[str],
        second: Sequence[str],
        models: Sequence[tuple[str, str]] = (),
    ) -> list[Verdict]:
        """Verdicts for the responses shown first; equal responses tie without a call."""
        named = models or [()] * len(prompts)
        sides = zip(first, second, strict=True)
        return self.values([Call(*each) for each in zip(prompts, sides, named, strict=True)])

    def values(self, calls: Sequence[Call]) -> list[float | None]:
        """The verdict or rating of each call; None where the judge failed.

        Raises:
            UserError: more calls without an answer than `max_failed_share`.
        """
        keys = [judgment_key(self.identity, call.prompt.prompt, *call.responses) for call in calls]
        missing: dict[str, Call] = {}
        for key, call in zip(keys, calls, strict=True):
            if not (self.remembers and key in self._known):
                missing.setdefault(key, call)
        for key in [key for key, call in missing.items() if len(set(call.responses)) < len(call.responses)]:
            self._write(key, missing.pop(key), Answer(TIE, {"identical": True}))
        if missing:
            self._make(missing, len(calls))
        for key, call in zip(keys, calls, strict=True):
            if key in self._known and (key, *_padded(call.models)) not in self._written:  # other models said the same
                self._append({**self._known[key], **_names(call.models)})
        self.used |= {key: self._known[key] for key in keys if key in self._known}
        column = "verdict" if all(len(call.responses) > 1 for call in calls) else "rating"
        return [self._known[key][column] if key in self._known else None for key in keys]

    def _make(self, missing: Mapping[str, Call], count: int) -> None:
        keys = {id(call): key for key, call in missing.items()}
        failures, allowed = Counter[str](), self.max_failed_share * count

        def done(call: Call, answer: Answer) -> bool:
            if not answer.failure:
                self._write(keys[id(call)], call, answer)
                return True
            failures[answer.failure] += 1
            return failures.total() <= allowed

        if self.remembers:
            print(self._forecast(list(missing.values()), count), file=sys.stderr)
        self.ask(list(missing.values()), done)
        self.asked += len(missing)
        self.failures += failures
        if failures.total() > allowed:
            why = ", ".join(f"{reason} ({number} times)" for reason, number in failures.most_common())
            raise UserError(
                f"{self.name}: no answer to {failures.total()} of {count} calls, and at most {self.max_failed_share:.0%} may "
                f"fail (max_failed_share): {why}. What was answered is kept in {self.log.path}: the next start asks the rest"
            )

    def _forecast(self, calls: Sequence[Call], count: int) -> str:
        """What is to come, in words: calls, tokens, and time and cost where they can be known."""
        size = sum(len(text) for call in calls for text in (str(call.prompt.prompt), *call.responses))
        tokens = size // 4 + 250 * len(calls)  # the template's own
        text = f"{self.name}: {len(calls)} calls to make ({count - len(calls)} are answered already), about {tokens:,} tokens"
        if self.prices is not None:
            known = [float(row["seconds"]) for row in self._known.values() if "seconds" in row]
            seconds = median(known) if known else SECONDS_PER_CALL
            text += f", {len(calls) * seconds / 60:.1f} minutes of calls one after another at {seconds:.1f} s each"
        if self.prices is not None and any(self.prices):
            text += f", and a cost of about {tokens * self.prices[0] / 1e6:.2f} and the answers'"
        return text

    def _write(self, key: str, call: Call, answer: Answer) -> Mapping[str, Any]:
        """The row of an answer, appended to the log unless it stands there already."""
        row: dict[str, Any] = {"id": call.prompt.row_id, "prompt": call.prompt.prompt}
        sides = ("first", "second") if len(call.responses) > 1 else ("response",)
        row |= dict(zip(sides, call.responses, strict=True))
        row |= {"verdict" if len(call.responses) > 1 else "rating": answer.value, "judge": self.name}
        row |= {**_names(call.models), **answer.more, "key": key}
        known = self._known.get(key)
        if known is None or (key, *_padded(call.models)) not in self._written or known != {**known, **row}:
            self._append(row)
        return row

    def _append(self, row: Mapping[str, Any]) -> None:
        self.log.append(row)
        self._known[str(row["key"])] = row
        self._written.add((str(row["key"]), *_models_of(row)))

    def failure_text(self) -> str:
        """The reason why items have no verdict, in words."""
        usage = self.usage()
        unread = f". {usage['unread']} of {usage['calls']} answers of {self.name} cannot be read, such as {usage.get('unread_example')!r}"
        return (unread if usage["unread"] else "") + (
            f". Calls without an answer: {dict(self.failures)}" if self.failures else ""
        )

    def usage(self) -> dict[str, Any]:
        """Calls of this start, what became of them, their tokens and time: for results."""
        if self.rater is not None:
            return self.rater.usage()
        rows = self.used.values()
        seconds = [float(row["seconds"]) for row in rows if "seconds" in row]
        tokens = [sum(int(row.get(name, 0)) for row in rows) for name in ("prompt_tokens", "answer_tokens")]
        unread = [row for row in rows if row.get("verdict", row.get("rating")) is None]
        found: dict[str, Any] = {"judge": self.name, "calls": len(rows), "made_now": self.asked, "unread": len(unread)}
        found |= {"unanswered": dict(self.failures)} | ({"unread_example": unread[0].get("unread")} if unread else {})
        found |= {"median_seconds": median(seconds)} if seconds else {}
        found |= {"prompt_tokens": tokens[0], "answer_tokens": tokens[1]} if any(tokens) else {}
        if self.prices is not None and any(self.prices):
            found["cost"] = sum(price * count / 1e6 for price, count in zip(self.prices, tokens, strict=True))
        return found


def _padded(models: Sequence[str]) -> tuple[str | None, str | None]:
    return (models[0], models[1]) if len(models) > 1 else (None, None)


def _names(models: Sequence[str]) -> dict[str, str]:
    return dict(zip(("first_model", "second_model"), models, strict=False))


def _models_of(row: Mapping[str, Any]) -> tuple[str | None, str | None]:
    return row.get("first_model"), row.get("second_model")

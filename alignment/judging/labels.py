"""Labels of people: what each annotator is asked and in which order, the file that holds every answer, and agreement.

The page is judging/label_page.py; comparisons and exports are made of the file in commands/label.py.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from random import Random
from statistics import median
from threading import Lock
from typing import Any

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.data.rows.files import RawRow, read_raw
from alignment.data.rows.read import ROW_FORMATS, filled_columns, read_rows
from alignment.data.rows.records import replies_of
from alignment.errors import UserError, raise_all
from alignment.files import hash_of, sync, write_json_lines
from alignment.judging.inputs import print_tally
from alignment.judging.judgments import RowLog
from alignment.settings import NonNegativeFloat, NonNegativeInt, Rule, Settings
from alignment.statistics.agreement import cohen_kappa

JSON = dict[str, object]
Values = Mapping[str, Any]  # of a row or a body, by column
LIKERT = 7  # of InstructGPT's overall quality
LONGEST_NAME = 60  # of an annotator
MOST_RESPONSES = 9  # a digit of the keyboard for each
EACH = ("models", "ranks", "ratings", "flags")  # have a value for each response, or none
PAIRED = {"responses": ("first", "second"), "models": ("first_model", "second_model")}  # columns of judgment rows
GIVEN = ("ranks", "ratings", "flags", "comment", "seconds")  # by an annotator; the rest is the question


@dataclass(frozen=True)
class Label(Settings):
    """A prompt with responses: as a file has it, as an annotator is asked about it, and with their answer.

    Attributes:
        responses: in the order shown; one is rated, two are compared, more are ranked.
        models: that gave the responses, where known; no annotator sees them.
        judge: the annotator.
        position: number of the question in the annotator's sequence, from 0.
        repeat: the pair was shown before, its sides exchanged.
        ranks: place of each response, 0 the best; equal places are a tie; empty: not answered yet.
        ratings: of each response on a Likert scale, 1 to 7; empty where none is asked for.
        flags: what each response was marked as.
        seconds: that the question was in view.
    """

    id: str
    prompt: str | list[dict[str, object]]
    responses: tuple[str, ...]
    models: tuple[str | None, ...] = ()
    judge: str = ""
    position: NonNegativeInt = 0
    repeat: bool = False
    ranks: tuple[NonNegativeInt, ...] = ()
    ratings: tuple[int, ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()
    comment: str = ""
    seconds: NonNegativeFloat = 0.0

    RULES = (
        Rule("responses", lambda c: not 0 < len(c.responses) <= MOST_RESPONSES, f"must be 1 to {MOST_RESPONSES}"),
        Rule(
            "responses",
            lambda c: ", ".join(key for key in EACH if len(getattr(c, key)) not in (0, len(c.responses))),
            "must be as many as {found}",
        ),
        Rule("ranks", lambda c: set(c.ranks) != set(range(len(set(c.ranks)))), "must be 0, 1, ... without a gap"),
        Rule("ratings", lambda c: not set(c.ratings) <= set(range(1, LIKERT + 1)), f"must be 1 to {LIKERT}"),
    )

    @cached_property
    def key(self) -> str:
        """Equal for the same responses in any order."""
        return hash_of([self.id, sorted(self.responses)])

    @property
    def slot(self) -> tuple[str, str, bool]:
        """Equal for two answers of one person to the same question."""
        return self.judge, self.key, self.repeat

    @property
    def by_text(self) -> list[int]:
        """Numbers of the responses in the alphabet's order of their texts, which is that of every label on them."""
        return sorted(range(len(self.responses)), key=self.responses.__getitem__)

    def in_order(self, order: Sequence[int]) -> "Label":
        """The label with its responses, and all that is said of each of them, in another order."""
        columns = {name: getattr(self, name) for name in ("responses", *EACH)}
        return replace(self, **{name: tuple(column[i] for i in order if column) for name, column in columns.items()})

    def row(self) -> JSON:
        """The label as a row: of a pair a judgment row, of other numbers of responses `responses` with `ranks`."""
        row: JSON = {key: value for key, value in asdict(self).items() if value or key in ("prompt", "position")}
        if len(self.responses) == 2:
            row |= zip(PAIRED["responses"], self.responses, strict=True)
            row |= zip(PAIRED["models"], self.models, strict=False)
            row["verdict"] = verdict(*self.ranks)
            row = {key: value for key, value in row.items() if key not in (*PAIRED, "ranks")}
        return row


def verdict(place: int, other: int) -> float:
    """1, 0.5 or 0 for a response by its place, 0 the best, and that of another one."""
    return 0.5 + (place < other) / 2 - (place > other) / 2


# Files


def labels_in(rows: Iterable[RawRow], *, judged: bool) -> tuple[Label, ...]:
    """The labels of judgment rows, and of rows with `responses`, a list or texts by the models' names.

    Args:
        judged: with the answers; else the questions alone.
    """
    rows = list(rows)
    raise_all(
        row.problem or f"{row.location}: verdict: must be 1, 0.5 or 0, found {(row.values or {})['verdict']!r:.40}"
        for row in rows
        if row.values is None or (judged and row.values.get("verdict", 1) not in (1, 0.5, 0))
    )
    values = [fields_in(row.values or {}, judged=judged) for row in rows]
    return build(tuple[Label, ...], SourcedYaml(values, {(i,): row.location for i, row in enumerate(rows)}))


def fields_in(row: Values, *, judged: bool) -> JSON:
    """A label's fields of a row."""
    known = [field.name for field in fields(Label)] if judged else ["prompt", "responses", "models"]
    values = {key: row[key] for key in known if row.get(key) is not None}
    values["id"] = str(row["id"]) if row.get("id") is not None else hash_of(row.get("prompt"))[:12]
    if isinstance(texts := row.get("responses"), dict):
        values |= {"models": list(texts), "responses": list(texts.values())}
    if "first" in row:
        values |= {key: [row.get(name) for name in names] for key, names in PAIRED.items()}
    if judged and "verdict" in row:
        values["ranks"] = [int(row["verdict"] < 0.5), int(row["verdict"] > 0.5)]
    return values


def read_questions(source: str) -> list[Label]:
    """The questions of a file: judgment rows, prompts with responses, comparisons, rankings, or demonstrations to rate.

    The same pair in both orders is one question.
    """
    rows = list(read_raw(source))
    first_row = next((row.values for row in rows if row.values), {})
    if first_row.keys().isdisjoint(("first", "responses")):
        columns = filled_columns(first_row)
        ranked = any(columns.issuperset(form.columns) for form in ROW_FORMATS["rankings"])
        records, tally = read_rows(source, "rankings" if ranked else "demonstrations")
        print_tally(source, tally)
        rows = [
            RawRow(record.row_id, {"prompt": getattr(record, "prompt", ""), "responses": replies_of(record)})
            for record in records
        ]
    items = {item.key: item for item in labels_in(rows, judged=False)}
    print(f"{source}: {len(items)} questions in {len(rows)} rows", file=sys.stderr)
    return list(items.values())


# What is asked and answered


def questions(items: Sequence[Label], judge: str, seed: int, repeats: float) -> list[Label]:
    """The questions to an annotator, in an order of their own that depends on nothing but names, texts and the seed.

    Hidden repeats, a share `repeats` of the pairs, are taken from the first third and shown again in the second half.
    """
    rng = Random(f"{seed}/{judge}")
    asked = [
        item.in_order(rng.sample(item.by_text, len(item.responses)))
        for item in sorted(items, key=lambda item: item.key)
    ]
    rng.shuffle(asked)
    count = round(repeats * sum(len(question.responses) == 2 for question in asked))
    half = len(asked) // 2
    early = [question.in_order((1, 0)) for question in asked[: len(asked) // 3] if len(question.responses) == 2]
    later = asked[half:] + [replace(question, repeat=True) for question in rng.sample(early, min(count, len(early)))]
    shown = asked[:half] + rng.sample(later, len(later))
    return [replace(question, judge=judge, position=i) for i, question in enumerate(shown)]


class LabelSession:
    """Questions and answers of all annotators; may be called from several threads."""

    def __init__(
        self, items: Sequence[Label], path: Path, *, seed: int, repeats: float, ratings: bool, flags: Sequence[str]
    ):
        """Read what has been answered, a last line that a kill cut short taken away.

        Args:
            ratings: each response is rated; a response alone always is.
            flags: that a response may be marked with.
        """
        labels = labels_in(RowLog(path).read, judged=True)
        keys = {item.key for item in items}
        if others := sum(label.key not in keys for label in labels):
            print(f"{path}: {others} labels are of other questions, and are left alone", file=sys.stderr)
        self.labels = {label.slot: label for label in labels if label.key in keys}
        self.path = path
        self.ratings = ratings
        self.flags = flags
        self.questions = lru_cache(lambda judge: questions(items, judge, seed, repeats))
        self._lock = Lock()

    def show(self, body: Values) -> JSON:
        """A question of the `annotator`, that of a `number` or the first that is open, and how far they are."""
        asked = self.questions(name_in(body))
        given = [self.labels.get(item.slot) for item in asked]
        seconds = [label.seconds for label in given if label]
        index = number_in({"number": [*given, None].index(None), **body}, len(asked) + 1)
        progress: JSON = {
            "number": index,
            "total": len(asked),
            "answered": len(seconds),
            "pace": median(seconds or [0]),
        }
        if index == len(asked):
            return progress | {"report": agreement_lines(self.labels.values())}
        question = asked[index]
        earlier = given[index]
        return progress | {
            "prompt": question.prompt,
            "responses": question.responses,
            "flags": self.flags,
            "likert": LIKERT if self.ratings or len(question.responses) == 1 else 0,
            "earlier": earlier and {key: getattr(earlier, key) for key in GIVEN},
        }

    def answer(self, body: Values) -> JSON:
        """Keep the `annotator`'s answer to the question of a `number`, on the disk before this returns; what is open.

        A second answer to the question takes the place of the first one.

        Raises:
            UserError: the answer is not whole.
        """
        asked = self.questions(name_in(body))
        question = asked[number_in(body, len(asked))]
        values = asdict(question) | {key: body[key] for key in GIVEN if key in body}
        label = build(Label, SourcedYaml(values, {(): "answer"}))
        rated = self.ratings or len(label.responses) == 1
        if not label.ranks or bool(label.ratings) != rated or not set().union(*label.flags) <= set(self.flags):
            raise UserError(
                "the answer is not whole: each response needs its place, a rating where one is asked for, and no marks "
                f"but {', '.join(self.flags)}"
            )
        with self._lock:
            log = RowLog(self.path)  # made anew, it mends what a full disk left of the last line
            if label.slot in self.labels:
                logged = zip(log.rows, labels_in(log.read, judged=True), strict=True)
                kept = [row for row, earlier in logged if earlier.slot != label.slot]
                write_json_lines(self.path, [*kept, label.row()])
            else:
                log.append(label.row())
                sync(self.path)
            self.labels = {**self.labels, label.slot: label}
        return self.show({"annotator": label.judge})


def name_in(body: Values) -> str:
    """The annotator's name without blanks around it; UserError where it is none."""
    name = str(body.get("annotator") or "").strip()
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise UserError(f"a name of an annotator has 1 to {LONGEST_NAME} characters on one line")
    return name


def number_in(body: Values, count: int) -> int:
    """The number of a question, below `count`; UserError where it is none."""
    index = body.get("number")
    if type(index) is not int or not 0 <= index < count:
        raise UserError(f"number: is {index!r}, and the questions have the numbers 0 to {count - 1}")
    return index


# Agreement


def agreement_lines(labels: Iterable[Label]) -> list[str]:
    """Lines: pace and self-agreement of each annotator, agreement of every two; a tie is a verdict of its own."""
    by_judge: dict[str, list[Label]] = {}
    for label in labels:
        by_judge.setdefault(label.judge, []).append(label)
    firsts = {}
    lines = []
    for judge, answers in by_judge.items():
        firsts[judge] = pair_verdicts(label for label in answers if not label.repeat)
        repeats = pair_verdicts(label for label in answers if label.repeat)
        pace = median(label.seconds for label in answers)
        lines.append(
            f"{judge}: {len(answers)} answers, {pace:.1f} s each (median)"
            + agreement_on("repeats", repeats, firsts[judge])
        )
    lines += [
        f"{one} and {other}" + agreement_on("pairs", firsts[one], firsts[other])
        for one, other in combinations(firsts, 2)
    ]
    return lines or ["no labels yet"]


def pair_verdicts(labels: Iterable[Label]) -> dict[tuple[str, ...], float]:
    """Id and two texts -> 1, 0.5 or 0 for the first of them, of every pair of responses that was compared or ranked.

    The texts of a pair stand in the order of their hashes, which is as good as drawn: chance agreement, which kappa
    takes away, is then that of judges who prefer neither side.
    """
    return {
        (label.id, one, other): verdict(place, lower)
        for label in labels
        for (one, place), (other, lower) in combinations(
            sorted(zip(label.responses, label.ranks, strict=True), key=lambda each: hash_of(each[0])), 2
        )
    }


def agreement_on(things: str, ours: Mapping[tuple[str, ...], float], theirs: Mapping[tuple[str, ...], float]) -> str:
    """On how many common pairs two sets of verdicts agree, and Cohen's kappa."""
    pairs = [(ours[pair], theirs[pair]) for pair in sorted(ours.keys() & theirs.keys())]
    if not pairs:
        return f"; no {things} to compare"
    equal = sum(a == b for a, b in pairs)
    kappa = cohen_kappa(*zip(*pairs, strict=True))["value"]
    chance = "" if kappa is None else f", kappa {kappa:.2f}"
    return f"; {equal} of {len(pairs)} {things} judged alike ({equal / len(pairs):.0%}{chance})"

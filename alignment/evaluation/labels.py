"""Labels of people: what each annotator is asked and in which order, and the file that holds every answer.

The page is serving/label_page.py; agreement, comparisons and exports are made of the file in commands/label.py.
"""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from statistics import median
from threading import Lock
from typing import Annotated, cast

from annotated_types import Interval

from alignment.config.load import build
from alignment.config.yaml_source import SourcedYaml
from alignment.data.rows.files import RawRow, json_line_rows, read_raw
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Columns, replies_of
from alignment.errors import UserError, raise_all
from alignment.evaluation.judgments import RowLog
from alignment.files import hash_of, sync, write_text
from alignment.settings import NonNegativeFloat, NonNegativeInt, Rule, Settings

JSON = dict[str, object]
SIDES = ("first", "second")
LIKERT = 7  # of InstructGPT's overall quality
LONGEST_NAME = 60  # of an annotator
MOST_RESPONSES = 9  # a digit of the keyboard for each
RANKS = {1: (0, 1), 0.5: (0, 0), 0: (1, 0)}  # verdict for the response shown first -> place of each
EACH = ("models", "ranks", "ratings", "flags")  # have a value for each response, or none
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
    ratings: tuple[Annotated[int, Interval(ge=1, le=LIKERT)], ...] = ()
    flags: tuple[tuple[str, ...], ...] = ()
    comment: str = ""
    seconds: NonNegativeFloat = 0.0

    RULES = (
        Rule("responses", lambda c: not 0 < len(c.responses) <= MOST_RESPONSES, f"must be 1 to {MOST_RESPONSES}"),
        *(
            Rule(
                key,
                lambda c, key=key: len(getattr(c, key)) not in (0, len(c.responses)),
                "must be as many as responses",
            )
            for key in EACH
        ),
        Rule("ranks", lambda c: set(c.ranks) != set(range(len(set(c.ranks)))), "must be 0, 1, ... without a gap"),
    )

    @cached_property
    def key(self) -> str:
        """Equal for the same responses in any order."""
        return hash_of([self.id, sorted(self.responses)])

    @property
    def slot(self) -> tuple[str, str, bool]:
        """Equal for two answers of one person to the same question."""
        return self.judge, self.key, self.repeat

    def in_order(self, order: Sequence[int]) -> "Label":
        """The label with its responses, and all that is said of each of them, in another order."""
        columns = {name: getattr(self, name) for name in ("responses", *EACH)}
        return replace(self, **{name: tuple(column[i] for i in order if column) for name, column in columns.items()})

    def row(self) -> JSON:
        """The label as a row: of a pair a judgment row, of other numbers of responses `responses` with `ranks`."""
        row: JSON = {key: value for key, value in asdict(self).items() if value or key in ("prompt", "position")}
        if len(self.responses) != 2:
            return row
        models = {f"{side}_model": model for side, model in zip(SIDES, self.models, strict=False)}
        sides = {**dict(zip(SIDES, self.responses, strict=True)), **models, "verdict": verdict(*self.ranks)}
        return {key: value for key, value in row.items() if key not in ("responses", "models", "ranks")} | sides


def verdict(place: int, other: int) -> float:
    """1, 0.5 or 0 for a response by its place, 0 the best, and that of another one."""
    return 0.5 + (place < other) / 2 - (place > other) / 2


def label_in(row: Columns, location: str, *, judged: bool) -> Label:
    """The label of a judgment row or a row with `responses`, a list or texts by the models' names; UserError with file:line.

    Args:
        judged: with the answer; else the question alone.
    """
    known = [field.name for field in fields(Label)] if judged else ["prompt", "responses", "models"]
    values = {key: row[key] for key in known if row.get(key) is not None}
    if "first" in row:
        values |= {
            "responses": [row.get(side) for side in SIDES],
            "models": [row.get(f"{side}_model") for side in SIDES],
        }
    elif isinstance(named := row.get("responses"), dict):
        values["models"], values["responses"] = list(named), list(named.values())
    if judged and "verdict" in row:
        if row["verdict"] not in list(RANKS):
            raise UserError(f"{location}: verdict: must be 1, 0.5 or 0, found {row['verdict']!r:.40}")
        values["ranks"] = next(ranks for known, ranks in RANKS.items() if known == row["verdict"])
    values["id"] = str(row["id"]) if row.get("id") is not None else ""
    label = build(Label, SourcedYaml(values, {(): location}))
    return label if label.id else replace(label, id=hash_of([label.prompt, sorted(label.responses)])[:12])


def labels_in(rows: Iterable[RawRow], *, judged: bool) -> list[Label]:
    """The labels of rows; one UserError for all rows that are none."""
    labels, problems = list[Label](), list[str]()
    for row in rows:
        try:
            labels.append(label_in(row.values or {}, row.location, judged=judged))
        except UserError as error:
            problems.append(row.problem or str(error))
    raise_all(problems)
    return labels


def read_questions(source: str) -> list[Label]:
    """The questions of a file: judgment rows, prompts with responses, comparisons, rankings, or demonstrations to rate.

    The same pair in both orders is one question.
    """
    raw = list(read_raw(source))
    names = set(next((row.values for row in raw if row.values), {}))
    if "first" in names or ("responses" in names and not names & {"ranking", "ranks", "scores"}):
        found = labels_in(raw, judged=False)
    else:
        ranked = names & {"chosen", "responses", "generations", "completions", "answers", "message_tree_id"}
        records, tally = read_rows(source, "rankings" if ranked else "demonstrations")
        print("\n".join([source, *tally.lines()]), file=sys.stderr)
        rows: list[JSON] = [{"prompt": getattr(each, "prompt", ""), "responses": replies_of(each)} for each in records]
        found = [label_in(row, source, judged=False) for row in rows]
    items = list({item.key: item for item in reversed(found)}.values())[::-1]
    print(f"{source}: {len(items)} questions in {len(found)} rows", file=sys.stderr)
    return items


def read_labels(path: Path, items: Sequence[Label]) -> dict[tuple[str, str, bool], Label]:
    """The labels of these questions by their slot."""
    labels = labels_in(json_line_rows(path), judged=True) if path.is_file() else []
    keys = {item.key for item in items}
    if others := sum(label.key not in keys for label in labels):
        print(f"{path}: {others} labels are of other questions, and are left alone", file=sys.stderr)
    return {label.slot: label for label in labels if label.key in keys}


def questions(items: Sequence[Label], judge: str, seed: int, repeats: float) -> list[Label]:
    """The questions to an annotator, in an order of their own that depends on nothing but names, texts and the seed.

    Hidden repeats, a share `repeats` of the pairs, are taken from the first third and shown again in the second half.
    """

    def draw(*of: object) -> str:
        return hash_of([seed, judge, *of])

    def shown(item: Label) -> Label:
        order = sorted(range(len(item.responses)), key=lambda i: draw(item.key, item.responses[i]))
        return replace(item.in_order(order), judge=judge)

    asked = [shown(item) for item in sorted(items, key=lambda item: draw("order", item.key))]
    early = [each for each in asked[: len(asked) // 3] if len(each.responses) == 2]
    count = round(repeats * sum(len(each.responses) == 2 for each in asked))
    again = sorted(early, key=lambda each: draw("repeat", each.key))[:count]
    half = len(asked) // 2
    later = [*asked[half:], *(replace(each.in_order((1, 0)), repeat=True) for each in again)]
    asked[half:] = sorted(later, key=lambda each: draw("later", each.key, each.repeat))
    return [replace(each, position=i) for i, each in enumerate(asked)]


class LabelSession:
    """Questions and answers of all annotators; may be called from several threads."""

    def __init__(
        self,
        items: Sequence[Label],
        path: Path,
        *,
        seed: int,
        repeats: float,
        ratings: bool,
        flags: Sequence[str],
        report: Callable[[Iterable[Label]], list[str]],
    ):
        """Read what has been answered, a last line that a kill cut short taken away.

        Args:
            ratings: each response is rated; a response alone always is.
            flags: that a response may be marked with.
            report: labels -> lines for the end of the page.
        """
        RowLog(path)
        self.path, self.labels, self.ratings, self.flags = path, read_labels(path, items), ratings, flags
        self.report, self._lock = report, Lock()
        self.questions = lru_cache(lambda judge: questions(items, judge, seed, repeats))

    def show(self, body: Columns) -> JSON:
        """A question of the `annotator`, that of a `number` or the first that is open, and how far they are."""
        asked = self.questions(name_in(body))
        given = [self.labels[each.slot].seconds for each in asked if each.slot in self.labels]
        opened = next((i for i, each in enumerate(asked) if each.slot not in self.labels), len(asked))
        number = cast("int", body.get("number", opened))
        progress: JSON = {
            "number": number,
            "total": len(asked),
            "answered": len(given),
            "pace": median(given or [0]),
        }
        if number == len(asked):
            return progress | {"report": self.report(self.labels.values())}
        question, earlier = asked[number], self.labels.get(asked[number].slot)
        shown: JSON = {"prompt": question.prompt, "responses": question.responses, "flags": self.flags}
        shown |= {"likert": LIKERT if self.rated(question) else 0}
        return progress | shown | {"earlier": earlier and {key: asdict(earlier)[key] for key in GIVEN}}

    def rated(self, question: Label) -> bool:
        """True where each response is rated."""
        return self.ratings or len(question.responses) == 1

    def answer(self, body: Columns) -> JSON:
        """Keep the `annotator`'s answer to the question of a `number`, on the disk before this returns; what is open.

        A second answer to the question takes the place of the first one.

        Raises:
            UserError: the answer is not whole.
        """
        question = self.questions(name_in(body))[cast("int", body["number"])]
        values = {**asdict(question), **{key: body[key] for key in GIVEN if key in body}}
        label = build(Label, SourcedYaml(values, {(): "answer"}))
        if not label.ranks or len(label.ratings) != len(label.responses) * self.rated(question):
            raise UserError(
                "the answer is not whole: each response needs its place, and a rating where one is asked for"
            )
        if unknown := set().union(*label.flags) - set(self.flags):
            raise UserError(f"unknown flag {sorted(unknown)[0]!r:.40}")
        with self._lock:
            log = RowLog(self.path)  # made anew, it mends what a full disk left of the last line
            if label.slot in self.labels:
                others = [row for row in log.rows if label_in(row, str(self.path), judged=True).slot != label.slot]
                lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in [*others, label.row()])
                write_text(self.path, "".join(lines))
            else:
                log.append(label.row())
                sync(self.path)
            self.labels = {**self.labels, label.slot: label}
        return self.show({"annotator": label.judge})


def name_in(body: Columns) -> str:
    """The annotator's name without blanks around it; UserError where it is none."""
    name = str(body.get("annotator") or "").strip()
    if not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
        raise UserError(f"a name of an annotator has 1 to {LONGEST_NAME} characters on one line")
    return name

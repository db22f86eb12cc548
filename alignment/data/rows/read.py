"""From file or Hub id to checked records. Every bad row is reported or counted; what a row means is in formats.py."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from alignment.data.rows.fields import BadRow
from alignment.data.rows.files import RawRow, hub_source, read_raw
from alignment.data.rows.formats import SHAPES, RowFormat, column_advice, complete, expected_columns, match_format
from alignment.data.rows.records import Comparison, Demonstration, Kind, Record, Tally
from alignment.errors import UserError, raise_all, suggest

Part = Literal["train", "evaluation"]

SHOWN_PROBLEMS = 20
TIE = "chosen and rejected are identical"


@dataclass(frozen=True)
class DataConfig:
    """Where rows come from, and what happens to those that do not fit."""

    train: str | list[str]  # file(s) or Hub id(s): owner/name, owner/name[split], owner/name:config[split]
    evaluation: str | list[str] | None = None
    split: str = "train"  # of a Hub data set that names none itself
    evaluation_split: str | None = None  # the same in `evaluation`; None: as `split`
    columns: dict[str, str] = field(default_factory=dict)  # our column name -> the file's
    max_rows: int | None = None  # stop after so many good rows
    on_bad_row: Literal["error", "skip"] = "error"
    max_length: int = 1024  # tokens of prompt and response together
    skip_ties: bool = True  # pairs with equal texts: drop and count them, or treat them as bad rows
    max_lost_share: float = 0.5  # of the rows read
    max_cut_share: float = 0.5  # of the rows kept: prompts without their beginning, or responses without their end

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("data.train names no file")
        if self.on_bad_row not in ("error", "skip"):
            raise ValueError(f"data.on_bad_row must be error or skip, got {self.on_bad_row!r}")
        if self.max_rows is not None and self.max_rows < 1:
            raise ValueError(f"data.max_rows must be at least 1, got {self.max_rows}")
        if self.max_length < 2:
            raise ValueError(f"data.max_length must be at least 2 tokens, got {self.max_length}")
        for name in ("max_lost_share", "max_cut_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"data.{name} must lie between 0 and 1, got {getattr(self, name)}")
        trained = {hub_source(source, self.split) for source in self.sources("train")}
        for source in self.sources("evaluation"):
            found = hub_source(source, self.split_of("evaluation"))
            if found is not None and found in trained:
                raise ValueError(
                    f"data.evaluation: {source} is read from the split '{found[-1]}', which is trained on; name the "
                    f"held-out one: data.evaluation_split=test, or data.evaluation={found[0]}[test]"
                )

    def sources(self, part: Part) -> list[str]:
        """Files and Hub ids of one part; none where no data is named for it."""
        named = self.train if part == "train" else self.evaluation or []
        return [named] if isinstance(named, str) else named

    def require_sources(self, part: Part) -> list[str]:
        """Files and Hub ids of one part.

        Raises:
            UserError: no data is named for it.
        """
        if not self.sources(part):
            raise UserError(f"data.{part} names no file")
        return self.sources(part)

    def split_of(self, part: Part) -> str:
        """The split read of a Hub data set that names none itself."""
        return self.split if part == "train" or self.evaluation_split is None else self.evaluation_split


def read_rows(
    source: str | Path | Sequence[str | Path],
    kind: Kind,
    *,
    split: str = "train",
    columns: dict[str, str] | None = None,
    max_rows: int | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    skip_ties: bool = True,
) -> tuple[list[Record], Tally]:
    """The records of one or several sources, in order, and the tally of what was dropped.

    Args:
        source: file (.jsonl[.gz], .json, .csv, .parquet) or Hub id, or several of them.
        split: of a Hub data set that names none itself.
        kind: text, demonstrations, comparisons or prompts.
        columns: our column name -> the source's, where they differ.
        max_rows: stop after so many good rows.
        on_bad_row: "error" reports all bad rows at once (up to 20); "skip" drops and counts them.
        skip_ties: drop and count pairs with equal texts; False: they are bad rows.

    Raises:
        UserError: no such source, no rows, columns that make no record of this kind, bad rows.
    """
    if kind not in get_args(Kind):
        raise UserError(f"unknown kind of rows {kind!r}; known: {', '.join(get_args(Kind))}")
    sources = [source] if isinstance(source, str | Path) else list(source)
    records: list[Record] = []
    counts = Tally()
    problems: list[str] = []
    for name in map(str, sources):
        left = None if max_rows is None else max_rows - len(records)
        if left == 0:
            break
        reading = _Reading(kind, skip_ties, left)
        reading.read(name, read_raw(name, split), columns or {}, keep_going=on_bad_row == "skip")
        records += reading.records
        problems += reading.problems
        counts = counts.merged_with(reading.counts)
    if problems and on_bad_row == "error":
        number = f"{len(problems)} bad row{'s' if len(problems) > 1 else ''}"
        problems.insert(0, f"{number}; mend them, or set data.on_bad_row=skip to leave them out")
        raise_all(problems, cap=SHOWN_PROBLEMS + 1)
    return records, counts


class _Reading:
    """The state of reading one source: records so far, problems so far, tally."""

    def __init__(self, kind: Kind, skip_ties: bool, max_rows: int | None):
        self.kind: Kind = kind
        self.skip_ties, self.max_rows = skip_ties, max_rows
        self.records: list[Record] = []
        self.problems: list[str] = []
        self.counts = Tally()
        self.form: type | None = None  # of the prompts in this source: text or messages
        self.form_place = ""

    def read(self, name: str, rows: Iterable[RawRow], columns: dict[str, str], keep_going: bool) -> None:
        raw = list(rows)
        if not raw:
            raise UserError(f"{name}: 0 rows in {name}")
        shape = _choose_shape(name, raw, self.kind, columns)
        for row in raw:
            if self.max_rows is not None and len(self.records) >= self.max_rows:
                break
            self.counts.rows += 1
            if row.values is None:
                self._bad(row.place, row.reason, row.problem)
            elif shape is not None:
                self._parse(row.place, _renamed(row.values, columns), shape)
        self.counts.kept = len(self.records)
        if not self.records and (keep_going or not self.problems):
            raise UserError(f"{name}: no row can be used\n" + "\n".join(self.counts.lines()[1:]))

    def _parse(self, place: str, values: dict[str, Any], shape: RowFormat) -> None:
        try:
            record = complete(shape.parse(values, place), values)
            self._check_form(record, place)
        except BadRow as bad:
            self._bad(place, bad.reason, f"{place}:{bad}")
            return
        if isinstance(record, Comparison) and record.chosen == record.rejected:
            if self.skip_ties:
                self.counts.drop(TIE, place)
            else:
                self._bad(place, TIE, f"{place}: {TIE}; drop the row or set data.skip_ties=true")
            return
        self.records.append(record)

    def _check_form(self, record: Record, place: str) -> None:
        """One source, one form of prompt: a file that mixes text and messages would be rendered in two ways."""
        form = type(getattr(record, "prompt", ""))
        if self.form is None:
            self.form, self.form_place = form, place
        if form is not self.form:
            words = {str: "text", list: "messages"}
            raise BadRow("prompt", f"is {words[form]} here and {words[self.form]} above", f"at {self.form_place}")

    def _bad(self, place: str, reason: str, problem: str) -> None:
        self.counts.drop(reason, place)
        self.problems.append(problem)


def _choose_shape(name: str, rows: list[RawRow], kind: Kind, columns: dict[str, str]) -> RowFormat | None:
    """The shape of the first readable row that has one; None where no row is readable at all."""
    readable = [row.values for row in rows if row.values is not None]
    if not readable:
        return None
    found = dict.fromkeys(str(key) for values in readable for key in values)
    _check_columns(name, kind, columns, list(found))
    for values in readable:
        present = {key for key, value in _renamed(values, columns).items() if value is not None}
        if kind == "comparisons" and {"responses", "ranking"} <= present:
            raise UserError(
                f"{name}: rows with responses + ranking (K-way groups) cannot be read yet; "
                "write each ordered pair as a row of prompt, chosen, rejected"
            )
        if shape := match_format(kind, present):
            return shape
    if kind == "comparisons" and {"label", "kto_tag"} & set(found):
        raise UserError(
            f"{name}: no comparisons here: found columns {', '.join(found)}. Rows of one response and a label, as KTO has "
            "them, say nothing of another response to the same prompt; give rows of prompt, chosen, rejected"
        )
    raise UserError(
        f"{name}: no {kind} here: found columns {', '.join(found)}; expected {expected_columns(kind)}. "
        f"Name the file's columns with {column_advice(kind, readable[0])}"
    )


def _check_columns(name: str, kind: Kind, columns: dict[str, str], found: list[str]) -> None:
    known = {key for shape in SHAPES[kind] for key in shape.columns} | {
        "input",
        "margin",
        "prompt",
        "instruction",
        "system",
    }
    problems = []
    for ours, theirs in columns.items():
        if ours not in known:
            problems.append(f"data.columns.{ours}: {kind} have no such column; {suggest(ours, known)}")
        if theirs not in found:
            problems.append(f"{name}: data.columns.{ours}={theirs}: no such column; {suggest(theirs, found)}")
    raise_all(problems)


def _renamed(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    if not columns:
        return row
    ours = {name: row[theirs] for name, theirs in columns.items() if theirs in row}
    return {**{key: value for key, value in row.items() if key not in columns.values()}, **ours}


def prompt_key(record: Record) -> str:
    """A text that is equal for equal prompts (or documents), for finding duplicates."""
    return repr(getattr(record, "prompt", None) or getattr(record, "text", None))


def record_key(record: Record) -> tuple[str, ...]:
    """What makes two records the same: prompt and responses, not the row they stood in."""
    if isinstance(record, Comparison):
        return prompt_key(record), record.chosen, record.rejected
    if isinstance(record, Demonstration):
        return prompt_key(record), record.response
    return (prompt_key(record),)


def overlap(train: Sequence[Any], evaluation: Sequence[Any], key: Callable[[Any], str] = prompt_key) -> list[str]:
    """Ids of the evaluation rows whose prompt (or text) also stands in the training rows."""
    known = {key(row) for row in train}
    return [row.row_id for row in evaluation if key(row) in known]

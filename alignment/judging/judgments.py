"""Judgments as JSON lines, one a call: read from any file of them, and appended as they are given.

A row says which two texts were shown in which order, and the verdict for the one shown first:

    {"id": ..., "prompt": ..., "first": ..., "second": ..., "verdict": 1 | 0.5 | 0 | null, "judge": ..., ...}

`null` is a call whose answer cannot be read. Forms for people, the labels that people gave and the log of a judge's
calls are all files of such rows. Judges are in judges.py.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from alignment.data.rows.files import RawRow, json_line_rows
from alignment.data.rows.records import Messages
from alignment.errors import UserError, raise_all
from alignment.files import explain_full_disk, hash_of
from alignment.statistics.winrate import LOSS, TIE, WIN, Verdict

TEXTS = ("id", "first", "second")
NO_PAIR = (
    "; a label of one or of more than two responses is no verdict on a pair: leave such rows out, or let people judge "
    "the form of `evaluate winrate`, which holds pairs alone"
)
VERDICTS = (WIN, TIE, LOSS, None)
COUNTS = ("prompt_tokens", "answer_tokens", "seconds")  # of a call, which a row may lack
NAMES = ("judge", "first_model", "second_model")  # which a row may lack


@dataclass(frozen=True)
class Judgment:
    """One verdict on two responses to one prompt.

    Attributes:
        id: name of the prompt's row.
        first, second: the responses, in the order in which they were shown.
        verdict: 1, 0.5 or 0 for the one shown first; None: there is none that can be read.
        prompt: text or messages; "" where the row has none.
        judge: who or what gave it: a person's name, a judge's identity; "" where the row does not say.
        first_model, second_model: names of the models whose responses they are; None where the row does not say.
        probability: of the first response being preferred, in [0, 1]; None where the judge gives none.
        extra: the row's further columns.
        location: FILE:LINE.
    """

    id: str
    first: str
    second: str
    verdict: Verdict
    prompt: str | Messages = ""
    judge: str = ""
    first_model: str | None = None
    second_model: str | None = None
    probability: float | None = None
    extra: Mapping[str, object] = field(default_factory=dict)
    location: str = ""


def judgment_key(judge: str, prompt: str | Messages, *texts: str) -> str:
    """Name of a call by its content: the judge with all that decides its answers, the prompt, the texts in order."""
    return hash_of([judge, prompt, *texts])


def read_judgments(path: Path) -> list[Judgment]:
    """The judgments of a file of JSON lines (.jsonl or .jsonl.gz), in its order.

    A last line that a kill has torn is left out, see `whole_rows`.

    Raises:
        UserError: no such file; rows that are no judgments, all of them, with file:line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: cannot read the verdicts: no such file")
    rows = whole_rows(path)
    raise_all(problem for row in rows if (problem := _problem(row)))
    return [_judgment(dict(row.values or {}), row.location) for row in rows]


def _problem(row: RawRow) -> str:
    """The reason why a row is no judgment, with file:line; empty where it is one."""
    values = row.values
    if values is None:
        return row.problem
    verdict = values.get("verdict")
    probability = values.get("probability")
    missing = [key for key in (*TEXTS, "verdict") if key not in values]
    texts = [*TEXTS, *(key for key in NAMES if values.get(key) is not None)]
    no_text = [key for key in texts if not isinstance(values.get(key), str)]
    is_probability = isinstance(probability, (int, float)) and 0 <= probability <= 1
    advice = NO_PAIR if "ranks" in values else ""
    checks = {
        f"no {', '.join(map(repr, missing))}; found {', '.join(map(repr, values))}{advice}": bool(missing),
        f"{', '.join(map(repr, no_text))} must be text": bool(no_text),
        f"'verdict' must be 1, 0.5, 0 or null, found {verdict!r}": isinstance(verdict, bool) or verdict not in VERDICTS,
        f"'probability' must be a number between 0 and 1 or null, found {probability!r}": not (
            probability is None or is_probability
        ),
    }
    return next((f"{row.location}: {problem}" for problem, holds in checks.items() if holds), "")


def log_problem(row: RawRow) -> str:
    """The reason why a row is no answer in a judge's log, with file:line; empty where it is one.

    A row holds a verdict on two responses, or one response, in the log of a rubric with its rating.
    """
    values = row.values or {}
    problem = row.problem or ("" if isinstance(values.get("response"), str) else _problem(row))
    wrong = [key for key in COUNTS if not _is_number(values.get(key, 0))]
    rating = values.get("rating")
    if rating is not None and not (_is_number(rating) and 1 <= rating <= 7):
        wrong.append("rating")
    return problem or (f"{row.location}: no number that can be: {', '.join(wrong)}" if wrong else "")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _judgment(row: dict[str, object], location: str) -> Judgment:
    names = [attribute.name for attribute in fields(Judgment) if attribute.name not in ("extra", "location")]
    given = {key: value for key in names if (value := row.pop(key, None)) is not None}
    given["verdict"] = None if given.get("verdict") is None else float(str(given["verdict"]))
    return Judgment(**given, extra=row, location=location)  # type: ignore[arg-type]


def whole_rows(path: Path, *, mend: bool = False) -> list[RawRow]:
    """The rows of a file of JSON lines, without a last line that a kill has torn: it has no line end and is no JSON.

    That is told on standard error. With `mend` it is taken out of the file, and the file ends with a line end.
    """
    rows = list(json_line_rows(path))
    data = b"" if path.suffix == ".gz" else path.read_bytes()
    if not rows or not data or data.endswith(b"\n"):
        return rows
    if rows[-1].values is None and (mend or len(rows) > 1):
        print(f"{rows.pop().location}: the last line is torn, as by a kill; it is left out", file=sys.stderr)
        if mend:
            os.truncate(path, data.rfind(b"\n") + 1)
    elif mend:
        with open(path, "ab") as file:
            file.write(b"\n")
    return rows


class RowLog:
    """A file of JSON lines to which each row is appended at once, and the rows that are in it.

    A kill costs the rows that are not yet given; a line that it tears is taken out by the next start. Threads may
    append at the same time. Without a path the rows are in memory alone. `problem_of` gives the reason why a row is
    refused; `read` are those of the file, with their locations.
    """

    def __init__(self, path: Path | None = None, problem_of: Callable[[RawRow], str] = lambda row: row.problem):
        self.path = path
        self._lock = threading.Lock()
        self.read = whole_rows(path, mend=True) if path is not None and path.is_file() else []
        raise_all(filter(None, map(problem_of, self.read)))
        self.rows: list[Mapping[str, object]] = [row.values for row in self.read if row.values is not None]

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row as one line, and hand it to the system before returning."""
        with self._lock:
            self.rows.append(row)
            if self.path is not None:
                with explain_full_disk(self.path, self.path):
                    self.path.parent.mkdir(parents=True, exist_ok=True)
                    with open(self.path, "ab") as file:
                        file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")

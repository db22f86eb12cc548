"""Judgments as JSON lines, one a call: read from any file of them, and appended as they are given. Judges are in judges.py.

A row says which two texts were shown in which order, and the verdict for the one shown first:

    {"id": ..., "prompt": ..., "first": ..., "second": ..., "verdict": 1 | 0.5 | 0 | null, "judge": ..., ...}

`null` is a call whose answer cannot be read. Forms for people, the labels that people gave and the log of a judge's calls
are all files of such rows.
"""

import json
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

from alignment.data.rows.files import RawRow, json_line_rows
from alignment.data.rows.records import Messages
from alignment.errors import UserError, raise_all
from alignment.evaluation.winrate import LOSS, TIE, WIN, Verdict
from alignment.files import explain_full_disk, hash_of

TEXTS = ("id", "first", "second")
NO_PAIR = (
    "; a label of one or of more than two responses is no verdict on a pair: leave such rows out, or let people judge the "
    "form of `evaluate winrate`, which holds pairs alone"
)
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
    """Name of a call by its content: the judge with all that decides its answers, the prompt, and the texts in order."""
    return hash_of([judge, prompt, *texts])


def read_judgments(path: Path) -> list[Judgment]:
    """The judgments of a file of JSON lines (.jsonl or .jsonl.gz), in its order.

    A last line that a kill has torn, which has no line end and is no JSON, is read over and told on standard error.

    Raises:
        UserError: no such file; rows that are no judgments, all of them, with file:line.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: cannot read the verdicts: no such file")
    rows = list(json_line_rows(path))
    if len(rows) > 1 and rows[-1].values is None and torn_bytes(path):
        print(f"{rows[-1].location}: the last line is torn, as by a kill; it is read over", file=sys.stderr)
        rows.pop()
    raise_all(problem for row in rows if (problem := _problem(row)))
    return [_judgment(dict(row.values or {}), row.location) for row in rows]


def _problem(row: RawRow) -> str:
    """The reason why a row is no judgment, with file:line; empty where it is one."""
    values, problem = row.values, ""
    if values is None:
        return row.problem
    verdict, probability = values.get("verdict"), values.get("probability")
    texts = [*TEXTS, *(key for key in NAMES if values.get(key) is not None)]
    if missing := [key for key in (*TEXTS, "verdict") if key not in values]:
        problem = f"no {', '.join(map(repr, missing))}; found {', '.join(map(repr, values))}" + NO_PAIR * (
            "ranks" in values
        )
    elif wrong := [key for key in texts if not isinstance(values[key], str)]:
        problem = f"{', '.join(map(repr, wrong))} must be text"
    elif isinstance(verdict, bool) or verdict not in (WIN, TIE, LOSS, None):
        problem = f"'verdict' must be 1, 0.5, 0 or null, found {verdict!r}"
    elif probability is not None and not (isinstance(probability, (int, float)) and 0 <= probability <= 1):
        problem = f"'probability' must be a number between 0 and 1 or null, found {probability!r}"
    return problem and f"{row.location}: {problem}"


def _judgment(row: dict[str, object], location: str) -> Judgment:
    names = [each.name for each in fields(Judgment) if each.name not in ("extra", "location")]
    given = {key: value for key in names if (value := row.pop(key, None)) is not None}
    given["verdict"] = None if given.get("verdict") is None else float(str(given["verdict"]))
    return Judgment(**given, extra=row, location=location)  # type: ignore[arg-type]


def torn_bytes(path: Path) -> int:
    """Size of a last line without a line end that is no JSON, as a kill within a write leaves it; 0 where there is none."""
    if path.suffix == ".gz" or not path.is_file():
        return 0
    last = path.read_bytes().rpartition(b"\n")[2]
    try:
        json.loads(last or b"0")
    except ValueError:
        return len(last)
    return 0


class RowLog:
    """A file of JSON lines to which each row is appended at once, and the rows that are in it.

    A kill costs the rows that are not yet given. One that tears a line leaves it without a line end: the next start takes
    it out of the file and says so. Threads may append at the same time. Without a path the rows are in memory alone.
    """

    def __init__(self, path: Path | None = None):
        self.path, self._lock = path, threading.Lock()
        self.rows: list[Mapping[str, object]] = []
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if torn := torn_bytes(path):
            os.truncate(path, path.stat().st_size - torn)
            print(f"{path}: the last line was torn, as by a kill; it is taken out", file=sys.stderr)
        found = list(json_line_rows(path)) if path.is_file() else []
        raise_all(row.problem for row in found if row.values is None)
        self.rows = [row.values for row in found if row.values is not None]

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row as one line, and hand it to the system before returning."""
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        with self._lock:
            self.rows.append(row)
            if self.path is not None:
                with explain_full_disk(self.path, self.path), open(self.path, "ab+") as file:
                    whole = not file.tell() or file.seek(-1, os.SEEK_END) < 0 or file.read() == b"\n"
                    file.write(line if whole else b"\n" + line)

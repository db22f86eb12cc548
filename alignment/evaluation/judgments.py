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
from dataclasses import dataclass, field
from pathlib import Path

from alignment.data.rows.files import RawRow, json_line_rows
from alignment.data.rows.records import Messages
from alignment.errors import UserError, raise_all
from alignment.evaluation.winrate import LOSS, TIE, WIN, Verdict
from alignment.files import explain_full_disk, hash_of

TEXTS = ("id", "first", "second")
REQUIRED = (*TEXTS, "verdict")


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


OPTIONAL = ("prompt", "judge", "first_model", "second_model", "probability")


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
    if len(rows) > 1 and rows[-1].values is None and not _ends_in_line(path):
        print(f"{rows[-1].location}: the last line is torn, as by a kill; it is read over", file=sys.stderr)
        rows.pop()
    raise_all(problem for row in rows if (problem := _problem(row)))
    return [_judgment(row.values or {}, row.location) for row in rows]


def _problem(row: RawRow) -> str:
    """The reason why a row is no judgment, with file:line; empty where it is one."""
    values = row.values
    if values is None:
        return row.problem
    if missing := [key for key in REQUIRED if key not in values]:
        return f"{row.location}: no {', '.join(map(repr, missing))}; found {', '.join(map(repr, values))}"
    texts = [*TEXTS, *(key for key in ("judge", "first_model", "second_model") if values.get(key) is not None)]
    if wrong := [key for key in texts if not isinstance(values[key], str)]:
        return f"{row.location}: {', '.join(map(repr, wrong))} must be text"
    verdict, probability = values["verdict"], values.get("probability")
    if isinstance(verdict, bool) or verdict not in (WIN, TIE, LOSS, None):
        return f"{row.location}: 'verdict' must be 1, 0.5, 0 or null, found {verdict!r}"
    if probability is not None and not (isinstance(probability, (int, float)) and 0 <= probability <= 1):
        return f"{row.location}: 'probability' must be a number between 0 and 1 or null, found {probability!r}"
    return ""


def _judgment(row: Mapping[str, object], location: str) -> Judgment:
    given = {key: row[key] for key in OPTIONAL if row.get(key) is not None}
    verdict = None if row["verdict"] is None else float(str(row["verdict"]))
    extra = {key: value for key, value in row.items() if key not in (*REQUIRED, *OPTIONAL)}
    first, second = str(row["first"]), str(row["second"])
    return Judgment(str(row["id"]), first, second, verdict, **given, extra=extra, location=location)  # type: ignore[arg-type]


def _ends_in_line(path: Path) -> bool:
    """True where a file ends in a line end, or is empty or compressed."""
    if path.suffix == ".gz" or not path.stat().st_size:
        return True
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


class RowLog:
    """A file of JSON lines to which each row is appended at once, and the rows that are in it.

    A kill costs the rows that are not yet given. One that tears a line leaves it without a line end: the next start takes
    it out of the file and says so. Threads may append at the same time. Without a path the rows are in memory alone.
    """

    def __init__(self, path: Path | None = None):
        self.path, self._lock = path, threading.Lock()
        self.rows: list[Mapping[str, object]] = []
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            _mend(path)
            found = list(json_line_rows(path)) if path.is_file() else []
            raise_all(row.problem for row in found if row.values is None)
            self.rows = [row.values for row in found if row.values is not None]

    def append(self, row: Mapping[str, object]) -> None:
        """Write a row as one line, and hand it to the system before returning."""
        line = json.dumps(row, ensure_ascii=False) + "\n"
        with self._lock:
            self.rows.append(row)
            if self.path is not None:
                with explain_full_disk(self.path, self.path), open(self.path, "ab") as file:
                    file.write(line.encode())


def _mend(path: Path) -> None:
    """Give the last line of a log its line end, or take it out where it is torn."""
    if not path.is_file() or _ends_in_line(path):
        return
    content = path.read_bytes()
    last = content.rpartition(b"\n")[2]
    try:
        json.loads(last)
    except ValueError:
        with open(path, "r+b") as file:
            file.truncate(len(content) - len(last))
        print(f"{path}: the last line was torn, as by a kill; it is taken out", file=sys.stderr)
    else:
        with open(path, "ab") as file:
            file.write(b"\n")

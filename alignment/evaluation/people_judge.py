"""People as a judge: the form that they fill in, and the verdicts that come back, of one person or of several.

A person is asked once about each pair, in an order that is drawn from the texts, so that nobody sees whose response is
whose. The texts are part of a verdict's key: it counts for the responses that were seen, and for no others.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from alignment.data.rows.records import Prompt
from alignment.errors import UserError, raise_all
from alignment.evaluation.agreement import agreement, krippendorff_alpha, majority_label
from alignment.evaluation.judgments import Judgment, read_judgments
from alignment.evaluation.winrate import TIE, Verdict
from alignment.files import hash_of, write_text

Pair = tuple[str, str, str]  # id of the prompt, text shown first, text shown second


@dataclass(frozen=True)
class PeopleJudge:
    """A judge that takes its verdicts from people's rows; called, it gives that of most of them, a tie where there is none.

    Attributes:
        path: file of the rows.
        votes: person -> pair as it was shown -> verdict for the response shown first.
    """

    path: Path
    votes: dict[str, dict[Pair, float]]

    def __call__(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> list[Verdict]:
        pairs = [(prompt.row_id, a, b) for prompt, a, b in zip(prompts, first, second, strict=True)]
        asked = [pair for pair in pairs if pair[1] != pair[2]]
        if asked and not any(self.of_people(pair) for pair in asked):
            raise UserError(
                f"{self.path}: its verdicts are on other prompts or responses, none on these {len(prompts)}; put the "
                "responses.jsonl and sampling.json that it was made from into the output directory, or let another file "
                "be written as a form"
            )
        return [TIE if pair[1] == pair[2] else majority_verdict(list(self.of_people(pair).values())) for pair in pairs]

    def of_people(self, pair: Pair) -> dict[str, float]:
        """Each person's verdict for the first text of a pair, in whichever order it was shown; a contradiction is a tie."""
        found = {}
        for person, votes in self.votes.items():
            orders = [votes.get(pair), votes.get(_turned(pair))]
            given = [vote if order == 0 else 1 - vote for order, vote in enumerate(orders) if vote is not None]
            if given:
                found[person] = given[0] if given[0] == given[-1] else TIE
        return found

    def shown_first(self, pair: Pair) -> tuple[list[float], list[bool]]:
        """Every verdict on a pair in either order for the text shown first, and of each person who saw both orders whether
        the two contradict each other."""
        orders = dict.fromkeys((pair, _turned(pair)))
        given = [[votes[each] for each in orders if each in votes] for votes in self.votes.values()]
        return [vote for each in given for vote in each], [sum(each) != 1 for each in given if len(each) > 1]

    def summary(self) -> dict[str, Any]:
        """Verdicts of each person, and how far they agree on the pairs that several have judged: for results."""
        pairs = {min(pair, _turned(pair)) for votes in self.votes.values() for pair in votes}
        shared = [given for pair in sorted(pairs) if len(given := list(self.of_people(pair).values())) > 1]
        couples = [each for given in shared for each in combinations(given, 2)]
        found: dict[str, Any] = {"verdicts": {name or "unnamed": len(votes) for name, votes in self.votes.items()}}
        if couples:
            found |= {"agreement": agreement(*zip(*couples, strict=True)), "judged_by_several": len(shared)}
            found["alpha"] = krippendorff_alpha(shared, level="ordinal")
        return found


def _turned(pair: Pair) -> Pair:
    return pair[0], pair[2], pair[1]


def majority_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that more than half of them are; a tie where none is, None of none."""
    label = majority_label(verdicts)
    return TIE if label is None and verdicts else label


def write_annotation_form(path: Path, prompts: Sequence[Prompt], ours: Sequence[str], baseline: Sequence[str]) -> None:
    """Write every pair of different responses once, on a line each, for people or another program to fill in."""
    lines: dict[str, None] = {}
    for prompt, *texts in zip(prompts, ours, baseline, strict=True):
        if texts[0] != texts[1]:
            first, second = sorted(texts, key=lambda text: hash_of([prompt.row_id, sorted(texts), text]))
            row = {"id": prompt.row_id, "prompt": prompt.prompt, "first": first, "second": second, "verdict": None}
            lines[json.dumps(row, ensure_ascii=False)] = None
    write_text(path, "".join(f"{line}\n" for line in lines))


def file_judge(path: Path) -> PeopleJudge:
    """People's verdicts from a file of judgment rows (.jsonl or .jsonl.gz), such as a form that was filled in.

    Rows are told apart by `judge`, the person's name. Of a named person's verdicts on the same pair in the same order the
    last one counts, as labels are appended. How many rows are filled in is printed on standard error where some are not.

    Raises:
        UserError: rows that are no judgments, or two different ones of nobody named on one pair, with file:line; no verdict
            is filled in. The judge raises it where the file holds none of the pairs that it is asked about.
    """
    path = Path(path)
    rows, places, problems = read_judgments(path), dict[tuple[str, Pair], Judgment](), list[str]()
    for row in rows:
        place = row.judge, (row.id, row.first, row.second)
        earlier = places.get(place)
        if earlier is not None and not row.judge and earlier.verdict != row.verdict:
            where = f"{earlier.verdict} in {earlier.location}"
            problems.append(f"{row.location}: id {row.id!r} has verdict {row.verdict}, but {where}")
        if earlier is None or row.verdict is not None:
            places[place] = row
    filled = sum(row.verdict is not None for row in places.values())
    if not rows:
        problems.append(f"{path}: no verdicts in this file")
    elif not filled:
        problems.append(
            f"0 of {len(places)} verdicts are filled in in {path}: write 1, 0.5 or 0 for the response shown first as "
            "each row's `verdict`, and run this again"
        )
    raise_all(problems)
    if filled < len(places):
        print(f"{filled} of {len(places)} verdicts are filled in in {path}", file=sys.stderr)
    votes: dict[str, dict[Pair, float]] = {}
    for (person, pair), row in places.items():
        if row.verdict is not None:
            votes.setdefault(person, {})[pair] = row.verdict
    return PeopleJudge(path, votes)

"""People as a judge: the form that they fill in, and the verdicts that come back, of one person or of several.

A person is asked once about each pair, in an order that is drawn from the texts, so that nobody sees whose response is
whose. The texts are part of a verdict's key: it counts for the responses that were seen, and for no others.
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean

from alignment.data.rows.records import Prompt
from alignment.errors import UserError, raise_all
from alignment.files import hash_of, write_text
from alignment.judging.judgments import Judgment, read_judgments
from alignment.statistics.agreement import Figures, agreement, krippendorff_alpha, majority_label
from alignment.statistics.corrected import MIN_LABELS, corrected_win_rate
from alignment.statistics.winrate import TIE, Verdict

Pair = tuple[str, str, str]  # id of the prompt, text shown first, text shown second
Votes = dict[str, float]  # person -> verdict for the text shown first


@dataclass(frozen=True)
class PeopleJudge:
    """A judge that takes its verdicts from people's rows; a call gives that of most of them, or a tie if there is none.

    Attributes:
        path: file of the rows.
        votes: pair as it was shown -> verdicts.
    """

    path: Path
    votes: dict[Pair, Votes]

    def __call__(self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> list[Verdict]:
        pairs = shown_pairs(prompts, first, second)
        asked = [pair for pair in pairs if pair[1] != pair[2]]
        if asked and not any(self.of_people(pair) for pair in asked):
            raise UserError(
                f"{self.path}: its verdicts are on other prompts or responses, none on these {len(prompts)}; put the "
                "responses.jsonl and sampling.json that it was made from into the output directory, or let another "
                "file be written as a form"
            )
        return [TIE if pair[1] == pair[2] else majority_verdict(list(self.of_people(pair).values())) for pair in pairs]

    def both_orders(self, pair: Pair) -> tuple[Votes, Votes]:
        """The verdicts of those who saw a pair like this, and of those who saw it in the other order."""
        turned = (pair[0], pair[2], pair[1])
        return self.votes.get(pair, {}), self.votes.get(turned, {}) if turned != pair else {}

    def of_people(self, pair: Pair) -> Votes:
        """Each person's verdict for the first text of a pair, shown in either order; a contradiction is a tie."""
        here, turned = self.both_orders(pair)
        flipped = {person: 1 - vote for person, vote in turned.items()}
        return flipped | {person: vote if flipped.get(person, vote) == vote else TIE for person, vote in here.items()}

    def orders(
        self, prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]
    ) -> tuple[list[float], list[bool | None]]:
        """The lead of the text shown first in each verdict, -1 to 1, and the contradictions, one for each pair.

        A contradiction is True where somebody who saw both orders contradicts himself, None where nobody saw both.
        """
        leads = list[float]()
        contradictions = list[bool | None]()
        for here, turned in map(self.both_orders, shown_pairs(prompts, first, second)):
            leads += [2 * vote - 1 for vote in (*here.values(), *turned.values())]
            both = [here[person] + turned[person] != 1 for person in here if person in turned]
            contradictions.append(any(both) if both else None)
        return leads, contradictions

    def usage(self) -> Figures:
        """Verdicts of each person, and how far they agree on the pairs that several have judged: for results."""
        pairs = sorted({(name, min(a, b), max(a, b)) for name, a, b in self.votes})
        shared = [given for pair in pairs if len(given := list(self.of_people(pair).values())) > 1]
        couples = [couple for given in shared for couple in combinations(given, 2)]
        counts = Counter(person or "unnamed" for votes in self.votes.values() for person in votes)
        figures: Figures = {"verdicts": dict(counts)}
        if couples:
            figures |= {"agreement": agreement(*zip(*couples, strict=True)), "judged_by_several": len(shared)}
            figures["alpha"] = krippendorff_alpha(shared, level="ordinal")
        return figures

    def faults(self) -> list[str]:
        """None: people answer what they are asked."""
        return []


def shown_pairs(prompts: Sequence[Prompt], first: Sequence[str], second: Sequence[str]) -> list[Pair]:
    """The names of pairs in people's rows."""
    return [(prompt.row_id, a, b) for prompt, a, b in zip(prompts, first, second, strict=True)]


def majority_verdict(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict that more than half of them are; a tie where none is, None of none."""
    label = majority_label(verdicts)
    return TIE if label is None and verdicts else label


def write_annotation_form(path: Path, prompts: Sequence[Prompt], ours: Sequence[str], baseline: Sequence[str]) -> None:
    """Write every pair of different responses once, on a line each, for people or another program to fill in."""
    rows = {}
    for prompt, *texts in zip(prompts, ours, baseline, strict=True):
        first, second = sorted(texts, key=lambda text: hash_of([prompt.row_id, sorted(texts), text]))
        shown = {"id": prompt.row_id, "prompt": prompt.prompt, "first": first, "second": second, "verdict": None}
        rows |= {json.dumps(shown, ensure_ascii=False): None} if first != second else {}
    write_text(path, "".join(f"{row}\n" for row in rows))


def file_judge(path: Path) -> PeopleJudge:
    """People's verdicts from a file of judgment rows (.jsonl or .jsonl.gz), such as a form that was filled in.

    Rows are told apart by `judge`, the person's name. Of a named person's verdicts on the same pair in the same order
    the last one counts, as labels are appended. How many rows are filled in is printed on standard error where some are
    not.

    Raises:
        UserError: rows that are no judgments, or two different ones of nobody named on one pair, with file:line; no
            verdict is filled in. The judge raises it where the file holds none of the pairs that it is asked about.
    """
    path = Path(path)
    rows = read_judgments(path)
    places = dict[tuple[str, Pair], Judgment]()
    problems = list[str]()
    for row in rows:
        place = row.judge, (row.id, row.first, row.second)
        earlier = places.get(place, row)
        if not row.judge and earlier.verdict != row.verdict:
            problems.append(
                f"{row.location}: id {row.id!r} has verdict {row.verdict}, but {earlier.verdict} in {earlier.location}"
            )
        places[place] = earlier if row.verdict is None else row
    filled = sum(row.verdict is not None for row in places.values())
    if not filled:
        problems.append(
            f"{filled} of {len(places)} verdicts are filled in in {path}: write 1, 0.5 or 0 for the response shown "
            "first as each row's `verdict`, and run this again"
        )
    raise_all(problems)
    if filled < len(places):
        print(f"{filled} of {len(places)} verdicts are filled in in {path}", file=sys.stderr)
    votes: dict[Pair, Votes] = {}
    for (person, pair), row in places.items():
        if row.verdict is not None:
            votes.setdefault(pair, {})[person] = row.verdict
    return PeopleJudge(path, votes)


def corrected_by_people(
    labels: Path, prompts: Sequence[Prompt], ours: Sequence[str], theirs: Sequence[str], verdicts: Sequence[Verdict]
) -> Figures | None:
    """`corrected_win_rate` of a judge's verdicts for our responses, with what people said of some of them in a file.

    None where they have said something of fewer than five different prompts.

    Args:
        labels: judgment rows, such as a form that was filled in: each counts for the texts in it, in either order.
        verdicts: of the judge, both orders merged.
    """
    people = file_judge(labels)
    item_votes = map(people.of_people, shown_pairs(prompts, ours, theirs))
    means = [fmean(votes.values()) if votes else None for votes in item_votes]
    names = [str(prompt.prompt) for prompt in prompts]
    if len({name for name, *pair in zip(names, means, verdicts, strict=True) if None not in pair}) < MIN_LABELS:
        return None
    return corrected_win_rate(verdicts, means, names)

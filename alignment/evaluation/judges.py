"""Judges of two responses, by scores, lengths or a file of verdicts; each pair is judged in both orders.

Rates and intervals are in winrate.py. No judge here calls a service.
"""

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alignment.data.rows.files import json_line_rows
from alignment.errors import UserError, raise_all
from alignment.evaluation.winrate import LOSS, TIE, WIN, Verdict, WinRate, merge_orders, paired_interval, win_rate
from alignment.files import write_text

if TYPE_CHECKING:
    from alignment.data.rows.records import Prompt

ROW = ("id", "first", "second", "verdict")  # of a form

Judge = Callable[[Sequence["Prompt"], Sequence[str], Sequence[str]], Sequence[Verdict]]
"""Prompts, responses shown first, responses shown second -> verdict for the one shown first; None: could not judge."""

ScoreFunction = Callable[[Sequence["Prompt"], Sequence[str]], Sequence[float]]
"""Prompts, one response to each -> one score each; higher is better, not a number: could not score."""


@dataclass(frozen=True)
class JudgeResult:
    """Verdicts of a judge on two sides.

    Attributes:
        win_rate: of ours, over the items that were judged.
        verdicts: for ours, one per prompt in order, both orders merged; None where the judge failed.
        inconsistent: items whose two orders disagreed; they count half and narrow no interval, see `win_rate`.
        failures: items without a verdict, in no rate.
        position_bias: mean verdict for the response shown first, over both orders of the judged items; 0.5 is no bias.
        inconsistent_interval: of the share of inconsistent items, 95 %.
        position_bias_interval: of the position bias, 95 %; the two orders of an item are a pair.
    """

    win_rate: WinRate
    verdicts: list[Verdict]
    inconsistent: int
    failures: int
    position_bias: float
    inconsistent_interval: tuple[float, float]
    position_bias_interval: tuple[float, float]


def compare(
    prompts: Sequence["Prompt"],
    ours: Sequence[str],
    baseline: Sequence[str],
    judge: Judge,
    *,
    max_failed_share: float = 0.1,
) -> JudgeResult:
    """Judge each pair of responses in both orders, the judge being called once with all of them."""
    verdicts = list(judge([*prompts, *prompts], [*ours, *baseline], [*baseline, *ours]))
    if len(verdicts) != 2 * len(prompts):
        raise ValueError(f"the judge gave {len(verdicts)} verdicts on {2 * len(prompts)} pairs")
    merged = merge_orders(verdicts[: len(prompts)], verdicts[len(prompts) :])
    judged = [verdict for verdict in merged.verdicts if verdict is not None]
    if not judged or merged.failures > max_failed_share * len(prompts):
        raise UserError(
            f"the judge failed on {merged.failures} of {len(prompts)} items; at most {max_failed_share:.0%} may fail, "
            "since failures are seldom a fair sample. Check the items that it could not judge, or raise max_failed_share"
        )
    orders = zip(verdicts[: len(prompts)], verdicts[len(prompts) :], strict=True)
    leads = [one + other - 1 for one, other in orders if one is not None and other is not None]  # of first over second
    n, ahead, behind = len(leads), sum(max(lead, 0) for lead in leads), sum(max(-lead, 0) for lead in leads)
    return JudgeResult(
        win_rate(judged, inconsistent=merged.inconsistent),
        merged.verdicts,
        merged.inconsistent,
        merged.failures,
        position_bias=(1 + (ahead - behind) / n) / 2,
        inconsistent_interval=paired_interval(merged.inconsistent, n - merged.inconsistent, n),
        position_bias_interval=paired_interval(ahead, behind, n),
    )


def score_judge(score: ScoreFunction, tie_margin: float = 0.0) -> Judge:
    """A judge that prefers the higher score, such as the gold reward or a reward model.

    Each distinct response is scored once, so that equal texts tie even if the scorer is noisy.

    Args:
        score: called once with all distinct (prompt, response) pairs.
        tie_margin: largest difference of scores that is still a tie, >= 0.
    """

    def judge(prompts: Sequence["Prompt"], first: Sequence[str], second: Sequence[str]) -> list[Verdict]:
        responses = {
            (id(prompt), response): prompt
            for side in (first, second)
            for prompt, response in zip(prompts, side, strict=True)
        }
        scores = score(list(responses.values()), [response for _, response in responses])
        known = {key: float(value) for key, value in zip(responses, scores, strict=True)}
        leads = [
            known[id(prompt), a] - known[id(prompt), b] for prompt, a, b in zip(prompts, first, second, strict=True)
        ]
        return [
            None if math.isnan(lead) else TIE if abs(lead) <= tie_margin else WIN if lead > 0 else LOSS
            for lead in leads
        ]

    return judge


longer_judge: Judge = score_judge(lambda _, responses: [len(response) for response in responses])
"""Prefers the response with more characters: the baseline that any judge must beat."""


def write_annotation_form(
    path: Path, prompts: Sequence["Prompt"], ours: Sequence[str], baseline: Sequence[str]
) -> None:
    """Write every pair that `compare` judges, in both orders and on a line each, for people or another program to fill in."""
    rows = [
        {"id": prompt.row_id, "prompt": prompt.prompt, "first": first, "second": second, "verdict": None}
        for one, other in ((ours, baseline), (baseline, ours))
        for prompt, first, second in zip(prompts, one, other, strict=True)
    ]
    lines = dict.fromkeys(json.dumps(row, ensure_ascii=False) for row in rows)  # each pair and order only once
    write_text(path, "".join(f"{line}\n" for line in lines))


def file_judge(path: Path) -> Judge:
    """A judge that takes its verdicts from a file of rows as `write_annotation_form` writes them (.jsonl or .jsonl.gz).

    `verdict` is 1, 0.5 or 0 for the response shown first; null, or a pair that is not in the file, is a failure. The
    texts are part of the key, so that verdicts on older responses do not count for these. How many are filled in is
    printed on standard error where some are not.

    Raises:
        UserError: rows that are not of this form, or two different verdicts on one pair, with file:line; no verdict is
            filled in. The judge raises it where the file holds none of the pairs that it is asked about.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: cannot read the verdicts: no such file")
    verdicts: dict[tuple[str, str, str], tuple[str, Verdict]] = {}
    problems: list[str] = []
    for row in json_line_rows(path):
        problem = _row_problem(row.values or {})
        if row.values is None or problem:
            problems.append(row.problem if row.values is None else f"{row.location}: {problem}")
            continue
        name, first, second, verdict = (row.values[key] for key in ROW)
        verdict = None if verdict is None else float(verdict)
        earlier_location, earlier = verdicts.setdefault((name, first, second), (row.location, verdict))
        if earlier != verdict:
            problems.append(f"{row.location}: id {name!r} has verdict {verdict}, but {earlier} in {earlier_location}")
    if not verdicts and not problems:
        problems.append(f"{path}: no verdicts in this file")
    filled = sum(verdict is not None for _, verdict in verdicts.values())
    if not filled and not problems:
        problems.append(
            f"0 of {len(verdicts)} verdicts are filled in in {path}: write 1, 0.5 or 0 for the response shown first as "
            "each row's `verdict`, and run this again"
        )
    raise_all(problems)
    if filled < len(verdicts):
        print(f"{filled} of {len(verdicts)} verdicts are filled in in {path}", file=sys.stderr)

    def judge(prompts: Sequence["Prompt"], first: Sequence[str], second: Sequence[str]) -> list[Verdict]:
        keys = [(prompt.row_id, a, b) for prompt, a, b in zip(prompts, first, second, strict=True)]
        if not verdicts.keys() & set(keys):
            raise UserError(
                f"{path}: its verdicts are on other prompts or responses, none on these {len(prompts)}; put the "
                "responses.jsonl and sampling.json that it was made from into the output directory, or let another file "
                "be written as a form"
            )
        return [verdicts.get(key, ("", None))[1] for key in keys]

    return judge


def _row_problem(row: Mapping[str, object]) -> str:
    """The reason why a row holds no verdict in the form's shape; empty where it does."""
    if missing := [key for key in ROW if key not in row]:
        return f"no {', '.join(map(repr, missing))}; found {', '.join(map(repr, row))}"
    if wrong := [key for key in ROW[:3] if not isinstance(row[key], str)]:
        return f"{', '.join(map(repr, wrong))} must be text"
    verdict = row["verdict"]
    valid = not isinstance(verdict, bool) and verdict in (WIN, TIE, LOSS, None)
    return "" if valid else f"'verdict' must be 1, 0.5, 0 or null, found {verdict!r}"

"""A judge held against people (`alignment evaluate judge`): its agreement with them, what it prefers, what its win rates are worth.

The rows are read in labeled_items.py; the statistics are in agreement.py and corrected.py, the page in report/judge_page.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Annotated, get_args

import numpy as np
from annotated_types import Interval

from alignment.data.rows.files import SUFFIXES
from alignment.errors import UserError
from alignment.evaluation.agreement import (
    Figures,
    Label,
    Level,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    macro_scores,
    mean_figures,
    vote_agreement,
)
from alignment.evaluation.corrected import MIN_LABELS, corrected_win_rate, labels_needed
from alignment.evaluation.inputs import check_hotel_prompts
from alignment.evaluation.judge_config import JudgeConfig
from alignment.evaluation.judge_faults import judgment_figures
from alignment.evaluation.judges import Judge, build_judge, compare, longer_judge
from alignment.evaluation.labeled_items import Items, LabelColumns, LabeledItem, add_items
from alignment.evaluation.logged_judge import LoggedJudge
from alignment.evaluation.report.judge_page import print_judge, write_judge_page
from alignment.evaluation.winrate import TIE, Verdict
from alignment.files import write_json

Judged = Sequence[
    tuple[LabeledItem, float]
]  # items and the judge's verdicts for the first response, both orders merged


@dataclass(frozen=True, kw_only=True)
class JudgeEvalConfig(JudgeConfig, LabelColumns):
    """Settings of a judge's evaluation on items that people have judged.

    Attributes:
        labels: file of rows with people's labels, or several: judgments, votes for models, comparisons, or rows of two
            responses whose columns `columns` names. With several files, figures are given for each.
        output: directory of results.json and judge.html, and of the judge's calls, which a later start reads again.
        verdicts: for judge=verdicts: a column of the rows, or a file (.jsonl, .csv, ...) of the judge's verdicts, rows of a
            known form with the same ids. Those on items that no person has judged count too: they narrow the corrected win rates.
        width: of a 95 % interval of a win rate, for which the labels needed are counted; 0.1 is +- 5 points.
    """

    labels: str | list[str]
    output: str
    width: Annotated[float, Interval(gt=0, lt=1)] = 0.1


def run(config: JudgeEvalConfig) -> Path:
    """Judge what people have judged, compare, and write `results.json`, `judge.html` and tables on the screen."""
    items: Items = {}
    files = [config.labels] if isinstance(config.labels, str) else config.labels
    verdicts = config.verdicts if config.judge == "verdicts" and config.verdicts else ""
    in_column = bool(verdicts) and not verdicts.endswith(SUFFIXES)
    rows = replace(config, columns={**config.columns, "verdict": verdicts}) if in_column else config
    for file in files:
        add_items(file, rows, items, subset=Path(file).name.partition(".")[0] if len(files) > 1 else "")
    if verdicts and not in_column:
        add_items(verdicts, config, items, by_judge=True)
    found = list(items.values())
    if not any(item.votes and (item.verdicts or not verdicts) for item in found):
        wanted = "a label of people" + (f" and a verdict of {verdicts}" if verdicts else "")
        raise UserError(f"{', '.join(files)}: no item has {wanted}; compare their ids and sides, and `annotators`")
    if not verdicts and (mute := [item.prompt.row_id for item in found if not item.has_texts]):
        raise UserError(
            f"{mute[0]}: no responses for judge={config.judge} to read; name their columns, first and second"
        )
    prompts = [item.prompt for item in found]
    if config.judge == "gold":
        check_hotel_prompts(prompts, "judge=gold")
    judge = judge_of_rows(found) if verdicts else build_judge(config, Path(config.output))
    sides = [item.first for item in found], [item.second for item in found]
    judged = compare(prompts, *sides, judge, max_failed_share=config.max_failed_share)
    results = {
        "judge": judge.name if isinstance(judge, LoggedJudge) else verdicts,
        "items": len(found),
        "failures": judged.failures,
        **judge_figures(found, judged.verdicts, config.width),
    }
    if not verdicts or any(len(item.verdicts) > 1 for item in found):
        orders = judgment_figures(judged)
        results |= {key: orders[key] for key in ("inconsistent", "position_bias")}
    results |= {"calls": judge.usage()} if isinstance(judge, LoggedJudge) else {}
    write_json(Path(config.output) / "results.json", results)
    write_judge_page(Path(config.output) / "judge.html", results)
    print_judge(results)
    return Path(config.output) / "results.json"


def judge_of_rows(items: Sequence[LabeledItem]) -> Judge:
    """A judge that gives the verdicts of the items' rows, those of one order for both where there is one."""

    def shown(item: LabeledItem, swapped: bool) -> Verdict:
        verdict = item.verdicts.get(swapped, item.verdicts.get(not swapped))
        return 1 - verdict if swapped and verdict is not None else verdict

    return lambda *_: [shown(item, swapped) for swapped in (False, True) for item in items]


# The figures


def judge_figures(items: Sequence[LabeledItem], verdicts: Sequence[Verdict], width: float) -> Figures:
    """The figures of results.json, from a judge's verdict for the first response of each item; `width` as in the config."""
    judged = [(item, verdict) for item, verdict in zip(items, verdicts, strict=True) if verdict is not None]
    voted = [(item, verdict) for item, verdict in judged if item.votes]
    decided = [(verdict, item.label) for item, verdict in voted if item.label is not None]
    subsets = sorted({item.subset for item, _ in voted})
    clusters = [item.cluster for item, _ in voted]
    people = [list(item.votes.values()) for item, _ in voted]
    both = [[*item.votes.values(), verdict] for item, verdict in voted]
    return {
        "labeled": sum(bool(item.votes) for item in items),
        "without_majority": len(voted) - len(decided),
        "agreement": agreement_figures(voted),
        "subsets": {
            name: agreement_figures([row for row in voted if row[0].subset == name])
            for name in subsets
            if len(subsets) > 1
        },
        "macro": macro_scores(*zip(*decided, strict=True)) if decided else None,
        "alpha": {
            name: {level: krippendorff_alpha(rows, level=level, clusters=clusters) for level in get_args(Level)}
            for name, rows in (("people", people), ("people and judge", both))
        },
        "longer": longer_figures(voted),
        **win_rate_figures(judged, width),
    }


def agreement_figures(voted: Judged) -> Figures:
    """Agreement of the judge with most people and with each, of the longer response, and of people among themselves."""

    def compared(rows: Sequence[tuple[LabeledItem, Label, Label]], *, pooled: bool = False) -> Figures:
        known = [row for row in rows if None not in row]
        votes, clusters = [row[1:] for row in known], [item.cluster for item, *_ in known]
        first, second = [one for one, _ in votes], [other for _, other in votes]
        kappa = fleiss_kappa(votes, clusters) if pooled else cohen_kappa(first, second, clusters)
        return {**vote_agreement(votes, clusters), "kappa": kappa}

    items, own = [item for item, _ in voted], [verdict for _, verdict in voted]
    longer = longer_judge(
        [item.prompt for item in items], [item.first for item in items], [item.second for item in items]
    )
    found = {"judge": compared([(item, verdict, item.label) for item, verdict in voted])}
    if all(item.has_texts for item in items) and longer != own:
        rows = zip(items, longer, strict=True)
        found["the longer response"] = compared([(item, verdict, item.label) for item, verdict in rows])
    if pairs := [(item, *pair) for item in items for pair in combinations(item.votes.values(), 2)]:
        found["judge and one person"] = compared(
            [(item, one, vote) for item, one in voted for vote in item.votes.values()]
        )
        found["two people"] = compared(pairs, pooled=True)
    return found


def longer_figures(voted: Judged) -> Figures | None:
    """Share of wins of the longer response by judge and by people, and the difference; None without texts of two lengths."""
    leads = [np.sign(len(item.first) - len(item.second)) * item.has_texts for item, _ in voted]
    unequal = [(lead, *row) for lead, row in zip(leads, voted, strict=True) if lead]
    verdicts = np.array([(lead, verdict, item.mean_vote) for lead, item, verdict in unequal]).reshape(-1, 3).T
    judge, people = TIE + verdicts[0] * (verdicts[1:] - TIE)
    parts, clusters = (
        {"judge": judge, "people": people, "difference": judge - people},
        [row[1].cluster for row in unequal],
    )
    return {name: mean_figures(values, clusters) for name, values in parts.items()} if unequal else None


def win_rate_figures(judged: Judged, width: float) -> Figures:
    """Corrected win rates of the first model of each pair, and the labels that an interval takes.

    The correlation of judge and people is that within pairs of models, and around one half where no models are named.
    """
    groups: dict[str, list[tuple[LabeledItem, float]]] = {}
    for item, verdict in judged:
        groups.setdefault(item.pair, []).append((item, verdict))
    pairs, rest = dict[str, Figures](), list[np.ndarray]()
    for pair, rows in sorted(groups.items()):
        known = np.array([(verdict, item.mean_vote) for item, verdict in rows if item.votes]).reshape(-1, 2)
        rest.append(known - (known.mean(0) if pair and len(known) else TIE))
        if pair and len(known) >= MIN_LABELS:
            sides = [verdict for _, verdict in rows], [item.mean_vote for item, _ in rows]
            pairs[pair] = corrected_win_rate(*sides, [item.cluster for item, _ in rows])
    errors = [abs(figures["bias"]) for figures in pairs.values()]
    moments = np.concatenate(rest).T @ np.concatenate(rest)
    people, scale = moments[1, 1] / max(sum(map(len, rest)), 1), (moments[0, 0] * moments[1, 1]) ** 0.5
    correlation = max(float(moments[0, 1] / scale), 0.0) if scale else 0.0  # a judge who errs on purpose is not used
    return {
        "pairs": pairs,
        "error": {"mean": fmean(errors), "largest": max(errors), "n": len(errors)} if errors else None,
        "labels": {
            "correlation": correlation,
            "worth": 1 / (1 - correlation**2) if correlation < 1 else None,
            "width": width,
            "needed": labels_needed(width, correlation=correlation, variance=float(people)) if people else None,
            "without_judge": labels_needed(width, variance=float(people)) if people else None,
        },
    }

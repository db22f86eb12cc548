"""A judge held against people (`alignment evaluate judge`): agreement with them, preferences, worth of its win rates.

The rows are read in labeled_items.py; the statistics are in agreement.py and corrected.py.
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
from alignment.files import write_figures
from alignment.judging.config import JudgeConfig
from alignment.judging.faults import judgment_figures
from alignment.judging.inputs import check_hotel_prompts
from alignment.judging.judges import Judge, JudgeResult, build_judge, compare, longer_judge
from alignment.judging.labeled_items import Items, LabelColumns, LabeledItem, add_items
from alignment.judging.logged_judge import LoggedJudge
from alignment.reports.html import Section, format_cell, format_share, render_page, table_of
from alignment.reports.recipe_report import print_table
from alignment.statistics.agreement import (
    Figures,
    Level,
    cohen_kappa,
    fleiss_kappa,
    krippendorff_alpha,
    mean_figures,
    vote_agreement,
)
from alignment.statistics.corrected import MIN_LABELS, corrected_win_rate, labels_needed
from alignment.statistics.winrate import TIE, Verdict
from alignment.training.run.directory import locked

# items and the judge's verdicts for the first response, both orders merged
Judged = Sequence[tuple[LabeledItem, float]]
Votes = tuple[LabeledItem, Verdict, Verdict]  # of two raters


@dataclass(frozen=True, kw_only=True)
class JudgeEvalConfig(JudgeConfig, LabelColumns):
    """Settings of a judge's evaluation on items that people have judged.

    Attributes:
        labels: file of rows with people's labels, or several: judgments, votes for models, comparisons, or rows of two
            responses whose columns `columns` names. With several files, figures are given for each.
        output: directory of results.json and judge.html, and of the judge's calls, which a later start reads again.
        verdicts: for judge=verdicts: a column of the rows, or a file (.jsonl, .csv, ...) of the judge's verdicts, rows
            of a known form with the same ids. Those on items that no person has judged count too: they narrow the
            corrected win rates.
        width: of a 95 % interval of a win rate, for which the labels needed are counted; 0.1 is +- 5 points.
    """

    labels: str | list[str]
    output: str
    width: Annotated[float, Interval(gt=0, lt=1)] = 0.1


@locked
def run(config: JudgeEvalConfig) -> Path:
    """Judge what people have judged, compare, and write `results.json`, `judge.html` and tables on the screen."""
    output = Path(config.output)
    verdicts = config.verdicts if config.judge == "verdicts" and config.verdicts else ""
    items = read_items(config, verdicts)
    if config.judge == "gold":
        check_hotel_prompts([item.prompt for item in items], "judge=gold")
    judge = judge_of_rows(items) if verdicts else build_judge(config, output)
    judged = judge_items(items, judge, config.max_failed_share)
    results = {
        "judge": judge.name if isinstance(judge, LoggedJudge) else verdicts,
        "items": len(items),
        "failures": judged.failures,
        **judge_figures(items, judged.verdicts, config.width),
    }
    twice = [item for item in items if len(item.verdicts) > 1 and None not in item.verdicts.values()]
    if twice or not verdicts:
        orders = judgment_figures(judge_items(twice, judge_of_rows(twice)) if verdicts else judged)
        results |= {key: orders[key] for key in ("inconsistent", "position_bias")}
    results |= {"calls": judge.usage()} if isinstance(judge, LoggedJudge) else {}
    path = write_figures(output / "results.json", results)
    show_results(path.with_name("judge.html"), results)
    return path


def judge_items(items: Sequence[LabeledItem], judge: Judge, max_failed_share: float = 1.0) -> JudgeResult:
    """The judgments on items, both orders of each."""
    sides = [item.first for item in items], [item.second for item in items]
    return compare([item.prompt for item in items], *sides, judge, max_failed_share=max_failed_share)


def read_items(config: JudgeEvalConfig, verdicts: str) -> list[LabeledItem]:
    """The items of the config's files, with `verdicts`, a file or a column of the rows, unless that is empty."""
    items: Items = {}
    files = [config.labels] if isinstance(config.labels, str) else config.labels
    for file in files:
        add_items(file, config, items, subset=Path(file).name.partition(".")[0] if len(files) > 1 else "")
    judged = [(file, {**config.columns, "label": verdicts}) for file in files if verdicts]
    if verdicts.endswith(SUFFIXES):
        judged = [(verdicts, {})]
    for file, columns in judged:
        add_items(file, replace(config, columns=columns), items, by_judge=True)
    labeled_items = list(items.values())
    if not any(item.votes and (item.verdicts or not verdicts) for item in labeled_items):
        wanted = "a label of people" + (f" and a verdict of {verdicts}" if verdicts else "")
        raise UserError(f"{', '.join(files)}: no item has {wanted}; compare their ids and sides, and `annotators`")
    mute = [item.prompt.row_id for item in labeled_items if not (verdicts or item.first or item.second)]
    if mute:
        raise UserError(
            f"{mute[0]}: no responses for judge={config.judge} to read; name their columns, first and second"
        )
    return labeled_items


def judge_of_rows(items: Sequence[LabeledItem]) -> Judge:
    """A judge that gives the verdicts of the items' rows, those of one order for both where there is one."""

    def shown(item: LabeledItem, swapped: bool) -> Verdict:
        verdict = item.verdicts.get(swapped, item.verdicts.get(not swapped))
        return 1 - verdict if swapped and verdict is not None else verdict

    return lambda *_: [shown(item, swapped) for swapped in (False, True) for item in items]


# The figures


def judge_figures(items: Sequence[LabeledItem], verdicts: Sequence[Verdict], width: float) -> Figures:
    """The figures of results.json, from a judge's verdict for each item's first response; `width` as in the config."""
    judged = [(item, verdict) for item, verdict in zip(items, verdicts, strict=True) if verdict is not None]
    voted = [(item, verdict) for item, verdict in judged if item.votes]
    subsets = sorted({item.subset for item, _ in voted})
    by_subset = {}
    for name in subsets if len(subsets) > 1 else ():
        by_subset[name] = agreement_figures([row for row in voted if row[0].subset == name])
    clusters = [item.cluster for item, _ in voted]
    labels = {
        "people": [list(item.votes.values()) for item, _ in voted],
        "people and judge": [[*item.votes.values(), verdict] for item, verdict in voted],
    }
    return {
        "labeled": sum(bool(item.votes) for item in items),
        "without_majority": sum(item.label is None for item, _ in voted),
        "agreement": agreement_figures(voted),
        "subsets": by_subset,
        "alpha": {
            name: {level: krippendorff_alpha(rows, level=level, clusters=clusters) for level in get_args(Level)}
            for name, rows in labels.items()
        },
        "longer": longer_figures(voted),
        **win_rate_figures(judged, width),
    }


def agreement_figures(voted: Judged) -> Figures:
    """Agreement of the judge with most people and with each, of the longer response, and of people among themselves."""
    items = [item for item, _ in voted]
    sides = [item.first for item in items], [item.second for item in items]
    longer = longer_judge([item.prompt for item in items], *sides)
    rows: dict[str, Sequence[Votes]] = {"judge": [(item, verdict, item.label) for item, verdict in voted]}
    # there are texts of two lengths, and another judge
    if {*longer} - {TIE} and longer != [verdict for _, verdict in voted]:
        rows["the longer response"] = [(item, verdict, item.label) for item, verdict in zip(items, longer, strict=True)]
    if pairs := [(item, *pair) for item in items for pair in combinations(item.votes.values(), 2)]:
        rows["judge and one person"] = [(item, one, vote) for item, one in voted for vote in item.votes.values()]
        rows["two people"] = pairs
    figures = {}
    for name, compared in rows.items():
        known = [row for row in compared if None not in row]
        votes = [row[1:] for row in known]
        clusters = [item.cluster for item, *_ in known]
        raters = [one for one, _ in votes], [other for _, other in votes]
        kappa = fleiss_kappa(votes, clusters) if name == "two people" else cohen_kappa(*raters, clusters)
        figures[name] = {**vote_agreement(votes, clusters), "kappa": kappa}
    return figures


def longer_figures(voted: Judged) -> Figures | None:
    """Share of wins of the longer response by judge and by people, and the difference; None if all texts are as long.

    The bounds are within those of a share, or of a difference of two, and are these where nothing is known.
    """
    rows = [(item, verdict) for item, verdict in voted if len(item.first) != len(item.second)]
    leads = np.sign([len(item.first) - len(item.second) for item, _ in rows])
    verdicts = np.array([(verdict, item.mean_vote) for item, verdict in rows]).reshape(-1, 2).T
    judge, people = TIE + leads * (verdicts - TIE)
    shares = {"judge": judge, "people": people, "difference": judge - people}
    clusters = [item.cluster for item, _ in rows]
    figures = {name: mean_figures(values, clusters) for name, values in shares.items()} if rows else {}
    for name, share in figures.items():
        lowest = -1.0 if name == "difference" else 0.0
        share["low"] = lowest if share["low"] is None else max(share["low"], lowest)
        share["high"] = 1.0 if share["high"] is None else min(share["high"], 1.0)
    return figures or None


def win_rate_figures(judged: Judged, width: float) -> Figures:
    """Corrected win rates of the first model of each pair, and the labels that an interval takes.

    The correlation of judge and people is that within pairs of models, and around one half where no models are named.
    It is at most that of half an item's disagreement, and None with fewer than five labeled clusters; `unlabeled` are
    the pairs of models with fewer.
    """
    pairs = dict[str, Figures]()
    rest = list[np.ndarray]()
    unlabeled = list[str]()
    for pair in sorted({item.pair for item, _ in judged}):
        rows = [row for row in judged if row[0].pair == pair]
        known = np.array([(verdict, item.mean_vote) for item, verdict in rows if item.votes]).reshape(-1, 2)
        rest.append(known - (known.mean(0) if pair and len(known) else TIE))
        if pair and len({item.cluster for item, _ in rows if item.votes}) < MIN_LABELS:
            unlabeled.append(pair)
        elif pair:
            sides = [verdict for _, verdict in rows], [item.mean_vote for item, _ in rows]
            pairs[pair] = corrected_win_rate(*sides, [item.cluster for item, _ in rows])
    errors = [abs(figures["bias"]) for figures in pairs.values()]
    moments = np.concatenate(rest).T @ np.concatenate(rest)
    people = moments[1, 1] / max(sum(map(len, rest)), 1)
    scale = (moments[0, 0] * moments[1, 1]) ** 0.5
    correlation = max(float(moments[0, 1] / scale), 0.0) if scale else 0.0  # a judge who errs on purpose is not used
    clusters = len({item.cluster for item, _ in judged if item.votes})
    correlation = min(correlation, (1 - 0.5 / max(clusters, 1)) ** 0.5)
    is_known = clusters >= MIN_LABELS
    needed = labels_needed(width, correlation=correlation, variance=float(people)) if people else None
    return {
        "pairs": pairs,
        "unlabeled": unlabeled,
        "error": {"mean": fmean(errors), "largest": max(errors), "n": len(errors)} if errors else None,
        "labels": {
            "correlation": correlation if is_known else None,
            "worth": 1 / (1 - correlation**2) if is_known else None,
            "width": width,
            "needed": needed if is_known else None,
            "without_judge": labels_needed(width, variance=float(people)) if people else None,
        },
    }


# The page


def show_results(path: Path, results: Figures) -> None:
    """Write the results as a self-contained page, and print its tables and sentences on standard output."""
    orders = {"the two orders contradict each other": "inconsistent", "the response shown first wins": "position_bias"}
    leans = {name: {"judge": results[key]} for name, key in orders.items() if key in results}
    longer = results["longer"] or {}
    shares = {name: {**share, "rate": share["value"]} for name, share in longer.items()}
    leans |= {"the longer response wins": shares} if shares else {}
    subsets = {name: figures["judge"] for name, figures in results["subsets"].items()}
    sections = [
        Section(
            "agreement",
            "Agreement",
            "The judge with most people and with each, and beside it people among themselves, the "
            "measure of all judges. Kappa and alpha are 0 for agreement by chance and 1 for no disagreement.",
            tables=[
                table_of(results["agreement"]),
                table_of(subsets),
                table_of(results["alpha"], "Krippendorff's alpha"),
            ],
        ),
        Section(
            "preferences", "Preferences", "What the judge prefers beyond what people do.", tables=[table_of(leans)]
        ),
        Section(
            "win_rates",
            "Win rates",
            "Win rate of the first model of each pair: by the judge on all items, by people's labels on "
            "some, and corrected: the labels' rate with the judge's verdicts on the other items (prediction-powered). "
            "Rogan-Gladen's takes the judge's errors alone from the labels; a dash: they are too many, or too little "
            "known.",
            tables=[table_of(results["pairs"])],
        ),
    ]
    sentences = judge_sentences(results)
    sections = [section for section in sections if any(section.tables)]
    render_page(path, kind="judge", title=str(results["judge"]), summary=" ".join(sentences), sections=sections)
    for table in [table for section in sections for table in section.tables if not isinstance(table, str)]:
        print_table(table)
    print("\n".join(sentences))


def judge_sentences(results: Figures) -> list[str]:
    """The meaning of the figures."""
    judge = results["agreement"]["judge"]
    labels = results["labels"]
    error = results["error"]
    sentences = [
        f"Of {results['items']} items people have judged {results['labeled']}, {results['without_majority']} of them "
        f"without a majority; the judge failed on {results['failures']}."
    ]
    if judge["with_ties"] is not None:
        agreed = format_share(judge["with_ties"])
        sentences.append(
            f"The judge gives the verdict of most people on {agreed}, kappa {format_cell(judge['kappa'])}."
        )
    if error is not None:
        sentences.append(
            f"Over {error['n']} pairs of models the judge's win rate is {100 * error['mean']:.1f} points off people's "
            f"on the same items in the mean, {100 * error['largest']:.1f} at most: compare models by the corrected "
            "rate."
        )
    few = f"people have labeled fewer than {MIN_LABELS} items, or prompts"
    if results["unlabeled"]:
        sentences.append(f"No win rate of {', '.join(results['unlabeled'])}: {few}.")
    if labels["correlation"] is None:
        sentences.append(f"A label's worth is not known: {few}.")
        return sentences
    sentences.append(
        f"Beside the judge's verdicts one label of people counts as {format_cell(labels['worth'])} (correlation "
        f"{labels['correlation']:.2f}): a correction takes the judge's bias out and replaces no labels. An interval of "
        f"{100 * labels['width']:g} points takes {labels['needed']} labels with the judge and "
        f"{labels['without_judge']} without."
    )
    return sentences

"""judge.html: a judge held against people, on one page and in words. The figures are computed in judge_run.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.evaluation.report.html import Row, Section, format_cell, format_share, render_page, with_interval
from alignment.evaluation.report.recipe_report import print_table

Results = Mapping[str, Any]  # of results.json, or a part of it


def write_judge_page(path: Path, results: Results) -> Path:
    """Write the results as a self-contained HTML page and return its path."""
    tables = judge_tables(results)
    leads = {
        "agreement": "The judge with most people and with each, and beside it people among themselves, the measure of all judges. "
        "Kappa and alpha are 0 for agreement by chance and 1 for no disagreement.",
        "preferences": "What the judge prefers beyond what people do.",
        "win rates": "Win rate of the first model of each pair: by the judge on all items, by people's labels on some, and corrected: "
        "the labels' rate with the judge's verdicts on the other items (prediction-powered). Rogan-Gladen's takes the judge's "
        "errors alone from the labels; a dash: they are too many, or too little known.",
    }
    sections = [
        Section(name.replace(" ", "_"), name.capitalize(), leads[name], tables=found)
        for name, found in tables.items()
        if any(found)
    ]
    summary = " ".join(judge_sentences(results))
    return render_page(path, kind="judge", title=str(results["judge"]), summary=summary, sections=sections)


def print_judge(results: Results) -> None:
    """Print the tables and what they mean on standard output."""
    for table in [table for tables in judge_tables(results).values() for table in tables]:
        print_table(table)
    for sentence in judge_sentences(results):
        print(sentence)


def judge_tables(results: Results) -> dict[str, list[list[Row]]]:
    """The tables of each section."""
    leans = {"the longer response wins": results["longer"]} if results["longer"] else {}
    orders = {"the two orders contradict each other": "inconsistent", "the response shown first wins": "position_bias"}
    subsets = {name: figures["judge"] for name, figures in results["subsets"].items()}
    return {
        "agreement": [_table(results["agreement"]), _table(subsets), _table(results["alpha"], "Krippendorff's alpha")],
        "preferences": [
            _table(leans | {name: {"judge": results[key]} for name, key in orders.items() if key in results})
        ],
        "win rates": [_table(results["pairs"])],
    }


def _table(rows: Results, heading: str = "") -> list[Row]:
    return [
        {heading: name} | {key.replace("_", " "): _cell(value) for key, value in row.items()}
        for name, row in rows.items()
    ]


def _cell(value: object) -> object:
    if not isinstance(value, Mapping) or "value" not in value:
        return value
    return with_interval(value["value"], None if value["low"] is None else [value["low"], value["high"]])


def judge_sentences(results: Results) -> list[str]:
    """The meaning of the figures."""
    rows, labels = results["agreement"], results["labels"]
    found = [
        f"Of {results['items']} items people have judged {results['labeled']}, {results['without_majority']} of them without a "
        f"majority; the judge failed on {results['failures']}."
    ]
    words = {
        "judge": "The judge gives the verdict of most people on",
        "the longer response": "The longer response is theirs on",
        "two people": "Two people agree with each other on",
    }
    for name, sentence in words.items():
        if name in rows and rows[name]["with_ties"] is not None:
            found.append(f"{sentence} {format_share(rows[name]['with_ties'])}, kappa {_cell(rows[name]['kappa'])}.")
    if results["longer"] and results["longer"]["difference"]["low"] is not None:
        more = results["longer"]["difference"]
        points = f"{100 * more['value']:+.1f} points [{100 * more['low']:+.1f}, {100 * more['high']:+.1f}]"
        found.append(f"The judge gives the longer response {points} of wins over what people give it.")
    if error := results["error"]:
        found.append(
            f"Over {error['n']} pairs of models the judge's win rate is {100 * error['mean']:.1f} points off people's on the "
            f"same items in the mean, {100 * error['largest']:.1f} at most: compare models by the corrected rate."
        )
    found.append(
        f"Beside the judge's verdicts one label of people counts as {format_cell(labels['worth'])} (correlation "
        f"{labels['correlation']:.2f}): a correction takes the judge's bias out and replaces no labels. An interval of "
        f"{100 * labels['width']:g} points takes {labels['needed']} labels with the judge and {labels['without_judge']} without."
    )
    return found

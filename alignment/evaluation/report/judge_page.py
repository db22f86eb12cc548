"""judge.html: a judge held against people, on one page and in words. The figures are computed in judge_run.py."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.evaluation.report.html import Row, Section, format_share, render_page, with_interval
from alignment.evaluation.report.recipe_report import print_table

Results = Mapping[str, Any]  # of results.json, or a part of it


def write_judge_page(path: Path, results: Results) -> Path:
    """Write the results as a self-contained HTML page and return its path."""
    tables = judge_tables(results)
    leads = {
        "agreement": "Judge and majority of people, and beside it people among themselves: no judge can be asked for more. "
        "Kappa and alpha are 0 for agreement by chance and 1 for no disagreement.",
        "preferences": "What the judge prefers beyond what people do.",
        "models": "Win rate of the first model of each pair: by the judge, by people's labels, and by both together.",
    }
    sections = [
        Section(name, name.capitalize(), leads[name], tables=found) for name, found in tables.items() if any(found)
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
    orders = {
        name.replace("_", " "): {"judge": results[name]}
        for name in ("inconsistent", "position_bias")
        if name in results
    }
    return {
        "agreement": [_table(results["agreement"]), _table(results["subsets"]), _table({"": results["alpha"]})],
        "preferences": [_table({**leans, **orders})],
        "models": [_table(results["pairs"])],
    }


def _table(rows: Results) -> list[Row]:
    return [
        {"": name} | {key.replace("_", " "): _cell(value) for key, value in row.items()} for name, row in rows.items()
    ]


def _cell(value: Any) -> object:
    if not isinstance(value, Mapping) or "value" not in value:
        return value
    return value["value"] if value["low"] is None else with_interval(value["value"], [value["low"], value["high"]])


def judge_sentences(results: Results) -> list[str]:
    """The meaning of the figures."""
    judge, people, labels = results["agreement"]["judge"], results["agreement"]["two people"], results.get("labels")
    if judge["with_ties"] is None:
        return ["No item has both a verdict of the judge and a majority of people."]
    found = [
        f"The judge agrees with most people on {format_share(judge['with_ties'])} of {judge['with_ties']['n']} items "
        f"(kappa {_cell(judge['kappa'])})."
    ]
    if people["with_ties"] is not None:
        found.append(
            f"Two people agree on {format_share(people['with_ties'])} of them (kappa {_cell(people['kappa'])})."
        )
    if longer := results["agreement"].get("the longer response"):
        found.append(
            f"The longer response alone is right in {format_share(longer['with_ties'])} (kappa {_cell(longer['kappa'])})."
        )
    if results["longer"] and (more := results["longer"]["difference"])["low"] is not None:
        told = more["low"] > 0 or more["high"] < 0
        points = [f"{100 * more[key]:+.1f}" for key in ("value", "low", "high")]
        found.append(
            f"It prefers the {'longer' if more['value'] > 0 else 'shorter'} response {'more' if told else 'no more, as far as can be told,'} "
            f"than people do: {points[0]} points [{points[1]}, {points[2]}]."
        )
    if error := results.get("error"):
        found.append(
            f"Over {error['n']} pairs of models its win rate is off from people's on the same items by {100 * error['mean']:.1f} points "
            f"in the mean and {100 * error['largest']:.1f} at most: compare models by the corrected rate."
        )
    if labels and labels["worth"]:
        found.append(
            f"One label of people, corrected by the judge's verdicts on many items, counts as {labels['worth']:.2f} labels "
            f"(correlation {labels['correlation']:.2f}): the judge removes none of them. A 95 % interval of {100 * labels['width']:g} points "
            f"takes {labels['needed']} labels, and {labels['without_judge']} without the judge."
        )
    return found

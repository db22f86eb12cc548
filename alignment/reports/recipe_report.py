"""The report of a recipe: curves of each stage, results of the evaluation, one table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment.errors import raise_all
from alignment.files import read_json_object
from alignment.reports.html import Row, Section, format_cell, with_interval
from alignment.reports.page import PAIR_PARTS, write_report
from alignment.reports.reward_page import card_section
from alignment.reports.run_log import StageRecord, read_log_rows, read_run_log, read_stage_record
from alignment.reports.sentences import Results, describe_run, preference_sentence, winner
from alignment.settings import Settings

COLUMNS = {
    "proxy": "reward model",
    "kl": "KL from baseline, nats",
    "language_loss": "text loss, nats/token",
    "response_tokens": "tokens per reply",
    "ended_share": "share that ended",
}
ORDERS = {  # of a judge
    "length_controlled": "at equal length",
    "inconsistent": "orders disagree",
    "position_bias": "shown first preferred",
    "longer_preferred": "longer preferred",
}


@dataclass(frozen=True)
class ReportConfig(Settings):
    """Settings of a report.

    Attributes:
        output: directory of report.html.
        title: its heading.
        summary: a sentence or two under it, after the one that says who won.
        stages: name -> directory of each training run, in order.
        evaluation: directory of the results of `evaluate winrate`; None: the page has curves and lineage only.
        reward_models: name -> directory of the card that `evaluate reward` wrote.
        benchmarks: directory of the results of `evaluate benchmarks`.
    """

    output: str
    title: str
    summary: str = ""
    stages: dict[str, str] = field(default_factory=dict)
    evaluation: str | None = None
    reward_models: dict[str, str] = field(default_factory=dict)
    benchmarks: str | None = None


def run(config: ReportConfig) -> Path:
    """Write `output/report.html` and print its table."""
    metrics = {name: read_log_rows(Path(folder) / "metrics.jsonl") for name, folder in config.stages.items()}
    folders = {
        "winrate": [config.evaluation],
        "benchmarks": [config.benchmarks],
        "reward": config.reward_models.values(),
    }
    raise_all(
        f"{Path(folder) / 'results.json'}: not there; run `alignment evaluate {command}` first"
        for command, named in folders.items()
        for folder in named
        if folder and not (Path(folder) / "results.json").is_file()
    )
    results = read_json_object(Path(config.evaluation) / "results.json") if config.evaluation else {}
    runs = {name: read_run_log(folder) for name, folder in config.stages.items() if metrics[name]}
    lineage = [_record(name, Path(folder)) for name, folder in config.stages.items()]
    answer = winner(results) or " ".join(describe_run(run) for run in [*runs.values()][-1:])
    budgets = training_budgets(lineage, metrics, results.get("models", {}))
    path = write_report(
        Path(config.output) / "report.html",
        config.title,
        summary=f"{answer} {config.summary}".strip(),
        verdicts=[*verdicts(results), *(f"Warning: {warning}." for warning in results.get("warnings", []))],
        tables={"Policies": policy_rows(results), "Training": budgets},
        results=results,
        stages=metrics,
        samples=results.get("samples", []),
        lineage=lineage,
        runs=runs,
        further=[
            *(
                card_section(name, read_json_object(Path(directory) / "card.json"))
                for name, directory in config.reward_models.items()
            ),
            *(
                benchmark_section(read_json_object(Path(directory) / "results.json"))
                for directory in [config.benchmarks]
                if directory
            ),
        ],
    )
    print_results(results)
    print_table(budgets)
    print(f"report: {path}")
    return path


def summary_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per policy, the columns in the table's order."""
    rows = []
    for name, model in results.get("models", {}).items():
        row = {"policy": name, f"win rate against {results['baseline']}": model.get("win_rate")}
        if rates := (model.get("win_rate") or {}).get("rates"):
            row["of each seed, %"] = ", ".join(f"{100 * rate:.1f}" for rate in rates)
        row |= {"corrected by people": model["by_people"]["corrected"]} if model.get("by_people") else {}
        row |= {label: model[key] for key, label in ORDERS.items() if model.get(key) and model[key].get("n", 1)}
        if "gold" in model:
            row["gold reward"] = with_interval(model["gold"]["total"], model.get("gold_interval"))
        row |= {
            label: with_interval(model[key], model.get(f"{key}_interval"))
            for key, label in COLUMNS.items()
            if key in model
        }
        row |= {label: model["pairs"][key] for key, (label, _) in PAIR_PARTS.items()} if "pairs" in model else {}
        rows.append(row)
    return rows


def policy_rows(results: Results) -> list[Row]:
    """One row per policy without the columns on its judgments, which a page has in a table of their own."""
    return [{key: row[key] for key in row if key not in ORDERS.values()} for row in summary_rows(results)]


def training_budgets(
    lineage: Sequence[StageRecord], metrics: Mapping[str, Sequence[Row]], policies: Mapping[str, object]
) -> list[dict[str, object]]:
    """One row for each policy that a stage of its name has trained: updates, rows of each, learning rate."""
    return [
        {
            "policy": record.name,
            "updates": metrics[record.name][-1]["step"],
            "rows per update": record.settings.get("training", {}).get("batch_size"),
            "learning rate": record.settings.get("optim", {}).get("learning_rate"),
        }
        for record in lineage
        if record.name in policies and metrics[record.name]
    ]


def verdicts(results: Results) -> list[str]:
    """The winner of each comparison, and how far its judge can be believed, in words."""
    judge = results.get("judging", {}).get("judge", results.get("judge"))
    models = results.get("models", {})
    judged = {name: model for name, model in models.items() if "win_rate" in model}
    return [
        f"{preference_sentence(name, model['win_rate'], results['baseline'])}; judge: {judge}."
        + " The judge's two orders contradict each other on "
        f"{model['inconsistent']['count']} {'pairs in all' if 'seeds' in model else 'of them'}."
        * bool(model["inconsistent"]["count"])
        for name, model in judged.items()
    ]


def benchmark_section(results: Results) -> Section:
    """The section of `evaluate benchmarks`: each task's figure of each model, before and after training."""
    tables = {}
    for task, entry in results["tasks"].items():
        key = entry["figure"]
        change = f"change from {entry['against']}"
        tables[f"{task}, {entry['rows']} rows: {key.replace('_', ' ')}"] = [
            {"model": name, "value": figures[key], change: entry["differences"].get(name, {}).get(key)}
            for name, figures in entry["models"].items()
        ]
    return Section("benchmarks", "Benchmarks", "The same tasks on each model, with 95 % intervals.", tables=tables)


def print_results(results: Mapping[str, Any]) -> None:
    """Print the summary of an evaluation on standard output, and who won in words."""
    print_table(summary_rows(results))
    for sentence in verdicts(results):
        print(sentence)


def print_table(rows: Sequence[Row]) -> None:
    """Print a table on standard output."""
    if not rows:
        return
    from rich.console import Console
    from rich.table import Column, Table

    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*(Column(name, overflow="fold") for name in columns))
    for row in rows:
        table.add_row(*(format_cell(row.get(column)) for column in columns))
    Console(width=160).print(table)


def _record(name: str, folder: Path) -> StageRecord:
    """Lineage of one stage under its name in the recipe."""
    record = read_stage_record(folder)
    times = folder.parent / "stages.json"
    seconds = json.loads(times.read_text()).get(folder.name, {}).get("seconds") if times.is_file() else None
    return replace(record, name=name, parents=[Path(parent).parent.name for parent in record.parents], seconds=seconds)

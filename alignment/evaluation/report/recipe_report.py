"""The report of a recipe: curves of each stage, results of the evaluation, one table."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from alignment.errors import raise_all
from alignment.evaluation.diagnosis import diagnose
from alignment.evaluation.report.charts import Bar, bar_chart, padded_limits
from alignment.evaluation.report.conclusions import account, winner
from alignment.evaluation.report.html import Chart, Row, Section, format_cell, format_share, with_interval
from alignment.evaluation.report.page import PAIR_PARTS, write_report
from alignment.evaluation.report.reward_page import card_section
from alignment.evaluation.run_log import StageRecord, read_log_rows, read_run_log, read_stage_record
from alignment.files import read_json_object
from alignment.settings import Settings

COLUMNS = {
    "proxy": "reward model",
    "kl": "KL from baseline, nats",
    "language_loss": "text loss, nats/token",
    "response_tokens": "tokens per reply",
    "ended_share": "share that ended",
}
ORDERS = {  # of a judge
    "length_controlled": "at equal length", "inconsistent": "orders disagree", "position_bias": "shown first preferred",
    "longer_preferred": "longer preferred",
}  # fmt: skip


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
    evaluation, benchmarks = (
        folder and Path(folder) / "results.json" for folder in (config.evaluation, config.benchmarks)
    )
    cards = {name: Path(folder) / "card.json" for name, folder in config.reward_models.items()}
    wanted = {"winrate": [evaluation], "benchmarks": [benchmarks], "reward": cards.values()}
    raise_all(
        f"{file}: not there; run `alignment evaluate {command}` first"
        for command, files in wanted.items()
        for file in files
        if file and not file.is_file()
    )
    results = read_json_object(evaluation) if evaluation else {}
    runs = {name: read_run_log(folder) for name, folder in config.stages.items() if metrics[name]}
    findings = {name: diagnose(log) for name, log in runs.items()}
    lineage = [_record(name, Path(folder)) for name, folder in config.stages.items()]
    table = [{key: row[key] for key in row if key not in ORDERS.values()} for row in summary_rows(results)]
    finished = {record.name: record.lineage.get("finished", 0) for record in lineage}
    ends = [account(runs[name], finished[name], findings[name]) for name in runs]
    answer = winner(results) or " ".join(ends[-1:])
    budgets = training_budgets(lineage, metrics, results.get("models", {}))
    sections = [card_section(name, read_json_object(file)) for name, file in cards.items()]
    path = write_report(
        Path(config.output) / "report.html",
        config.title,
        summary=f"{answer} {config.summary}".strip(),
        verdicts=[*verdicts(results), *(f"Warning: {warning}." for warning in results.get("warnings", []))],
        tables={"Policies": table, "Training": budgets},
        results=results,
        stages=metrics,
        samples=results.get("samples", []),
        lineage=lineage,
        findings=findings,
        further=[*sections, *benchmark_sections(read_json_object(benchmarks) if benchmarks else {})],
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


def verdicts(results: Mapping[str, Any]) -> list[str]:
    """The winner of each comparison, and how far its judge can be believed, in words."""
    sentences = []
    for name, model in results.get("models", {}).items():
        if "win_rate" not in model:
            continue
        rate, baseline = model["win_rate"], results["baseline"]
        figures = f"{format_share(rate)} of {rate['n']}"
        if rate["low"] > 0.5:
            words = f"{name}'s responses are preferred to {baseline}'s: {figures}"
        elif rate["high"] < 0.5:
            words = f"{baseline}'s responses are preferred to {name}'s, which win {figures}"
        else:
            words = f"Between {name} and {baseline} nothing is decided: {name} wins {figures}, and the interval includes 50 %"
        words += f" (judge: {results.get('judging', {}).get('judge', results['judge'])})."
        if count := model["inconsistent"]["count"]:
            words += f" The judge's two orders contradict each other on {count} of them."
        sentences.append(words)
    return sentences


def benchmark_sections(results: Mapping[str, Any]) -> Iterator[Section]:
    """The section of `evaluate benchmarks`: each task's figures of each model, before and after training."""
    charts, tables = list[Chart](), dict[str, list[Row]]()
    for task, entry in results.get("tasks", {}).items():
        figure, against = entry["figure"], entry["against"]
        figures = {name: own[figure] for name, own in entry["models"].items()}
        bars = [Bar(name, own["value"], (own["low"], own["high"])) for name, own in figures.items()]
        limits = padded_limits([end for bar in bars for end in bar.interval or ()])
        title, unit = f"Benchmark: {task}", f"{figure.replace('_', ' ')}, 95 % interval"
        charts.append(Chart(title, unit, bar_chart(title, bars, limits=limits)))
        tables[f"{task}: {entry['rows']} rows"] = [
            {"model": name, **{key.replace("_", " "): value for key, value in own.items()},
             f"change from {against}, {figure.replace('_', ' ')}": entry["differences"].get(name, {}).get(figure)}
            for name, own in entry["models"].items()
        ]  # fmt: skip
    yield Section("benchmarks", "Benchmarks", "The same tasks on each model.", charts, tables)


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
    record, times = read_stage_record(folder), folder.parent / "stages.json"
    seconds = json.loads(times.read_text()).get(folder.name, {}).get("seconds") if times.is_file() else None
    return replace(record, name=name, parents=[Path(parent).parent.name for parent in record.parents], seconds=seconds)

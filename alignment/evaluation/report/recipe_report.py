"""The report of a recipe: curves of each stage, results of the evaluation, one table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.evaluation.report.page import (
    PAIR_PARTS,
    KLPoint,
    ReportData,
    Sample,
    SampleResponse,
    StageRecord,
    WinRateRow,
    format_cell,
    format_share,
    verdict_sentence,
    with_interval,
    write_report,
)
from alignment.evaluation.report.run_report import read_log_rows, read_stage_record
from alignment.evaluation.winrate import WinRate


@dataclass(frozen=True)
class ReportConfig:
    """Settings of a report.

    Attributes:
        output: directory of report.html.
        title: its heading.
        summary: a sentence or two under it.
        stages: name -> directory of each training run, in order.
        evaluation: directory of the results of `evaluate winrate`; None: the page has curves and lineage only.
    """

    output: str
    title: str
    summary: str = ""
    stages: dict[str, str] = field(default_factory=dict)
    evaluation: str | None = None


def run(config: ReportConfig) -> Path:
    """Write `output/report.html` and print its table.

    Raises:
        UserError: no results of a stage or of the evaluation.
    """
    metrics = {name: read_log_rows(Path(folder) / "metrics.jsonl") for name, folder in config.stages.items()}
    results = _read_results(config.evaluation)
    lineage = [_record(name, folder) for name, folder in config.stages.items()]
    updates = {name: lines[-1]["step"] for name, lines in metrics.items() if lines}
    rows = [{key: value for key, value in row.items() if key not in ORDERS} for row in summary_rows(results)]
    budgets = [{"policy": row["policy"], **training_budget(lineage, updates, row["policy"])} for row in rows]
    budgets = [row for row in budgets if len(row) > 1]
    data = ReportData(
        title=config.title,
        summary=config.summary,
        verdicts=[
            *map(verdict_sentence, win_rate_rows(results)),
            *(f"Warning: {warning}." for warning in results.get("warnings", [])),
        ],
        summary_table=rows,
        budget_table=budgets,
        win_rates=win_rate_rows(results),
        gold_parts={name: model["gold"] for name, model in results.get("models", {}).items() if "gold" in model},
        pairs={name: model["pairs"] for name, model in results.get("models", {}).items() if "pairs" in model},
        overoptimization={name: points for name, lines in metrics.items() if (points := kl_points(lines))},
        stages=metrics,
        samples=read_samples(results),
        lineage=lineage,
    )
    path = write_report(Path(config.output) / "report.html", data)
    print_results(results)
    print_table(budgets)
    print(f"report: {path}")
    return path


def summary_rows(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row per policy, the columns in the table's order."""
    rows = []
    for name, model in results.get("models", {}).items():
        row: dict[str, Any] = {"policy": name, f"win rate against {results['baseline']}": None}
        if "win_rate" in model:
            row[f"win rate against {results['baseline']}"] = WinRate(**model["win_rate"])
            bias, inconsistent = model["position_bias"], model["inconsistent"]
            shares = (
                format_share(**{key: found[key] for key in ("rate", "low", "high")}) for found in (inconsistent, bias)
            )
            row |= dict(zip(ORDERS, shares, strict=True))
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


def training_budget(lineage: Sequence[StageRecord], updates: Mapping[str, int], policy: str) -> dict[str, object]:
    """What the training run of a policy's name was given; nothing where no stage of that name was trained."""
    for record in lineage:
        if record.name == policy and policy in updates:
            training, optim = (record.settings.get(section, {}) for section in ("training", "optim"))
            rows, rate = training.get("batch_size"), optim.get("learning_rate")
            return {"updates": updates[policy], "rows per update": rows, "learning rate": rate}
    return {}


ORDERS = ("orders disagree", "shown first preferred")  # of a judge; a page has them among its counts
COLUMNS = {
    "proxy": "reward model",
    "kl": "KL from baseline, nats",
    "language_loss": "text loss, nats/token",
    "response_tokens": "tokens per reply",
    "ended_share": "share that ended",
}


def win_rate_rows(results: Mapping[str, Any]) -> list[WinRateRow]:
    """Rows of the win-rate chart."""
    return [
        WinRateRow(
            name,
            results["baseline"],
            results["judge"],
            WinRate(**model["win_rate"]),
            model["inconsistent"]["count"],
            model["failures"],
            tuple(model["position_bias"][key] for key in ("rate", "low", "high")),
        )
        for name, model in results.get("models", {}).items()
        if "win_rate" in model
    ]


def kl_points(lines: list[dict[str, Any]]) -> list[KLPoint]:
    """The path of a PPO run through (KL, proxy, gold); nothing for other runs."""
    return [KLPoint(line["kl"], line.get("score"), line.get("gold_score")) for line in lines if "kl" in line]


def read_samples(results: Mapping[str, Any]) -> list[Sample]:
    """Prompts with every policy's response."""
    return [
        Sample(
            row["prompt"],
            {name: SampleResponse(each["text"], each["score"]) for name, each in row["responses"].items()},
        )
        for row in results.get("samples", [])
    ]


def print_results(results: Mapping[str, object]) -> None:
    """Print the summary of an evaluation on standard output, and who won in words."""
    print_table(summary_rows(results))
    for row in win_rate_rows(results):
        print(verdict_sentence(row))


def print_table(rows: Sequence[Mapping[str, object]]) -> None:
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


def _record(name: str, folder: str) -> StageRecord:
    """Lineage of one stage under its name in the recipe."""
    record = read_stage_record(Path(folder))
    parents = [str(Path(parent).parent.name) for parent in record.parents]
    seconds = json.loads((Path(folder).parent / "stages.json").read_text()) if _has_times(folder) else {}
    return StageRecord(name, record.hash, parents, seconds.get(Path(folder).name, {}).get("seconds"), record.settings)


def _has_times(folder: str) -> bool:
    return (Path(folder).parent / "stages.json").is_file()


def _read_results(folder: str | None) -> dict[str, Any]:
    if folder is None:
        return {}
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise UserError(f"{path}: not there; run `alignment evaluate winrate` first")
    return json.loads(path.read_text(encoding="utf-8"))

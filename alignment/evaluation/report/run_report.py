"""The report of one run, from the files in its directory."""

import json
from pathlib import Path
from typing import Any

from alignment.config.yaml_source import read_yaml
from alignment.data.rows.files import json_line_rows
from alignment.errors import UserError, raise_all
from alignment.evaluation.report.page import ReportData, StageRecord, write_report
from alignment.files import hash_of

SAMPLES_SHOWN = 8
RESULTS = tuple(prefix + metric for prefix in ("", "held_out_") for metric in ("loss", "perplexity", "accuracy"))


def read_log_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a run's JSON-lines log; none where there is no file. A last line cut short by a crash is left out.

    Raises:
        UserError: broken lines before the last, with file:line.
    """
    rows = list(json_line_rows(path)) if path.exists() else []
    if rows and rows[-1].values is None and not path.read_bytes().endswith(b"\n"):
        rows.pop()
    raise_all(row.problem for row in rows if row.values is None)
    return [row.values for row in rows if row.values is not None]


def read_stage_record(directory: Path) -> StageRecord:
    """Settings, parents and the hash of the whole lineage of a run.

    Raises:
        UserError: there is no lineage.json, so it is not a run's directory.
    """
    directory = Path(directory)
    if not (directory / "lineage.json").is_file():
        inside = sorted(str(path.parent) for path in directory.glob("*/lineage.json"))
        more = f"; the runs in it: {', '.join(inside)}" if inside else "; give the `output` of a training stage"
        raise UserError(f"{directory} is not a run's directory: it has no lineage.json{more}")
    lineage = json.loads((directory / "lineage.json").read_text(encoding="utf-8"))
    config = directory / "config.yaml"
    settings = read_yaml(config).values or {} if config.is_file() else {}
    return StageRecord(lineage["stage"], hash_of(lineage), list(lineage["parents"]), None, settings)


def write_run_report(directory: Path) -> Path:
    """Write `report.html` of a single run into its directory: data sources, curves, sampled texts, lineage."""
    directory = Path(directory)
    record = read_stage_record(directory)
    log = read_log_rows(directory / "metrics.jsonl")
    samples = [
        {
            "prompt": row["prompt"],
            "responses": {f"update {row['step']}": {"text": row["response"], "score": row.get("score")}},
        }
        for row in read_log_rows(directory / "samples.jsonl")[-SAMPLES_SHOWN:]
    ]
    data = ReportData(
        title=f"{directory.name}: {record.name}" if directory.name != record.name else record.name,
        tables=[source_table(directory, log)],
        stages={record.name: log},
        samples=samples,
        lineage=[record],
    )
    return write_report(directory / "report.html", data)


def source_table(directory: Path, log: list[dict[str, Any]]) -> list[dict[str, object]]:
    """One row for each data source: rows, share drawn, and the last value of each metric; none where a run has one source.

    Args:
        directory: of a run; its sources.json says what was read.
        log: lines of its metrics.jsonl.
    """
    path = directory / "sources.json"
    table = []
    for source in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
        name = source["name"]
        shares = [line[f"share/{name}"] for line in log if line.get(f"share/{name}") is not None]
        row = {"source": name, "rows": source.get("rows"), "share of draws": source.get("share")}
        row["share of what counted"] = sum(shares) / len(shares) if shares else None
        for metric in RESULTS:
            values = [line[f"{metric}/{name}"] for line in log if f"{metric}/{name}" in line]
            row[metric.replace("_", " ")] = values[-1] if values else None
        table.append(row)
    kept = [column for column in table[0] if any(row[column] is not None for row in table)] if table else []
    return [{column: row[column] for column in kept} for row in table]

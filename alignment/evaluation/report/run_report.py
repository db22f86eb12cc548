"""The report of one run, from the files in its directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alignment.config.yaml_source import read_yaml
from alignment.data.rows.files import json_line_rows
from alignment.errors import UserError, raise_all
from alignment.evaluation.report.page import ReportData, Sample, SampleResponse, StageRecord, write_report
from alignment.evaluation.report.source_table import source_table
from alignment.files import hash_of

SAMPLES_SHOWN = 8


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
        raise UserError(f"{directory} is not a run's directory: it has no lineage.json")
    lineage = json.loads((directory / "lineage.json").read_text(encoding="utf-8"))
    config = directory / "config.yaml"
    settings = read_yaml(config).values or {} if config.is_file() else {}
    return StageRecord(lineage["stage"], hash_of(lineage), list(lineage["parents"]), None, settings)


def write_run_report(directory: Path) -> Path:
    """Write `report.html` of a single run into its directory: data sources, curves, sampled texts, lineage."""
    directory = Path(directory)
    record = read_stage_record(directory)
    log = read_log_rows(directory / "metrics.jsonl")
    data = ReportData(
        title=f"{directory.name}: {record.name}" if directory.name != record.name else record.name,
        summary_table=source_table(directory, log),
        stages={record.name: log},
        samples=[_sample(row) for row in read_log_rows(directory / "samples.jsonl")[-SAMPLES_SHOWN:]],
        lineage=[record],
    )
    return write_report(directory / "report.html", data)


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(row["prompt"], {f"update {row['step']}": SampleResponse(row["response"], row.get("score"))})

"""A finished run's directory, read back for its report. What the page looks like is in report.py."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from alignment.errors import UserError
from alignment.evaluation.report.page import Answer, ReportData, Sample, StageRecord, write_report
from alignment.files import hash_of

SAMPLES_SHOWN = 8


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file; none where there is no file. A last line cut short by a crash is left out.

    Raises:
        UserError: a broken line before the last, with file:line.
    """
    if not path.exists():
        return []
    rows = []
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise UserError(f"{path}:{number}: not JSON: {error.msg} at column {error.colno}") from error
    return rows


def read_record(directory: Path, seconds: float | None = None) -> StageRecord:
    """Lineage and settings of a run, the hash being that of its whole lineage.

    Args:
        seconds: how long it took; a run does not know, its pipeline does.

    Raises:
        UserError: no lineage.json there, so that it is no run.
    """
    directory = Path(directory)
    if not (directory / "lineage.json").is_file():
        raise UserError(f"{directory} is not a run's directory: it has no lineage.json")
    lineage = json.loads((directory / "lineage.json").read_text(encoding="utf-8"))
    config = directory / "config.yaml"
    settings = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {}
    return StageRecord(lineage["stage"], hash_of(lineage), list(lineage["parents"]), seconds, settings)


def write_run_report(directory: Path) -> Path:
    """Write `report.html` of a single run into its directory: curves, texts seen on the way, lineage."""
    directory = Path(directory)
    record = read_record(directory)
    data = ReportData(
        title=f"{directory.name}: {record.name}" if directory.name != record.name else record.name,
        stages={record.name: read_lines(directory / "metrics.jsonl")},
        samples=[_sample(row) for row in read_lines(directory / "samples.jsonl")[-SAMPLES_SHOWN:]],
        lineage=[record],
    )
    return write_report(directory / "report.html", data)


def _sample(row: Mapping[str, Any]) -> Sample:
    return Sample(row["prompt"], {f"update {row['step']}": Answer(row["response"], row.get("score"))})

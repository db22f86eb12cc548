"""The data sources of a run in its report: a table of their rows, shares and results, and a chart of each metric by source."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from alignment.evaluation.report.metric_panels import Panel

HELD_OUT = "held_out_"
RESULTS = ("loss", "perplexity", "accuracy")


def source_table(directory: Path, log: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """One row for each source: rows, share drawn, and the last value of each metric; none where a run tells none apart.

    Args:
        directory: of a run; its sources.json says what was read.
        log: lines of its metrics.jsonl.
    """
    path = directory / "sources.json"
    sources = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    table = []
    for source in sources:
        name, shares = source["name"], [line.get(f"share/{source['name']}") for line in log]
        known = [share for share in shares if isinstance(share, float)]
        row: dict[str, object] = {"source": name, "rows": source.get("rows"), "share of draws": source.get("share")}
        row["share of what counted"] = sum(known) / len(known) if known else None
        for metric in (*RESULTS, *(HELD_OUT + metric for metric in RESULTS)):
            row[metric.replace("_", " ")] = next(
                (line[key] for line in reversed(log) if (key := f"{metric}/{name}") in line), None
            )
        table.append(row)
    kept = [column for column in table[0] if any(row[column] is not None for row in table)] if table else []
    return [{column: row[column] for column in kept} for row in table]


def source_panels(log: Sequence[Mapping[str, object]]) -> list[Panel]:
    """One chart for each metric that is logged by source, such as loss/NAME, with a curve for each source."""
    keys = dict.fromkeys(key.removeprefix(HELD_OUT) for line in log for key in line if "/" in key)
    panels: dict[str, dict[str, str]] = {}
    for key in keys:
        metric, _, name = key.partition("/")
        panels.setdefault(metric, {})[key] = name
    return [Panel(f"{metric.replace('_', ' ').capitalize()} by source", "", named) for metric, named in panels.items()]

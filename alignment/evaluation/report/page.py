"""report.html: a run or a recipe in one file that loads nothing else."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from alignment.evaluation.report.charts import (
    SERIES,
    Bar,
    Curve,
    bar_chart,
    is_finite_number,
    padded_limits,
    path_chart,
    rate_chart,
)
from alignment.evaluation.report.html import Chart, Row, write_page
from alignment.evaluation.report.metric_charts import Log, stage_charts

Models = Mapping[str, Mapping[str, Any]]  # policy -> its part of an evaluation's results.json
Colors = Mapping[str, int]  # policy -> number of its color
PAIR_PARTS = {  # key of `evaluate winrate` on held-out comparisons -> column of the table, note of the chart
    "chosen_log_prob_change": (
        "chosen, change in nats",
        "log-probability of chosen responses since the baseline, nats",
    ),
    "rejected_log_prob_change": ("rejected, change in nats", "of rejected responses, nats"),
    "margin": ("pair margin, nats", "change of the chosen minus change of the rejected response, nats"),
}
OVEROPTIMIZATION = (  # metric, title, note
    ("score", "Proxy reward", "what was optimized: the reward model's score"),
    (
        "gold_score",
        "Gold score",
        "the true score: where it falls while the proxy rises, the policy exploits its reward model",
    ),
)


@dataclass(frozen=True)
class StageRecord:
    """Lineage of a stage's result, its settings, and how long it took."""

    name: str
    hash: str
    parents: Sequence[str] = ()
    seconds: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ReportData:
    """Content of a report; empty parts are left out.

    Attributes:
        title, summary: a headline and a paragraph.
        verdicts: sentences that say who won.
        tables: in order.
        results: of `evaluate winrate`, as in results.json.
        paths: policy -> lines of its log with its KL to the reference, in order of training.
        stages: stage -> lines of its metrics.jsonl.
        samples: `{prompt, responses: {policy: {text, score}}}`; a prompt is text or chat messages.
        lineage: the stages in order.
    """

    title: str
    summary: str = ""
    verdicts: Sequence[str] = ()
    tables: Sequence[Sequence[Row]] = ()
    results: Mapping[str, Any] = field(default_factory=dict)
    paths: Mapping[str, Log] = field(default_factory=dict)
    stages: Mapping[str, Log] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    lineage: Sequence[StageRecord] = ()


def write_report(path: Path, data: ReportData) -> Path:
    """Write a self-contained HTML page and return its path. All text is escaped, and the page runs no script."""
    models = data.results.get("models", {})
    names = [*models, *data.paths, *(name for sample in data.samples for name in sample["responses"])]
    colors = {name: number % len(SERIES) for number, name in enumerate(dict.fromkeys(names))}
    stages = {name: stage_charts(name, log) for name, log in data.stages.items()}
    return write_page(
        path,
        "report.html.jinja",
        data=data,
        tables=[table for table in data.tables if table],
        colors=colors,
        judged={name: model for name, model in models.items() if "win_rate" in model},
        win_rate_charts=win_rate_charts(data.results, colors),
        gold_charts=gold_charts(models, colors),
        pair_charts=pair_charts(models, colors),
        overoptimization_charts=overoptimization_charts(data.paths, colors),
        stages={name: charts for name, charts in stages.items() if any(charts)},
        settings={record.name: dict(flatten_settings(record.settings)) for record in data.lineage},
        longest_seconds=max((record.seconds or 0 for record in data.lineage), default=0),
    )


def win_rate_charts(results: Mapping[str, Any], colors: Colors) -> list[Chart]:
    """One chart of all policies against the baseline."""
    rates = {name: model["win_rate"] for name, model in results.get("models", {}).items() if "win_rate" in model}
    title = f"Win rate against {results['baseline']}" if rates else ""
    return [rate_chart(title, f"judge: {results['judge']}", rates, colors)] if rates else []


def gold_charts(models: Models, colors: Colors) -> list[Chart]:
    """One chart for each part of the gold score, each on the scale of its part."""
    charts, scores = [], {name: model["gold"] for name, model in models.items() if "gold" in model}
    for part in dict.fromkeys(part for gold in scores.values() for part in gold):
        bars = [Bar(name, gold[part], None, colors[name]) for name, gold in scores.items() if part in gold]
        limits = padded_limits([bar.value for bar in bars])
        charts.append(Chart(part.capitalize(), "", bar_chart(f"Gold score, part {part}", bars, limits=limits)))
    return charts


def pair_charts(models: Models, colors: Colors) -> list[Chart]:
    """One chart for each of `PAIR_PARTS`, all on the same scale; a policy that has not moved at all is left out."""
    pairs = {name: model["pairs"] for name, model in models.items() if "pairs" in model}
    moved = {name: parts for name, parts in pairs.items() if any(parts[part] for part in PAIR_PARTS)}
    limits = padded_limits([parts[part] for parts in moved.values() for part in PAIR_PARTS])
    charts = []
    for part, (title, note) in PAIR_PARTS.items() if moved else ():
        bars = [Bar(name, parts[part], None, colors[name]) for name, parts in moved.items()]
        svg = bar_chart(f"Held-out pairs: {title}", bars, limits=limits)
        charts.append(Chart(title.partition(",")[0].capitalize(), note, svg))
    return charts


def overoptimization_charts(paths: Mapping[str, Log], colors: Colors) -> list[Chart]:
    """Two charts over the same KL: the score that was optimized, and the true one."""
    charts = []
    for metric, title, note in OVEROPTIMIZATION:
        curves = []
        for policy, log in paths.items():
            points = [(line.get("kl"), line.get(metric)) for line in log]
            if known := [point for point in points if all(map(is_finite_number, point))]:
                kl, scores = zip(*known, strict=True)
                curves.append(Curve(policy, kl, scores, colors[policy]))
        if curves:
            svg = path_chart(f"{title} over KL", curves, "KL to the reference, nats per response", title, noisy=True)
            charts.append(Chart(title, note, svg))
    return charts


def flatten_settings(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings as dotted keys and text."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)

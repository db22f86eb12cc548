"""report.html: a run or a recipe in one file that loads nothing else. Charts are drawn in charts.py."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from alignment.evaluation.report.charts import (
    Bar,
    Curve,
    bar_chart,
    curve_chart,
    is_finite_number,
    padded_limits,
    path_chart,
)
from alignment.evaluation.report.metric_panels import FURTHER, MAIN, Panel
from alignment.evaluation.report.source_table import source_panels
from alignment.evaluation.winrate import WinRate
from alignment.files import write_text

TEMPLATES = Path(__file__).parent / "templates"
HELD_OUT = "held_out_"
SERIES_COLORS = 8  # in the style sheet
PAIR_PARTS = {  # key of `evaluate winrate` on held-out comparisons -> column of the table, note of the chart
    "chosen_log_prob_change": (
        "chosen, change in nats",
        "log-probability of chosen responses since the baseline, nats",
    ),
    "rejected_log_prob_change": ("rejected, change in nats", "of rejected responses, nats"),
    "margin": ("pair margin, nats", "change of the chosen minus change of the rejected response, nats"),
}


@dataclass(frozen=True)
class WinRateRow:
    """One policy's win rate against a baseline by one judge; `position_bias` is that of the judge, low, high."""

    policy: str
    baseline: str
    judge: str
    win_rate: WinRate
    inconsistent: int = 0
    failures: int = 0
    position_bias: tuple[float, ...] | None = None


@dataclass(frozen=True)
class KLPoint:
    """One step of training: KL to the reference (nats per response), the optimized score and the true one."""

    kl: float
    proxy: float | None = None
    gold: float | None = None


@dataclass(frozen=True)
class SampleResponse:
    """A policy's response and its gold score."""

    text: str
    score: float | None = None


@dataclass(frozen=True)
class Sample:
    """A prompt (text or chat messages) and each policy's response."""

    prompt: str | Sequence[Mapping[str, str]]
    responses: Mapping[str, SampleResponse]


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
        budget_table: rows of a second table, what each policy was trained with.
        summary_table: rows of the results table: column name -> text, number or `WinRate`; the first names the row.
        win_rates: one row for each policy, baseline and judge.
        gold_parts: policy -> part of the gold score -> mean.
        pairs: policy -> key of `PAIR_PARTS` -> mean over held-out comparisons; other keys are not shown.
        overoptimization: policy -> its points in order of training.
        stages: stage -> lines of its metrics.jsonl.
        samples: a few prompts with each policy's response.
        lineage: the stages in order.
        notes: paragraphs at the end.
    """

    title: str
    summary: str = ""
    verdicts: Sequence[str] = ()
    summary_table: Sequence[Mapping[str, Any]] = ()
    budget_table: Sequence[Mapping[str, Any]] = ()
    win_rates: Sequence[WinRateRow] = ()
    gold_parts: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    pairs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    overoptimization: Mapping[str, Sequence[KLPoint]] = field(default_factory=dict)
    stages: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    samples: Sequence[Sample] = ()
    lineage: Sequence[StageRecord] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Chart:
    """A chart with its title and note."""

    title: str
    note: str
    svg: Markup


def write_report(path: Path, data: ReportData) -> Path:
    """Write a self-contained HTML page and return its path. All text is escaped, and the page runs no script."""
    environment = page_environment()
    colors = policy_colors(data)
    stages = {name: visible_and_folded_charts(name, rows) for name, rows in data.stages.items()}
    tables = (data.summary_table, data.budget_table)
    html = environment.get_template("report.html.jinja").render(
        data=data,
        tables=[(rows, list(dict.fromkeys(key for row in rows for key in row))) for rows in tables if rows],
        colors=colors,
        win_rate_charts=win_rate_charts(data.win_rates, colors),
        gold_charts=gold_charts(data.gold_parts, colors),
        pair_charts=pair_charts(data.pairs, colors),
        overoptimization_charts=overoptimization_charts(data.overoptimization, colors),
        stages={name: charts for name, charts in stages.items() if any(charts)},
        settings={record.name: dict(flatten_settings(record.settings)) for record in data.lineage},
        longest_seconds=max((record.seconds or 0 for record in data.lineage), default=0),
    )
    write_text(path, html)
    return Path(path)


def page_environment() -> Environment:
    """Templates of pages: all text is escaped, unknown names are errors, and `cell` and `duration` format values."""
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "cell": _breakable_cell,
        "duration": format_duration,
        "share": lambda bias: format_share(*bias),
    }
    return environment


def policy_colors(data: ReportData) -> dict[str, int]:
    """One color per policy for the whole page, in order of appearance."""
    names = dict.fromkeys(
        [
            *data.gold_parts,
            *data.pairs,
            *(row.policy for row in data.win_rates),
            *data.overoptimization,
            *(name for sample in data.samples for name in sample.responses),
        ]
    )
    return {name: number % SERIES_COLORS for number, name in enumerate(names)}


def win_rate_charts(rows: Sequence[WinRateRow], colors: Mapping[str, int]) -> list[Chart]:
    """One chart for each baseline and judge."""
    charts = []
    for baseline, judge in dict.fromkeys((row.baseline, row.judge) for row in rows):
        group = [row for row in rows if (row.baseline, row.judge) == (baseline, judge)]
        bars = [
            Bar(row.policy, row.win_rate.rate, (row.win_rate.low, row.win_rate.high), colors[row.policy])
            for row in group
        ]
        svg = bar_chart(f"Win rates against {baseline}, judge: {judge}", bars, limits=(0, 1), percent=True, line_at=0.5)
        charts.append(Chart(f"Win rate against {baseline}", f"judge: {judge}", svg))
    return charts


def gold_charts(parts: Mapping[str, Mapping[str, float]], colors: Mapping[str, int]) -> list[Chart]:
    """One chart for each part of the gold score, each on the scale of its part."""
    charts = []
    for part in dict.fromkeys(part for scores in parts.values() for part in scores):
        bars = [Bar(name, s[part], None, colors[name]) for name, s in parts.items() if is_finite_number(s.get(part))]
        limits = padded_limits([bar.value for bar in bars])
        charts.append(Chart(part.capitalize(), "", bar_chart(f"Gold score, part {part}", bars, limits=limits)))
    return charts


def pair_charts(pairs: Mapping[str, Mapping[str, float]], colors: Mapping[str, int]) -> list[Chart]:
    """One chart for each of `PAIR_PARTS`, all on the same scale; a policy that has not moved at all is left out."""
    moved = {name: parts for name, parts in pairs.items() if any(parts[part] for part in PAIR_PARTS)}
    limits = padded_limits([parts[part] for parts in moved.values() for part in PAIR_PARTS])
    charts = []
    for part, (title, note) in PAIR_PARTS.items() if moved else ():
        bars = [Bar(name, parts[part], None, colors[name]) for name, parts in moved.items()]
        svg = bar_chart(f"Held-out pairs: {title}", bars, limits=limits)
        charts.append(Chart(title.partition(",")[0].capitalize(), note, svg))
    return charts


def overoptimization_charts(paths: Mapping[str, Sequence[KLPoint]], colors: Mapping[str, int]) -> list[Chart]:
    """Two charts over the same KL: the score that was optimized, and the true one."""
    charts = []
    for name, title, note in (
        ("proxy", "Proxy reward", "what was optimized: the reward model's score"),
        (
            "gold",
            "Gold score",
            "the true score: where it falls while the proxy rises, the policy exploits its reward model",
        ),
    ):
        curves = []
        for policy, points in paths.items():
            known = [p for p in points if is_finite_number(p.kl) and is_finite_number(getattr(p, name))]
            if known:
                heights = [getattr(point, name) for point in known]
                curves.append(Curve(policy, [point.kl for point in known], heights, colors[policy]))
        if curves:
            svg = path_chart(f"{title} over KL", curves, "KL to the reference, nats per response", title, noisy=True)
            charts.append(Chart(title, note, svg))
    return charts


def visible_and_folded_charts(
    stage: str, rows: Sequence[Mapping[str, Any]], row_length: int = 3
) -> tuple[list[Chart], list[Chart]]:
    """A stage's charts that are shown, at least one row of them, and those that are folded."""
    main = charts_of(stage, rows, MAIN)
    further = charts_of(stage, rows, [*source_panels(rows), *FURTHER, *other_panels(rows)])
    moved = max(row_length - len(main), 0)
    return main + further[:moved], further[moved:]


def charts_of(stage: str, rows: Sequence[Mapping[str, Any]], panels: Iterable[Panel]) -> list[Chart]:
    """Charts of those panels for which a stage has measurements."""
    charts = []
    for panel in panels:
        curves = tuple(
            Curve(label, tuple(row["step"] for row in known), tuple(row[key] for row in known), number)
            for number, (key, label) in enumerate(_keys(panel))
            if (known := [row for row in rows if is_finite_number(row.get("step")) and is_finite_number(row.get(key))])
        )
        if curves:
            svg = curve_chart(f"{stage}: {panel.title}", curves, "update")
            charts.append(Chart(panel.title, panel.note, svg))
    return charts


def _keys(panel: Panel) -> list[tuple[str, str]]:
    """Metric keys of a panel and their labels, each followed by the held-out metric."""
    if len(panel.keys) == 1:
        (key,) = panel.keys
        return [(key, "training"), (HELD_OUT + key, "held out")]
    return [
        pair for key, label in panel.keys.items() for pair in ((key, label), (HELD_OUT + key, f"{label}, held out"))
    ]


def other_panels(rows: Sequence[Mapping[str, object]]) -> list[Panel]:
    """A panel for each metric that no known panel shows; metrics of single sources are shown by `source_panels`."""
    shown = {"step", "tokens"} | {key for panel in (*MAIN, *FURTHER) for key in panel.keys}
    keys = dict.fromkeys(key.removeprefix(HELD_OUT) for row in rows for key in row)
    keys = [key for key in keys if key not in shown and "/" not in key]
    return [Panel(key.replace("_", " ").capitalize(), "", {key: key}) for key in keys]


def flatten_settings(settings: Mapping[str, object], prefix: str = "") -> Iterable[tuple[str, str]]:
    """Nested settings as dotted keys and text."""
    for key, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten_settings(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def format_cell(value: object) -> str:
    """A table cell: numbers with three significant digits, win rates with their interval, a dash for nothing."""
    if value is None or value == "":
        return "–"
    if isinstance(value, WinRate):
        return format_share(value.rate, value.low, value.high)
    if isinstance(value, float):
        size = abs(value)
        text = (
            f"{value:,.0f}" if 1e3 <= size < 1e7 else f"{value:#.3g}" if size == 0 or size >= 1e-3 else f"{value:.2e}"
        )
        return text.replace("-", "\N{MINUS SIGN}")
    return str(value)


def format_share(rate: float, low: float, high: float) -> str:
    """A share and its interval in percent."""
    return f"{100 * rate:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


def with_interval(value: float, interval: Sequence[float] | None) -> float | str:
    """A number and its interval as a cell; the number alone where it has none."""
    return value if interval is None else f"{format_cell(value)} [{', '.join(map(format_cell, interval))}]"


def _breakable_cell(value: object) -> str:
    """A cell whose only line break, where it ends in an interval, is before that: a table takes the width of the window."""
    text = format_cell(value)
    return text.replace(" ", "\N{NO-BREAK SPACE}").replace("\N{NO-BREAK SPACE}[", " [") if text.endswith("]") else text


def verdict_sentence(row: WinRateRow) -> str:
    """The winner of a comparison, and how far its judge can be believed, in words."""
    rate, policy, baseline = row.win_rate, row.policy, row.baseline
    figures = f"{format_share(rate.rate, rate.low, rate.high)} of {rate.n}"
    if rate.low > 0.5:
        words = f"{policy}'s responses are preferred to {baseline}'s: {figures}"
    elif rate.high < 0.5:
        words = f"{baseline}'s responses are preferred to {policy}'s, which win {figures}"
    else:
        words = f"Between {policy} and {baseline} nothing is decided: {policy} wins {figures}, and the interval includes 50 %"
    words += f" (judge: {row.judge})."
    if row.inconsistent:
        words += f" The judge's two orders contradict each other on {row.inconsistent} of them."
    return words


def format_duration(seconds: float | None) -> str:
    """Seconds as `1.2 s`, `3 min 04 s` or `1 h 05 min`."""
    if seconds is None:
        return "–"
    if seconds < 90:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"

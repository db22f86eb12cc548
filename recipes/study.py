"""Numbers of finished runs and evaluations, gathered into one page of charts and tables: `run: ../study.py:run` in a recipe.

Nothing is measured here. `results.json` holds the points of each series and the figures made of them; `report.html` shows both.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, Literal

import numpy as np

from alignment.errors import UserError, raise_all, suggest
from alignment.files import read_json_object, write_json
from alignment.reports.charts import SERIES, Curve, path_chart
from alignment.reports.html import Chart, Section, render_page
from alignment.reports.run_log import read_log_rows
from alignment.settings import PositiveInt, Rule, Settings

Law = Literal["best_of_n", "rl"]
Point = Mapping[str, Any]  # "name" (of a model, or an update's number), and quantity -> number
LAW_POINTS = 60


@dataclass(frozen=True)
class SeriesConfig(Settings):
    """One series of points.

    Attributes:
        columns: quantity -> column of the source; of results a dotted key, such as `gold.total`.
        run: directory of a training run: a point for each line of its metrics.jsonl that has all columns.
        results: a JSON file with results: a point for each item at the key `at`. Of several files the items of one name
            are one point; a key that more than one has is read from the first.
        at: dotted key of a mapping or a list in the results.
        names: of the items of the mapping, in order; None: all of them.
        smooth: points of a run that are averaged around each one, an odd number.
        fit: law of over-optimization to fit to the quantities `kl` and `gold`.
        kept: column of a run whose highest value decides which weights it keeps (`training.keep_best`).
    """

    columns: dict[str, str]
    run: str | None = None
    results: str | list[str] = field(default_factory=list)
    at: str = ""
    names: list[str] | None = None
    smooth: PositiveInt = 1
    fit: Law | None = None
    kept: str | None = None

    RULES = (
        Rule("run", lambda c: (c.run is None) == (not c.results), "or results must be given, and not both"),
        Rule("smooth", lambda c: c.smooth % 2 == 0, "must be an odd number of points, got {self.smooth}; 1 is none"),
        Rule("run", lambda c: c.run is None and (c.smooth > 1 or c.kept), "goes with smooth and kept"),
        Rule("at", lambda c: c.run is not None and (c.at or c.names), "and names go with results"),
        Rule("fit", lambda c: c.fit and not {"kl", "gold"} <= set(c.columns), "needs the columns kl and gold"),
    )


@dataclass(frozen=True)
class ChartConfig:
    """One chart.

    Attributes:
        x, y: quantities.
        title, note: over it.
        root: the horizontal axis shows the square root of x, values below 0 as 0.
        series: names of those that are shown; None: all that have both quantities.
        laws: draw the fitted laws beside the points.
    """

    x: str
    y: str
    title: str
    note: str = ""
    root: bool = False
    series: list[str] | None = None
    laws: bool = False


@dataclass(frozen=True)
class PeakConfig:
    """The highest value of the quantity `of` in each of `series`, and what happens to the quantity `against` after it."""

    of: str
    against: str
    series: list[str]


@dataclass(frozen=True)
class SavingsConfig:
    """The share of a cost's increase that each series takes back without losing what was gained.

    Attributes:
        cost, gain: quantities, such as the loss on text and the gold score.
        start, base: series of one point: before anything was learned, and with the whole increase.
        series: those that are compared.
        tolerance: a point counts where its gain is at least that of the base less this.
    """

    cost: str
    gain: str
    start: str
    base: str
    series: list[str]
    tolerance: float = 0.0


@dataclass(frozen=True)
class StudyConfig(Settings):
    """Settings of a study.

    Attributes:
        output: directory of results.json and report.html.
        title, summary: heading of the page, and a sentence or two under it.
        series: name -> where its points come from.
        charts: in order.
        peak, savings: figures; None: none.
    """

    output: str
    title: str
    series: dict[str, SeriesConfig]
    summary: str = ""
    charts: list[ChartConfig] = field(default_factory=list)
    peak: PeakConfig | None = None
    savings: SavingsConfig | None = None

    RULES = (Rule("series", lambda c: next(_missing_series(c), "")),)


def _missing_series(config: StudyConfig) -> Iterator[str]:
    """Series and quantities that charts and figures name and that do not exist."""
    uses = [(chart.title, chart.series or [], (chart.x, chart.y)) for chart in config.charts]
    if (peak := config.peak) is not None:
        uses.append(("peak", peak.series, (peak.of, peak.against)))
    if (own := config.savings) is not None:
        uses.append(("savings", [own.start, own.base, *own.series], (own.cost, own.gain)))
    known = {quantity for series in config.series.values() for quantity in series.columns}
    for use, names, quantities in uses:
        for name in [*names, *quantities]:
            if name not in (config.series if name in names else known):
                yield f"has no {name!r}, which {use} names; {suggest(name, [*config.series, *known])}"
        for name, quantity in product(names, quantities):
            if name in config.series and quantity not in config.series[name].columns:
                yield f"{name} has no column {quantity!r}, which {use} names"


def run(config: StudyConfig) -> Path:
    """Gather the points, write `results.json` and `report.html`, and return the path of the results.

    Missing runs, results, items and columns are told all at once.
    """
    points: dict[str, list[Point]] = {}
    problems = []
    for name, series in config.series.items():
        try:
            points[name] = smoothed(read_points(series), series.smooth)
        except UserError as error:
            problems += [f"series {name}: {line}" for line in str(error).splitlines()]
    raise_all(problems)
    laws = {
        name: fit_law(series.fit, *([point[key] for point in points[name]] for key in ("kl", "gold")))
        for name, series in config.series.items()
        if series.fit is not None
    }
    sections, peaks, savings = _chart_sections(config, points, laws), {}, {}
    if (peak := config.peak) is not None:
        for name in peak.series:
            peaks[name] = find_peak(points[name], of=peak.of, against=peak.against, kept=_kept(config.series[name]))
        sections.append(_peak_section(peak, peaks))
    if (own := config.savings) is not None:
        for name in own.series:
            savings[name] = find_saving(points[name], points[own.start][0], points[own.base][0], own)
        sections.append(_saving_section(own, savings))
    if laws:
        lead = (
            "Gao et al. 2022, with d = sqrt(KL): gold = start + d (alpha - beta d) for best-of-n, "
            "start + d (alpha - beta log d) for reinforcement learning."
        )
        sections.append(Section("laws", "Laws", lead, tables=[[{"series": name, **law} for name, law in laws.items()]]))
    if tables := [points[name] for name, series in config.series.items() if series.run is None]:
        sections.append(Section("points", "Numbers", tables=tables))
    output = Path(config.output)
    write_json(output / "results.json", {"series": points, "laws": laws, "peaks": peaks, "savings": savings})
    render_page(output / "report.html", kind="study", title=config.title, summary=config.summary, sections=sections)
    return output / "results.json"


# Points


def read_points(series: SeriesConfig) -> list[Point]:
    """The points of a series; each column must be in a line of the run, or in every item of the results."""
    source, rows = _rows(series)
    points: list[Point] = [
        {"name": name} | {key: _number(row, column) for key, column in series.columns.items()} for name, row in rows
    ]
    for key, column in series.columns.items():
        without = [point["name"] for point in points if point[key] is None]
        if without and (series.run is None or len(without) == len(points)):
            item = "" if series.run is not None else f" in {without[0]}"
            raise UserError(f"{source}: there is no number {column!r}{item}")
    complete = [point for point in points if None not in point.values()]
    raise_all([] if complete else [f"{source}: no line has all of {', '.join(series.columns.values())}"])
    return complete


def _rows(series: SeriesConfig) -> tuple[str, Sequence[tuple[str, Mapping[str, object]]]]:
    """The path of a series' source, and its (name, row) pairs."""
    if series.run is not None:
        path = Path(series.run) / "metrics.jsonl"
        raise_all([] if path.is_file() else [f"{path}: is not there; the run is not finished"])
        return str(path), [(str(row.get("step")), row) for row in read_log_rows(path)]
    paths = [series.results] if isinstance(series.results, str) else series.results
    parts = [_items(Path(path), series.at) for path in paths]
    names = list(parts[0]) if series.names is None else series.names
    raise_all(
        f"{path}: {series.at} has no {name!r}; {suggest(name, rows)}"
        for path, rows in zip(paths, parts, strict=True)
        for name in names
        if name not in rows
    )
    merged = [(name, {key: value for rows in parts[::-1] for key, value in rows[name].items()}) for name in names]
    return ", ".join(paths), merged


def _items(path: Path, at: str) -> dict[str, Mapping[str, object]]:
    """The items at a dotted key of a file with results, by name; the items of a list are numbered from 1."""
    found: Any = read_json_object(path)
    for key in filter(None, at.split(".")):
        if not isinstance(found, Mapping) or key not in found:
            raise UserError(f"{path}: there is no key {at!r}")
        found = found[key]
    items = enumerate(found, 1) if isinstance(found, list) else found.items()
    return {str(name): row for name, row in items}


def _number(row: Mapping[str, Any], column: str) -> float | None:
    """The number at a dotted key; None where there is none."""
    found: Any = row
    for key in [column] if column in row else column.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def smoothed(points: Sequence[Point], width: int) -> list[Point]:
    """Each point with the mean of the `width` points around it, of fewer at the ends; `width` is odd, 1 changes nothing."""
    found = []
    for i, point in enumerate(points):
        near = points[max(0, i - width // 2) : i + width // 2 + 1]
        means = {key: float(np.mean([one[key] for one in near])) for key in point.keys() - {"name"}}
        found.append({key: means.get(key, value) for key, value in point.items()})
    return found


# Figures


def fit_law(law: Law, kl: Sequence[float], gold: Sequence[float]) -> dict[str, Any]:
    """A law of over-optimization fitted by least squares, with d = sqrt(KL).

    best_of_n: gold = start + d * (alpha - beta * d);  rl: gold = start + d * (alpha - beta * log d)

    Args:
        kl: from the starting policy, nats; measured values below 0 count as 0.
        gold: true scores, as many.

    Returns:
        law, start, alpha, beta (per sqrt(nat)); peak_kl, the KL at which the law is highest, None where it has no peak;
        explained, the share of the points' variance.

    Source: Gao et al. 2022, arXiv:2210.10760, equations 1 and 2 (alpha and beta as there), with a free start.
    """
    if len({max(0.0, each) for each in kl}) < 3:
        raise UserError(f"fit={law}: a law with three coefficients needs points at three different values of the KL")
    heights = np.asarray(gold, float)
    start, alpha, beta = np.linalg.lstsq(_law_terms(law, kl), heights, rcond=None)[0].tolist()
    found = {"law": law, "start": start, "alpha": alpha, "beta": beta, "peak_kl": None}
    if beta > 0 and law == "rl":  # where the derivative is 0
        found["peak_kl"] = math.exp(min(alpha / beta - 1, 300.0)) ** 2
    elif beta > 0 and alpha > 0:
        found["peak_kl"] = (alpha / (2 * beta)) ** 2
    variation = float(((heights - heights.mean()) ** 2).sum())
    left = float(((heights - law_heights(found, kl)) ** 2).sum())
    return {**found, "explained": 1 - left / variation if variation > 0 else 0.0}


def law_heights(law: Mapping[str, Any], kl: Sequence[float]) -> np.ndarray:
    """The law's gold score at each KL."""
    return _law_terms(law["law"], kl) @ np.array([law["start"], law["alpha"], law["beta"]])


def _law_terms(law: Law, kl: Sequence[float]) -> np.ndarray:
    """Factors of start, alpha and beta at each KL, [n, 3]."""
    distance = np.sqrt(np.maximum(np.asarray(kl, float), 0.0))
    bent = distance if law == "best_of_n" else np.log(np.where(distance > 0, distance, 1.0))  # d log d goes to 0 at 0
    return np.column_stack([np.ones_like(distance), distance, -distance * bent])


def find_peak(points: Sequence[Point], *, of: str, against: str, kept: str | None = None) -> dict[str, Any]:
    """The highest point of `of`, how far it falls to the end, and how far `against` still rises.

    `kept` names the point that was kept; kept_of_peak is its share of the highest value.
    """
    first, highest, last = points[0], max(points, key=lambda point: point[of]), points[-1]
    figures = {"highest": highest, "first": first, "last": last, "fall": highest[of] - last[of]}
    chosen = next((point for point in points if point["name"] == kept), None)
    if kept is not None and chosen is None:
        raise UserError(f"the weights are those of update {kept}, whose line lacks a column of the series")
    share = chosen[of] / highest[of] if chosen is not None and highest[of] > 0 else None
    return {**figures, "rise": last[against] - highest[against], "kept": chosen, "kept_of_peak": share}


def _kept(series: SeriesConfig) -> str | None:
    """The update whose weights a run kept: the first one with the highest value of the column `kept`."""
    if series.kept is None:
        return None
    source, rows = _rows(series)
    values = {name: value for name, row in rows if (value := _number(row, series.kept)) is not None}
    raise_all([] if values else [f"{source}: no line has the number {series.kept!r}, by which weights are kept"])
    return max(values, key=lambda name: values[name])


def find_saving(points: Sequence[Point], start: Point, base: Point, own: SavingsConfig) -> dict[str, Any]:
    """The largest share of the cost's increase from `start` to `base` that a point removes while its gain is the base's.

    removed = 1 - (cost - cost of start) / (cost of base - cost of start), where gain >= gain of base - tolerance;
    None where no point has equal gain, or where there is no increase.
    """
    increase = base[own.cost] - start[own.cost]
    costs = {point["name"]: {key: point[key] - start[key] for key in (own.cost, own.gain)} for point in points}
    equal = [point for point in points if point[own.gain] >= base[own.gain] - own.tolerance]
    if increase <= 0 or not equal:
        return {"increase": increase, "removed": None, "best": "", "costs": costs}
    best = min(equal, key=lambda point: point[own.cost])
    removed = 1 - (best[own.cost] - start[own.cost]) / increase
    return {"increase": increase, "removed": removed, "best": best["name"], "costs": costs}


# The page


def _chart_sections(config: StudyConfig, points: Mapping[str, list[Point]], laws: Mapping[str, Any]) -> list[Section]:
    lead = "Each dot is one measurement, the large one the last; runs move along their line in order of training."
    charts = [_chart(config, chart, points, laws) for chart in config.charts]
    return [Section("charts", "Charts", lead, charts)] if charts else []


def _peak_section(peak: PeakConfig, peaks: Mapping[str, Any]) -> Section:
    of, against = peak.of, peak.against
    rows = [
        {"series": name, f"{of} first": one["first"][of], f"{of} highest": one["highest"][of], f"{of} last": one["last"][of],
         f"{against} at the peak": one["highest"][against], f"{against} last": one["last"][against],
         "kept": one["kept"] and one["kept"][of], "kept / highest": one["kept_of_peak"]}
        for name, one in peaks.items()
    ]  # fmt: skip
    lead = (
        f"Where {of} is highest, and what {of} and {against} do after that. Runs are averaged over neighboring updates."
    )
    return Section("peaks", "Peaks", lead, tables=[rows])


def _saving_section(own: SavingsConfig, savings: Mapping[str, Any]) -> Section:
    rows = [
        {"series": name, "point": each, f"{own.cost}, change": found[own.cost], f"{own.gain}, change": found[own.gain],
         "share removed": 1 - found[own.cost] / saving["increase"] if saving["increase"] > 0 else None,
         "best of equal gain": "yes" if each == saving["best"] else ""}
        for name, saving in savings.items()
        for each, found in saving["costs"].items()
    ]  # fmt: skip
    lead = (
        f"Changes since {own.start}, and the share of the increase of {own.cost} up to {own.base} that is not there. The "
        f"gain is equal where {own.gain} is at least that of {own.base} less {own.tolerance:g}."
    )
    return Section("savings", "What is taken back", lead, tables=[rows])


def _chart(
    config: StudyConfig, chart: ChartConfig, points: Mapping[str, list[Point]], laws: Mapping[str, Any]
) -> Chart:
    """One chart of the series that have both quantities, with their laws if they are asked for."""
    colors = {name: number % len(SERIES) for number, name in enumerate(points)}
    scale = (lambda x: math.sqrt(max(0.0, x))) if chart.root else float
    having_both = [name for name, own in config.series.items() if {chart.x, chart.y} <= own.columns.keys()]
    curves = []
    for name in chart.series or having_both:
        x, y = ([point[key] for point in points[name]] for key in (chart.x, chart.y))
        curves.append(Curve(name, list(map(scale, x)), y, colors[name]))
        if chart.laws and name in laws:
            kl = np.linspace(0, max(x), LAW_POINTS)
            heights = law_heights(laws[name], kl).tolist()
            curves.append(Curve(f"law of {name}", list(map(scale, kl)), heights, len(curves) + 3))
    x, y = (axis.replace("_", " ") for axis in (f"square root of {chart.x}" if chart.root else chart.x, chart.y))
    return Chart(chart.title, chart.note, path_chart(chart.title, curves, x, y))

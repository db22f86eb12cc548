"""report.html of a study: its charts and tables in one file that loads nothing else. The points are gathered in study.py."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from alignment.evaluation.report.charts import Curve, path_chart
from alignment.evaluation.report.page import SERIES_COLORS, Chart, page_environment
from alignment.evaluation.report.reward_page import Section
from alignment.evaluation.study_config import ChartConfig, StudyConfig
from alignment.evaluation.study_figures import Study
from alignment.files import write_text

Row = Mapping[str, object]
LAW_POINTS = 60


def write_study_page(path: Path, config: StudyConfig, study: Study) -> Path:
    """Write a study as a self-contained HTML page and return its path. All text is escaped, and the page runs no script."""
    sections = [
        _charts(config, study),
        _peaks(config, study),
        _savings(config, study),
        _laws(study),
        _points(config, study),
    ]
    html = page_environment().get_template("sections.html.jinja").render(
        kind="study", title=config.title, summary=config.summary, sections=[one for one in sections if one is not None]
    )  # fmt: skip
    write_text(path, html)
    return path


def _charts(config: StudyConfig, study: Study) -> Section | None:
    colors = {name: number % SERIES_COLORS for number, name in enumerate(study.points)}
    charts = [_chart(config, chart, study, colors) for chart in config.charts]
    lead = "Each dot is one measurement, the large one the last; runs move along their line in order of training."
    return Section("charts", "Charts", lead, charts) if charts else None


def _chart(config: StudyConfig, chart: ChartConfig, study: Study, colors: Mapping[str, int]) -> Chart:
    """One chart of the series that have both quantities, with their laws if they are asked for."""
    names = chart.series or [
        name for name, series in config.series.items() if {chart.x, chart.y} <= series.columns.keys()
    ]
    curves = []
    for name in names:
        x = _axis([point[chart.x] for point in study.points[name]], root=chart.root)
        curves.append(Curve(name, x, [point[chart.y] for point in study.points[name]], colors[name]))
        if chart.laws and name in study.laws:
            kl = np.linspace(0, max(point[chart.x] for point in study.points[name]), LAW_POINTS).tolist()
            law = Curve(f"law of {name}", _axis(kl, root=chart.root), study.laws[name].gold(kl), len(curves) + 3)
            curves.append(law)
    label = f"square root of {chart.x}" if chart.root else chart.x
    return Chart(
        chart.title, chart.note, path_chart(chart.title, curves, label.replace("_", " "), chart.y.replace("_", " "))
    )


def _axis(values: Sequence[float], *, root: bool) -> list[float]:
    return [math.sqrt(max(0.0, value)) for value in values] if root else list(values)


def _peaks(config: StudyConfig, study: Study) -> Section | None:
    if config.peak is None:
        return None
    of, against = config.peak.of, config.peak.against
    rows: list[Row] = [
        {
            "series": name,
            f"{of} first": peak.first[of],
            f"{of} highest": peak.highest[of],
            f"{of} last": peak.last[of],
            f"{against} at the peak": peak.highest[against],
            f"{against} last": peak.last[against],
            "kept": None if peak.kept is None else peak.kept[of],
            "kept / highest": peak.kept_of_peak,
        }
        for name, peak in study.peaks.items()
    ]
    lead = (
        f"Where {of} is highest, and what {of} and {against} do after that. Runs are averaged over neighboring updates."
    )
    return Section("peaks", "Peaks", lead, tables=[rows])


def _savings(config: StudyConfig, study: Study) -> Section | None:
    if config.savings is None:
        return None
    own = config.savings
    rows: list[Row] = [
        {
            "series": name,
            "point": each,
            f"{own.cost}, change": found[own.cost],
            f"{own.gain}, change": found[own.gain],
            "share removed": 1 - found[own.cost] / saving.increase if saving.increase > 0 else None,
            "best of equal gain": "yes" if each == saving.best else "",
        }
        for name, saving in study.savings.items()
        for each, found in saving.costs.items()
    ]
    lead = (
        f"Changes since {own.start}, and the share of the increase of {own.cost} up to {own.base} that is not there. The gain is "
        f"equal where {own.gain} is at least that of {own.base} less {own.tolerance:g}."
    )
    return Section("savings", "What is taken back", lead, tables=[rows])


def _laws(study: Study) -> Section | None:
    rows: list[Row] = [
        {
            "series": name,
            "law": law.law,
            "start": law.start,
            "alpha": law.alpha,
            "beta": law.beta,
            "peak at KL": law.peak_kl,
            "explained": law.explained,
        }
        for name, law in study.laws.items()
    ]
    lead = (
        "Gao et al. 2022, with d = sqrt(KL): gold = start + d (alpha - beta d) for best-of-n, "
        "start + d (alpha - beta log d) for reinforcement learning."
    )
    return Section("laws", "Laws", lead, tables=[rows]) if rows else None


def _points(config: StudyConfig, study: Study) -> Section | None:
    """The points of results as a table; runs are in the charts alone."""
    tables: list[Sequence[Row]] = [
        [{name: point.name, **point.values} for point in study.points[name]]
        for name, series in config.series.items()
        if series.results is not None
    ]
    return Section("points", "Numbers", "", tables=tables) if tables else None

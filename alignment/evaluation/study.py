"""Studies: numbers of finished runs and evaluations, gathered into one page of charts and tables: a stage of recipes, `study`.

Nothing is measured here: every number was logged by a run or written by an evaluation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import takewhile
from pathlib import Path

from alignment.errors import UserError, raise_all, suggest
from alignment.evaluation.overoptimization import GoldFit, fit_gold
from alignment.evaluation.report.run_report import read_log_rows
from alignment.evaluation.study_config import FITTED, SeriesConfig, StudyConfig
from alignment.evaluation.study_figures import Point, Saving, ScorePeak, Study, find_peak, find_saving, smoothed
from alignment.files import read_json_object, write_json


def run(config: StudyConfig) -> Path:
    """Gather the points, write `results.json` and `report.html`, and return the path of the results.

    Raises:
        UserError: missing runs, results, items or columns, all at once; points that a figure cannot be made of.
    """
    from alignment.evaluation.report.study_page import write_study_page  # matplotlib, which --help does not need

    points: dict[str, list[Point]] = {}
    problems = []
    for name, series in config.series.items():
        try:
            points[name] = smoothed(read_points(series), series.smooth)
        except UserError as error:
            problems += [f"series {name}: {line}" for line in str(error).splitlines()]
    raise_all(problems)
    study = Study(points, _laws(config, points), _peaks(config, points), _savings(config, points))
    output = Path(config.output)
    write_json(output / "results.json", _as_json(study))
    write_study_page(output / "report.html", config, study)
    return output / "results.json"


def _as_json(study: Study) -> Mapping[str, object]:
    series = {name: [{"name": one.name, **one.values} for one in points] for name, points in study.points.items()}
    figures = {"laws": study.laws, "peaks": study.peaks, "savings": study.savings}
    return {"series": series} | {
        key: {name: asdict(figure) for name, figure in found.items()} for key, found in figures.items()
    }


def read_points(series: SeriesConfig) -> list[Point]:
    """The points of a series; lines of a run that lack a column are left out.

    Raises:
        UserError: no such file, key or item; a column that no line has, or that an item of results lacks.
    """
    source, rows = _rows(series)
    values = [{name: _number(row, column) for name, column in series.columns.items()} for _, row in rows]
    for name, column in series.columns.items():
        without = [each for (each, _), found in zip(rows, values, strict=True) if found[name] is None]
        if without and (series.results is not None or len(without) == len(rows)):
            where = f" in {without[0]}" if series.results is not None else ""
            raise UserError(f"{source}: there is no number {column!r}{where}")
    found = [
        Point({key: number for key, number in each.items() if number is not None}, name)
        for (name, _), each in zip(rows, values, strict=True)
        if None not in each.values()
    ]
    raise_all([] if found else [f"{source}: no line has all of {', '.join(series.columns.values())}"])
    return found


def _rows(series: SeriesConfig) -> tuple[str, list[tuple[str, Mapping[str, object]]]]:
    """Where the points are written, and their names (in a run: the update's number) with what is written of each."""
    if series.run is not None:
        path = Path(series.run) / "metrics.jsonl"
        raise_all([] if path.is_file() else [f"{path}: is not there; the run is not finished"])
        return str(path), [(str(row.get("step")), row) for row in read_log_rows(path)]
    paths = [Path(path) for path in series.result_files]
    parts = [_items(path, series) for path in paths]
    names = list(parts[0]) if series.names is None else series.names
    raise_all(
        f"{path}: {series.at} has no {name!r}; {suggest(name, rows)}"
        for path, rows in zip(paths, parts, strict=True)
        for name in names
        if name not in rows
    )
    raise_all([] if names else [f"{paths[0]}: {series.at or 'it'} has no items"])
    return ", ".join(map(str, paths)), [
        (name, {key: one for rows in parts[::-1] for key, one in rows[name].items()}) for name in names
    ]


def _items(path: Path, series: SeriesConfig) -> dict[str, Mapping[str, object]]:
    """The items at the key `at` of a file with results, by name; the items of a list are numbered from 1."""
    found: object = read_json_object(path)
    for key in filter(None, series.at.split(".")):
        if not isinstance(found, Mapping) or key not in found:
            raise UserError(f"{path}: there is no key {series.at!r}")
        found = found[key]
    items = enumerate(found, 1) if isinstance(found, list) else found.items() if isinstance(found, Mapping) else ()
    return {str(name): row for name, row in items if isinstance(row, Mapping)}


def _number(row: Mapping[str, object], column: str) -> float | None:
    """The number at a dotted key; None where there is none."""
    found: object = row.get(column)
    if found is None:
        found = row
        for key in column.split("."):
            found = found.get(key) if isinstance(found, Mapping) else None
    return float(found) if isinstance(found, int | float) else None


def _laws(config: StudyConfig, points: Mapping[str, list[Point]]) -> dict[str, GoldFit]:
    laws = {}
    for name, series in config.series.items():
        if series.fit is not None:
            kl, gold = ([point[quantity] for point in points[name]] for quantity in FITTED)
            try:
                laws[name] = fit_gold(series.fit, kl, gold)
            except ValueError as error:
                raise UserError(f"series {name}: {error}") from error
    return laws


def _peaks(config: StudyConfig, points: Mapping[str, list[Point]]) -> dict[str, ScorePeak]:
    if config.peak is None:
        return {}
    of, against = config.peak.of, config.peak.against
    return {
        name: find_peak(points[name], of=of, against=against, kept=_kept_index(config.series[name], points[name]))
        for name in config.peak.series
    }


def _kept_index(series: SeriesConfig, points: Sequence[Point]) -> int | None:
    """Index of the point whose weights the run kept: the first one with the highest value of the column `kept`."""
    if series.kept is None:
        return None
    source, rows = _rows(series)
    within = takewhile(lambda item: not _exceeds(item[1], series.kept_budget), rows)
    held_out = {name: number for name, row in within if (number := _number(row, series.kept)) is not None}
    if not held_out:
        raise UserError(
            f"{source}: no line within the budget has the number {series.kept!r}, by which weights are kept"
        )
    best, steps = max(held_out, key=lambda name: held_out[name]), [point.name for point in points]
    if best not in steps:
        raise UserError(
            f"{source}: {series.kept} is highest after update {best}, whose line lacks a column of the series"
        )
    return steps.index(best)


def _exceeds(row: Mapping[str, object], bounds: Mapping[str, float]) -> bool:
    """Whether a column of the line is above its bound."""
    return any((number := _number(row, column)) is not None and number > bound for column, bound in bounds.items())


def _savings(config: StudyConfig, points: Mapping[str, list[Point]]) -> dict[str, Saving]:
    if config.savings is None:
        return {}
    own = config.savings
    start, base = points[own.start][0], points[own.base][0]
    return {
        name: find_saving(points[name], start, base, cost=own.cost, gain=own.gain, tolerance=own.tolerance)
        for name in own.series
    }

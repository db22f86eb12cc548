"""A page on several runs (`alignment report RUN RUN`): training runs, evaluations of win rates, or both, side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignment.errors import UserError, raise_all
from alignment.evaluation.diagnosis import diagnose
from alignment.evaluation.report.conclusions import account, better_run, joined, winner
from alignment.evaluation.report.html import Row, short_path
from alignment.evaluation.report.page import (
    ends_table,
    flatten_settings,
    logged_samples,
    write_report,
    write_run_report,
)
from alignment.evaluation.report.recipe_report import summary_rows, verdicts
from alignment.evaluation.run_log import StageRecord, read_log_rows, read_run_log, read_stage_record
from alignment.files import read_json_object

OWN = ("output", "training.resume", "training.trackers", "training.tracking.")  # settings of which no result depends


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of one run, or of several side by side, and return its path.

    Args:
        folders: directories of training runs, or of results of `evaluate winrate` with the same baseline and judge.
    """
    evaluations = {folder: results for folder in folders if (results := read_evaluation(folder))}
    trained = [folder for folder in folders if folder not in evaluations]
    if len(folders) == 1 and trained:
        return write_run_report(trained[0], path)
    names = dict(zip(folders, short_names(folders), strict=True))
    runs = {names[folder]: read_run_log(folder) for folder in trained}
    records = [replace(read_stage_record(folder), name=names[folder]) for folder in trained]
    findings = {name: diagnose(run) for name, run in runs.items()}
    differing = settings_that_differ(records)
    judged = join_evaluations({names[folder]: results for folder, results in evaluations.items()})
    said = list(conclude(judged, {names[folder]: results for folder, results in evaluations.items()}))
    if len(runs) > 1:
        said.append(better_run(runs, [str(row["setting"]) for row in differing]))
    finished = {record.name: record.lineage.get("finished", 0) for record in records}
    return write_report(
        path,
        f"{joined(list(names.values()))} compared" if len(folders) > 1 else folders[0].name,
        summary=" ".join(said),
        verdicts=[
            *verdicts(judged),
            *(f"{name}: {account(run, finished[name], findings[name])}" for name, run in runs.items()),
        ],
        tables={
            "Policies": summary_rows(judged),
            "Settings that differ": differing,
            "Metrics at the end, with the 95 % interval of the scatter of updates": ends_table(runs),
        },
        results=judged,
        stages={names[folder]: read_log_rows(folder / "metrics.jsonl") for folder in trained},
        samples=[
            *judged.get("samples", []),
            *logged_samples({names[folder]: read_log_rows(folder / "samples.jsonl") for folder in trained}),
        ],
        lineage=records,
        findings=findings,
        together=True,
    )


def read_evaluation(folder: Path) -> dict[str, Any]:
    """results.json of `evaluate winrate`; empty where the folder is a training run's."""
    found = read_json_object(folder / "results.json") if (folder / "results.json").is_file() else {}
    return found if {"baseline", "judge", "models"} <= found.keys() else {}


def short_names(folders: Sequence[Path]) -> list[str]:
    """The ends of paths, as long as it takes to tell them apart."""
    paths = [folder.resolve().parts for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError(f"{joined([str(folder) for folder in folders])}: a run is named twice; name each once")
    return next(
        names
        for length in range(1, max(map(len, paths)) + 1)
        if len(set(names := ["/".join(parts[-length:]) for parts in paths])) == len(paths)
    )


def settings_that_differ(records: Sequence[StageRecord]) -> list[Row]:
    """A row for each setting that is not the same in all runs; files and models are the same where their hashes are."""
    settings = {record.name: dict(_settings(record)) for record in records}
    keys = dict.fromkeys(key for own in settings.values() for key in own)
    table = [{"setting": key, **{name: own.get(key) for name, own in settings.items()}} for key in keys]
    return [row for row in table if len(set(list(row.values())[1:])) > 1]


def _settings(record: StageRecord) -> Iterator[tuple[str, str]]:
    hashes = {**record.lineage.get("parents", {}), **record.lineage.get("data", {})}  # by path, by key
    yield "stage", record.lineage["stage"]
    for key, value in flatten_settings(record.settings):
        known = hashes.get(key) or hashes.get(value)
        if not key.startswith(OWN):
            yield key, f"{short_path(value)} ({known[:8]})" if isinstance(known, str) else value


def join_evaluations(evaluations: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Evaluations as one: the policies under their evaluation's name where there are several.

    Raises:
        UserError: The baselines or the judges differ, so that no chart can hold all win rates.
    """
    for key in ("baseline", "judge"):
        found = {name: results[key] for name, results in evaluations.items()}
        why = "win rates against them are on different scales; write a report of each"
        raise_all([f"{key}: {found}: {why}"] if len(set(found.values())) > 1 else [])
    if not evaluations:
        return {}
    label = "{1}, {0}" if len(evaluations) > 1 else "{1}"
    samples = dict[str, dict[str, Any]]()
    for name, results in evaluations.items():
        for sample in results.get("samples", []):
            own = {label.format(name, policy): response for policy, response in sample["responses"].items()}
            samples.setdefault(str(sample["prompt"]), {**sample, "responses": {}})["responses"].update(own)
    return {
        **next(iter(evaluations.values())),
        "models": {
            label.format(name, policy): model
            for name, results in evaluations.items()
            for policy, model in results["models"].items()
        },
        "samples": list(samples.values()),
    }


def conclude(judged: Mapping[str, Any], evaluations: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Who won: over all evaluations where policies met the same responses of the baseline, else in each."""
    met = [
        [(sample["prompt"], sample["responses"][results["baseline"]]["text"]) for sample in results.get("samples", [])]
        for results in evaluations.values()
    ]
    if all(met[0] == own for own in met):
        yield winner(judged)
        return
    yield from (f"{name}: {winner(results)}" for name, results in evaluations.items())
    yield "The baseline's responses differ between the evaluations, so their win rates are not compared with each other."

"""A page on several runs (`alignment report RUN RUN`): training runs, win-rate evaluations, or both, side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from alignment.errors import UserError, raise_all
from alignment.files import read_json_object
from alignment.reports.html import Row, short_path
from alignment.reports.page import flatten_settings, logged_samples, write_report, write_run_report
from alignment.reports.recipe_report import policy_rows, verdicts
from alignment.reports.run_log import StageRecord, read_run_log, read_stage_record
from alignment.reports.sentences import Results, better_run, describe_run, joined, winner

OWN = {"output", "resume", "trackers", "tracking"}  # settings that change no result


def write_comparison(folders: Sequence[Path], path: Path) -> Path:
    """Write the page of one run, or of several side by side, and return its path.

    Args:
        folders: directories of training runs, or of results of `evaluate winrate` with the same baseline and judge.
    """
    named = dict(zip(short_names(folders), folders, strict=True))
    evaluations = {name: results for name, folder in named.items() if (results := read_evaluation(folder))}
    trained = {name: folder for name, folder in named.items() if name not in evaluations}
    if len(named) == len(trained) == 1:
        return write_run_report(folders[0], path)
    runs = {name: read_run_log(folder) for name, folder in trained.items()}
    records = [replace(read_stage_record(folder), name=name) for name, folder in trained.items()]
    differing = changed_settings(records)
    judged = join_evaluations(evaluations)
    better = [better_run(runs, [str(row["setting"]) for row in differing])] if len(runs) > 1 else []
    return write_report(
        path,
        joined(list(named)) + " compared" * (len(named) > 1),
        summary=" ".join([*winners(judged, evaluations), *better]).strip(),
        verdicts=[*verdicts(judged), *(f"{name}: {describe_run(run)}" for name, run in runs.items())],
        tables={"Policies": policy_rows(judged), "Settings that differ": differing},
        results=judged,
        runs=runs,
        samples=[
            *judged.get("samples", []),
            *logged_samples({name: run.samples for name, run in runs.items()}),
        ],
        lineage=records,
        together=True,
    )


def read_evaluation(folder: Path) -> Results:
    """results.json of `evaluate winrate`; empty where the folder has none."""
    results = read_json_object(folder / "results.json") if (folder / "results.json").is_file() else {}
    return results if {"baseline", "judge", "models"} <= results.keys() else {}


def short_names(folders: Sequence[Path]) -> list[str]:
    """The part of each path that tells it apart from the others, from the end; or its end, where one part does not."""
    paths = [folder.resolve().parts for folder in folders]
    if len(set(paths)) < len(paths):
        raise UserError(f"{joined([str(folder) for folder in folders])}: a run is named twice; name each once")
    options = (
        ["/".join(path[-depth:][:parts]) for path in paths]
        for depth in range(1, max(map(len, paths)) + 1)
        for parts in (1, depth)
    )
    return next(names for names in options if len(set(names)) == len(names))


def changed_settings(records: Sequence[StageRecord]) -> list[Row]:
    """A row for each setting that is not the same in all runs, run -> value.

    A section that a run lacks is a single row. Of runs of several stages only settings that all of them have are shown.
    """
    settings = {record.name: _settings(record) for record in records}
    keys = dict.fromkeys(key for run_settings in settings.values() for key in run_settings)
    lacking = tuple(f"{key}." for key in keys if any(other.startswith(f"{key}.") for other in keys))
    rows = [
        {"setting": key} | {name: run_settings.get(key, "...") for name, run_settings in settings.items()}
        for key in keys
    ]
    rows = [row for row in rows if len(set(list(row.values())[1:])) > 1 and not row["setting"].startswith(lacking)]
    alike = len({record.lineage["stage"] for record in records}) == 1
    return [row for row in rows if alike or "..." not in row.values()]


def _settings(record: StageRecord) -> dict[str, str]:
    """Settings as dotted keys and text, with hashes of files and models: equal ones are equal wherever they lie."""
    hashes = {**record.lineage.get("parents", {}), **record.lineage.get("data", {})}  # by path, by key
    return {
        key: f"{short_path(value)} ({str(known)[:8]})" if (known := hashes.get(key, hashes.get(value))) else value
        for key, value in flatten_settings({"stage": record.lineage["stage"], **record.settings})
        if not OWN & {*key.split(".")}
    }


def join_evaluations(evaluations: Mapping[str, Results]) -> dict[str, Any]:
    """Evaluations as one: the policies under their evaluation's name where there are several.

    Raises:
        UserError: The baselines or the judges differ, so that no chart can hold all win rates.
    """
    problems = []
    for key in ("baseline", "judge"):
        by_name = {name: results[key] for name, results in evaluations.items()}
        if len(set(by_name.values())) > 1:
            problems.append(f"{key}: {by_name}: win rates on different scales; write a report of each")
    raise_all(problems)
    label = "{policy} ({name})" if len(evaluations) > 1 else "{policy}"
    models = dict[str, Any]()
    samples = dict[str, dict[str, Any]]()
    for name, results in evaluations.items():
        models |= {label.format(policy=policy, name=name): model for policy, model in results["models"].items()}
        for sample in results.get("samples", []):
            joint = samples.setdefault(str(sample["prompt"]), {**sample, "responses": {}})["responses"]
            joint |= {
                label.format(policy=policy, name=name): response for policy, response in sample["responses"].items()
            }
    return {**next(iter(evaluations.values()), {}), "models": models, "samples": list(samples.values())}


def winners(judged: Results, evaluations: Mapping[str, Results]) -> list[str]:
    """Who won: over all evaluations where policies met the same responses of the baseline, else in each."""
    met = []
    for results in evaluations.values():
        if results.get("samples"):
            baseline = results["baseline"]
            texts = [(sample["prompt"], sample["responses"][baseline]["text"]) for sample in results["samples"]]
            met.append((results.get("judging", {}).get("judge"), texts))
    if len(evaluations) < 2 or (len(met) == len(evaluations) and all(conditions == met[0] for conditions in met)):
        return [winner(judged)]
    return [
        *(f"{name}: {winner(results)}" for name, results in evaluations.items()),
        "Their judges or their baseline's responses differ, so these win rates are not compared with each other.",
    ]

"""Runs a recipe: stages in order; those already finished are recognized by a content hash and skipped."""

import gc
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from alignment.config.load import build, data_folder, packaged_folder
from alignment.config.yaml_source import SourcedYaml, dotted, fill, references, strings
from alignment.errors import UserError, raise_all, suggest
from alignment.files import (
    PAGE,
    code_hash,
    hash_of,
    hashes_below,
    refuse_other_file,
    remove_directory,
    remove_leftovers,
    sha256,
    write_json,
)
from alignment.pipeline.recipe import FOLDERS, Recipe, StageEntry, check_expectations, read_json, read_recipe
from alignment.pipeline.stages import STAGES, find_stage, missing_data, stage_file, with_micro_batch, write_page

MODEL_FILES = ("config.json", "adapter_config.json", "tokenizer.json")
GIT_HASH = 40  # digits; a SHA-256 has 64


class Stage(NamedTuple):
    """A stage ready to run, which writes into a directory of its name."""

    name: str
    config: Any  # checked, with every reference replaced
    run: Callable[[Any], Any]
    lineage: dict[str, Any]  # hashes of code, settings, files read and parent stages
    hash: str  # of the lineage; equal hashes give equal results


def run_recipe(
    source: str,
    output: Path,
    overrides: Sequence[str] = (),
    *,
    start: str | None = None,
    only: str | None = None,
    check: bool = False,
) -> bool:
    """Run the unfinished stages; True if the results lie in the recipe's expected ranges, or without `check`.

    A mistake in any stage is reported before the first one starts.

    Args:
        source: recipe folder, file, or packaged name.
        output: each stage writes into a directory of its name in here.
        overrides: `stage.key=value`, or `seed=value`.
        start: run this stage and those after it again, finished or not.
        only: run this stage alone, again; those before it must be finished.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            "a recipe runs in one process; launch its stages one by one: accelerate launch -m alignment sft ..."
        )
    output = Path(output)
    recipe, stages = plan(source, output, overrides)
    names = [stage.name for stage in stages]
    if wrong := [name for name in (start, only) if name is not None and name not in names]:
        raise UserError(f"there is no stage {wrong[0]!r}; {suggest(wrong[0], names)}")
    if start is not None and only is not None:
        raise UserError("--from and --only exclude each other")
    rerun = {only} if only else set(names[names.index(start) :]) if start else set()
    wanted = {only} if only else set(names)
    from alignment.training.run.directory import lock  # imports torch: not before the cheap checks

    with lock(output):
        _check_directories(stages, output, wanted)
        for stage_number, stage in enumerate(stages, start=1):
            if stage.name in wanted:
                done = stage.name not in rerun and is_finished(stage, output)
                print(f"[{stage_number}/{len(stages)}] {stage.name}{': finished before' if done else ''}", flush=True)
                if not done:
                    run_stage(stage, output, rerun=stage.name in rerun)
    return check_expectations(recipe.expect, output) if check else True


# Planning


def plan(source: str, output: Path, overrides: Sequence[str] = ()) -> tuple[Recipe, list[Stage]]:
    """A recipe's stages, every config checked and every data file found; UserError with all problems of all stages."""
    recipe, folder, written = read_recipe(source, overrides)
    names = {"seed": recipe.seed, "data": str(data_folder()), "recipe": str(folder)}
    names |= {"configs": str(packaged_folder("configs"))} | {name: str(output / name) for name in recipe.names}
    raise_all(
        wrong_reference
        for i, stage in enumerate(written)
        for wrong_reference in _wrong_references(*stage, recipe.names[:i], folder)
    )
    raise_all(problem for stage in written for problem in _missing_files(*stage, names))
    problems = []
    stages = list[Stage]()
    code = code_hash()
    hashes = dict.fromkeys(recipe.names, "wrong")  # stages that build on a wrong one are checked too
    for entry, document in written:
        try:
            stages.append(_resolve(entry, document, names, hashes, code))
            hashes[entry.name] = stages[-1].hash
        except UserError as error:
            problems += [f"stage {entry.name}: {line}" for line in str(error).splitlines()]
    raise_all(problems)
    return recipe, stages


def _wrong_references(entry: StageEntry, document: SourcedYaml, earlier: Sequence[str], folder: Path) -> Iterator[str]:
    """Unknown verbs and files of stages, and `${...}` that do not name an earlier stage."""
    values = dict(document.values or {})
    file = stage_file(entry.run, folder)
    if file is None and entry.run not in STAGES:
        yield f"stage {entry.name}: there is no stage {entry.run!r} to run; {suggest(entry.run, STAGES)}"
    if file is not None and not file.is_file():
        yield f"stage {entry.name}: run: {file} is not there"
    if values.pop("output", None) not in (None, f"${{{entry.name}}}"):
        yield f"stage {entry.name}: output: a recipe's stages write into directories of their own; leave it out"
    for text in (text for text in strings(values) if "${" in text.partition("${")[2].partition("}")[0]):
        yield f"stage {entry.name}: {text} needs axes that this stage's name has; elsewhere it stands in a list"
    known = ["seed", *FOLDERS, *earlier]
    for name in sorted(references(values) - set(known)):
        yield f"stage {entry.name}: ${{{name}}} is no stage before this one; {suggest(name, known)}"


def _missing_files(entry: StageEntry, document: SourcedYaml, names: Mapping[str, object]) -> Iterator[str]:
    """Files below `${data}`, `${recipe}` or `${configs}` that do not exist."""
    for text in strings(document.values):
        path = Path(str(fill(text, names)))
        if references(text) & set(FOLDERS) and not path.exists():
            advice = "; set ALIGNMENT_DATA to the folder of real data" if "data" in references(text) else ""
            yield f"stage {entry.name}: {path} is not there{advice}"


def _resolve(
    entry: StageEntry, document: SourcedYaml, names: Mapping[str, object], hashes: Mapping[str, str], code: str
) -> Stage:
    """Check a stage's config and collect everything that its result depends on."""
    values = dict(document.values or {})
    folder = Path(str(names["recipe"]))
    config_class, run = find_stage(entry.run, folder)
    filled = {**fill(values, names), "output": names[entry.name]}
    config = build(config_class, SourcedYaml(filled, document.locations))
    values.pop("output", None)
    parents = {parent: hashes[parent] for parent in sorted(references(values) & set(hashes))}
    file = stage_file(entry.run, folder)
    lineage = {
        "verb": entry.run,
        "code": code,
        # Without directories, so that a run may be moved: parents are given by their hashes, data by its files.
        "settings": fill(values, {"seed": names["seed"], **{name: f"${{{name}}}" for name in FOLDERS}, **parents}),
        "parents": parents,
        "files": {text: content for text in strings(values) if (content := _content(text, names))}
        | ({} if file is None else {"stage": {path.name: sha256(path) for path in sorted(file.parent.glob("*.py"))}}),
    }
    return Stage(entry.name, config, run, lineage, hash_of(lineage))


def _content(text: str, names: Mapping[str, object]) -> str | dict[str, str] | None:
    """Hashes of the files that a setting names; None where it names none, or a stage, which has its own hash."""
    if references(text) - set(FOLDERS):
        return None
    path = Path(fill(text, names)) if references(text) else Path(os.path.expanduser(text))
    if os.path.isfile(path):  # False for text that is too long for a path, where Path's own method raises an error
        return sha256(path)
    # A plain word may be a directory's name by chance; it counts only if the directory holds a model.
    if not os.path.isdir(path) or (os.sep not in text and not any((path / name).is_file() for name in MODEL_FILES)):
        return None
    return hashes_below(path)


# Running


def run_stage(stage: Stage, output: Path, *, rerun: bool) -> None:
    """Run a stage, from its checkpoints if its settings are unchanged; write `complete` to its lineage.json last."""
    directory = output / stage.name
    record = read_json(output / "stages.json")
    changed = record.get(stage.name, {}).get("hash") != stage.hash or hub_start_changed(directory)
    if directory.exists() and (rerun or changed):
        remove_directory(directory)
    remove_leftovers(directory)
    (directory / "lineage.json").unlink(missing_ok=True)
    directory.mkdir(parents=True, exist_ok=True)
    write_json(output / "stages.json", {**record, stage.name: {"hash": stage.hash}})
    started = time.monotonic()
    try:
        raise_all(f"{dotted(key)}: {why}" for key, why in missing_data(stage.config))
        stage.run(with_micro_batch(stage.config))
    except UserError as error:
        raise UserError(f"stage {stage.name}: {error}") from error
    seconds = round(time.monotonic() - started, 2)
    gc.collect()  # a stage's models may be in reference cycles; the next stage needs their memory
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024  # of this process so far; Linux reports kilobytes
    measured = {"hash": stage.hash, "seconds": seconds, "process_peak_megabytes": peak}
    write_json(output / "stages.json", {**record, stage.name: measured})
    print(f"      {seconds:.0f} s", flush=True)
    lineage = {"stage": stage.lineage["verb"], "code": stage.lineage["code"], "data": stage.lineage["files"]}
    # lineage.json is there already where a run has written more.
    lineage |= {"parents": stage.lineage["parents"]} | read_json(directory / "lineage.json")
    write_json(directory / "lineage.json", lineage)
    write_page(directory)
    if stage.lineage["verb"] == "report":
        shutil.copyfile(directory / "report.html", output / "report.html")
    write_json(
        directory / "lineage.json", {**lineage, "pipeline": {**stage.lineage, "hash": stage.hash, "complete": True}}
    )


def is_finished(stage: Stage, output: Path) -> bool:
    """True where a stage was completed with the same code, settings, files and parents."""
    lineage = read_json(output / stage.name / "lineage.json").get("pipeline", {})
    same = lineage.get("complete") is True and lineage.get("hash") == stage.hash
    return same and not hub_start_changed(output / stage.name)


def hub_start_changed(directory: Path) -> bool:
    """True where a Hub model that a run started from has another commit on this machine than the run noted.

    It is no part of the stage's hash, being unknown until the stage has fetched the model for the first time.
    """
    parents = read_json(directory / "lineage.json").get("parents", {})
    named = parents.items() if isinstance(parents, dict) else ()  # a stage of the recipe's own may write anything
    commits = {name: commit for name, commit in named if isinstance(commit, str) and len(commit) == GIT_HASH}
    if not commits:
        return False
    from alignment.training.run.lineage import hub_commit  # imports torch: only where it is needed

    return any(hub_commit(name) != commit for name, commit in commits.items())


def _check_directories(stages: Sequence[Stage], output: Path, wanted: set[str]) -> None:
    """Refuse to overwrite a directory of the user, or to run a stage whose parents are not finished."""
    refuse_other_file(output / "report.html", PAGE)
    record = read_json(output / "stages.json")
    by_name = {stage.name: stage for stage in stages}
    foreign = [output / name for name in wanted if name not in record and any((output / name).glob("*"))]
    parents = {parent for name in wanted for parent in by_name[name].lineage["parents"]} - wanted
    unfinished = [name for name in sorted(parents) if not is_finished(by_name[name], output)]
    raise_all(
        [f"{directory}: was not written by a recipe; choose another --output" for directory in sorted(foreign)]
        + [
            f"stage {stage_name} comes first and is not finished (or what it depends on has changed)"
            for stage_name in unfinished
        ]
    )

"""Checkpoints of a run: whole or not at all, verified before they are read. What goes in comes from engine and loop.

    checkpoints/step-000100/
        manifest.json           written last: SHA-256 of every other file, and of itself
        state.json              counters, the algorithm's state, environment
        identity.json           what must be the same for a resume: config and data
        random.json             global random states, one per rank
        model.safetensors       trained weights and buffers by name      (several engines: in a folder each)
        optimizer.safetensors   AdamW's state by parameter name          (deepspeed/ under DeepSpeed)
A checkpoint lies between two updates: no half-summed gradient is ever stored. A damaged one that a resume had to pass
over is kept as damaged-step-000100, and is no checkpoint any more.
"""

import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from alignment.errors import UserError, raise_all
from alignment.files import atomic_directory, hash_of, remove_directory, remove_leftovers, sha256, write_json
from alignment.training.distributed import ProcessGroup
from alignment.training.engine import Engine
from alignment.training.run.lineage import differences
from alignment.training.run.random_state import random_state, set_random_state

MANIFEST, STATE, IDENTITY, RANDOM = "manifest.json", "state.json", "identity.json", "random.json"
Engines = Engine | Mapping[str, Engine]


def save_checkpoint(
    root: Path,
    step: int,
    engines: Engines,
    state: dict[str, Any],
    identity: dict[str, Any],
    keep: int,
    *,
    drawn: bool = True,
) -> Path:
    """Write `root/step-NNNNNN`, then delete older ones until `keep` are left; every rank must call it.

    Args:
        state: JSON-like, whatever the algorithm needs beside engines and random states.
        identity: JSON-like, compared on resume.
        drawn: whether training has drawn random numbers, each rank its own, as dropout does.

    Raises:
        UserError: not enough room on the disk. Nothing is deleted before the new checkpoint is complete.
    """
    named = _named(engines)
    process_group = process_group_of(engines)
    path = root / f"step-{step:06d}"
    randoms = process_group.gather_objects(random_state())
    with ExitStack() as stack:
        if process_group.is_main:
            check_room(root, named)
            temporary = stack.enter_context(atomic_directory(path))
        directory = Path(process_group.broadcast_object(str(temporary) if process_group.is_main else None))
        for name, engine in named.items():
            if process_group.is_main:
                (directory / name).mkdir(exist_ok=True)
            process_group.barrier()
            engine.backend.save(directory / name)
        process_group.barrier()
        if process_group.is_main:
            counters = {name: {"step": engine.step} for name, engine in named.items()}
            kept = {"step": step, "engines": counters, "state": state, "environment": environment(process_group.size)}
            kept["drawn"] = drawn
            write_json(directory / STATE, kept)
            write_json(directory / IDENTITY, identity)
            write_json(directory / RANDOM, randoms)
            manifest = {"format": 2, "step": step, "files": hashes(directory)}
            write_json(directory / MANIFEST, manifest | {"sum": hash_of(manifest)})
    if process_group.is_main:
        delete_older(path, keep)
    process_group.barrier()
    return path


def delete_older(newest: Path, keep: int) -> None:
    """Delete checkpoints older than `newest`, which has just been written, until `keep` are left with it.

    A directory of a later step is none of this run's, and one without a sound manifest is no checkpoint: they neither
    count nor go.
    """
    older = [path for path in checkpoints(newest.parent) if step_of(path) < step_of(newest)]
    sound = [path for path in older if not read_manifest(path)[1]]
    for path in sound[keep - 1 :]:
        remove_directory(path)


def restore_checkpoint(path: Path, engines: Engines, identity: dict[str, Any]) -> dict[str, Any]:
    """Put a verified checkpoint back into the engines and the global random states; every rank must call it.

    Returns:
        The algorithm's `state` as saved, with `step`.

    Raises:
        UserError: config or data differ (each difference is listed), or a file or tensor does not fit; or another
            number of processes could not go on as the run was.
    """
    named = _named(engines)
    process_group = process_group_of(engines)
    raise_all(
        f"{path} was made with other settings: {line}; take the old ones back, or choose another output directory"
        for line in differences(_read(path / IDENTITY), json.loads(json.dumps(identity)))
    )
    kept = _read(path / STATE)
    if set(kept["engines"]) != set(named):
        raise UserError(f"{path} holds the engines {sorted(kept['engines'])}, this run has {sorted(named)}")
    check_world_size(path, kept, process_group)
    if process_group.is_main:
        for line in differences(kept["environment"], environment(process_group.size)):
            _warn(f"{path} was made in another environment ({line}); results may differ in the last digits")
    for name, engine in named.items():
        engine.backend.load(path / name)
        engine.step = int(kept["engines"][name]["step"])
    randoms = _read(path / RANDOM)
    if process_group.rank < len(randoms):
        set_random_state(randoms[process_group.rank])
    return kept["state"] | {"step": kept["step"]}


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none at all.

    Where the one before a damaged one is taken, the damaged one is named in a warning and set aside under another name:
    it must not count when older checkpoints are deleted. Left-overs of a save that was cut short are removed.

    Raises:
        UserError: a file of the newest checkpoint was deleted, or every checkpoint is damaged.
    """
    for hidden in list(root.glob(".step-*")):
        remove_leftovers(root / hidden.name.split(".")[1])
    damaged: dict[Path, list[str]] = {}
    for path in checkpoints(root):
        problems, missing = verify(path)
        if missing:
            raise UserError(
                f"{path / missing[0]} is missing, so the run cannot be resumed as it was; put the file back, or delete "
                f"{path} to resume from the checkpoint before it"
            )
        if not problems:
            for other, found in damaged.items():
                _warn(f"passing over a damaged checkpoint, kept as {set_aside(other).name}: {'; '.join(found)}")
            return path
        damaged[path] = problems
    if damaged:
        problems = [line for found in damaged.values() for line in found]
        raise UserError(
            f"no checkpoint in {root} is whole ({'; '.join(problems)}); delete them to start from the beginning"
        )
    return None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint so that it is none any more, and return where it is now; nothing is deleted."""
    aside, number = path.with_name(f"damaged-{path.name}"), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"damaged-{path.name}-{number}")
    os.rename(path, aside)
    return aside


def checkpoints(root: Path) -> Iterator[Path]:
    """Checkpoint directories, newest first, whole or not."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    yield from sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved, from its name."""
    return int(path.name.split("-")[1])


def verify(path: Path) -> tuple[list[str], list[str]]:
    """What is wrong with a checkpoint: (sentences about damage, names of files that are gone)."""
    files, problem = read_manifest(path)
    if problem:
        return [problem], []
    damage, missing = [], []
    for name, digest in files.items():
        if not (path / name).is_file():
            missing.append(name)
            continue
        try:
            if sha256(path / name) != digest:
                damage.append(f"{path / name} does not have the content that was saved")
        except OSError as error:
            damage.append(f"{path / name} cannot be read ({error.strerror})")
    return damage, missing


def read_manifest(path: Path) -> tuple[dict[str, str], str]:
    """SHA-256 of each file of a checkpoint by name, and what is wrong with the manifest, or ''. Opens no other file."""
    file = path / MANIFEST
    if not file.is_file():
        return {}, f"{file} is missing"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return {}, f"{file} cannot be read ({type(error).__name__})"
    if not isinstance(manifest, dict):
        return {}, f"{file} holds a {type(manifest).__name__} where an object was saved"
    total = manifest.pop("sum", None)
    if total != hash_of(manifest) and manifest.get("format") != 1:  # format 1 had no sum
        return {}, f"{file} does not have the content that was saved"
    files = manifest.get("files")
    if not isinstance(files, dict) or not {STATE, IDENTITY, RANDOM} <= set(files):
        return {}, f"{file} does not name the files of a checkpoint"
    for name in files:
        if "\0" in name or not Path(os.path.realpath(path / name)).is_relative_to(os.path.realpath(path)):
            return {}, f"{file} names {name!r}, which is no file of this checkpoint"
    return files, ""


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, by relative path."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): sha256(file) for file in files}


def check_room(root: Path, engines: Mapping[str, Engine]) -> None:
    """Raise UserError where the disk has no room for another checkpoint: weights and two moments, float32."""
    root.mkdir(parents=True, exist_ok=True)
    elements = sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for engine in engines.values()
        for parameter in engine.backend.unwrapped.parameters()
        if parameter.requires_grad
    )
    needed, free = 12 * elements, shutil.disk_usage(root).free
    if free < needed:
        raise UserError(f"{root}: a checkpoint needs about {needed} bytes and {free} are free; older ones are kept")


def check_world_size(path: Path, kept: dict[str, Any], process_group: ProcessGroup) -> None:
    """Raise UserError where a run saved by another number of processes would not go on as it was.

    Rows, minibatches and samples do not depend on the number of ranks, so that only rounding differs, unless each rank
    has drawn random numbers of its own (dropout), or has files of its own (DeepSpeed).
    """
    before = kept["environment"]["world_size"]
    if before == process_group.size:
        return
    if process_group.kind == "deepspeed":
        why = "DeepSpeed's files belong to one process each"
    elif kept.get("drawn", True):
        why = "every process draws its own dropout, and the run would not go on as it was"
    else:
        return
    raise UserError(
        f"{path} was saved by {before} processes, and now there are {process_group.size}: {why}; resume with {before}, or choose "
        "another output directory"
    )


def environment(world_size: int) -> dict[str, Any]:
    """What results depend on in their last digits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def process_group_of(engines: Engines) -> ProcessGroup:
    """The processes that train together; all engines of a run have the same."""
    return next(iter(_named(engines).values())).process_group


def _named(engines: Engines) -> dict[str, Engine]:
    """A single engine's files lie in the checkpoint itself."""
    return {"": engines} if isinstance(engines, Engine) else dict(engines)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is missing, so the run cannot be resumed as it was; put the file back")
    return json.loads(path.read_text(encoding="utf-8"))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)

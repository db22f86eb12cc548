"""Checkpoints of a run: whole or not at all, verified before they are read. What goes in comes from engine and loop.

    checkpoints/step-000100/
        manifest.json           written last: SHA-256 of every other file
        state.json              counters, the algorithm's state, environment
        identity.json           what must be the same for a resume: config and data
        random.json             global random states, one per rank
        model.safetensors       trained weights and buffers by name      (several engines: in a folder each)
        optimizer.safetensors   AdamW's state by parameter name          (deepspeed/ under DeepSpeed)
A checkpoint lies between two updates: no half-summed gradient is ever stored.
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
from alignment.files import atomic_directory, sha256, write_json
from alignment.training.engine import Engine
from alignment.training.random_state import random_state, set_random_state

MANIFEST, STATE, IDENTITY, RANDOM = "manifest.json", "state.json", "identity.json", "random.json"
Engines = Engine | Mapping[str, Engine]


def save_checkpoint(
    root: Path, step: int, engines: Engines, state: dict[str, Any], identity: dict[str, Any], keep: int
) -> Path:
    """Write `root/step-NNNNNN`, then delete all but the newest `keep`; every rank must call it.

    Args:
        state: JSON-like, whatever the algorithm needs beside engines and random states.
        identity: JSON-like, compared on resume.

    Raises:
        UserError: not enough room on the disk. Nothing is deleted before the new checkpoint is complete.
    """
    named = _named(engines)
    world = next(iter(named.values())).world
    path = root / f"step-{step:06d}"
    randoms = world.gather_objects(random_state())
    with ExitStack() as stack:
        if world.rank == 0:
            check_room(root, named)
            temporary = stack.enter_context(atomic_directory(path))
        directory = Path(world.broadcast_object(str(temporary) if world.rank == 0 else None))
        for name, engine in named.items():
            if world.rank == 0:
                (directory / name).mkdir(exist_ok=True)
            world.barrier()
            engine.save(directory / name)
        world.barrier()
        if world.rank == 0:
            counters = {name: engine.state() for name, engine in named.items()}
            kept = {"step": step, "engines": counters, "state": state, "environment": environment(world.size)}
            write_json(directory / STATE, kept)
            write_json(directory / IDENTITY, identity)
            write_json(directory / RANDOM, randoms)
            write_json(directory / MANIFEST, {"format": 1, "step": step, "files": hashes(directory)})
    if world.rank == 0:
        for old in list(checkpoints(root))[keep:]:
            hidden = old.with_name(f".{old.name}.old-{os.getpid()}")
            old.rename(hidden)  # at once, so that no half-deleted checkpoint is ever found
            shutil.rmtree(hidden)
    world.barrier()
    return path


def load_checkpoint(path: Path, engines: Engines, identity: dict[str, Any]) -> dict[str, Any]:
    """Put a verified checkpoint back into the engines and the global random states; every rank must call it.

    Returns:
        The algorithm's `state` as saved, with `step`.

    Raises:
        UserError: config or data differ (each difference is listed), or a file or tensor does not fit.
    """
    named = _named(engines)
    world = next(iter(named.values())).world
    raise_all(
        f"{path} was made with other settings: {line}; take the old ones back, or choose another output directory"
        for line in differences(_read(path / IDENTITY), json.loads(json.dumps(identity)))
    )
    kept = _read(path / STATE)
    if set(kept["engines"]) != set(named):
        raise UserError(f"{path} holds the engines {sorted(kept['engines'])}, this run has {sorted(named)}")
    if world.rank == 0:
        for line in differences(kept["environment"], environment(world.size)):
            _warn(f"{path} was made in another environment ({line}); results may differ in the last digits")
    for name, engine in named.items():
        engine.load(path / name)
        engine.load_state(kept["engines"][name])
    randoms = _read(path / RANDOM)
    if world.rank < len(randoms):
        set_random_state(randoms[world.rank])
    return kept["state"] | {"step": kept["step"]}


def latest_checkpoint(root: Path) -> Path | None:
    """The newest whole checkpoint, or None where there is none at all.

    A damaged one is named in a warning and the one before it is taken. Left-overs of a save that was cut short are
    removed.

    Raises:
        UserError: a file of the newest checkpoint was deleted, or every checkpoint is damaged.
    """
    remove_partial(root)
    damaged = []
    for path in checkpoints(root):
        problems, missing = verify(path)
        if missing:
            raise UserError(
                f"{path / missing[0]} is missing, so the run cannot be resumed as it was; put the file back, or delete "
                f"{path} to resume from the checkpoint before it"
            )
        if not problems:
            return path
        damaged += problems
        _warn(f"skipping a damaged checkpoint: {'; '.join(problems)}")
    if damaged:
        raise UserError(
            f"no checkpoint in {root} is whole ({'; '.join(damaged)}); delete them to start from the beginning"
        )
    return None


def checkpoints(root: Path) -> Iterator[Path]:
    """Checkpoint directories, newest first, whole or not."""
    found = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    yield from sorted(found, key=lambda path: int(path.name.split("-")[1]), reverse=True)


def verify(path: Path) -> tuple[list[str], list[str]]:
    """What is wrong with a checkpoint: (sentences about damage, names of files that are gone)."""
    try:
        files: dict[str, str] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return [f"{path / MANIFEST} cannot be read ({type(error).__name__})"], []
    missing = [name for name in files if not (path / name).is_file()]
    changed = [name for name, digest in files.items() if name not in missing and sha256(path / name) != digest]
    return [f"{path / name} does not have the content that was saved" for name in changed], missing


def hashes(directory: Path) -> dict[str, str]:
    """SHA-256 of every file below a directory, by relative path."""
    files = sorted(file for file in directory.rglob("*") if file.is_file())
    return {file.relative_to(directory).as_posix(): sha256(file) for file in files}


def remove_partial(root: Path) -> None:
    """Delete what saves that were cut short left behind."""
    for path in [*root.glob(".step-*.partial-*"), *root.glob(".step-*.old-*")]:
        shutil.rmtree(path, ignore_errors=True)


def check_room(root: Path, engines: Mapping[str, Engine]) -> None:
    """Raise UserError where the disk has no room for another checkpoint: weights and two moments, float32."""
    root.mkdir(parents=True, exist_ok=True)
    elements = sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for engine in engines.values()
        for parameter in engine.unwrapped.parameters()
        if parameter.requires_grad
    )
    needed, free = 12 * elements, shutil.disk_usage(root).free
    if free < needed:
        raise UserError(f"{root}: a checkpoint needs about {needed} bytes and {free} are free; older ones are kept")


def differences(old: Any, new: Any, key: str = "") -> list[str]:
    """Where two JSON-like values differ, as 'dotted.key: old -> new'."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted({*old, *new})
            for line in differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if old == new else [f"{key}: {old!r} -> {new!r}"]


def environment(world_size: int) -> dict[str, Any]:
    """What results depend on in their last digits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def _named(engines: Engines) -> dict[str, Engine]:
    """A single engine's files lie in the checkpoint itself."""
    return {"": engines} if isinstance(engines, Engine) else dict(engines)


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is missing, so the run cannot be resumed as it was; put the file back")
    return json.loads(path.read_text(encoding="utf-8"))


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)

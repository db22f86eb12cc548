"""Checkpoints of a run: written atomically, verified before they are read.

    checkpoints/step-000100/
        manifest.json           written last: SHA-256 of every other file, and of itself
        state.json              counters, the algorithm's state, environment
        identity.json           what must be equal for a resume: config and data
        random.json             global random states, one per rank
        model.safetensors       trained weights and buffers by name      (several engines: in a folder each)
        optimizer.safetensors   the optimizer's state by name
        average.safetensors     the moving average of the trained weights by name, where `training.ema_decay` is set
        *-shards/               in place of these where weights are sharded by FSDP2
        zero-rank-00001.safetensors   in place of these under ZeRO: what rank 1 holds
    checkpoints/best/step-000080/   the same, of the best evaluation; see training/result.py
A checkpoint is saved between two updates: it holds no partly accumulated gradient. A damaged one that a resume skipped
is renamed to damaged-step-000100, and no longer counts as a checkpoint.
"""

import base64
import json
import os
import platform
import random
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from alignment.errors import UserError, raise_all
from alignment.files import (
    atomic_directory,
    hash_of,
    hashes_below,
    remove_directory,
    remove_leftovers,
    sha256,
    write_json,
)
from alignment.ragged import has_apple_gpu
from alignment.training.distributed import ProcessGroup
from alignment.training.engine import Engine
from alignment.training.optim import trainable_parameters
from alignment.training.run.lineage import LENGTHS, differences

FORMAT = 4  # of the files of a checkpoint; what has another is not read
MANIFEST = "manifest.json"
STATE = "state.json"
IDENTITY = "identity.json"
RANDOM = "random.json"
Engines = Engine | Mapping[str, Engine]


def engines_of(engines: Engines) -> dict[str, Engine]:
    """Engines by the subdirectory of their files; a single engine's files are in the checkpoint itself."""
    return {"": engines} if isinstance(engines, Engine) else dict(engines)


def process_group_of(engines: Engines) -> ProcessGroup:
    """The processes that train together; all engines of a run have the same."""
    return next(iter(engines_of(engines).values())).process_group


def save_checkpoint(
    root: Path,
    step: int,
    engines: Engines,
    state: dict[str, Any],
    identity: dict[str, Any],
    *,
    keep: int,
    drawn: bool = True,
) -> Path:
    """Write `root/step-NNNNNN`, then delete older ones until `keep` are left; a collective operation.

    Args:
        state, identity: JSON-like; the algorithm's own state, and what is compared on resume.
        drawn: whether training has used random numbers, different ones on each rank, as dropout does.
    """
    named = engines_of(engines)
    process_group = process_group_of(engines)
    path = root / f"step-{step:06d}"
    random_states = process_group.gather_objects(random_state())
    with ExitStack() as stack:
        temporary = None
        if process_group.is_main:
            check_disk_space(root, engines)
            temporary = str(stack.enter_context(atomic_directory(path)))
        directory = Path(process_group.broadcast_object(temporary))
        blind = [rank for rank, sees in enumerate(process_group.gather_objects(directory.is_dir())) if not sees]
        if blind:
            raise UserError(
                f"{root}: ranks {', '.join(map(str, blind))} do not see this directory, into which every rank writes "
                "its part of a checkpoint; choose an output on a file system that all machines share"
            )
        for name, engine in named.items():
            if process_group.is_main:
                (directory / name).mkdir(exist_ok=True)
            process_group.barrier()
            engine.save(directory / name)
        process_group.barrier()
        if process_group.is_main:
            counters = {name: {"step": engine.step} for name, engine in named.items()}
            saved = {"step": step, "engines": counters, "state": state, "drawn": drawn}
            write_json(directory / STATE, saved | {"environment": _environment(process_group.size)})
            write_json(directory / IDENTITY, identity)
            write_json(directory / RANDOM, random_states)
            manifest = {"format": FORMAT, "step": step, "files": hashes_below(directory)}
            write_json(directory / MANIFEST, manifest | {"sum": hash_of(manifest)})
    if process_group.is_main:
        # Later steps belong to another run, and what has no valid manifest is no checkpoint.
        older = [
            checkpoint
            for checkpoint in checkpoints(root)
            if step_of(checkpoint) < step and not read_manifest(checkpoint)[1]
        ]
        for checkpoint in older[keep - 1 :]:
            remove_directory(checkpoint)
    process_group.barrier()
    return path


def restore_checkpoint(path: Path, engines: Engines, identity: dict[str, Any]) -> dict[str, Any]:
    """Load a verified checkpoint into the engines and the global random states; a collective operation.

    Returns:
        The algorithm's `state` as saved, with `step`, and `extended`: True where the run that saved it was to be of
        another length, which `refuse_other_run` allows for one that is finished.
    """
    named = engines_of(engines)
    process_group = process_group_of(engines)
    if (written := _read(path / MANIFEST).get("format")) != FORMAT:
        raise UserError(
            f"{path} has the format {written!r}, this version reads {FORMAT}; resume with the version that saved it, "
            "or choose another output directory"
        )
    changed = differences(_read(path / IDENTITY), json.loads(json.dumps(identity)))
    raise_all(
        f"{path} was made with other settings: {line}; take the old ones back, or choose another output directory"
        for line in changed
        if not line.startswith(LENGTHS)
    )
    saved = _read(path / STATE)
    if set(saved["engines"]) != set(named):
        raise UserError(f"{path} holds the engines {sorted(saved['engines'])}, this run has {sorted(named)}")
    before = saved["environment"]["world_size"]
    if before != process_group.size and saved["drawn"]:  # else only rounding differs
        raise UserError(
            f"{path} was saved by {before} processes, and now there are {process_group.size}: every process draws its "
            f"own dropout, and the run would not go on as it was; resume with {before}, or choose another output "
            "directory"
        )
    if process_group.is_main:
        for line in differences(saved["environment"], _environment(process_group.size)):
            _warn(f"{path} was made in another environment ({line}); results may differ in the last digits")
    for name, engine in named.items():
        engine.load(path / name)
        engine.step = int(saved["engines"][name]["step"])
    random_states = _read(path / RANDOM)
    if process_group.rank < len(random_states):
        set_random_state(random_states[process_group.rank])
    return saved["state"] | {"step": saved["step"], "extended": bool(changed)}


def latest_checkpoint(root: Path) -> Path | None:
    """The newest intact checkpoint, or None if there is none; newer damaged ones are named in a warning and renamed."""
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
            for other, reasons in damaged.items():
                _warn(f"passing over a damaged checkpoint, kept as {rename_corrupt(other).name}: {'; '.join(reasons)}")
            return path
        damaged[path] = problems
    if damaged:
        problems = [line for reasons in damaged.values() for line in reasons]
        raise UserError(
            f"no checkpoint in {root} is whole ({'; '.join(problems)}); delete them to start from the beginning"
        )
    return None


def rename_corrupt(path: Path) -> Path:
    """Rename a damaged directory so that it no longer counts, and return its new path; nothing is deleted."""
    aside = path.with_name(f"damaged-{path.name}")
    suffix = 1
    while os.path.lexists(aside):
        suffix += 1
        aside = path.with_name(f"damaged-{path.name}-{suffix}")
    os.rename(path, aside)
    return aside


def checkpoints(root: Path) -> Iterator[Path]:
    """Checkpoint directories, newest first, intact or damaged."""
    paths = [path for path in root.glob("step-*") if re.fullmatch(r"step-\d+", path.name)]
    yield from sorted(paths, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """The step after which a checkpoint was saved, read from its name."""
    return int(path.name.split("-")[1])


def verify(path: Path) -> tuple[list[str], list[str]]:
    """Problems of a checkpoint: (sentences about damage, names of missing files)."""
    files, problem = read_manifest(path)
    damage = [problem] if problem else []
    missing = [name for name in files if not (path / name).is_file()]
    for name, digest in files.items():
        try:
            if name not in missing and sha256(path / name) != digest:
                damage.append(f"{path / name} does not have the content that was saved")
        except OSError as error:
            damage.append(f"{path / name} cannot be read ({error.strerror})")
    return damage, missing


def read_manifest(path: Path) -> tuple[dict[str, str], str]:
    """SHA-256 of each file of a checkpoint by name, and the manifest's problem or ''. Opens no other file."""
    file = path / MANIFEST
    if not file.is_file():
        return {}, f"{file} is missing"
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        if manifest.pop("sum") == hash_of(manifest):
            return manifest["files"], ""
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        return {}, f"{file} cannot be read ({type(error).__name__})"
    return {}, f"{file} does not have the content that was saved"


def check_disk_space(root: Path, engines: Engines) -> None:
    """Raise UserError if the disk has no space for another checkpoint: about weights and two moments in float32."""
    root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(root).free
    needed = 12 * sum(
        getattr(parameter, "ds_numel", parameter.numel())
        for engine in engines_of(engines).values()
        for parameter in trainable_parameters(engine.backend.unwrapped).values()
    )
    if free < needed:
        raise UserError(f"{root}: a checkpoint needs about {needed} bytes and {free} are free; older ones are kept")


def _environment(world_size: int) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "world_size": world_size,
    }


def _read(path: Path) -> Any:
    if not path.is_file():
        raise UserError(f"{path} is missing, so the run cannot be resumed as it was; put the file back")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}); put the file back") from error


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


# The global random states of one process as plain JSON values. Local generators are not included.


def random_state() -> dict[str, Any]:
    """States of the global generators of Python, NumPy and torch, on the CPU and on all devices."""
    kind, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {
        "python": [kind, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), position, has_gauss, cached],
        "torch": _encode(torch.get_rng_state()),
        "cuda": [_encode(state) for state in cuda],
        "mps": [_encode(torch.mps.get_rng_state())] if has_apple_gpu() else [],
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore what `random_state` returned; devices that no longer exist are left out."""
    kind, words, gauss = state["python"]
    random.setstate((kind, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_decode(state["torch"]))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, saved in enumerate(state["cuda"][:devices]):
        torch.cuda.set_rng_state(_decode(saved), device)
    for saved in state.get("mps", ()) if has_apple_gpu() else ():
        torch.mps.set_rng_state(_decode(saved))


def generator_states() -> list[str]:
    """States of torch's global generators on the CPU and all devices, which are the ones that models use."""
    state = random_state()
    return [state["torch"], *state["cuda"], *state["mps"]]


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """While open, random numbers may be used; afterwards the global random states are as before."""
    state = random_state()
    try:
        yield
    finally:
        set_random_state(state)


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().numpy())).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)

"""Origin of a run: hashes of code, config, data and parent checkpoints, and the comparison with an earlier run."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from alignment.errors import UserError
from alignment.files import code_hash, hash_of, hashes_below, sha256
from alignment.settings import leaves

ENDS = 2**20  # bytes of a file of streamed rows that are hashed at either end
# Config keys that may change when a run is resumed: they affect memory, files and logs, not the result.
RESUMABLE_KEYS = frozenset(
    {
        "output",
        "resume",
        "trackers",
        "tracking",
        "save_every_steps",
        "keep_last_checkpoints",
        "evaluate_every_steps",
        "micro_batch_tokens",
        "gradient_checkpointing",
        "keep_activations",
        "rollout_weights",
        "max_shard_size",
        "share_prompts",
        "urls",
        "weights_folder",
        "timeout_seconds",
        "retries",
        "requests",
        "cuda_graphs",
    }
)
# What a run writes beside its model, checkpoints and metrics.
ALSO_WRITTEN = ("config.yaml", "base", "best", "report.html", "samples.jsonl", "sources.json")
LENGTHS = ("config.training.epochs", "config.training.max_steps")  # may grow when a run is finished


def identity_of(
    config: Mapping[str, object], parents: Sequence[str], files: Mapping[str, Sequence[Path]] | None = None
) -> dict[str, Any]:
    """Settings that affect the result, and the content of all inputs; they must be equal to resume a checkpoint."""
    return {
        "config": without_runtime_keys(config),
        "data": input_hashes(config, files),
        "parents": parent_hashes(parents),
    }


def refuse_other_run(output: Path, stage: str, identity: Mapping[str, object]) -> bool:
    """Refuse a directory that a run with other settings or data has written; every difference is listed.

    A finished run may be made longer, where it kept the checkpoint of its end.

    Returns:
        True where it holds a finished run with these settings, and its model.
    """
    paths = {name: output / name for name in ("model", "checkpoints", "metrics.jsonl")}
    entries = [
        name
        for name, path in paths.items()
        if (any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size > 0)
    ]
    new = {"stage": stage, **json.loads(json.dumps(identity))}
    if not entries:
        if not (output / "lineage.json").exists() and earlier_run(output).get("config") != new["config"]:
            entries = [name for name in ALSO_WRITTEN if (output / name).exists()]
        if entries:
            raise UserError(
                f"{output}: holds {', '.join(entries)} that no run has written, and a run writes files of these names\n"
                "Nothing was changed. Choose another output directory"
            )
        return False
    old = earlier_run(output)
    finished = old.pop("finished", 0)
    old.pop("source", "")
    changed = [line for key in old for line in differences(old[key], new[key], key)]
    if old and not changed:
        return finished > 0 and "model" in entries
    only_length = all(line.startswith(LENGTHS) for line in changed)
    if finished and only_length and _is_longer(old["config"], new["config"], finished):
        if not (output / "checkpoints" / f"step-{finished:06d}").is_dir():
            raise UserError(
                f"{output}: this run is finished after {finished} updates and kept no checkpoint of its end to go on "
                f"from. Start another run from its model ({output / 'model'}) in another output directory, or delete "
                "this one"
            )
        return False
    why = "\n".join(["of a run with other settings:", *changed]) if old else "that no run of this kind has written"
    raise UserError(
        f"{output}: holds {', '.join(entries)} {why}\nNothing was changed. Choose another output directory, or delete "
        "this one"
    )


def _is_longer(old: object, new: object, finished: int) -> bool:
    """True where a config asks for more updates than the run of another one has finished."""
    match old, new:
        case _, {"training": {"max_steps": int(steps)}}:
            return steps > finished
        case {"training": {"max_steps": None, "epochs": int() | float() as before}}, {"training": {"epochs": after}}:
            return after > before
    return False


def earlier_run(output: Path) -> dict[str, Any]:
    """Stage and identity of the run that wrote a directory; {} if no run wrote it.

    And `finished`, its updates if it is, and `source`, the hash of the library's source at its last start.
    """
    from alignment.config.yaml_source import read_yaml

    identity: dict[str, Any] = {}
    try:
        if (output / "config.yaml").is_file():
            identity["config"] = without_runtime_keys(read_yaml(output / "config.yaml").values)
        if (output / "lineage.json").is_file():
            lineage = json.loads((output / "lineage.json").read_text(encoding="utf-8"))
            identity |= {key: lineage[key] for key in ("stage", "data", "parents")}
            identity["finished"] = int(lineage.get("finished", 0))
            identity["source"] = lineage.get("code", {}).get("source", "")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"{output}: config.yaml or lineage.json of an earlier run cannot be read ({type(error).__name__}), so it "
            "is not known whether this run may go on from it; choose another output directory, or delete this one"
        ) from error
    return identity


def differences(old: object, new: object, key: str = "") -> list[str]:
    """The differences of two JSON-like values, each as 'dotted.key: old -> new'."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [
            line
            for name in sorted({*old, *new})
            for line in differences(old.get(name), new.get(name), f"{key}.{name}" if key else name)
        ]
    return [] if old == new else [f"{key}: {old!r} -> {new!r}"]


def lineage_of(stage: str, config: Mapping[str, object], identity: Mapping[str, object]) -> dict[str, Any]:
    """The content of lineage.json."""
    return {
        "stage": stage,
        "code": code_version(),
        "config": hash_of(config),
        "data": identity["data"],
        "parents": identity["parents"],
    }


def without_runtime_keys(value: Any) -> Any:
    """A config without the keys that may change when it is resumed.

    How often a run evaluates may not where evaluations choose the weights that are its result, or end it.
    """
    if not isinstance(value, dict):
        return value
    chooses = bool(value.get("keep_best") or value.get("early_stopping"))
    dropped = RESUMABLE_KEYS - {"evaluate_every_steps"} if chooses else RESUMABLE_KEYS
    return {key: without_runtime_keys(entry) for key, entry in value.items() if key not in dropped}


def input_hashes(
    config: Mapping[str, object], files: Mapping[str, Sequence[Path]] | None = None
) -> dict[str, str | dict[str, str]]:
    """SHA-256 of every file that the config refers to, by dotted key; of streamed rows, size and hash of both ends.

    `files` has, by dotted key, the files behind a setting that is no file's name: a directory of rows, a module.
    """
    data: Any = config.get("data") if isinstance(config.get("data"), dict) else {}

    def hash_input(key: str, path: Path) -> str:
        streamed = data.get("streaming") and key.startswith("data.train")
        return hash_of_ends(path) if streamed else sha256(path)

    values = {".".join(map(str, key)): leaf for key, leaf in leaves(config) if not RESUMABLE_KEYS.intersection(key)}
    texts = {key: leaf for key, leaf in values.items() if isinstance(leaf, str)}
    named = {key: hash_input(key, Path(text)) for key, text in texts.items() if os.path.isfile(text)}
    return named | {key: {str(path): hash_input(key, path) for path in paths} for key, paths in (files or {}).items()}


def hash_of_ends(path: Path) -> str:
    """Hash of a file's size and of its first and last megabyte."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        first = file.read(ENDS)
        file.seek(max(0, size - ENDS))
        return hash_of([size, hashlib.sha256(first).hexdigest(), hashlib.sha256(file.read(ENDS)).hexdigest()])


def parent_hashes(parents: Sequence[str]) -> dict[str, str | None]:
    """A hash over the files of each parent checkpoint, or the commit of a model from the Hub."""
    paths = {name: Path(os.path.expanduser(name)) for name in parents}
    return {name: directory_hash(path) if path.is_dir() else hub_commit(name) for name, path in paths.items()}


def hub_commit(name: str) -> str | None:
    """Commit of a Hub model's snapshot in the local cache; None where there is none. Asks no server."""
    from huggingface_hub import try_to_load_from_cache

    for file in ("config.json", "adapter_config.json"):
        if isinstance(path := try_to_load_from_cache(name, file), str):
            return Path(path).parent.name
    return None


def directory_hash(directory: Path) -> str:
    """Hash of the names and contents of all files below a directory."""
    return hash_of(hashes_below(directory))


def code_version() -> dict[str, Any]:
    """This library's source as one hash, its git commit if it has one, and the versions of the main dependencies."""
    package = Path(__file__).resolve().parents[2]
    names = ("torch", "transformers", "accelerate", "peft", "safetensors", "deepspeed", "bitsandbytes")
    versions = {name: metadata.version(name) for name in names if any(metadata.distributions(name=name))}
    versions["python"] = platform.python_version()
    try:
        command = ["git", "-C", str(package), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        commit = done.stdout.strip() if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired):
        commit = None  # installed without git: the source hash has to do
    return {"source": code_hash(), "commit": commit, "versions": versions}

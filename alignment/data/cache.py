"""The cache of prepared rows: a directory with one entry per key, written whole or not at all, and checked when opened.

    DIRECTORY/entries/KEY/     manifest.json and the files that it lists
    DIRECTORY/locks/KEY        locked while one process looks for the entry or makes it

A key stands for all that prepared rows depend on: the rows' bytes, the tokenizer, the settings and the code that
prepares them. Settings count unless they are known not to matter, so that a new one counts from its first day.
"""

import dataclasses
import functools
import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.rows.files import hub_source, source_files
from alignment.data.rows.hub import load_hub
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.files import atomic_directory, cache_directory, hash_of, hashes_below, remove_directory, sha256

MANIFEST = "manifest.json"
VERIFY_BYTES = 64 * 2**20  # smaller entries are hashed at every opening, larger ones where a file's times have changed
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised by what is no entry
PACKAGES = ("tokenizers", "transformers", "jinja2")  # their versions may change what a row becomes
# Settings that change no row and no token: the sources have keys of their own, limits are checked on the stored tally.
WITHOUT_EFFECT = frozenset(
    {
        "train",
        "evaluation",
        "evaluation_share",
        "split",
        "evaluation_split",
        "columns",
        "max_rows",
        "mixing",
        "mixing_maximum",
        "temperature",
        "max_lost_share",
        "processes",
        "cache",
        "check",
        "streaming",
        "shuffle_buffer",
    }
)
WITHOUT_EFFECT_OF_A_SOURCE = frozenset({"name", "weight", "max_rows"})
ORIGIN = ("name_or_path", "is_local", "local_files_only")  # where a tokenizer came from, not what it is


@dataclass(frozen=True)
class Entry:
    """A cache entry, whole and checked; `cached`: it was there already; `notes`: a damaged one was replaced."""

    directory: Path
    manifest: Mapping[str, Any]
    cached: bool
    notes: tuple[str, ...] = ()


def get_entry(cache: Path, key: str, make: Callable[[Path], Mapping[str, Any]]) -> Entry:
    """The entry of a key; `make` fills its directory and returns its manifest where it is missing or damaged.

    Of several processes that ask for it, one makes it.
    """
    directory = cache / "entries" / key
    notes = ()
    try:
        for name in ("entries", "locks"):
            (cache / name).mkdir(parents=True, exist_ok=True)
        locked = FileLock(cache / "locks" / key).acquire()
    except OSError as error:
        why = f"cannot be written ({error.strerror}), and rows are prepared into it"
        raise UserError(f"{cache}: {why}; name another directory by data.cache or ALIGNMENT_CACHE") from error
    with locked:
        if os.path.lexists(directory):
            try:
                return open_entry(directory, key)
            except DAMAGE as error:
                notes = (f"{directory}: prepared rows were damaged ({error}) and are prepared again",)
                remove_directory(directory)
        with atomic_directory(directory) as new:
            content = {**make(new), "key": key, "created": time.time()}
            content["stored"] = {path.name: _stamp(path) | {"sha256": sha256(path)} for path in sorted(new.iterdir())}
            text = json.dumps({**content, "check": hash_of(content)})
            (new / MANIFEST).write_text(text, encoding="utf-8")
    return Entry(directory, json.loads(text), False, notes)


def open_entry(directory: Path, key: str) -> Entry:
    """The entry in a directory; one of `DAMAGE` is raised where it is missing or damaged."""
    manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    check = manifest.pop("check")
    if manifest["key"] != key or hash_of(manifest) != check:
        raise ValueError(f"{MANIFEST} does not have its checksum")
    small = sum(file["bytes"] for file in manifest["stored"].values()) <= VERIFY_BYTES
    for name, file in manifest["stored"].items():
        changed = _stamp(directory / name) != {key: file[key] for key in ("bytes", "changed", "inode")}
        if (small or changed) and sha256(directory / name) != file["sha256"]:
            raise ValueError(f"{name} does not have its checksum")
    os.utime(directory / MANIFEST)  # its last use
    return Entry(directory, manifest, True)


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "changed": stat.st_mtime_ns, "inode": stat.st_ino}


def table_key(
    source: SourceConfig, config: DataConfig, tokenizer: Tokenizer, *, name: str, max_rows: int | None
) -> str:
    """The key of one source's prepared rows; `name` is that of the preparation."""
    settings = dataclasses.asdict(config)
    source_settings = dataclasses.asdict(source)
    parts = {
        "preparation": name,
        "rows": content_of(source),
        "source": {key: value for key, value in source_settings.items() if key not in WITHOUT_EFFECT_OF_A_SOURCE},
        "settings": {key: value for key, value in settings.items() if key not in WITHOUT_EFFECT},
        "max_rows": max_rows,
        "tokenizer": tokenizer_hash(tokenizer),
        "code": preparation_code_hash(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }
    return hash_of(parts)[:32]


def content_of(source: SourceConfig) -> dict[str, str]:
    """Hashes of the files of a source by path; for a Hub data set, the fingerprint that `datasets` gives it."""
    if files := source_files(source.source, str(source.split)):
        return {str(file): sha256(file) for file in files}
    hub_name = hub_source(source.source, str(source.split))
    if hub_name is None:
        return {}  # no such file: reading it says so
    dataset = load_hub(*hub_name)
    return {"fingerprint": getattr(dataset, "_fingerprint", None) or hash_of([dict(row) for row in dataset])}


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Hash of the files that the tokenizer would be saved as: vocabulary, special tokens, chat template."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files: dict[str, object] = {**hashes_below(Path(folder))}
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
    return hash_of({**files, "tokenizer_config.json": {name: x for name, x in config.items() if name not in ORIGIN}})


@functools.lru_cache(maxsize=1)
def preparation_code_hash() -> str:
    """Hash of the source of every module that reads or tokenizes rows: all of alignment/data."""
    return hash_of(hashes_below(Path(__file__).parent, "*.py"))


# As `alignment data cache` lists and clears it


class Listed(NamedTuple):
    """An entry of the cache, and how many days ago it was made and last opened; kind "damaged" where it is."""

    key: str
    kind: str
    source: str = ""
    rows: int = 0
    tokens: int = 0
    bytes: int = 0
    made: float = math.inf
    used: float = math.inf


def list_entries(cache: Path, older_than: float = 0.0) -> list[Listed]:
    """Entries unused for at least `days`, newest first."""
    entries = [_listed(path) for path in (cache / "entries").glob("[0-9a-f]" * 32)]
    return sorted((entry for entry in entries if entry.used >= older_than), key=lambda entry: entry.used)


def _listed(directory: Path) -> Listed:
    size = sum(path.stat().st_size for path in directory.glob("*"))
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        times = manifest["created"], (directory / MANIFEST).stat().st_mtime
        rows = manifest["rows"]
        tokens = manifest["tally"]["tokens"]
        ages = ((time.time() - moment) / 86400 for moment in times)
        return Listed(directory.name, manifest["kind"], manifest["source"], rows, tokens, size, *ages)
    except DAMAGE:
        return Listed(directory.name, "damaged", bytes=size)


def cache_lines(directory: str | None = None, *, clear: bool = False, older_than: float | None = None) -> list[str]:
    """The entries of the cache as lines of a table, and their sum; or, with `clear`, what was deleted.

    A run that has opened an entry keeps reading it; the system frees the space when the run ends. An entry that is
    being prepared stays.

    Args:
        directory: of the cache; None: the default one.
        older_than: only entries last used more than this many days ago; None: all.
    """
    cache = cache_directory(directory)
    entries = list_entries(cache, older_than or 0.0)
    lines = list[str]()
    if clear:
        for entry in list(entries):
            try:
                with FileLock(cache / "locks" / entry.key, timeout=0):
                    remove_directory(cache / "entries" / entry.key)
            except Timeout:
                entries.remove(entry)
                lines.append(f"left {entry.key}: a process is preparing it")
    elif entries:
        head = ("key", "kind", "source", "rows", "tokens", "MB", "days since made", "since used")
        cells = [head] + [
            (*names, f"{rows:,}", f"{tokens:,}", f"{size / 1e6:.1f}", f"{made:.1f}", f"{used:.1f}")
            for *names, rows, tokens, size, made, used in entries
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    size = sum(entry.bytes for entry in entries) / 1e6
    count = f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {size:.1f} MB"
    return [*lines, f"{cache}: {'deleted ' if clear else ''}{count}"]

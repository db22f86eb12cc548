"""The cache of prepared rows: a directory with one entry per key, written whole or not at all, and checked when opened.

    DIRECTORY/entries/KEY/     manifest.json and the files that it lists
    DIRECTORY/locks/KEY        locked while one process looks for the entry or makes it

The system releases a lock when its process ends, however it ends. Entries are renamed into place when they are complete.
"""

import atexit
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from alignment.files import atomic_directory, cache_directory, hash_of, remove_directory, sha256

MANIFEST = "manifest.json"
VERIFY_BYTES = 64 * 2**20  # smaller entries are hashed at every opening, larger ones where a file's times have changed

DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError)  # raised by what is no entry

Make = Callable[[Path], Mapping[str, Any]]  # directory to fill -> content of its manifest


@dataclass(frozen=True)
class Entry:
    """One entry of the cache, whole and checked.

    Attributes:
        directory: where its files are.
        manifest: what was written with them.
        cached: True where it was there already.
        notes: what the user should know: a damaged entry that was replaced, a directory that cannot be written.
    """

    directory: Path
    manifest: Mapping[str, Any]
    cached: bool
    notes: tuple[str, ...] = ()


def get_entry(cache: Path, key: str, make: Make) -> Entry:
    """The entry of a key; `make` fills it where it is missing or damaged. Of several processes, one does so.

    Where the cache cannot be written, the entry is made in a temporary directory, which ends with the process.
    """
    problem = write_problem(cache)
    if not problem:
        return _get(cache, key, make)
    with suppress(*DAMAGE):
        return open_entry(cache / "entries" / key, key)
    made = _get(temporary_cache(), key, make)
    note = (
        f"{cache}: cannot be written ({problem}), so rows are prepared into a temporary directory, and again by the next "
        "run; name another directory by data.cache or ALIGNMENT_CACHE"
    )
    return replace(made, notes=(note, *made.notes))


def write_problem(cache: Path) -> str:
    """Why the cache cannot be written, or ''."""
    try:
        for name in ("entries", "locks"):
            (cache / name).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=cache / name):
                pass
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _get(cache: Path, key: str, make: Make) -> Entry:
    """The entry of a key in a cache that can be written, made where it is missing or damaged."""
    directory, notes = cache / "entries" / key, ()
    with _locked(cache / "locks" / key):
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
        stamp = _stamp(directory / name)
        if stamp["bytes"] != file["bytes"]:
            raise ValueError(f"{name} has {stamp['bytes']} bytes, not {file['bytes']}")
        changed = any(stamp[key] != file[key] for key in stamp)
        if (small or changed) and sha256(directory / name) != file["sha256"]:
            raise ValueError(f"{name} does not have its checksum")
    with suppress(PermissionError):  # an entry of another user
        os.utime(directory / MANIFEST)  # its last use
    return Entry(directory, manifest, True)


def _stamp(path: Path) -> dict[str, int]:
    stat = path.stat()
    return {"bytes": stat.st_size, "changed": stat.st_mtime_ns, "inode": stat.st_ino}


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While open, this process alone holds the lock of that name; on a file system without locks, several may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open_lock(path)
    try:
        with suppress(OSError):  # without locks the last of two writers wins, and both write the same
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open_lock(path: Path) -> int:
    """A descriptor of a lock, made where there is none; a directory in its place is locked as a file is."""
    return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDONLY | os.O_CREAT, 0o666)


def temporary_cache() -> Path:
    """A cache that ends with this process, shared by the processes that one launcher started on this machine."""
    several = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1
    owner = f"{os.getuid()}-{os.getppid()}-{os.environ.get('MASTER_PORT', '')}" if several else f"{os.getpid()}"
    path = Path(tempfile.gettempdir()) / f"alignment-data-{owner}"
    path.mkdir(mode=0o700, exist_ok=True)
    if path.is_symlink() or path.stat().st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    atexit.register(_remove_own, path, os.getpid())
    return path


def _remove_own(path: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked child
        shutil.rmtree(path, ignore_errors=True)


@dataclass(frozen=True)
class Listed:
    """An entry as `alignment data cache` lists it.

    Attributes:
        key: name of the entry.
        kind: of its rows.
        source: file or Hub id that they come from.
        rows, tokens, bytes: its size.
        created, used: when it was made and last opened, in seconds since 1970.
    """

    key: str
    kind: str
    source: str
    rows: int
    tokens: int
    bytes: int
    created: float
    used: float


def list_entries(cache: Path, older_than: float | None = None) -> list[Listed]:
    """The entries of a cache, the one used last first; damaged ones with kind "damaged".

    Args:
        older_than: only those last used more than this many days ago; None: all.
    """
    folder = cache / "entries"
    found = [_listed(path) for path in folder.iterdir() if not path.name.startswith(".")] if folder.is_dir() else []
    oldest = time.time() if older_than is None else time.time() - older_than * 86400
    return sorted((entry for entry in found if entry.used <= oldest), key=lambda entry: -entry.used)


def _listed(directory: Path) -> Listed:
    size = sum(path.stat().st_size for path in directory.glob("*"))
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        rows, tokens, created = manifest["rows"], manifest["tally"]["tokens"], manifest["created"]
        used = (directory / MANIFEST).stat().st_mtime
        return Listed(directory.name, manifest["kind"], manifest["source"], rows, tokens, size, created, used)
    except DAMAGE:
        return Listed(directory.name, "damaged", "", 0, 0, size, 0.0, 0.0)


def clear_entries(cache: Path, older_than: float | None = None) -> tuple[list[Listed], list[Listed]]:
    """Delete entries: (deleted, left because a process holds them).

    A run that has opened an entry keeps reading it; the system frees the space when the run ends.

    Args:
        older_than: only those last used more than this many days ago; None: all.
    """
    deleted, left = [], []
    for entry in list_entries(cache, older_than):
        lock = _open_lock(cache / "locks" / entry.key)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove_directory(cache / "entries" / entry.key)
            deleted.append(entry)
        except BlockingIOError:
            left.append(entry)
        finally:
            os.close(lock)
    return deleted, left


# As `alignment data cache` prints it

HEAD = ("key", "kind", "source", "rows", "tokens", "MB", "age", "last used")


def cache_lines(directory: str | None = None, *, clear: bool = False, older_than: float | None = None) -> list[str]:
    """The entries of the cache as lines of a table, and their sum; or, with `clear`, what was deleted.

    Args:
        directory: of the cache; None: the default one.
        clear: delete the entries.
        older_than: only those last used more than this many days ago; None: all.
    """
    cache = cache_directory(directory)
    if clear:
        deleted, left = clear_entries(cache, older_than)
        held = [f"left {entry.key}: a process is preparing it" for entry in left]
        return [*held, f"{cache}: deleted {_sum(deleted)}"]
    entries = list_entries(cache, older_than)
    rows = [HEAD, *map(_cells, entries)] if entries else []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [*lines, f"{cache}: {_sum(entries)}"]


def _cells(entry: Listed) -> tuple[str, ...]:
    numbers = (f"{entry.rows:,}", f"{entry.tokens:,}", f"{entry.bytes / 1e6:.1f}")
    return entry.key, entry.kind, entry.source, *numbers, _ago(entry.created), _ago(entry.used)


def _sum(entries: list[Listed]) -> str:
    size = sum(entry.bytes for entry in entries) / 1e6
    return f"{len(entries)} {'entry' if len(entries) == 1 else 'entries'}, {size:.1f} MB"


def _ago(moment: float) -> str:
    """Time since a moment, in its largest unit."""
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"

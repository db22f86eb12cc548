"""Writes that either happen whole or not at all, and content hashes. Knows nothing of what it writes.

What is being written lies beside its place under a hidden name, locked by the process that writes it. The system gives
the lock free when that process ends, however it ends: what can be locked is a left-over, and the next write to the same
place removes it. A file system without locks keeps its left-overs.

    .model.partial-1a2b3c4d     being written, or cut short
    .model.old-1a2b3c4d         the one from before, whole, for the moment in which its successor takes its name
    .model.removed-1a2b3c4d     being deleted
"""

import ctypes
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from alignment.errors import UserError


def sync(path: Path) -> None:
    """Ask the disk to keep a file or a directory entry before we go on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Let `write` fill a temporary neighbor of `path`, then rename it over `path`.

    Raises:
        UserError: the disk is full; `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    with _neighbor(path, Path.touch) as temporary, naming_full_disk(path, temporary):
        write(temporary)
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Atomic UTF-8 text file."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Atomic, indented JSON file."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A temporary neighbor directory that replaces `path` when the block ends well, and vanishes when it does not.

    At every moment `path` is whole, old or new. Where the system cannot exchange two names in one step, a process
    killed between two renames leaves no `path`: then `remove_leftovers` puts the old one back.

    Raises:
        UserError: the disk is full; `path` is as it was.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    with _neighbor(path, Path.mkdir) as temporary, naming_full_disk(path, temporary):
        yield temporary
        for file in temporary.rglob("*"):
            sync(file)
        sync(temporary)
        _put_in_place(temporary, path)
        sync(path.parent)


def remove_directory(path: Path) -> None:
    """Delete a directory so that no half of it is ever found under its name."""
    hidden = _hidden_name(path, "removed")
    os.rename(path, hidden)
    _delete(hidden)


def remove_leftovers(path: Path) -> None:
    """Delete what processes that are gone left of `path`; put the old one back where its successor never came."""
    hidden = re.compile(rf"\.{re.escape(path.name)}\.(partial|old|removed)-\w+")
    for left in list(path.parent.iterdir()) if path.parent.is_dir() else []:
        kind = hidden.fullmatch(left.name)
        descriptor = _lock(left, fcntl.LOCK_EX | fcntl.LOCK_NB) if kind else None
        if kind is None or descriptor is None:
            continue
        if kind[1] == "old" and not os.path.lexists(path):
            os.rename(left, path)
        else:
            _delete(left)
        os.close(descriptor)


@contextmanager
def naming_full_disk(path: Path, written: Path) -> Iterator[None]:
    """Turn the error of a full disk, which names no file, into one that names the file and the bytes.

    Args:
        path: what is being written, for the user.
        written: what there is of it so far.

    Raises:
        UserError: the disk, or the user's share of it, is full.
    """
    try:
        yield
    except Exception as error:
        if not (_is_full(error) or _is_full(error.__cause__)):  # a file inside a directory has named itself already
            raise
        files = [written, *written.rglob("*")] if written.is_dir() else [written]
        size = sum(file.stat().st_size for file in files if file.is_file())
        free = shutil.disk_usage(path.parent).free
        raise UserError(
            f"{path}: the disk is full: {size} bytes of it are written, it needs more, and {free} are free. What was "
            "there before is untouched; make room and run again"
        ) from (error.__cause__ or error)


def _is_full(error: BaseException | None) -> bool:
    """Whether the system had no room; safetensors has an error type of its own, with the system's words in its text."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or os.strerror(errno.ENOSPC) in str(error)


@contextmanager
def _neighbor(path: Path, create: Callable[[Path], Any]) -> Iterator[Path]:
    """A new hidden neighbor of `path`, locked; what lies under its name in the end is deleted."""
    while True:
        temporary = _hidden_name(path, "partial")
        create(temporary)
        descriptor = _lock(temporary, fcntl.LOCK_EX)
        if descriptor is not None or temporary.exists():  # else another process took it for a left-over in between
            break
    try:
        yield temporary
    finally:
        _delete(temporary)
        if descriptor is not None:
            os.close(descriptor)


def _lock(path: Path, operation: int) -> int | None:
    """A descriptor that locks `path` for this process; None where it is held, gone, or on a disk without locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, operation)
        locked = os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        locked = False
    if not locked:
        os.close(descriptor)
    return descriptor if locked else None


def _put_in_place(new: Path, path: Path) -> None:
    """Give `new` the name `path`; what had it before lies under the name of `new`, or is deleted."""
    if not os.path.lexists(path):
        os.rename(new, path)
    elif not exchange(new, path):
        old, removed = _hidden_name(path, "old"), _hidden_name(path, "removed")
        descriptor = _lock(path, fcntl.LOCK_EX)
        os.rename(path, old)
        os.rename(new, path)
        os.rename(old, removed)  # so that what is found under `old` is whole
        _delete(removed)
        if descriptor is not None:
            os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; False where the system or the file system cannot. Linux alone has the call."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    here, swap = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(one), here, os.fsencode(other), swap) == 0


def _hidden_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{kind}-{secrets.token_hex(4)}")


def _delete(path: Path) -> None:
    """Delete a file, a link or a directory as far as the system allows; what stays is a left-over."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def hash_of(value: Any) -> str:
    """Hex SHA-256 of a JSON-like value; the same for any order of keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

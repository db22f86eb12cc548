"""One run per directory: a lock file that says who holds it. Knows nothing of what the run does."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from alignment.errors import UserError


@contextmanager
def directory_lock(directory: Path) -> Iterator[None]:
    """Hold `directory` for the length of the block.

    A lock left behind by a process of this machine that is gone is taken over, and said so.

    Raises:
        UserError: another run holds it, or may hold it on another machine.
    """
    path = Path(directory) / ".lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    mine = {"pid": os.getpid(), "host": socket.gethostname(), "since": datetime.now(timezone.utc).isoformat()}
    try:
        _create(path, mine)
    except FileExistsError:
        _remove_stale(path)
        try:
            _create(path, mine)
        except FileExistsError as error:
            raise UserError(f"{directory}: another run has just taken it; choose another output") from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _create(path: Path, content: dict[str, object]) -> None:
    """Write the lock; of two that try, the file system lets one through."""
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _remove_stale(path: Path) -> None:
    """Remove the lock of a dead process of this machine.

    Raises:
        UserError: its owner lives, or cannot be looked up from here.
    """
    try:
        owner = json.loads(path.read_text(encoding="utf-8"))
        pid, host, since = int(owner["pid"]), str(owner["host"]), str(owner["since"])
    except FileNotFoundError:
        return
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: a lock that cannot be read; delete it if no run uses this directory") from error
    if host != socket.gethostname():
        raise UserError(
            f"{path}: process {pid} on {host} has been using this directory since {since}; "
            "wait for it, choose another output, or delete the lock if that machine no longer runs it"
        )
    if _is_alive(pid):
        raise UserError(
            f"{path}: process {pid} has been using this directory since {since}; wait for it, choose another output, "
            "or delete the lock if that process is something else by now"
        )
    print(f"{path}: left behind by process {pid}, which is gone; taken over")
    path.unlink(missing_ok=True)


def _is_alive(pid: int) -> bool:
    """Whether a process of this machine exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # someone else's, so it exists
        return True
    return True

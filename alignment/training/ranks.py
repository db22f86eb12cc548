"""What the processes of a run tell each other beside training: that all do the same work, and that one has failed.

With one process nothing here does anything. What they say while they train is in world.py.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from alignment.errors import raise_all
from alignment.training.distributed import init_distributed, launched_rank, launched_size
from alignment.training.run.lineage import code_version, differences

FAILURE = "alignment/failure"  # key of the store: the first rank that failed, and why
LOOK_SECONDS = 1.0  # between two looks at it
GRACE_SECONDS = 5.0  # for a rank to leave by itself once another has failed
CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "connection was")

_watching = False


def compare_start(config: dict[str, Any]) -> None:
    """Raise on every rank where their configs, sources of this library or versions of torch differ; call it on all.

    Raises:
        UserError: every difference, with the rank.
    """
    if launched_size() > 1:
        code = code_version()
        compare_ranks({"config": config, "code": {"source": code["source"], "versions": code["versions"]}})


def compare_rows(name: str, rows: Sequence[Any]) -> None:
    """Raise on every rank where not all have read the same rows in the same order; call it on all.

    Args:
        name: of the rows, for the message.
        rows: examples as training takes them; their `repr` says all of them.

    Raises:
        UserError: the ranks that differ from rank 0.
    """
    if launched_size() > 1:
        digest = hashlib.sha256()
        for row in rows:
            digest.update(repr(row).encode())
        compare_ranks({name: {"rows": len(rows), "hash of the rows": digest.hexdigest()[:16]}})


def compare_ranks(values: dict[str, Any]) -> None:
    """Raise on every rank where they hold different JSON-like values; a collective operation.

    Raises:
        UserError: every difference to rank 0, with the rank.
    """
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    raise_all(
        f"rank {rank} has not what rank 0 has: {line}; give all ranks the same config, data and version of the library"
        for rank, theirs in enumerate(everyone)
        for line in differences(everyone[0], theirs)
    )


@contextmanager
def failing_together() -> Iterator[None]:
    """While open, an error on one rank ends the others within seconds, with a sentence in place of a broken connection.

    The processes meet here, before there is anything to train. Open inside another one it does nothing.
    """
    global _watching
    if launched_size() == 1 or _watching:
        yield
        return
    init_distributed()
    store = _store()
    closed, _watching = threading.Event(), True
    threading.Thread(target=_watch, args=(store, closed), daemon=True).start()
    try:
        yield
    except (Exception, SystemExit) as error:
        closed.set()
        _leave_with(error, store)
        raise
    finally:
        closed.set()
        _watching = False


def is_first_to_say(text: str) -> bool:
    """Whether no other rank has said this before: what all ranks find wrong is told once."""
    if not dist.is_initialized():
        return True
    try:
        return _store().add(f"alignment/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:  # the store has gone with its process, and nobody is left to say it
        return True


def _leave_with(error: Exception | SystemExit, store: Any) -> None:
    """Let the other ranks know why this one ends, or end with the rank that failed first.

    Raises:
        SystemExit: the error is only what another rank's failure looks like from here.
    """
    stopped = isinstance(error, SystemExit)
    lost = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in CONNECTION_WORDS)
    first = _failure(store)
    for _ in range(int(GRACE_SECONDS / LOOK_SECONDS)):
        if first is not None or not lost:
            break
        time.sleep(LOOK_SECONDS)  # the rank that let the connection go may be about to say why
        first = _failure(store)
    if first is not None:
        if lost or stopped:
            _say(first)
            raise SystemExit(1) from error
    elif lost:
        text = f"it lost the connection to another rank, which was killed, ran out of memory or hangs ({_short(error)})"
        store.set(FAILURE, json.dumps({"rank": launched_rank(), "error": text}))
        print(f"error: rank {launched_rank()} ends: {text}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    elif not stopped:
        text = f"{type(error).__name__}: {_short(error)}"
        store.set(FAILURE, json.dumps({"rank": launched_rank(), "error": text}))


def _watch(store: Any, closed: threading.Event) -> None:
    """End this process soon after another rank has failed: it may wait for that rank where no signal reaches it."""
    while not closed.wait(LOOK_SECONDS):
        first = _failure(store)
        if first is not None:
            if first["rank"] != launched_rank() and not closed.wait(GRACE_SECONDS):
                _say(first)
                os._exit(1)
            return


def _failure(store: Any) -> dict[str, Any] | None:
    """Rank and error of the first rank that failed, or None."""
    try:
        return json.loads(store.get(FAILURE)) if store.check([FAILURE]) else None
    except RuntimeError:  # the store is kept by the launcher, or by rank 0 where that has none of its own
        return {"rank": 0, "error": "its process, or the launcher's, has ended"}


def _say(first: dict[str, Any]) -> None:
    """One sentence on each machine; the rank that failed says the rest."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        text = f"error: rank {launched_rank()} ends because rank {first['rank']} failed: {first['error']}"
        print(text, file=sys.stderr, flush=True)


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:500]


def _store() -> Any:
    """A connection of its own to the store where the processes met: the main thread may be waiting on the other."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()

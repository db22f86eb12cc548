"""Agreement of ranks: equal configs, code and data at the start, and an end of all ranks when one of them fails.

With one process nothing here has an effect. The collective operations of training are in distributed.py.
"""

import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from alignment.errors import raise_all
from alignment.training.distributed import init_distributed, launch_settings, launched_rank, launched_size
from alignment.training.run.lineage import code_version, differences

PACKAGES = ("peft", "safetensors", "deepspeed", "bitsandbytes")  # compared beside those of lineage.json
ENDS = 2**20  # bytes of a file that are compared at either end
FAILURE = "alignment/failure"  # key of the store: the first rank that failed, and its error
POLL_SECONDS = 1.0  # between two reads of this key
GRACE_SECONDS = 5.0  # for a rank to end by itself after another has failed
CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "connection was")

_watching = False


def compare_start(config: Mapping[str, object]) -> None:
    """Check that all ranks have the same config, launch settings, source of this library and versions of packages.

    A collective operation.

    Raises:
        UserError: every difference, with the rank; on every rank.
    """
    if launched_size() > 1:
        code = code_version()
        versions = code["versions"] | {
            name: metadata.version(name) for name in PACKAGES if any(metadata.distributions(name=name))
        }
        compare_ranks(
            {"config": config, "launch": launch_settings(), "code": {"source": code["source"], "versions": versions}}
        )


def compare_checkpoints(directories: Mapping[str, Path]) -> None:
    """Check that all ranks have the same files in the checkpoints that the run starts from; a collective operation.

    Compared are names, sizes, and a hash over the first and the last megabyte of each file: ranks read different slices
    of the weights, and nobody would notice that they are slices of different models.

    Args:
        directories: by the name that the config has for them.

    Raises:
        UserError: every difference, with the rank; on every rank.
    """
    if launched_size() > 1:
        compare_ranks({name: _fingerprints(directory) for name, directory in directories.items()})


def _fingerprints(directory: Path) -> dict[str, str]:
    """Size and hash of the ends of each file of a directory."""
    found = {}
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest = hashlib.sha256(file.read(ENDS))
            file.seek(max(0, size - ENDS))
            digest.update(file.read(ENDS))
        found[path.name] = f"{size} bytes, {digest.hexdigest()[:16]}"
    return found


def compare_rows(name: str, rows: Sequence[object]) -> None:
    """Check that all ranks have read the same rows in the same order; a collective operation.

    Args:
        name: of the rows, for the message.
        rows: examples as training takes them, compared by their `repr`; prepared rows on disk by their key, which is a
            hash of all that they were made of.

    Raises:
        UserError: the ranks that differ from rank 0; on every rank.
    """
    if launched_size() > 1:
        key = getattr(rows, "key", None)
        if key is None:
            digest = hashlib.sha256()
            for row in rows:
                digest.update(repr(row).encode())
            key = digest.hexdigest()
        compare_ranks({name: {"rows": len(rows), "hash of the rows": key[:16]}})


def compare_ranks(values: Mapping[str, object]) -> None:
    """Check that all ranks have the same JSON-like values; a collective operation.

    Raises:
        UserError: every difference to rank 0, with the rank; on every rank.
    """
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, values)
    raise_all(
        f"rank {rank} has not what rank 0 has: {line}; give all ranks the same config, data and version of the library"
        for rank, theirs in enumerate(by_rank)
        for line in differences(by_rank[0], theirs)
    )


@contextmanager
def propagate_failures() -> Iterator[None]:
    """While open, an error on one rank ends the others within seconds, with a message in place of a broken connection.

    The process group is joined here, before there is anything to train. Nested inside itself it has no effect.
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
        _report_failure(error, store)
        raise
    finally:
        closed.set()
        _watching = False


def is_first_to_report(text: str) -> bool:
    """Whether no other rank has reported this text before, so that an error of all ranks is printed once."""
    if not dist.is_initialized():
        return True
    try:
        return _store().add(f"alignment/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:  # the store ended with its process, and no other rank is left to report it
        return True


def _report_failure(error: Exception | SystemExit, store: Store) -> None:
    """Publish this rank's error for the others, unless it is only a consequence of another rank's failure.

    Raises:
        SystemExit: the error is a consequence of another rank's failure.
    """
    stopped = isinstance(error, SystemExit)
    lost = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in CONNECTION_WORDS)
    first = _first_failure(store)
    for _ in range(int(GRACE_SECONDS / POLL_SECONDS)):
        if first is not None or not lost:
            break
        time.sleep(POLL_SECONDS)  # the rank that closed the connection may be about to report its error
        first = _first_failure(store)
    if first is not None:
        if lost or stopped:
            _print_failure(first)
            raise SystemExit(1) from error
    elif lost:
        text = f"it lost the connection to another rank, which was killed, ran out of memory or hangs ({_first_line(error)})"
        store.set(FAILURE, json.dumps({"rank": launched_rank(), "error": text}))
        print(f"error: rank {launched_rank()} ends: {text}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error
    elif not stopped:
        text = f"{type(error).__name__}: {_first_line(error)}"
        store.set(FAILURE, json.dumps({"rank": launched_rank(), "error": text}))


def _watch(store: Store, closed: threading.Event) -> None:
    """End this process soon after another rank has failed: it may be blocked in a collective that no signal interrupts."""
    while not closed.wait(POLL_SECONDS):
        first = _first_failure(store)
        if first is not None:
            if first["rank"] != launched_rank() and not closed.wait(GRACE_SECONDS):
                _print_failure(first)
                os._exit(1)
            return


def _first_failure(store: Store) -> dict[str, Any] | None:
    """Rank and error of the first rank that failed, or None."""
    try:
        return json.loads(store.get(FAILURE)) if store.check([FAILURE]) else None
    except RuntimeError:  # the store lives in the launcher, or in rank 0 if the launcher has none
        return {"rank": 0, "error": "its process, or the launcher's, has ended"}


def _print_failure(first: Mapping[str, object]) -> None:
    """Print one sentence on each machine; the rank that failed prints the whole error."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        text = f"error: rank {launched_rank()} ends because rank {first['rank']} failed: {first['error']}"
        print(text, file=sys.stderr, flush=True)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:500]


def _store() -> Store:
    """A second connection to the process group's store: the main thread may be blocked on the first one."""
    store: Any = dist.distributed_c10d._get_default_store()
    return store.clone()

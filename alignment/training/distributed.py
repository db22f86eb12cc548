"""The processes of a run: joining, collective operations, agreement on config, code and data, and their common end.

All processes end when one fails. With one process nothing here communicates.
"""

import atexit
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from alignment.errors import UserError, raise_all
from alignment.ragged import has_apple_gpu
from alignment.training.run.lineage import code_version, differences, hash_of_ends

# Longest wait of a rank for the others in one collective operation. Rank 0 hashes and writes checkpoints while the rest
# wait: hundreds of gigabytes on a slow disk take longer than NCCL's ten minutes. A rank that fails is noticed within
# seconds by other means (`propagate_failures`), so a long timeout costs nothing.
TIMEOUT = timedelta(hours=2)

# The launch file's `fsdp_config`, which Accelerate passes on as FSDP_* variables: setting -> supported values (the
# first one is the default), and the advice for any other value.
# `fsdp_cpu_ram_efficient_loading`, `fsdp_sync_module_states` and `fsdp_use_orig_params` are ignored: Accelerate always
# sends them, and with any value all ranks start with rank 0's weights.
FSDP_SETTINGS: dict[str, tuple[tuple[str, ...], str]] = {
    "VERSION": (("2",), "set it to 2, as configs/launch/fsdp2.yaml does"),
    "RESHARD_AFTER_FORWARD": (("true", "false"), "set it to true or false"),
    "SHARDING_STRATEGY": (
        ("full_shard", "hybrid_shard", "1", "4"),
        "set it to FULL_SHARD or HYBRID_SHARD; fsdp_reshard_after_forward: false is what SHARD_GRAD_OP was",
    ),
    "OFFLOAD_PARAMS": (("false", "true"), "set it to true or false"),
    "AUTO_WRAP_POLICY": (("", "transformer_based_wrap"), "leave it out: every block is sharded by itself"),
    "TRANSFORMER_CLS_TO_WRAP": (("",), "leave it out: every block is sharded by itself"),
    "ACTIVATION_CHECKPOINTING": (("false",), "set it to false, and training.gradient_checkpointing=true in the config"),
    "ACTIVATION_CHECKPOINTING_OFFLOAD": (("false",), "set it to false"),
    "FORWARD_PREFETCH": (("false", "true"), "set it to true or false"),
    "BACKWARD_PREFETCH": (("", "backward_pre"), "leave it out"),
    "IGNORED_MODULES": (("",), "leave it out: every weight is sharded"),
    "STATE_DICT_TYPE": (
        ("", "full_state_dict", "sharded_state_dict"),
        "leave it out: each process writes its shards, for any number of processes",
    ),
}

# Variables of Accelerate's launcher that decide how a run is spread over processes; others differ between machines.
LAUNCH_PREFIXES = ("FSDP_", "ACCELERATE_USE_", "ACCELERATE_DEEPSPEED_", "ACCELERATE_GRADIENT_", "PARALLELISM_CONFIG_")

FAILURE = "alignment/failure"  # key of the store: the first rank that failed, and its error
POLL_SECONDS = 1.0  # between two reads of this key
GRACE_SECONDS = 5.0  # for a rank to end by itself after another has failed
CONNECTION_WORDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "connection was")
_watching = False

T = TypeVar("T")


@dataclass(frozen=True)
class ProcessGroup:
    """The processes that train together. With one process no method communicates or waits for a device."""

    kind: str  # single, ddp (replicas), fsdp2 or deepspeed (ZeRO)
    rank: int  # number of this process, from 0
    size: int  # number of processes
    device: torch.device  # of this process; its models live there
    accelerator: Any  # Accelerate's object, which reads the launch configuration

    @property
    def is_main(self) -> bool:
        """True on rank 0, which alone writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, elementwise."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def largest(self, count: int) -> int:
        """The largest of all ranks' numbers."""
        return int(self.max(torch.tensor(count)))

    def _reduce(self, values: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        if self.size == 1:
            return values
        values = values.detach().to(self.device, copy=True)
        dist.all_reduce(values, op=operation)
        return values

    def gather(self, values: list[float]) -> list[list[float]]:
        """The lists of all ranks, in order of rank, on every rank; all must have the same length."""
        if self.size == 1:
            return [values]
        local = torch.tensor(values, dtype=torch.float64, device=self.device)
        by_rank = [torch.empty_like(local) for _ in range(self.size)]
        dist.all_gather(by_rank, local)
        return torch.stack(by_rank).tolist()

    def gather_objects(self, value: T) -> list[T]:
        """A picklable value of every rank, in order of rank, on every rank. Slow; for checkpoints and messages."""
        if self.size == 1:
            return [value]
        by_rank: list[Any] = [None] * self.size
        dist.all_gather_object(by_rank, value)
        return by_rank

    def broadcast_object(self, value: T | None) -> T:
        """Rank 0's picklable value, on every rank; what other ranks pass is ignored."""
        by_rank: list[Any] = self.gather_objects(value if self.is_main else None)
        return by_rank[0]

    def on_main(self, function: Callable[[], T]) -> T:
        """The picklable result of a function that rank 0 alone calls, on every rank; its UserError is raised on all."""
        result: Any = None
        if self.is_main:
            try:
                result = function()
            except UserError as error:
                result = error
        result = self.broadcast_object(result)
        if isinstance(result, UserError):
            raise result
        return result

    def barrier(self) -> None:
        """Wait until every rank has reached this call."""
        if self.size > 1:
            dist.barrier()


def fsdp_settings() -> dict[str, str]:
    """Each setting of FSDP_SETTINGS as the launch file sent it, in lower case, or its default."""
    return {name: os.environ.get(f"FSDP_{name}", accepted[0]).lower() for name, (accepted, _) in FSDP_SETTINGS.items()}


def launched_rank() -> int:
    """The rank that the launcher gave this process; known before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def launched_size() -> int:
    """Number of processes that the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def launched_kind() -> str:
    """The kind of process group that the launcher asked for, as in `ProcessGroup`; known before any exists."""
    if _launched_with("DEEPSPEED"):
        return "deepspeed"
    if launched_size() == 1:
        return "single"
    return "fsdp2" if _launched_with("FSDP") else "ddp"


def shares_weights() -> bool:
    """True where networks in training can hold the same frozen weights; FSDP2 and ZeRO shard each network by itself."""
    return launched_kind() in ("single", "ddp")


def init_distributed() -> ProcessGroup:
    """Join the processes started by `accelerate launch` or `torchrun`; without a launcher, a group of one process."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    deepspeed = _launched_with("DEEPSPEED")
    fsdp = _launched_with("FSDP")
    if fsdp:
        raise_all(
            f"launch configuration: fsdp_{name.lower()}: {os.environ[f'FSDP_{name}']} is not supported; {way_out}"
            for name, (accepted, way_out) in FSDP_SETTINGS.items()
            if fsdp_settings()[name] not in accepted
        )
    if has_apple_gpu() and (deepspeed or fsdp or launched_size() > 1):
        raise UserError(
            "Apple's GPU trains in one process, without FSDP2 and DeepSpeed; start it without a launcher, or set "
            "ACCELERATE_USE_CPU=true in the environment"
        )
    on_cpu = not torch.cuda.is_available() and not has_apple_gpu()
    handlers: list[Any] = [InitProcessGroupKwargs(backend=_backend(on_cpu, deepspeed), timeout=TIMEOUT)]
    # Accelerate's own mixed precision stays off: the backends set the precision, alike for all of them.
    accelerator = Accelerator(mixed_precision="no", cpu=on_cpu and not deepspeed, kwargs_handlers=handlers)
    atexit.register(_destroy_process_group)
    kind = "deepspeed" if deepspeed else "single" if accelerator.num_processes == 1 else "fsdp2" if fsdp else "ddp"
    return ProcessGroup(kind, accelerator.process_index, accelerator.num_processes, accelerator.device, accelerator)


def _destroy_process_group() -> None:
    # gloo's threads release Python objects shortly after the last operation. A release while the interpreter is already
    # closing aborts the process and hides its exit code (pytorch/pytorch#179291), so we wait for it.
    if dist.is_initialized():
        gloo = "gloo" in dist.get_backend()
        dist.destroy_process_group()
        time.sleep(0.5 if gloo else 0.0)


def _launched_with(plugin: str) -> bool:
    return os.environ.get(f"ACCELERATE_USE_{plugin}", "false").lower() == "true"


def _backend(on_cpu: bool, deepspeed: bool) -> str | None:
    from accelerate.utils import is_deepspeed_available

    if deepspeed and not is_deepspeed_available():
        raise UserError("the launch configuration asks for DeepSpeed, which is not installed: pip install deepspeed")
    # On the CPU Accelerate treats several DeepSpeed processes as one unless the communication backend is named.
    if on_cpu:
        return "gloo" if deepspeed else None
    # Offloaded shards are summed and gathered in host memory.
    return "cpu:gloo,cuda:nccl" if _launched_with("FSDP") and fsdp_settings()["OFFLOAD_PARAMS"] == "true" else None


# Agreement of ranks


def compare_start(config: Mapping[str, object]) -> None:
    """Check that all ranks have the same config, launch settings, source and packages; a collective operation.

    A DeepSpeed configuration file is represented by its content.
    """
    if launched_size() == 1:
        return
    code = {key: value for key, value in code_version().items() if key != "commit"}
    launch = {
        name: value for name, value in os.environ.items() if name.startswith(LAUNCH_PREFIXES) or name == "WORLD_SIZE"
    }
    for name, value in launch.items():
        if name.endswith("_CONFIG_FILE") and Path(value).is_file():
            launch[name] = Path(value).read_text(encoding="utf-8")
    compare_ranks({"config": config, "launch": launch, "code": code})


def compare_checkpoints(directories: Mapping[str, Path]) -> None:
    """Check that all ranks have the same files in the checkpoints, by config key, that the run starts from.

    A collective operation. Ranks read slices of the weights, and nobody would notice slices of different models.
    """
    if launched_size() > 1:
        named = {name: sorted(filter(Path.is_file, directory.iterdir())) for name, directory in directories.items()}
        compare_ranks({name: {path.name: hash_of_ends(path)[:16] for path in paths} for name, paths in named.items()})


def compare_rows(name: str, rows: Sequence[object]) -> None:
    """Check that all ranks have read the same rows in the same order; a collective operation.

    Prepared rows on disk are compared by their key, a hash of all that they were made of; others by their `repr`.
    """
    if launched_size() > 1:
        key = getattr(rows, "key", None) or hashlib.sha256("".join(map(repr, rows)).encode()).hexdigest()
        compare_ranks({name: {"rows": len(rows), "hash of the rows": key[:16]}})


def compare_ranks(values: Mapping[str, object]) -> None:
    """Check that all ranks have the same JSON-like values; a collective operation."""
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, values)
    raise_all(
        f"rank {rank} has not what rank 0 has: {line}; give all ranks the same config, data and version of the library"
        for rank, theirs in enumerate(by_rank)
        for line in differences(by_rank[0], theirs)
    )


# The end of all ranks when one fails


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
    closed = threading.Event()
    _watching = True
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
    """True where no other rank has reported this text before, so that an error of all ranks is printed once."""
    if not dist.is_initialized():
        return True
    try:
        return _store().add(f"alignment/said/{hashlib.sha256(text.encode()).hexdigest()}", 1) == 1
    except RuntimeError:  # the store ended with its process, and no other rank is left to report it
        return True


def _report_failure(error: Exception | SystemExit, store: Store) -> None:
    """Publish this rank's error for the others; if it only follows from another rank's, print that one and exit."""
    lost = isinstance(error, RuntimeError) and any(word in str(error).lower() for word in CONNECTION_WORDS)
    until = time.monotonic() + (GRACE_SECONDS if lost else 0)
    while (first := _first_failure(store)) is None and time.monotonic() < until:
        time.sleep(POLL_SECONDS)  # the rank that closed the connection may be about to report its error
    text = f"{type(error).__name__}: {_first_line(error)}"
    if lost and first is None:
        text = (
            "it lost the connection to another rank, which was killed, ran out of memory or hangs "
            f"({_first_line(error)})"
        )
        print(f"error: rank {launched_rank()} ends: {text}", file=sys.stderr, flush=True)
    if first is None and not isinstance(error, SystemExit):
        store.set(FAILURE, json.dumps({"rank": launched_rank(), "error": text}))
    elif first is not None and (lost or isinstance(error, SystemExit)):
        _print_failure(first)
    if lost or (first is not None and isinstance(error, SystemExit)):
        raise SystemExit(1) from error


def _watch(store: Store, closed: threading.Event) -> None:
    """End this process soon after another rank fails: it may be blocked in a collective that no signal interrupts."""
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

"""A run's directory: its lock, the files that rank 0 writes in training, the signals that stop the run, and displays.

Checkpoints are in checkpoints.py.
"""

import fcntl
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from datetime import timedelta
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import yaml

from alignment.errors import UserError, raise_all
from alignment.files import explain_full_disk, remove_directory, remove_leftovers, write_json, write_text
from alignment.training.distributed import init_distributed, launched_rank, launched_size
from alignment.training.run.lineage import earlier_run, identity_of, lineage_of, refuse_other_run

LOGS = ("metrics.jsonl", "samples.jsonl")
CLEAR = "\x1b[K"  # deletes the rest of a terminal's line


class Run:
    """Writes config.yaml, lineage.json, metrics.jsonl, samples.jsonl and tensorboard/, and shows the progress.

    A context manager, which closes the run.

    Attributes:
        identity: what a resume compares; empty on ranks above 0.
        finished: True where the directory holds this run, finished; nothing is opened then, and nothing may be written.
        total: updates or iterations of the whole run, lowered where it ends early; 0 before `steps` is called.
        began: time of the first update of this start, in seconds of `time.monotonic`.
        last_save: time of the last checkpoint (before it, of the first update) and the seconds that it took.
        requested: numbers of signals that asked this process to stop; handled at the end of an update.
        other_source: hash of the library's source at the run's last start, where it was not that of now; else ''.
        random_start: states of torch's generators before the first update.
        stopped: the signal that all ranks have agreed to stop on, after saving a checkpoint; 0 before.
    """

    def __init__(
        self,
        output: str | Path,
        config: Mapping[str, Any],
        *,
        stage: str,
        parents: Sequence[str] = (),
        files: Mapping[str, Sequence[Path]] | None = None,
        again: bool = False,
    ):
        """Create the directory and take its lock.

        Args:
            config: as resolved, secrets left out.
            parents: models that the run starts from.
            files: as for `lineage.input_hashes`.
            again: start from the beginning: checkpoints and logs of a run with these settings are deleted.
        """
        self.output = Path(output)
        self.checkpoints = self.output / "checkpoints"
        self.is_main = launched_rank() == 0
        self.identity: dict[str, Any] = {}
        self.finished = False
        self.total = 0
        self.stopped = 0
        self.began = 0.0
        self.last_save = (0.0, 0.0)
        self.other_source = ""
        self.random_start: list[str] = []
        self.requested: list[int] = []
        self._lineage: dict[str, Any] = {}
        self._board: Any = None  # TensorBoard's files
        self._trackers: list[Any] = []
        self._failing: list[str] = []  # names of trackers that have failed
        self._first = 0  # step of this start
        self._shown = 0.0  # when progress was shown
        self._resources = ExitStack()  # lock, trackers, signal handlers: each is released even if another one fails
        self._clock = time.perf_counter()
        trackers = config.get("training", {}).get("trackers", [])
        check_trackers(trackers, config.get("training", {}).get("tracking", {}))
        if trackers:
            init_distributed()  # Accelerate's trackers need its state; a collective operation
        if self.is_main:
            try:
                self._resources.enter_context(lock(self.output))
                remove_leftovers(self.output / "model")
                self.identity = identity_of(config, parents, files)
                self.finished = refuse_other_run(self.output, stage, self.identity) and not again
                if not self.finished:
                    self._open(config, stage, trackers, again=again)
            except BaseException:
                self._resources.close()
                raise
        if launched_size() > 1:
            self.finished = init_distributed().broadcast_object(self.finished)
        if self.finished:
            self._print(
                f"{self.output}: this run is finished and stays as it is; give --again (training.again=true) to repeat "
                "it, or remove the directory"
            )

    def _open(self, config: Mapping[str, Any], stage: str, trackers: Sequence[str], *, again: bool) -> None:
        """Rank 0's part of the start; no file of an earlier run is changed before all checks have passed."""
        folders = (self.checkpoints, self.output / "model", self.output / "tensorboard")
        raise_all(f"{path}: is a file in the place of a directory; move it away" for path in folders if path.is_file())
        if not again:
            raise_all(problem for name in LOGS for problem in read_log(self.output / name)[1])
        from torch.utils.tensorboard import SummaryWriter

        self._resources.callback(self._tell, lambda tracker: tracker.finish())
        for name in trackers:
            if name != "tensorboard":
                self._trackers.append(_open_tracker(name, self.output, stage, config))
        self._board = SummaryWriter(self.output / "tensorboard")
        self._resources.callback(self._board.close)
        if again:
            for name in LOGS:
                (self.output / name).unlink(missing_ok=True)
            if self.checkpoints.is_dir():
                remove_directory(self.checkpoints)
        before = earlier_run(self.output).get("source", "") if self.checkpoints.is_dir() else ""
        self._lineage = lineage_of(stage, config, self.identity)
        self.other_source = before if before != self._lineage["code"]["source"] else ""
        write_text(self.output / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True))
        write_json(self.output / "lineage.json", self._lineage)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._lineage and isinstance(error, Exception) and not isinstance(error, _DryRunEnd):
            with suppress(OSError, UserError):  # the error that ends the run may be a full disk
                write_json(self.output / "lineage.json", {**self._lineage, "failed": type(error).__name__})
        elif error is None and self.total and self.is_main:
            self._lineage["finished"] = self.total
            write_json(self.output / "lineage.json", self._lineage)
        self._resources.close()
        if not self.total and isinstance(error, KeyboardInterrupt | SystemExit):
            self._print("stopped before the first update: nothing was trained; what earlier starts saved is untouched")
        elif error is None and self.requested:
            self._print(f"signal {self.requested[0]} came when the run was finished; its model is written")
            signal.raise_signal(self.requested[0])  # now with the effect that it has outside a run

    def show_first_rows(self, rows_at: Callable[[int], Sequence[object]]) -> None:
        """End a dry run here, where all is ready for the first update, whose rows it shows."""
        if (show := DRY_RUN.get()) is not None:
            show(self, rows_at(0))
            raise _DryRunEnd

    def steps(self, first: int, total: int) -> Iterator[int]:
        """Numbers first ... total - 1 with progress shown; SystemExit once a checkpoint is saved on a stop request.

        From here until the run is closed, signals are recorded and do not interrupt what is being written.
        """
        self.total = total
        if self.is_main:  # those updates are repeated
            for name in LOGS:
                truncate_lines(self.output / name, first)
        self._clock = time.perf_counter()
        self.began = self._shown = time.monotonic()
        self._first = first
        self.last_save = (self.began, 0.0)
        self._resources.enter_context(_stop_requests(self.requested))
        for step in range(first, total):
            yield step
            if self.stopped:
                self._print(f"stopped by signal {self.stopped} after step {step + 1}; a checkpoint is saved")
                raise SystemExit(128 + self.stopped)
            if step + 1 >= self.total:
                break

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the metrics of update `step` (from 1) to metrics.jsonl and the trackers, and show the progress."""
        now = time.perf_counter()
        seconds = now - self._clock
        self._clock = now
        line: dict[str, Any] = {"step": step, **metrics}
        if "tokens" in metrics:
            line.setdefault("tokens_per_second", metrics["tokens"] / max(seconds, 1e-9))
        if not self.is_main:
            return
        # JSON has no literal for a value that is not finite.
        finite = {name: value if math.isfinite(value) else None for name, value in line.items()}
        self._append("metrics.jsonl", finite)
        for name, value in finite.items():
            if self._board is not None and name != "step" and value is not None:
                self._board.add_scalar(name, value, step)
        self._tell(lambda tracker: tracker.log(line, step=step))
        if self.total:
            self._show(step, line)
        if (callback := UPDATE_CALLBACK.get()) is not None:
            callback(finite)

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the progress: in a terminal as one line that changes, elsewhere as a line every ten seconds."""
        now = time.monotonic()
        is_live = sys.stderr.isatty() and step < self.total
        if now - self._shown < (0.5 if is_live else 10.0) and step < self.total:
            return
        self._shown = now
        parts = [f"{name} {metrics[name]:.4g}" for name in ("loss", "score", "kl", "accuracy") if name in metrics]
        if metrics.get("tokens_per_second"):
            parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
        left = timedelta(seconds=int((now - self.began) / max(1, step - self._first) * (self.total - step)))
        text = "  ".join([f"step {step}/{self.total}", *parts, f"{left} left"])
        print(text, end=f"{CLEAR}\r" if is_live else "\n", file=sys.stderr, flush=True)

    def log_samples(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        """Write texts of update `step`, of equal columns, to samples.jsonl, and to trackers with tables as a table."""
        if not self.is_main or not rows:
            return
        for row in rows:
            self._append("samples.jsonl", {"step": step, **row})
        text = yaml.safe_dump([dict(row) for row in rows], sort_keys=False, allow_unicode=True)
        self._board.add_text("samples", "    " + text.replace("\n", "\n    "), step)  # shown as it is
        names = list(rows[0])
        values = [list(row.values()) for row in rows]
        by_name = {name: [row[name] for row in rows] for name in names}

        def show(tracker):
            if tracker.name in ("wandb", "clearml"):
                tracker.log_table("samples", names, values, step=step)
            elif tracker.name == "trackio":
                tracker.log({"samples": import_module("trackio").Table(names, values)}, step=step)
            elif tracker.name == "mlflow":  # which appends to its file
                import_module("mlflow").log_table(by_name | {"step": [step] * len(rows)}, "samples.json")

        self._tell(show)

    def _tell(self, call: Callable[..., object]) -> None:
        """Call a function with each tracker; the first failure of one is noted, and none ends the run."""
        for tracker in self._trackers:
            try:
                call(tracker)
            except Exception as error:
                if tracker.name not in self._failing:
                    self._failing.append(tracker.name)
                    self.note(
                        f"training.trackers: {tracker.name} failed ({type(error).__name__}: {error}); the run goes on, "
                        f"and {' and '.join(LOGS)} have everything"
                    )

    def note(self, text: str) -> None:
        """Write a remark to standard error and lineage.json, such as the number of dropped rows."""
        if self.is_main:
            self._lineage.setdefault("notes", []).append(text)
            write_json(self.output / "lineage.json", self._lineage)
            self._print(text)

    def _append(self, name: str, line: Mapping[str, object]) -> None:
        path = self.output / name
        with explain_full_disk(path, path), open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def _print(self, text: str) -> None:
        if self.is_main:
            print(CLEAR + text if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def truncate_lines(path: Path, step: int) -> None:
    """Keep the lines of a run's log up to `step`; an incomplete last line, left by a crash, is deleted too."""
    lines, problems = read_log(path)
    raise_all(problems)
    if path.exists():
        write_text(path, "".join(text for line_step, text in lines if line_step <= step))


def read_log(path: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Step and text of each complete line of a run's log, and the problems of invalid lines; none without a file."""
    lines = []
    problems = []
    *whole, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]  # texts may contain other line separators
    for line_number, content in enumerate(whole, 1):
        text = content.decode("utf-8", errors="replace")
        step = None
        with suppress(ValueError, LookupError, TypeError, RecursionError):
            step = json.loads(content)["step"]
        if type(step) is int:
            lines.append((step, f"{text}\n"))
        else:
            problems.append(
                f"{path}:{line_number}: not a line of a run's log, with a step; delete the line, or the file"
            )
    return lines, problems


Config = TypeVar("Config")


def locked(run: Callable[[Config], Path]) -> Callable[[Config], Path]:
    """A function of a config that has the config's `output` locked while it runs."""

    @wraps(run)
    def under_lock(config: Config) -> Path:
        with lock(Path(vars(config)["output"])):
            return run(config)

    return under_lock


@contextmanager
def lock(directory: Path, name: str = "") -> Iterator[None]:
    """While open, this process has a directory locked, or the file of that name in it.

    The system releases the lock when the process ends in any way.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / (f".{name}.lock" if name else ".lock")
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held for the run's life
    except OSError as error:
        why = "is a file" if directory.is_file() else error.strerror
        raise UserError(f"{directory}: the output directory cannot be written ({why}); choose another") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise UserError(
            f"{directory / name} is in use by another run (process {holder}); wait for it, or choose another output"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()} on {os.uname().nodename}")
    file.flush()
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file open too
        file.close()


@contextmanager
def _stop_requests(requested: list[int]) -> Iterator[None]:
    """While open, SIGTERM and SIGINT are recorded instead of ending the process; the second one ends it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def record(number: int, frame: FrameType | None) -> None:
        requested.append(number)
        for kind in before:
            signal.signal(kind, signal.SIG_DFL)

    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGINT)}
    for kind in before:
        signal.signal(kind, record)
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


# Accelerate's trackers

# The argument of Accelerate's class for each key of `training.tracking` that a tracker has.
ARGUMENTS = {
    "wandb": {"project": "run_name", "name": "name", "group": "group", "tags": "tags"},
    "trackio": {"project": "run_name", "name": "name"},
    "swanlab": {"project": "run_name", "name": "experiment_name"},
    "comet_ml": {"project": "run_name"},
    "clearml": {"project": "project_name", "name": "task_name", "tags": "tags"},
    "mlflow": {"project": "experiment_name", "name": "run_name"},
    "aim": {"project": "experiment", "name": "run_name"},
    "dvclive": {},
}
# Variables that count where the key is not set; other trackers read theirs themselves.
VARIABLES = {
    ("wandb", "project"): "WANDB_PROJECT",
    ("wandb", "name"): "WANDB_NAME",
    ("comet_ml", "project"): "COMET_PROJECT_NAME",
    ("clearml", "project"): "CLEARML_PROJECT",
    ("clearml", "name"): "CLEARML_TASK",
}


def check_trackers(names: Sequence[str], tracking: Mapping[str, object]) -> None:
    """Refuse trackers that do not exist or are not installed, and keys of `training.tracking` that none takes."""
    taken = {key for name in names for key in ARGUMENTS.get(name, ())}
    problems = []
    for key, value in tracking.items():
        if value and key not in taken:
            takers = ", ".join(name for name, keys in ARGUMENTS.items() if key in keys)
            problems.append(
                f"training.tracking.{key}: {', '.join(names) or 'no tracker'} takes no {key}; name one of {takers} in "
                "training.trackers, or leave it out"
            )
    raise_all(problems)
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    known = sorted(map(str, LOGGER_TYPE_TO_CLASS))
    for name in names:
        if name not in known:
            raise UserError(f"training.trackers: unknown tracker {name!r}; known are {', '.join(known)}")
        if name not in map(str, get_available_trackers()):
            raise UserError(f"training.trackers: {name} is not installed: pip install {name}")


def _open_tracker(name: str, output: Path, stage: str, config: Mapping[str, Any]) -> Any:
    """One of Accelerate's trackers, started with the run's config. `init_distributed` must have been called."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    kind = LOGGER_TYPE_TO_CLASS[name]
    arguments: dict[str, Any] = {"logging_dir": str(output)} if kind.requires_logging_directory else {}
    default = {"project": "alignment", "name": f"{stage}-{output.name}"}
    for key, argument in ARGUMENTS[name].items():
        setting = config["training"].get("tracking", {}).get(key)
        variable = VARIABLES.get((name, key), "")
        if value := setting or os.environ.get(variable) or default.get(key):
            arguments[argument] = value
    try:
        tracker = kind(**arguments)
        tracker.start()
        tracker.store_init_configuration(dict(config))
    except Exception as error:
        raise UserError(
            f"training.trackers: {name} does not start ({type(error).__name__}: {error}); set it up as its own pages "
            "say, or leave it out"
        ) from error
    return tracker


OnUpdate = Callable[[dict[str, Any]], object]  # takes a line of metrics.jsonl
UPDATE_CALLBACK: ContextVar[OnUpdate | None] = ContextVar("update_callback", default=None)


@contextmanager
def update_callback(callback: OnUpdate | None) -> Iterator[None]:
    """Let the runs in this block call a function with each line of their metrics; None: none."""
    token = UPDATE_CALLBACK.set(callback)
    try:
        yield
    finally:
        UPDATE_CALLBACK.reset(token)


class _DryRunEnd(Exception):
    """The end of a dry run, before its first update."""


DRY_RUN: ContextVar[Callable[[Run, Sequence[object]], object] | None] = ContextVar("dry_run", default=None)


@contextmanager
def dry_run(show: Callable[[Run, Sequence[object]], object]) -> Iterator[None]:
    """Let the run in this block end before its first update; `show` takes it and the rows of that update."""
    token = DRY_RUN.set(show)
    try:
        with suppress(_DryRunEnd):
            yield
    finally:
        DRY_RUN.reset(token)

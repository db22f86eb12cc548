"""A process for code that nobody has read: without files, sockets, signals and further processes, and with limits.

On Linux alone, by seccomp and Landlock: elsewhere it refuses. What the process gives up, and how the answer is kept
from the tests and the verdict, is in sandbox_program.py. There is no weaker sandbox to fall back to.
"""

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from alignment.errors import UserError
from alignment.settings import PositiveFloat, PositiveInt, Settings

PROGRAM = Path(__file__).with_name("sandbox_program.py")
PROBE = """
import os, sys
def attempts():
    yield lambda: open("/etc/hostname")
    yield lambda: open("/tmp/alignment-sandbox", "w")
    yield lambda: os.fork()
    yield lambda: os.kill(os.getppid(), 0)
    yield lambda: __import__("_socket").socket()
for attempt in attempts():
    try:
        attempt()
    except (OSError, ImportError):
        continue
    sys.exit("open")
print("shut")
"""


@dataclass(frozen=True)
class SandboxLimits(Settings):
    """Limits of one run.

    Attributes:
        cpu_seconds: time of the processor, rounded up to whole seconds.
        wall_seconds: time until everything is killed.
        memory_megabytes: address space of a process, of which Python itself needs 30.
        output_bytes: longest output of a program, and longest value that a function gives back.
    """

    cpu_seconds: PositiveFloat = 5.0
    wall_seconds: PositiveFloat = 10.0
    memory_megabytes: Annotated[int, Ge(64)] = 512
    output_bytes: PositiveInt = 65_536


@functools.cache
def require_sandbox() -> None:
    """Check once that this machine shuts the sandbox: a probe must fail at files, sockets, processes and signals."""
    if not sys.platform.startswith("linux"):
        raise UserError(
            f"rewards: code is run in a sandbox of the Linux kernel (seccomp), and this is {sys.platform}; train on "
            "Linux, or leave the entry `code` out"
        )
    output = run_program(PROBE, "", SandboxLimits(wall_seconds=30.0), modules=("_socket",))
    if output is None or output.strip() != "shut":
        raise UserError(
            "rewards: code is run in a sandbox of the Linux kernel, and this kernel, machine or container does not let "
            "a process shut itself in (seccomp on x86_64 or aarch64); run elsewhere, or leave the entry `code` out"
        )


def run_program(code: str, text: str, limits: SandboxLimits, modules: tuple[str, ...] = ()) -> str | None:
    """The output of an untrusted program that reads `text`; None where it fails, exceeds a limit, or prints no UTF-8.

    `modules` are loaded beside those that the code imports.
    """
    task = {"code": code, "modules": modules, "input": text}
    deadline = time.monotonic() + limits.wall_seconds
    with task_file(task) as given, started("program", asdict(limits), stdin=given, stdout=subprocess.PIPE) as process:
        output = printed_by(process, limits)
        try:  # a program may close its output and go on
            if output is None or process.wait(max(0.0, deadline - time.monotonic())) != 0:
                return None
            return output.decode()
        except (subprocess.TimeoutExpired, UnicodeDecodeError):
            return None


def passes(code: str, tests: str, limits: SandboxLimits) -> bool:
    """True where code passes tests: Python source, asserts as a rule, that call its functions and classes.

    The tests run in a sandboxed process of their own, which holds nothing of the answer. Values (numbers, texts, dates,
    tuples of them) are copied between the processes, changes of lists, dicts and sets are told to the other one, and
    other objects stay where they are: operators, calls and attributes reach them there. No object of the answer equals
    a value of the tests; one of a class derived from a built-in one compares by its built-in content.
    `limits.wall_seconds` is for both together.
    """
    with (
        task_file({"code": code, "tests": tests, "modules": ()}) as given,
        started("answer", asdict(limits), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as answer,
    ):
        assert answer.stdin is not None and answer.stdout is not None
        requests = answer.stdin.fileno()
        replies = answer.stdout.fileno()
        settings = asdict(limits) | {"requests": requests, "replies": replies}
        with started("tests", settings, stdin=given, stdout=subprocess.PIPE, kept=(requests, replies)) as tests_process:
            return printed_by(tests_process, limits) == b"passed"


@contextlib.contextmanager
def task_file(task: Mapping[str, object]) -> Iterator[int]:
    """An open file without a name that holds a task as one line."""
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(task).encode() + b"\n")
        file.seek(0)
        yield file.fileno()


@contextlib.contextmanager
def started(
    role: str, settings: Mapping[str, float], *, stdin: int, stdout: int, kept: tuple[int, ...] = ()
) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of sandbox_program.py in a session of its own, killed with its whole group at the end.

    `role` is program, answer or tests, `settings` are limits and the numbers of the pipes, `kept` further open files.
    """
    arguments = [sys.executable, "-I", "-S", "-E", "-B", "-X", "utf8", str(PROGRAM), role, json.dumps(settings)]
    with subprocess.Popen(
        arguments,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
        env={},
        cwd="/",
        start_new_session=True,
        pass_fds=kept,
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # a process that was not waited for keeps its number
                os.killpg(process.pid, signal.SIGKILL)


def printed_by(process: "subprocess.Popen[bytes]", limits: SandboxLimits) -> bytes | None:
    """All that a process prints; None where it takes too long or prints too much."""
    assert process.stdout is not None
    deadline = time.monotonic() + limits.wall_seconds
    received = b""
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and poll.poll(1000 * left):
        part = os.read(process.stdout.fileno(), 65_536)
        received += part
        if not part or len(received) > limits.output_bytes:
            return received if not part else None
    return None

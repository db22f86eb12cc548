"""The sandbox: right answers pass, and no answer gets out of it, holds it up, or passes without being right."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from alignment.errors import UserError
from alignment.rewards.code import sandbox
from alignment.rewards.code.sandbox import SandboxLimits, passes, require_sandbox, run_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux's")

LIMITS = SandboxLimits(cpu_seconds=1, wall_seconds=4, memory_megabytes=256, output_bytes=10_000)
TEST = "assert f(2, 3) == 5\nassert f(-1, 1) == 0"
CASES = yaml.safe_load(Path(__file__).with_name("sandbox_cases.yaml").read_text(encoding="utf-8"))


def test_this_machine_shuts_the_sandbox():
    require_sandbox()


def test_a_program_is_compared_by_what_it_prints():
    assert run_program("a, b = map(int, input().split())\nprint(a + b)", "2 3\n", LIMITS) == "5\n"
    assert run_program("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n3\n", LIMITS) == "6\n"
    assert run_program("print(5)\nraise SystemExit(3)", "", LIMITS) is None
    assert run_program("print(input())", "", LIMITS) is None


# --- answers that try to pass without being right --------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES["forgeries"])
def test_no_answer_passes_without_being_right(name):
    assert passes(CASES["forgeries"][name], TEST, LIMITS) is False


def test_a_test_that_catches_everything_does_not_pass_a_dead_answer():
    test = "try:\n    f(1)\nexcept BaseException:\n    pass\nassert True"
    assert passes("import os\ndef f(x):\n    os._exit(0)", test, LIMITS) is False


# --- answers that try to get out -------------------------------------------------------------------------------------

HELPERS = """
import os, sys
PARENT = os.getppid() if False else {parent}
def libc_call(name, *arguments):
    ctypes = sys.modules["ctypes"]
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) >= 0:
        return "done"
    raise OSError(ctypes.get_errno(), "refused")
def libc_syscall(number, *arguments):
    return libc_call("syscall", number, *arguments)
try:
    {attempt}
    print("done")
except (OSError, RuntimeError) as error:
    print("refused", getattr(error, "errno", None))
"""


@pytest.mark.parametrize("name", CASES["attempts"])
def test_no_answer_gets_out(name, tmp_path):
    code = HELPERS.format(parent=os.getpid(), attempt=CASES["attempts"][name])
    output = run_program(code, "", LIMITS)
    assert output is not None and output.startswith("refused"), output
    assert output.split()[1] in ("1", "None", "38"), output  # EPERM, not a missing file: the call itself is refused
    assert not os.path.exists("/tmp/alignment-sandbox-escape") and not os.path.exists("sandbox-escape")


def test_the_attempts_do_succeed_outside(tmp_path):
    """The attempts are real: without the sandbox those that need no rights succeed."""
    for name in ("write in /tmp", "read", "list", "libc open", "libc socket", "libc memfd", "fork", "pipe", "stat"):
        code = "import ctypes\n" + HELPERS.format(parent=os.getpid(), attempt=CASES["attempts"][name])
        printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20).stdout
        assert "done" in printed and "refused" not in printed, name
    os.remove("/tmp/alignment-sandbox-escape")


def test_sockets_cannot_be_opened_where_their_module_is_there():
    server = socket.create_server(("127.0.0.1", 0))
    code = f"import _socket\ns = _socket.socket()\ns.connect(('127.0.0.1', {server.getsockname()[1]}))"
    assert run_program(code, "", LIMITS, modules=("_socket",)) is None
    server.setblocking(False)
    with pytest.raises(BlockingIOError):
        server.accept()
    server.close()


def test_the_environment_and_open_files_of_the_run_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "hidden")
    (tmp_path / "open").write_text("secret")
    with (tmp_path / "open").open() as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nprint('hidden' in str(os.environ))\n"
        code += f"try:\n    print(os.read({file.fileno()}, 9))\nexcept OSError:\n    print('none')"
        assert run_program(code, "", LIMITS) == "False\nnone\n"


# --- answers that try to hold it up ----------------------------------------------------------------------------------

HUNGRY = {
    **CASES["hungry"],
    "endless sign": "f = " + "-" * 200_000 + "1",
    "endless attribute": "f = a" + ".b" * 200_000,
    "endless sum": "f = 1" + "+1" * 200_000,
    "endless branches": "if 1: pass\n" + "elif 1: pass\n" * 20_000,
    "endless expression": "f = " + "(" * 10000 + ")" * 10000,
}


@pytest.mark.parametrize("name", HUNGRY)
def test_no_answer_holds_it_up(name):
    began = time.monotonic()
    limits = SandboxLimits(cpu_seconds=1, wall_seconds=0.5, memory_megabytes=256, output_bytes=10_000)
    if "def f" in HUNGRY[name] or name == "sleep":
        assert passes(HUNGRY[name], TEST, limits) is False
    else:
        assert run_program(HUNGRY[name], "", limits) in (None, "")
    assert time.monotonic() - began < 5


def test_time_of_the_processor_is_limited_by_itself():
    began = time.monotonic()
    limits = SandboxLimits(cpu_seconds=1, wall_seconds=60, memory_megabytes=256, output_bytes=10_000)
    assert run_program("while True: pass", "", limits) is None
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("close", ["os.close(1)", "os.closerange(0, 64)", "sys.stdout.close(); os.close(1)"])
def test_the_deadline_holds_after_a_program_closed_its_output(close):
    began = time.monotonic()
    limits = SandboxLimits(cpu_seconds=1, wall_seconds=0.7, memory_megabytes=256)
    code = f"import os, sys, time\nprint(5, flush=True)\n{close}\ntime.sleep(8)"
    assert run_program(code, "", limits) is None
    assert time.monotonic() - began < 4


def test_nothing_is_left_running(monkeypatch, tmp_path):
    program = tmp_path / "program.py"  # under a name of its own: other tests run the sandbox at the same time
    program.symlink_to(sandbox.PROGRAM)
    monkeypatch.setattr(sandbox, "PROGRAM", program)
    limits = SandboxLimits(cpu_seconds=5, wall_seconds=0.5)
    assert passes("def f(x, y):\n    return x + y", TEST, limits) is True
    assert passes("import time\ntime.sleep(1000)", TEST, limits) is False
    assert [number for number in os.listdir("/proc") if number.isdigit() and str(program) in _command(number)] == []


def _command(number):
    try:
        with open(f"/proc/{number}/cmdline") as file:
            return file.read()
    except OSError:
        return ""


def test_where_there_is_no_sandbox_it_says_so(monkeypatch):
    require_sandbox.cache_clear()
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(UserError, match=r"sandbox of the Linux kernel .seccomp., and this is darwin"):
        require_sandbox()
    monkeypatch.undo()
    monkeypatch.setattr(sandbox, "run_program", lambda *arguments, **settings: None)
    with pytest.raises(UserError, match="does not let a process shut itself in"):
        require_sandbox()
    monkeypatch.undo()
    require_sandbox.cache_clear()

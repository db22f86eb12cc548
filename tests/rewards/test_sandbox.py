"""The sandbox: right answers pass, and no answer gets out of it, holds it up, or passes without being right."""

import os
import socket
import subprocess
import sys
import time

import pytest

from alignment.errors import UserError
from alignment.rewards import sandbox
from alignment.rewards.sandbox import SandboxLimits, passes, require_sandbox, run_program

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux's")

LIMITS = SandboxLimits(cpu_seconds=1, wall_seconds=4, memory_megabytes=256, output_bytes=10_000)
TEST = "assert f(2, 3) == 5\nassert f(-1, 1) == 0"


def test_this_machine_shuts_the_sandbox():
    require_sandbox()


# --- right and wrong answers ----------------------------------------------------------------------------------------

CHECK = "def check(candidate):\n    assert candidate([3, 1, 2]) == [1, 2, 3]\n    assert candidate([]) == []\n\ncheck(order)"
RAISES = "try:\n    f(-1)\n    raise RuntimeError\nexcept ValueError:\n    pass\nassert f(4) == 2.0"
STACK = "s = Stack()\ns.push(4)\ns.push((1, 'a'))\nassert len(s) == 2 and s.pop() == (1, 'a') and s.items == [4]"


@pytest.mark.parametrize(
    ("code", "test", "right"),
    [
        ("def f(a, b):\n    return a + b", TEST, True),
        ("def f(a, b):\n    return a * b", TEST, False),
        ("def order(x):\n    return sorted(x)", CHECK, True),
        ("def order(x):\n    return x", CHECK, False),
        ("def f(x):\n    if x < 0:\n        raise ValueError(x)\n    return x ** 0.5", RAISES, True),
        ("def f(x):\n    return abs(x) ** 0.5", RAISES, False),
        ("def sort(x):\n    x.sort()", "x = [3, 1]\nsort(x)\nassert x == [1, 3]", True),  # changes its argument
        (
            "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
            "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
            STACK,
            True,
        ),
        (
            "from collections import Counter\nimport math\ndef f(s):\n    return Counter(s), {1, math.inf}, b'x', None, 1j",
            "assert f('aab') == ({'a': 2, 'b': 1}, {1, float('inf')}, b'x', None, 1j)",
            True,
        ),
        ("import numpy\ndef f(a, b):\n    return a + b", TEST, False),  # no packages in there
        ("def f(a, b) return a + b", TEST, False),
        ("def g(a, b):\n    return a + b", TEST, False),
        ("print('x' * 5000)\ndef f(a, b):\n    print('noise')\n    return a + b", TEST, True),
    ],
)
def test_an_answer_passes_exactly_where_it_is_right(code, test, right):
    assert passes(code, test, LIMITS) is right


def test_a_program_is_compared_by_what_it_prints():
    assert run_program("a, b = map(int, input().split())\nprint(a + b)", "2 3\n", LIMITS) == "5\n"
    assert run_program("import sys\nprint(sum(map(int, sys.stdin)))", "1\n2\n3\n", LIMITS) == "6\n"
    assert run_program("print(5)\nraise SystemExit(3)", "", LIMITS) is None
    assert run_program("print(input())", "", LIMITS) is None


# --- answers that try to pass without being right --------------------------------------------------------------------

FORGERIES = {
    "exit": "import os\nos._exit(0)",
    "exit in the call": "import os, sys\ndef f(a, b):\n    sys.exit(0)",
    "exit quietly": "import os\ndef f(a, b):\n    os._exit(0)",
    "marker": "print('passed')\ndef f(a, b):\n    print('passed')\n    return 0",
    "marker on every file": """
import os
for number in range(64):
    try:
        os.write(number, b"passed")
    except OSError:
        pass
def f(a, b):
    return 0
""",
    "always equal": """
class Same(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 5
def f(a, b):
    return Same(1)
""",
    "always equal object": """
class Same:
    def __eq__(self, other): return True
    def __getattr__(self, name): return self
    def __call__(self, *a): return True
def f(a, b):
    return Same()
""",
    "builtins": """
import builtins, sys
builtins.AssertionError = type("E", (BaseException,), {})
builtins.eval = builtins.exec = builtins.compile = lambda *a, **k: None
sys.modules["__main__"].run_tests = lambda *a: None
def f(a, b):
    return 0
""",
    "frames": """
import sys, gc
def f(a, b):
    seen = []
    frame = sys._getframe()
    while frame:
        seen += list(map(repr, frame.f_locals.values()))
        frame = frame.f_back
    seen += [repr(each) for each in gc.get_objects() if isinstance(each, (str, bytes, dict)) and len(repr(each)) < 5000]
    text = " ".join(seen)
    mark = "f(2, 3) " + "== "
    return int(text[text.index(mark) + len(mark)])
""",
    "replies ahead": """
import os
for number in range(3, 16):
    try:
        os.write(number, b'{"value": 1, "items": []}\\n' * 3)
    except OSError:
        pass
def f(a, b):
    return 0
""",
    "bad replies": """
import os
def f(a, b):
    for number in range(3, 16):
        try:
            os.write(number, b'{"value": ["object", "x"], "items": 3}\\n')
        except OSError:
            pass
    return 0
""",
    "deep reply": """
def f(a, b):
    x = []
    for _ in range(100000):
        x = [x]
    return x
""",
    "closed files": "import os\nos.closerange(0, 64)\ndef f(a, b):\n    return 0",
    "fake error": "class AssertionError(Exception): pass\ndef f(a, b):\n    raise AssertionError",
}


@pytest.mark.parametrize("name", FORGERIES)
def test_no_answer_passes_without_being_right(name):
    assert passes(FORGERIES[name], TEST, LIMITS) is False


def test_a_test_that_catches_everything_does_not_pass_a_dead_answer():
    test = "try:\n    f(1)\nexcept BaseException:\n    pass\nassert True"
    assert passes("import os\ndef f(x):\n    os._exit(0)", test, LIMITS) is False


# --- answers that try to get out -------------------------------------------------------------------------------------

ATTEMPTS = {
    "write in the working directory": "open('sandbox-escape', 'w')",
    "write in /tmp": "open('/tmp/alignment-sandbox-escape', 'w').write('x')",
    "os.open": "os.open('/tmp/alignment-sandbox-escape', os.O_CREAT | os.O_WRONLY)",
    "read": "open('/etc/passwd').read()",
    "read the interpreter": "open(os.__file__).read()",
    "list": "os.listdir('/')",
    "remove": "os.remove('/tmp/alignment-sandbox-kept')",
    "rename": "os.rename('/tmp/alignment-sandbox-kept', '/tmp/alignment-sandbox-escape')",
    "link": "os.symlink('/etc', '/tmp/alignment-sandbox-escape')",
    "mkdir": "os.mkdir('/tmp/alignment-sandbox-escape')",
    "chmod": "os.chmod('/tmp/alignment-sandbox-kept', 0o777)",
    "stat": "os.stat('/etc/passwd')",
    "libc open": "libc_call('open', b'/tmp/alignment-sandbox-escape', 65, 438)",
    "libc openat2": "libc_syscall(437, -100, b'/etc/passwd', b'\\0' * 24, 24)",
    "libc memfd": "libc_call('memfd_create', b'x', 0)",
    "libc socket": "libc_call('socket', 2, 1, 0)",
    "libc socketpair": "libc_call('socketpair', 1, 1, 0, b'\\0' * 8)",
    "libc execve": "libc_call('execve', b'/bin/true', None, None)",
    "libc ptrace": "libc_call('ptrace', 16, PARENT, 0, 0)",
    "libc process_vm_readv": "libc_call('process_vm_readv', PARENT, None, 0, None, 0, 0)",
    "libc io_uring": "libc_syscall(425, 8, b'\\0' * 120)",
    "libc bpf": "libc_syscall(321, 0, b'\\0' * 64, 64)",
    "libc mount": "libc_call('mount', b'x', b'/tmp', b'tmpfs', 0, None)",
    "libc prctl": "libc_call('prctl', 22, 0, 0, 0, 0)",
    "libc setrlimit": "libc_call('setrlimit', 0, b'\\xff' * 16)",
    "x32 open": "libc_syscall(0x40000000 + 2, b'/etc/passwd', 0)",
    "fork": "os.fork()",
    "forkpty": "os.forkpty()",
    "system": "1 / (os.system('true') != 0) and None or (_ for _ in ()).throw(OSError(1, 'refused'))",
    "spawn": "os.posix_spawn('/bin/true', ['true'], {})",
    "execv": "os.execv('/bin/true', ['true'])",
    "thread": "__import__('_thread').start_new_thread(print, ())",
    "kill the parent": "os.kill(PARENT, 9)",
    "kill the group of the parent": "os.killpg(PARENT, 9)",
    "kill everything": "os.kill(-1, 9)",
    "setuid": "os.setuid(0)",
    "chroot": "os.chroot('/')",
    "chdir": "os.chdir('/tmp')",
    "pipe": "os.pipe()",
}
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


@pytest.mark.parametrize("name", ATTEMPTS)
def test_no_answer_gets_out(name, tmp_path):
    code = HELPERS.format(parent=os.getpid(), attempt=ATTEMPTS[name])
    output = run_program(code, "", LIMITS)
    assert output is not None and output.startswith("refused"), output
    assert output.split()[1] in ("1", "None", "38"), output  # EPERM, not a missing file: the call itself is refused
    assert not os.path.exists("/tmp/alignment-sandbox-escape") and not os.path.exists("sandbox-escape")


def test_the_attempts_do_succeed_outside(tmp_path):
    """The attempts are real: without the sandbox those that need no rights succeed."""
    for name in ("write in /tmp", "read", "list", "libc open", "libc socket", "libc memfd", "fork", "pipe", "stat"):
        code = "import ctypes\n" + HELPERS.format(parent=os.getpid(), attempt=ATTEMPTS[name])
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
    "endless loop": "while True: pass",
    "endless loop in the call": "def f(a, b):\n    while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "sleep, signals ignored": "import signal_free",
    "memory": "x = bytearray(10 ** 10)",
    "memory in steps": "x = []\nwhile True: x.append(bytearray(10 ** 6))",
    "deep recursion": "import sys\nsys.setrecursionlimit(10 ** 9)\ndef g(): return g()\ng()",
    "deep recursion in C": "import sys\nsys.setrecursionlimit(10 ** 9)\nclass A:\n    def __repr__(self): return repr(self)\nrepr(A())",
    "fork bomb": "import os\nwhile True: os.fork()",
    "output": "while True: print('x' * 10000)",
    "long value": "def f(a, b): return 'x' * 10 ** 7",
    "large number": "def f(a, b): return 10 ** 100000",
    "endless power": "def f(a, b): return 9 ** 9 ** 9",
    "endless sign": "f = " + "-" * 200_000 + "1",
    "endless attribute": "f = a" + ".b" * 200_000,
    "endless sum": "f = 1" + "+1" * 200_000,
    "endless branches": "if 1: pass\n" + "elif 1: pass\n" * 20_000,
    "endless power in the source": "f = 9 ** 9 ** 9",
    "endless expression": "f = " + "(" * 10000 + ")" * 10000,
}
HUNGRY["sleep, signals ignored"] = (
    "import time, _signal\nfor n in range(1, 32):\n    try: _signal.signal(n, _signal.SIG_IGN)\n    except Exception: pass\n"
    "while True: time.sleep(1)"
)


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


def test_nothing_is_left_running():
    limits = SandboxLimits(cpu_seconds=5, wall_seconds=0.5)
    before = set(os.listdir("/proc"))
    assert passes("import time\ntime.sleep(1000)", TEST, limits) is False
    ours = [
        number
        for number in set(os.listdir("/proc")) - before
        if number.isdigit() and "sandbox_program" in _command(number)
    ]
    assert ours == []


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

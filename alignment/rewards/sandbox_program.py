"""The program inside the sandbox: it gives up what it could do to the machine, then runs an answer or its tests.

It is started by sandbox.py as a script of an interpreter without site-packages and environment, and imports the standard
library alone. There are three roles:

* program: runs code that reads its standard input and prints.
* answer: runs code, then calls its functions for the process with the tests, over two pipes, and sends values back.
* tests: runs the tests. The names of the answer are stand-ins that ask the answer's process; only plain data comes back,
  so nothing that the answer defines, overrides or prints is ever run or seen where the verdict is made, and the tests are
  never where the answer is.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalCall=false, reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false, reportOptionalMemberAccess=false
# The values of answers and tests are of any type: what can be done with them is found out here, not declared.

import ast
import builtins
import ctypes
import importlib
import io
import json
import os
import resource
import signal
import struct
import sys

REFUSED, DIED = 77, 78  # exit codes: no sandbox on this machine; the other process is gone
EPERM = 1
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
ALLOWED = {  # system call -> its number on x86_64 and on aarch64; every other one gives EPERM
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "readv": (19, 65), "writev": (20, 66), "sched_yield": (24, 124), "mremap": (25, 216),
    "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172), "exit": (60, 93), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175),
    "getegid": (108, 177), "sigaltstack": (131, 132), "gettid": (186, 178), "futex": (202, 98), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94),
    "getrandom": (318, 278),
}  # fmt: skip
MODULES = frozenset({  # of the standard library that code may import; they are loaded before the sandbox is shut
    "__future__", "abc", "array", "ast", "base64", "binascii", "bisect", "calendar", "cmath", "collections",
    "colorsys", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions",
    "functools", "graphlib", "hashlib", "heapq", "html", "inspect", "io", "itertools", "json", "keyword", "math",
    "numbers", "operator", "os", "pprint", "queue", "random", "re", "secrets", "statistics", "string", "struct",
    "sys", "textwrap", "time", "types", "typing", "unicodedata", "unittest", "warnings", "zlib",
})  # fmt: skip
LATER = {
    "datetime": ["_strptime"],
    "time": ["_strptime"],
    "collections": ["collections.abc"],
}  # what these load on first use
LANDLOCK_CREATE, LANDLOCK_RESTRICT = 444, 446  # the same numbers on both machines
LANDLOCK_FILE_RIGHTS = (13, 14, 15, 15, 16)  # number of file rights by version of the interface, from 1 on


def run_role() -> None:
    """Read one line with what to do, load the modules that it imports, shut the sandbox, and do it."""
    role, settings, requests = sys.argv[1], json.loads(sys.argv[2]), private(0)
    task = json.loads(requests.readline())
    limit(settings)
    for name in (*task["modules"], *imported(task["tests"] if role == "tests" else task["code"])):
        importlib.import_module(name)
    if role == "program":
        sys.stdin = io.TextIOWrapper(io.BytesIO(task["input"].encode()), encoding="utf-8")
        shut()
        exec(compile(task["code"], "<answer>", "exec"), {"__name__": "__main__"})
    elif role == "answer":
        replies = private(1)
        shut()
        answer_requests(task["code"], requests, replies)
    else:
        verdict = private(1)
        questions, replies = os.fdopen(settings["requests"], "wb"), os.fdopen(settings["replies"], "rb")
        send(questions, {"modules": (), "code": task["code"]})
        shut()
        run_tests(task, Channel(questions, replies, settings["output_bytes"]))
        verdict.write(b"passed")
        verdict.flush()


def private(number: int) -> io.BufferedIOBase:
    """A copy of standard input (0) or output (1), which itself then leads nowhere."""
    mode = "rb" if number == 0 else "wb"
    copy = os.fdopen(os.dup(number), mode)
    with open(os.devnull, mode) as nowhere:
        os.dup2(nowhere.fileno(), number)
    return copy


# Giving up


def imported(code: str) -> "list[str]":
    """The modules among `MODULES` that code imports anywhere, with what they load later; none where it does not parse."""
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append((node.module or "").partition(".")[0])
    found = [name for name in dict.fromkeys(names) if name in MODULES]
    return [each for name in found for each in (name, *LATER.get(name, []))]


def limit(settings: "dict[str, float]") -> None:
    """Limits on time, memory and files, from the reading of the code on: its source alone may be a trap."""
    cpu, memory = max(1, round(settings["cpu_seconds"] + 0.499)), int(settings["memory_megabytes"] * 2**20)
    limits = {"CPU": cpu, "AS": memory, "FSIZE": 0, "NOFILE": 16, "NPROC": 0, "CORE": 0, "MEMLOCK": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def shut() -> None:
    """No new rights; no files and no network; only the calls of `ALLOWED`.

    The process exits with `REFUSED` where the kernel does not do as it is asked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = [ctypes.c_ulong] * 4
    libc.prctl.argtypes = [ctypes.c_int, *arguments]
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the parent
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        os._exit(REFUSED)
    forbid_files(libc)
    machine = os.uname().machine
    if machine not in ARCHES:
        os._exit(REFUSED)
    program = filter_of(machine)
    steps = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(steps)))
    if libc.prctl(22, 2, ctypes.addressof(header), 0, 0):  # PR_SET_SECCOMP
        os._exit(REFUSED)


def filter_of(machine: str) -> bytes:
    """The steps of a seccomp filter, 8 bytes each: it allows the calls of `ALLOWED`, and refuses the others with EPERM.

    A call of another architecture's table kills the process.
    """
    load, equal, back = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    kill, refuse, allow = 0x80000000, 0x00050000 | EPERM, 0x7FFF0000
    numbers = sorted(pair[list(ARCHES).index(machine)] for pair in ALLOWED.values())
    steps = [(load, 0, 0, 4), (equal, 1, 0, ARCHES[machine]), (back, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(equal, len(numbers) - i, 0, number) for i, number in enumerate(numbers)]
    steps += [(back, 0, 0, refuse), (back, 0, 0, allow)]
    return b"".join(struct.pack("HBBI", *step) for step in steps)


def forbid_files(libc: ctypes.CDLL) -> None:
    """Landlock without a single rule: no path can be opened and no port reached; nothing where the kernel has none.

    The filter of system calls refuses the same; this is the second door.
    """
    version = libc.syscall(LANDLOCK_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return
    files = 2 ** LANDLOCK_FILE_RIGHTS[min(version, len(LANDLOCK_FILE_RIGHTS)) - 1] - 1
    rights = struct.pack("Q", files) + (struct.pack("Q", 3) if version >= 4 else b"")
    ruleset = libc.syscall(LANDLOCK_CREATE, ctypes.c_char_p(rights), ctypes.c_size_t(len(rights)), ctypes.c_uint32(0))
    if ruleset < 0 or libc.syscall(LANDLOCK_RESTRICT, ctypes.c_int(ruleset), ctypes.c_uint32(0)):
        os._exit(REFUSED)
    os.close(ruleset)


# Data between the two processes


def to_json(value: object, objects: "list[object]") -> object:
    """A value as JSON: plain data by its content, with the methods of the built-in type; else its number in `objects`."""
    if value is None or value is True or value is False:
        return value
    for kind, plain in ((int, int.__int__), (float, float.__float__), (str, str.__str__)):
        if isinstance(value, kind):
            return plain(value)
    for mark, kind in (("list", list), ("tuple", tuple), ("set", set), ("frozenset", frozenset)):
        if isinstance(value, kind):
            return [mark, *(to_json(item, objects) for item in kind.__iter__(value))]
    if isinstance(value, dict):
        return ["dict", *([to_json(key, objects), to_json(item, objects)] for key, item in dict.items(value))]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", bytes(memoryview(value)).hex()]
    if isinstance(value, complex):
        return ["complex", complex.__complex__(value).real, complex.__complex__(value).imag]
    if isinstance(value, Remote):
        return ["object", value._number]
    objects.append(value)
    return ["object", len(objects) - 1]


def from_json(value: object, known: "object") -> object:
    """What `to_json` made JSON of; `known(number)` is an object of the other process."""
    if not isinstance(value, list):
        return value
    mark, *items = value
    if mark == "dict":
        return {from_json(key, known): from_json(item, known) for key, item in items}
    if mark == "bytes":
        return bytes.fromhex(items[0])
    if mark == "complex":
        return complex(*items)
    if mark == "object":
        return known(items[0])
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[mark](from_json(item, known) for item in items)


def send(stream: io.BufferedIOBase, message: object) -> None:
    """Write one line."""
    stream.write(json.dumps(message).encode() + b"\n")
    stream.flush()


# The answer


def answer_requests(code: str, requests: io.BufferedIOBase, replies: io.BufferedIOBase) -> None:
    """Run the code, then do what is asked for, one line each, until nothing more comes."""
    names: dict[str, object] = {"__name__": "__answer__"}
    exec(compile(code, "<answer>", "exec"), names)
    objects: list[object] = []
    while line := requests.readline():
        try:
            reply = reply_to(json.loads(line), names, objects)
        except Exception as error:
            reply = {"error": type(error).__name__, "text": str(error)[:200]}
        send(replies, reply)


def reply_to(request: "dict[str, object]", names: "dict[str, object]", objects: "list[object]") -> "dict[str, object]":
    """The reply to a request: a value, and what the call made of its arguments."""
    target, rest = request["target"], [from_json(item, objects.__getitem__) for item in request["items"]]
    thing = names[target] if isinstance(target, str) else objects[target]
    if request["kind"] == "call":
        named = {name: from_json(item, objects.__getitem__) for name, item in request["named"].items()}
        value = thing(*rest, **named)
        return {"value": to_json(value, objects), "items": [to_json(item, objects) for item in rest]}
    actions = {"attribute": getattr, "length": len, "item": lambda x, key: x[key], "items": list}
    return {"value": to_json(actions[request["kind"]](thing, *rest), objects)}


# The tests


class Channel:
    """Requests to the answer's process and its replies; where it is gone, or a reply too long, the tests have failed."""

    def __init__(self, requests: io.BufferedIOBase, replies: io.BufferedIOBase, longest: int):
        self.requests, self.replies, self.longest = requests, replies, int(longest)

    def ask(
        self, kind: str, target: "str | int", items: "tuple[object, ...]" = (), named: "dict | None" = None
    ) -> object:
        """The value of a request; a built-in exception of the answer is raised again, any other as `AnswerError`."""
        named = {name: to_json(item, []) for name, item in (named or {}).items()}
        message = {"kind": kind, "target": target, "items": [to_json(item, []) for item in items], "named": named}
        try:
            send(self.requests, message)
            line = self.replies.readline(self.longest)
            reply = json.loads(line) if line.endswith(b"\n") else os._exit(DIED)
        except (OSError, ValueError, RecursionError):
            os._exit(DIED)
        if not isinstance(reply, dict) or "error" in reply:
            kind_of_error = getattr(builtins, str(reply["error"]), None) if isinstance(reply, dict) else None
            known = isinstance(kind_of_error, type) and issubclass(kind_of_error, Exception)
            raise (kind_of_error if known else AnswerError)("raised by the answer")
        try:
            for item, changed in zip(items, reply.get("items", ()), strict=False):
                put_back(item, from_json(changed, self.remote))
            return from_json(reply["value"], self.remote)
        except (KeyError, TypeError, ValueError, RecursionError, OverflowError):
            os._exit(DIED)

    def remote(self, number: object) -> "Remote":
        """The stand-in for an object that stayed with the answer."""
        return Remote(self, int(number))


class AnswerError(Exception):
    """An exception of a class that the answer defines."""


class Remote:
    """Something of the answer: a function, a class or an object. It equals nothing but itself."""

    __slots__ = ("_channel", "_number")

    def __init__(self, channel: Channel, number: "str | int"):
        self._channel, self._number = channel, number

    def __call__(self, *items: object, **named: object) -> object:
        return self._channel.ask("call", self._number, items, named)

    def __getattr__(self, name: str) -> object:
        return self._channel.ask("attribute", self._number, (name,))

    def __len__(self) -> int:
        return self._channel.ask("length", self._number)

    def __getitem__(self, key: object) -> object:
        return self._channel.ask("item", self._number, (key,))

    def __iter__(self) -> object:
        return iter(self._channel.ask("items", self._number))

    def __bool__(self) -> bool:
        return True


def put_back(item: object, changed: object) -> None:
    """Change a list, dict or set as the call changed the copy that it was given."""
    if type(item) is list and type(changed) is list:
        item[:] = changed
    elif type(item) in (dict, set) and type(changed) is type(item):
        item.clear()
        item.update(changed)


def run_tests(task: "dict[str, str]", channel: Channel) -> None:
    """Run the tests; the names that they use and do not define are the answer's. An exception ends the process."""
    tree = ast.parse(task["tests"], "<tests>")
    scope: dict[str, object] = {"__name__": "__tests__"}
    scope |= {name: Remote(channel, name) for name in free_names(tree)}
    exec(compile(tree, "<tests>", "exec"), scope)


def free_names(tree: ast.AST) -> "set[str]":
    """Names that a program reads and neither defines, imports nor has from Python."""
    read, bound = set(), set(dir(builtins))
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (read if isinstance(node.ctx, ast.Load) else bound).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
            bound.add(node.name)
        elif isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.alias):
            bound.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            bound.add(node.name)
    return read - bound


if __name__ == "__main__":
    run_role()

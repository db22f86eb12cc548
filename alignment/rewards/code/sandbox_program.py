"""The program inside the sandbox: it gives up what it could do to the machine, then runs an answer or its tests.

It is started by sandbox.py as a script of an interpreter without site-packages and environment, and imports the
standard library alone. There are three roles:

* program: runs code that reads its standard input and prints.
* answer: runs code, then calls its functions for the process with the tests, over two pipes, and sends values back.
* tests: runs the tests. The names of the answer are stand-ins that ask the answer's process. Values are copied, and
  what is done to other objects is done where they are, so nothing that the answer defines or overrides is ever run
  where the verdict is made, and the tests are never where the answer is. No object of the answer equals a value of the
  tests.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportOptionalCall=false, reportGeneralTypeIssues=false, reportReturnType=false, reportOperatorIssue=false
# pyright: reportOptionalMemberAccess=false
# The values of answers and tests are of any type: what can be done with them is found out here, not declared.

import ast
import builtins
import collections
import contextlib
import ctypes
import importlib
import io
import json
import math
import operator
import os
import signal
import struct
import symtable
import sys
import time
import types

# exit codes: no sandbox on this machine; the other process is gone
REFUSED = 77
DIED = 78
EPERM = 1
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*
ALLOWED = {  # system call -> its number on x86_64 and on aarch64; every other one gives EPERM
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "readv": (19, 65), "writev": (20, 66),
    "sched_yield": (24, 124), "mremap": (25, 216), "madvise": (28, 233), "nanosleep": (35, 101), "getpid": (39, 172),
    "exit": (60, 93), "gettimeofday": (96, 169), "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174),
    "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "sigaltstack": (131, 132),
    "gettid": (186, 178), "futex": (202, 98), "restart_syscall": (219, 128), "clock_gettime": (228, 113),
    "clock_getres": (229, 114), "clock_nanosleep": (230, 115), "exit_group": (231, 94), "getrandom": (318, 278),
}  # fmt: skip
MODULES = frozenset({  # of the standard library that code may import; they are loaded before the sandbox is shut
    "__future__", "abc", "array", "ast", "asyncio", "base64", "binascii", "bisect", "calendar", "cmath", "collections",
    "colorsys", "contextlib", "copy", "csv", "dataclasses", "datetime", "decimal", "difflib", "enum", "fractions",
    "functools", "graphlib", "hashlib", "heapq", "html", "inspect", "io", "itertools", "json", "keyword", "math",
    "numbers", "operator", "os", "pprint", "queue", "random", "re", "secrets", "statistics", "string", "struct",
    "sys", "textwrap", "time", "types", "typing", "unicodedata", "unittest", "warnings", "zlib",
})  # fmt: skip
HELPERS = frozenset({  # names of other libraries that tests forget to import: an answer must not define its own judge
    "approx", "isclose", "allclose", "assert_allclose", "assert_almost_equal", "assert_array_equal", "assert_equal",
    "array_equal", "raises", "pytest", "np", "numpy", "pd", "pandas", "scipy", "sympy", "torch",
})  # fmt: skip
LATER = {"datetime": ["_strptime"], "time": ["_strptime"], "collections": ["collections.abc", "heapq"]}  # on first use
# the same numbers on both machines
LANDLOCK_CREATE = 444
LANDLOCK_RESTRICT = 446
LANDLOCK_FILE_RIGHTS = (13, 14, 15, 15, 16)  # number of file rights by version of the interface, from 1 on
NAMES: "dict[str, object]" = {"__builtins__": builtins}  # of the code or the tests
PEER: "Peer | None" = None  # the one end of the pipes that this process has


def run_role() -> None:
    """Read one line with what to do, load the modules that it imports, shut the sandbox, and do it."""
    global NAMES, PEER
    role = sys.argv[1]
    settings = json.loads(sys.argv[2])
    requests = private(0)
    task = json.loads(requests.readline())
    limit(settings)
    load([*task["modules"], *imported(task["code"])])
    if role == "program":
        sys.stdin = io.TextIOWrapper(io.BytesIO(task["input"].encode()), encoding="utf-8")
        restrict_process()
        exec(compile(task["code"], "<answer>", "exec"), NAMES | {"__name__": "__main__"})
        return
    module = types.ModuleType(f"__{role}__")  # dataclasses look their module up
    sys.modules[module.__name__] = module
    vars(module).update(NAMES)
    NAMES = vars(module)
    if role == "answer":
        PEER = Peer(requests, private(1), None, judges=False)
        restrict_process()
        answer_requests(task["code"], PEER)
        return
    verdict = private(1)
    questions = os.fdopen(settings["requests"], "wb")
    replies = os.fdopen(settings["replies"], "rb")
    modules = imported(task["tests"])
    questions.write(json.dumps({"modules": modules, "code": task["code"]}).encode() + b"\n")
    questions.flush()
    load(modules)
    PEER = Peer(replies, questions, settings["output_bytes"], judges=True)
    restrict_process()
    run_tests(task["tests"], PEER)
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
    """The modules of `MODULES` that code imports anywhere, with what they load later; none where it does not parse."""
    try:
        tree = ast.parse(code)
        names = names_of_tests(code)["modules"]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.append(node.module or "")
    modules = [name for name in dict.fromkeys(names) if name.partition(".")[0] in MODULES]
    return [module for name in modules for module in (name, *LATER.get(name, []))]


def use_loop_without_sockets() -> None:
    """Let asyncio make event loops that wait for time alone."""
    import asyncio  # loaded by now; few answers need it, and it takes long

    class Loop(asyncio.BaseEventLoop):
        """Its own selector, in which nothing ever happens."""

        def __init__(self):
            super().__init__()
            self._selector = self

        def select(self, seconds: "float | None") -> "list[object]":
            if seconds is None:
                raise RuntimeError("the event loop waits for something that is not there")
            time.sleep(seconds)
            return []

        def _process_events(self, events: "list[object]") -> None: ...

        def _write_to_self(self) -> None: ...

    asyncio.DefaultEventLoopPolicy._loop_factory = Loop


def load(modules: "list[str]") -> None:
    """Import modules while files can be read; code that imports one that is not there sees that for itself."""
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "asyncio" in modules:
        use_loop_without_sockets()


def limit(settings: "dict[str, float]") -> None:
    """Limits on time, memory and files, from the reading of the code on: its source alone may be a trap."""
    import resource  # not there on Windows, where the names of tests are still read

    cpu = max(1, round(settings["cpu_seconds"] + 0.499))
    memory = int(settings["memory_megabytes"] * 2**20)
    limits = {"CPU": cpu, "AS": memory, "FSIZE": 0, "NOFILE": 16, "NPROC": 0, "CORE": 0, "MEMLOCK": 0}
    for name, most in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))


def restrict_process() -> None:
    """No new rights; no files and no network; only the calls of `ALLOWED`.

    The process exits with `REFUSED` where the kernel does not do as it is asked.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    machine = os.uname().machine
    libc.prctl.argtypes = [ctypes.c_int, *[ctypes.c_ulong] * 4]
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: die with the parent
    if machine not in ARCHES or libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        os._exit(REFUSED)
    forbid_files(libc)
    program = filter_of(machine)
    steps = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(steps)))
    if libc.prctl(22, 2, ctypes.addressof(header), 0, 0):  # PR_SET_SECCOMP
        os._exit(REFUSED)


def filter_of(machine: str) -> bytes:
    """The steps of a seccomp filter, 8 bytes each: it allows the calls of `ALLOWED`, and refuses the others with EPERM.

    A call of another architecture's table kills the process.
    """
    # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
    load = 0x20
    equal = 0x15
    back = 0x06
    kill = 0x80000000
    refuse = 0x00050000 | EPERM
    allow = 0x7FFF0000
    numbers = sorted(pair[list(ARCHES).index(machine)] for pair in ALLOWED.values())
    steps = [(load, 0, 0, 4), (equal, 1, 0, ARCHES[machine]), (back, 0, 0, kill), (load, 0, 0, 0)]
    steps += [(equal, len(numbers) - i, 0, call) for i, call in enumerate(numbers)]
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


# Values between the two processes

EXACT = {type(None), bool, float, str}  # sent as JSON
VALUES = {  # further immutable values, made anew by their type: module -> names
    "builtins": {"complex", "range", "slice"},
    "decimal": {"Decimal"},
    "fractions": {"Fraction"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
}
CONTAINERS = (  # changeable; a derived class before its base
    collections.OrderedDict,
    collections.defaultdict,
    collections.Counter,
    collections.deque,
    dict,
    list,
    set,
    bytearray,
)
CONTENTS = (int, float, complex, str, bytes, tuple, frozenset)  # bases whose content decides for a derived object
ERRORS = {  # modules whose exceptions are made anew where the tests are
    "decimal",
    "json.decoder",
    "queue",
    "_queue",
    "zlib",
    "binascii",
    "struct",
    "_struct",
    "re",
    "statistics",
    "dataclasses",
    "asyncio.exceptions",
}
STEERING = (StopIteration, StopAsyncIteration, GeneratorExit)  # end a loop of the tests without a failure
HIDDEN = (types.ModuleType, types.FrameType, types.CodeType, types.TracebackType)
SHOWN = {"__name__", "__qualname__", "__doc__", "__module__"}  # of the special attributes that the tests give away


def special(module: types.ModuleType, *names: str) -> "dict[str, object]":
    """Functions of a module by the names of the special methods that they call."""
    return {f"__{name}__": getattr(module, name) for name in names}


FORWARD = special(operator, "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "lshift", "rshift")
FORWARD |= {"__and__": operator.and_, "__or__": operator.or_, "__xor__": operator.xor}
REVERSED = {f"__r{name[2:]}": (lambda x, y, action=action: action(y, x)) for name, action in FORWARD.items()}
ARITHMETIC = FORWARD | REVERSED
COMPARISONS = special(operator, "eq", "ne", "lt", "le", "gt", "ge")
CONVERSIONS = special(builtins, "int", "float", "complex", "abs", "round", "bool")
CONVERSIONS |= special(operator, "index", "neg", "pos", "invert") | special(math, "trunc", "floor", "ceil")
OTHERS = special(builtins, "len", "hash", "str", "repr", "format", "iter", "next", "reversed")
OTHERS |= special(operator, "contains", "getitem", "setitem", "delitem")
OTHERS |= {
    "__call__": lambda x, *items, **named: x(*items, **named),
    "__enter__": lambda x: type(x).__enter__(x),
    "__exit__": lambda x, *items: type(x).__exit__(x, *items, None),
    "__copy__": lambda x: sys.modules["copy"].copy(x),
    "__deepcopy__": lambda x: sys.modules["copy"].deepcopy(x),
    "__setattr__": setattr,
    "__delattr__": delattr,
}
OPERATIONS = ARITHMETIC | COMPARISONS | CONVERSIONS | OTHERS
READING = {  # methods that look at the content of a list or a set: no answer overrides them
    "__iter__",
    "__len__",
    "__contains__",
    "__reversed__",
    "count",
    "index",
    "isdisjoint",
    "issubset",
    "issuperset",
    "union",
    "intersection",
    "difference",
    "symmetric_difference",
}
LOCAL = {"__class__", "__next__", "__iter__", "__copy__", "__deepcopy__", *COMPARISONS}


class AnswerError(Exception):
    """An exception of the answer that would end a loop of the tests, or that cannot be made anew."""


class RemoteClass(type):
    """A class of the other process: its instances are `Remote`, its own attributes are asked for there."""

    def __getattribute__(cls, name: str) -> object:
        if name.startswith("__") and (name in LOCAL or hasattr(type, name)):
            return type.__getattribute__(cls, name)
        return PEER.ask("get", cls, name)


class Remote(metaclass=RemoteClass):
    """An object of the other process. What is done to it is done there."""

    __slots__ = ()

    def __getattribute__(self, name: str) -> object:
        reads_content = name in READING and not name.startswith("__") and isinstance(self, (list, set))
        if name in LOCAL or reads_content or (isinstance(self, BaseException) and hasattr(BaseException, name)):
            return object.__getattribute__(self, name)
        return PEER.ask("get", self, name)

    def __getattr__(self, name: str) -> object:  # of objects whose content comes first
        return PEER.ask("get", self, name)


def operation(name: str) -> object:
    """The method that asks the other process for an operator; built-in content is read and compared here."""
    kinds = (list, set) if name in READING else ()
    if name == "__bool__":
        kinds = (*CONTAINERS, str, bytes, tuple, frozenset)

    def method(self, *items, **named):
        if kind := builtin_base(kinds, self):
            return kind.__len__(self) > 0 if name == "__bool__" else getattr(kind, name)(self, *items)
        if name in ("__deepcopy__", "__exit__"):  # what else was copied, and the traceback, stay here
            items = items[:-1]
        return PEER.ask(name, self, *items, **named)

    def compare(self, other):
        if is_remote(other) or not PEER.judges:
            return PEER.ask(name, self, other)
        kind = builtin_base(CONTAINERS, self)
        return getattr(kind, name)(self, other) if kind else NotImplemented

    return compare if name in COMPARISONS else method


def builtin_base(kinds: "tuple[type, ...]", value: object) -> "type | None":
    """The first of some built-in classes that a value is an instance of; None without one."""
    return next((kind for kind in kinds if isinstance(value, kind)), None)


def is_remote(value: object) -> bool:
    """True for an object or a class of the other process."""
    return type(value) is RemoteClass or type(type(value)) is RemoteClass


for _name in OPERATIONS:
    setattr(Remote, _name, operation(_name))
    if _name not in {"__setattr__", "__delattr__", *COMPARISONS, "__hash__", "__bool__"}:
        setattr(RemoteClass, _name, operation(_name))


def standard_name(value: object) -> "tuple[str, str] | None":
    """Module and name of a class or function of the standard library; None of everything else."""
    owner = getattr(value, "__objclass__", value)
    module = getattr(owner, "__module__", None)
    name = getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or module in ("__tests__", "__answer__", "__main__"):
        return None
    return (module, name) if standard(module, name) is value else None


def standard(module: str, name: str) -> object:
    """The object of that name in a loaded module of the standard library; None without one."""
    value = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


def can_subclass(kind: type) -> bool:
    """True where objects of the other process may derive from a class here: it holds their content, or is an error."""
    return kind in (*CONTENTS, *CONTAINERS) or (issubclass(kind, BaseException) and not issubclass(kind, STEERING))


def bases_of(kind: type) -> "list[type]":
    """The bases of a class; bases of the library such as object, ABC and Enum give way to their own bases."""
    bases = []
    for base in kind.__bases__:
        stays = standard_name(base) is None or (
            can_subclass(base) and base.__module__ in {"builtins", "collections", *ERRORS}
        )
        bases += [base] if stays else bases_of(base)
    return list(dict.fromkeys(bases))


def container_items(value: object) -> "list[object]":
    """All items of a container, keys before values, by the methods of its built-in type."""
    kind = builtin_base(CONTAINERS, value)
    return [*kind.__iter__(value), *(kind.values(value) if issubclass(kind, dict) else ())]


def set_items(container: object, items: "list[object]") -> None:
    """Make a container hold what `container_items` gave."""
    kind = builtin_base(CONTAINERS, container)
    half = len(items) // 2
    kind.clear(container)
    if not issubclass(kind, dict):
        return (kind.update if kind is set else kind.extend)(container, items)
    for key, item in zip(items[:half], items[half:], strict=True):
        kind.__setitem__(container, key, item)


class Peer:
    """One end of the pipes between answer and tests: it asks the other end, and serves what that asks meanwhile.

    Immutable values are copied. Lists, dicts and other containers have a copy at both ends, and each message says what
    changed in them, so that a change of an argument is seen at the other end. All other objects stay where they are.

    Args:
        requests, replies: what comes from the other end, and what goes there.
        longest: bytes of a message beyond those that were sent; None: no limit.
        judges: this is the end of the tests, which gives nothing away that leads to its names.
    """

    def __init__(self, received: io.BufferedIOBase, sent: io.BufferedIOBase, longest: "int | None", *, judges: bool):
        self.received = received
        self.sent = sent
        self.longest = longest
        self.judges = judges
        self.objects: dict[int, object] = {}  # above 0: of this end; below: of the other
        self.numbers: dict[int, int] = {}  # id -> number
        self.contents: dict[int, list[object] | None] = {}  # containers -> items as the other end knows them
        self.last = 0
        self.receiving = False
        self.asked = False
        self.shown: dict[str, object] = {}  # variables of the answer that the tests read, as the tests know them
        self.mixed: set[int] = set()  # results of arithmetic of an object of the answer with a number of the tests
        self.decoders = {  # mark of an encoded value -> what makes the value of the rest
            "known": lambda number: self.objects[number],
            "int": lambda text: int(text, 16),
            "bytes": bytes.fromhex,
            "tuple": lambda *parts: tuple(map(self.decode, parts)),
            "value": self.decode_value,
            "frozenset": lambda *parts: frozenset(map(self.decode, parts)),
            "standard": self.decode_standard,
            "error": self.decode_error,
        }

    def ask(self, action: str, target: object, *items: object, **named: object) -> object:
        """The value that the other end gives; its exception is raised."""
        self.asked = self.asked or action != "names"
        object_number = None if target is None else self.numbers[id(target)]
        mixed = self.judges and (
            (action in ARITHMETIC and not is_remote(items[0]))
            or any(self.numbers.get(id(operand)) in self.mixed for operand in (target, *items[:1]))
        )
        self.send(
            {
                "do": action,
                "to": object_number and -object_number,
                "items": [self.encode(item) for item in items],
                "named": {name: self.encode(item) for name, item in named.items()},
            }
        )
        while "do" in (message := self.read_message()):
            self.send(self.perform(message))
        if "error" in message:
            error = message.pop("error")
            steers = isinstance(error, STEERING) and not (action == "__next__" and isinstance(error, StopIteration))
            raise error if isinstance(error, BaseException) and not steers else AnswerError("raised by the answer")
        value = message.pop("value")
        if mixed and (action in ARITHMETIC or action in CONVERSIONS):
            if not is_remote(value):
                raise AnswerError("an object of the answer in place of a number")
            self.mixed.add(self.numbers[id(value)])
        return value

    def perform(self, message: "dict[str, object]") -> "dict[str, object]":
        """The reply to a request."""
        try:
            action = message["do"]
            target = message.pop("to")
            items = message.pop("items")
            named = message.pop("named")
            if self.judges and action == "input":
                return {"value": self.encode(builtins.input(*items))}
            if action == "names" and not self.judges:
                self.shown = {name: NAMES[name] for name in items[0] if name in NAMES}
                return {"value": self.encode({**self.shown})}
            thing = self.objects[target]
            if self.judges and action in ("get", "__setattr__", "__delattr__"):
                self.check_attribute(action, thing, items[0])
            return {"value": self.encode(ACTIONS[action](thing, *items, **named))}
        except BaseException as error:
            error.__traceback__ = error.__context__ = None
            return {"error": self.encode(error)}

    def check_attribute(self, action: str, thing: object, name: object) -> None:
        """Refuse attributes of the tests' objects that lead to their code, and changes of all but their own objects."""
        from_tests = type(thing).__module__ == "__tests__" and not isinstance(thing, type)
        if (
            not isinstance(name, str)
            or (name.startswith("__") and name not in SHOWN)
            or (action != "get" and not from_tests)
        ):
            raise AttributeError(f"no attribute {name!r} is given away")

    # Messages

    def send(self, message: "dict[str, object]") -> None:
        """Write one line: the message, what changed in the containers, and which of them nothing else here holds."""
        if not self.judges:
            message["printed"] = printed_text()
            message["names"] = {
                name: self.encode(NAMES[name]) for name in self.shown if NAMES.get(name) is not self.shown[name]
            }
            self.shown = {name: NAMES.get(name) for name in self.shown}
        changes = []
        done = set()
        while not self.receiving and (
            left := [object_number for object_number in self.contents if object_number not in done]
        ):
            for object_number in left:
                done.add(object_number)
                container = self.objects[object_number]
                before = self.contents[object_number]
                items = container_items(container)
                if before is None or len(items) != len(before) or not all(map(operator.is_, items, before)):
                    self.contents[object_number] = items
                    changes.append([object_number, *self.kind_of(container), [self.encode(item) for item in items]])
                del container, before, items
        dropped = []
        while not self.receiving and (
            dead := [
                object_number
                for object_number in self.contents
                if type(self.objects[object_number]) in CONTAINERS and sys.getrefcount(self.objects[object_number]) <= 2
            ]
        ):
            dropped += dead
            for object_number in dead:
                self.forget(object_number)
        line = json.dumps({**message, "changes": changes, "dropped": dropped}).encode() + b"\n"
        if self.longest is not None:
            self.longest += 2 * len(line)
        self.sent.write(line)
        self.sent.flush()

    def read_message(self) -> "dict[str, object]":
        """Read one line. A message that is none, or too long, or the end of the other process, end this one."""
        line = self.received.readline(-1 if self.longest is None else self.longest)
        if not line.endswith(b"\n"):
            os._exit(DIED)
        try:
            message = json.loads(line)
            self.receiving = True
            for object_number, kind, extra, _ in message["changes"]:
                if kind and object_number > 0 and -object_number not in self.objects:
                    made = next(container_type for container_type in CONTAINERS if container_type.__name__ == kind)
                    self.add(-object_number, made(maxlen=extra) if kind == "deque" else made())
            for name in ("value", "error"):
                if name in message:
                    message[name] = self.decode(message[name])
            if "do" in message:
                message["items"] = [self.decode(argument) for argument in message["items"]]
                message["named"] = {name: self.decode(item) for name, item in message["named"].items()}
            # All that was encoded is decoded, in the same order: what is new is described once, and later only referred
            # to.
            for name, encoded in message.pop("names", {}).items():
                value = self.decode(encoded)
                if name in self.shown and NAMES.get(name) is self.shown[name]:
                    self.shown[name] = NAMES[name] = value
            for object_number, kind, extra, items in message.pop("changes"):
                container = self.objects[-object_number]
                factory = self.decode(extra)
                if -object_number not in self.contents:
                    os._exit(DIED)
                set_items(container, [self.decode(item) for item in items])
                if kind == "defaultdict" and object_number > 0:
                    container.default_factory = factory
                self.contents[-object_number] = container_items(container)
                del container
            for object_number in message.pop("dropped"):
                self.forget(-object_number)
            if text := message.pop("printed", ""):
                sys.stdout.write(text)
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError, OverflowError, ArithmeticError):
            os._exit(DIED)
        finally:
            self.receiving = False
        return message

    def kind_of(self, container: object) -> "tuple[str, object]":
        """The name of a container's type, empty for derived ones, and what else it is made of."""
        kind = type(container)
        if kind not in CONTAINERS:
            return "", None
        argument = "maxlen" if kind is collections.deque else "default_factory"
        return kind.__name__, self.encode(getattr(container, argument, None))

    def add(self, number: int, value: object) -> object:
        """Give a value a number."""
        self.objects[number] = value
        self.numbers[id(value)] = number
        if isinstance(value, CONTAINERS):
            self.contents[number] = None if number > 0 else []
        return value

    def forget(self, number: int) -> None:
        """Take a container's number back: it is a value like others from now on."""
        del self.contents[number], self.numbers[id(self.objects.pop(number))]

    def encode(self, value: object) -> object:
        """A value as JSON."""
        kind = type(value)
        if kind in EXACT:
            return value
        if kind is int:
            return value if -(2**63) < value < 2**63 else ["int", hex(value)]
        if kind in (tuple, frozenset):
            return [kind.__name__, *map(self.encode, value)]
        if kind is bytes:
            return ["bytes", value.hex()]
        if id(value) in self.numbers:
            return ["known", -self.numbers[id(value)]]
        if isinstance(value, HIDDEN) and self.judges:
            raise TypeError(f"a {kind.__name__} is not given away")
        standard_kind = standard_name(kind)
        if standard_kind and standard_kind[1] in VALUES.get(standard_kind[0], ()):
            return ["value", *standard_kind, *map(self.encode, parts_of(value))]
        if standard_kind and isinstance(value, BaseException):
            return ["error", self.encode(kind), *map(self.encode, value.args)]
        if (isinstance(value, type) or (self.judges and callable(value))) and (name := standard_name(value)):
            return ["standard", *name]
        self.last = object_number = self.last + 1
        self.add(object_number, value)
        if isinstance(value, type):
            return [
                "class",
                object_number,
                value.__name__,
                overridden(value),
                [self.encode(base) for base in bases_of(value)],
            ]
        if kind in CONTAINERS:
            return ["known", -object_number]
        if kind is types.CoroutineType:
            return ["await", object_number]
        content = builtin_base(CONTENTS, value)
        parts = [] if content is None else [plain_content(content, value)]
        if isinstance(value, BaseException):
            parts = value.args
        encoded_class = self.encode(kind) if standard_kind is None and kind.__module__ != "builtins" else None
        return ["object", object_number, encoded_class, *map(self.encode, parts)]  # the class first, as it is decoded

    def decode(self, value: object) -> object:
        """The value that `encode` made JSON of."""
        if not isinstance(value, list):
            return value
        mark, *rest = value
        return self.decoders[mark](*rest) if mark in self.decoders else self.decode_object(mark, -rest[0], rest[1:])

    def decode_value(self, module: str, name: str, *parts: object) -> object:
        """A value of `VALUES`, made anew by its type."""
        if name not in VALUES.get(module, ()):
            raise LookupError(name)
        return standard(module, name)(*map(self.decode, parts))

    def decode_error(self, *parts: object) -> Exception:
        """An exception of the library, made anew; an `AnswerError` where that is not possible."""
        kind, *items = map(self.decode, parts)
        if type(kind) is not RemoteClass:
            with contextlib.suppress(TypeError):
                return kind(*items)
        return AnswerError(*items)

    def decode_standard(self, module: str, name: str) -> object:
        """A class or function of the library; where the tests are, classes of values and errors only."""
        value = standard(module, name)
        known = isinstance(value, type) and (
            module == "builtins"
            or name in VALUES.get(module, ())
            or value in CONTAINERS
            or (module in ERRORS and issubclass(value, Exception))
        )
        return value if known or not self.judges else mirror(name, [], [])

    def decode_object(self, mark: str, number: int, rest: "list[object]") -> object:
        """A stand-in for an object, a class or a coroutine of the other end."""
        if number >= 0 or number in self.objects:
            raise LookupError(number)
        if mark == "class":
            return self.add(number, mirror(rest[0], rest[1], [self.decode(base) for base in rest[2]]))
        if mark == "await":
            return waiting(self.add(number, object()))
        kind = Remote if rest[0] is None else self.decode(rest[0])
        items = [self.decode(part) for part in rest[1:]]
        if type(kind) is not RemoteClass:
            raise TypeError(kind)
        content = next(
            (builtin for builtin in (*CONTENTS, *CONTAINERS, BaseException) if issubclass(kind, builtin)), object
        )
        return self.add(number, content.__new__(kind, *items))


async def waiting(target: object) -> object:
    """A coroutine of the other end: it runs there as a whole when it is awaited here."""
    return PEER.ask("await", target)


def finished(coroutine: object) -> object:
    """The value of a coroutine, run to its end."""
    if "asyncio" in sys.modules:
        return sys.modules["asyncio"].run(coroutine)
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the coroutine waits for something that is not there")


# What the other end may ask for, of an object that is here.
ACTIONS = OPERATIONS | {"get": getattr, "await": finished}


def mirror(name: str, own: "list[str]", bases: "list[type]") -> type:
    """A class for the stand-ins of another process's class: with the same bases, as far as those hold content.

    The methods of immutable content come before those that ask: no answer overrides how its numbers and texts compare.
    """
    bases = [base for base in bases if type(base) is RemoteClass or (isinstance(base, type) and can_subclass(base))]
    first = [base for base in bases if issubclass(base, (*CONTENTS, BaseException))]
    if not any(type(base) is RemoteClass for base in bases):
        bases = [*bases, Remote] if first else [Remote, *bases]
    names: dict[str, object] = {"__slots__": ()}
    if first:
        shown = {"__str__", "__repr__", "__format__"}
        if issubclass(first[0], tuple):
            shown |= {"__setattr__", *ARITHMETIC.keys() & set(own)}
        names |= {method: vars(Remote)[method] for method in shown}
    try:
        return type.__new__(RemoteClass, name, tuple(bases), names)
    except TypeError:  # bases that do not go together
        return mirror(name, [], [])


def overridden(kind: type) -> "list[str]":
    """The operators that a class or its bases define outside the library."""
    names = [name for cls in kind.__mro__ if standard_name(cls) is None for name in vars(cls)]
    return [name for name in names if name in ARITHMETIC]


def plain_content(kind: type, value: object) -> object:
    """The content of an object of a derived class, by the methods of its built-in type."""
    if kind is str:
        return str.__str__(value)
    return kind(kind.__iter__(value)) if kind in (bytes, tuple, frozenset) else kind.__pos__(value)


def parts_of(value: object) -> "tuple[object, ...]":
    """The arguments from which the type of a value of `VALUES` makes it anew."""
    if isinstance(value, complex):
        return value.real, value.imag
    return value.__reduce_ex__(2)[1]


# The answer

# what is printed goes to the tests, and no more than this from one call
PRINTED = io.BytesIO()
LONGEST_PRINT = 2_000


def printed_text() -> str:
    """The text that the answer has printed since the last call."""
    try:
        text = PRINTED.getvalue().decode(errors="replace")
        PRINTED.seek(0)
        PRINTED.truncate()
    except ValueError:  # the answer closed it
        return ""
    return text[:LONGEST_PRINT]


def answer_requests(code: str, peer: Peer) -> None:
    """Run the code, then do what is asked for, one line each, until nothing more comes."""
    sys.stdout = io.TextIOWrapper(PRINTED, encoding="utf-8", write_through=True)
    exec(compile(code, "<answer>", "exec"), NAMES)
    printed_text()  # nothing of the tests has run yet that could read it
    builtins.input = lambda *items: peer.ask("input", None, *items)
    while True:
        peer.send(peer.perform(peer.read_message()))


# The tests


def run_tests(tests: str, peer: Peer) -> None:
    """Run the tests; the names that they read are the answer's where it defines them. An exception ends the process.

    Names of standard modules come from the library, and names that Python has too from the answer only where the tests
    need no other name of it. Tests do not pass that ask the answer nothing, nor those that need a name which neither
    they nor Python nor the answer define, unless they look for missing names themselves.
    """
    tree = ast.parse(tests, "<tests>")
    names = names_of_tests(tests)
    variables = peer.ask("names", None, [*names["answer"], *names["builtins"]])
    if not variables.keys() >= {*names["needed"]} and not {"NameError", "globals"} & {*names["builtins"]}:
        raise AnswerError("a name that the tests need is missing")
    for name in [*names["answer"], *([] if names["needed"] else names["builtins"])]:
        if name in variables:
            NAMES[name] = variables[name]
            if name not in names["bound"]:  # what the tests set stays as they set it
                peer.shown[name] = variables[name]
    for name in names["modules"]:
        NAMES[name] = importlib.import_module(name)
    exec(compile(ExpectedFirst(names).visit(tree), "<tests>", "exec"), NAMES)
    if not peer.asked and (not variables or any(is_remote(value) for value in variables.values())):
        raise AnswerError("nothing was asked of the answer")


class ExpectedFirst(ast.NodeTransformer):
    """`f(x) == g(x)` with the answer's f as `g(x) == f(x)`: the expected value is computed before the answer runs."""

    def __init__(self, names: "dict[str, list[str]]"):
        self.answer = {*names["answer"]} - {*names["bound"]}

    def asks(self, node: ast.AST) -> bool:
        """True where an expression reads a name that may be the answer's."""
        return any(isinstance(part, ast.Name) and part.id in self.answer for part in ast.walk(node))

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Turn `==` and `!=` round where the answer stands on the left alone."""
        self.generic_visit(node)
        right = node.comparators[0]
        calls = any(isinstance(part, ast.Call) for part in ast.walk(right))
        same = len(node.ops) == 1 and isinstance(node.ops[0], (ast.Eq, ast.NotEq))
        if same and calls and self.asks(node.left) and not self.asks(right):
            node.left, node.comparators = right, [node.left]
        return node


def names_of_tests(tests: str) -> "dict[str, list[str]]":
    """The names that tests read, by where they come from. SyntaxError where the tests are no Python.

    Returns:
        answer: may be the answer's; builtins: Python's, unless the answer has them; modules: of the library, not
        imported and only read for their attributes; helpers: of other libraries, not imported; bound: defined or
        imported by the tests; needed: those of `answer` that are read and not bound. Local names are in none.
    """
    tree = ast.parse(tests, "<tests>")
    read = set()
    needed = set()
    bound = set()
    scopes = [symtable.symtable(tests, "<tests>", "exec")]
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            name = symbol.get_name()
            local = symbol.is_local() and scope.get_type() != "module"
            if symbol.is_free() or (local and scope.get_type() != "class"):
                continue
            if symbol.is_referenced():
                read.add(name)
                if not local:  # in the body of a class, `f = staticmethod(f)` reads the f outside
                    needed.add(name)
            if not local and (symbol.is_assigned() or symbol.is_imported()):
                bound.add(name)
    for node in ast.walk(tree):
        star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        if star and node.module in {*MODULES, "collections.abc"}:
            module = importlib.import_module(node.module)
            bound.update(getattr(module, "__all__", vars(module)))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    whole = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in inner}
    names = {"answer": [], "builtins": [], "modules": [], "helpers": [], "bound": sorted(bound)}
    for name in sorted(read):
        kind = "builtins" if name in dir(builtins) else "" if name.startswith("__") else "answer"
        if kind == "answer" and name not in bound:
            kind = "modules" if name in MODULES - whole else "helpers" if name in HELPERS else kind
        names.get(kind, []).append(name)
    names["needed"] = sorted({*names["answer"]} & needed - bound)
    return names


if __name__ == "__main__":
    run_role()

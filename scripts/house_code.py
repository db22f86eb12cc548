"""A package's source as a graph: its modules, their imports, and the functions that one function calls.

Nothing is imported or run; all is read from the syntax trees. `house.py` counts on it, and the architecture test too.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Module:
    """A module of the package: its dotted name, its file and its syntax tree."""

    name: str
    path: Path
    tree: ast.Module
    lines: list[str]


@dataclass(frozen=True, eq=False)
class Class:
    """A class of the package."""

    name: str  # "alignment.training.engine:Engine"
    module: Module
    node: ast.ClassDef


@dataclass(frozen=True, eq=False)
class Function:
    """A function, a method or a function inside one; `outer` is the function around it, `owner` its class."""

    name: str  # "alignment.training.engine:Engine.update"
    module: Module
    node: FunctionNode
    owner: Class | None = None
    outer: "Function | None" = None


@dataclass(frozen=True)
class Instance:
    """A value that is an object of a class of the package."""

    of: Class


Value = Module | Class | Function | Instance


@dataclass
class Package:
    """All modules below a directory, under the name `alignment` whatever the directory is called."""

    directory: Path
    modules: dict[str, Module] = field(init=False)
    functions: dict[str, Function] = field(init=False, default_factory=dict)  # those inside functions too
    classes: dict[str, Class] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.modules = {name: _read(name, path) for name, path in module_files(self.directory).items()}
        for module in self.modules.values():
            self._collect(module, module.tree.body, "", None, None)

    def _collect(
        self, module: Module, body: list[ast.stmt], prefix: str, owner: Class | None, outer: Function | None
    ) -> None:
        for node in definitions(body):
            name = f"{module.name}:{prefix}{node.name}"
            if isinstance(node, ast.ClassDef):
                known = self.classes[name] = Class(name, module, node)
                self._collect(module, node.body, f"{prefix}{node.name}.", known, None)
            else:
                function = self.functions[name] = Function(name, module, node, owner, outer)
                self._collect(module, node.body, f"{prefix}{node.name}.", None, function)

    @cached_property
    def methods(self) -> dict[str, list[Function]]:
        """Class -> its methods."""
        found: dict[str, list[Function]] = {}
        for function in self.functions.values():
            if function.owner is not None:
                found.setdefault(function.owner.name, []).append(function)
        return found

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> modules that it imports, those imported inside functions and for types only too."""
        return {module.name: self._imported(module, module.tree) for module in self.modules.values()}

    @cached_property
    def imports_on_load(self) -> dict[str, set[str]]:
        """Module -> modules that are loaded with it: its imports outside functions and `if TYPE_CHECKING`."""
        found = {}
        for module in self.modules.values():
            lines: list[ast.stmt] = [node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
            found[module.name] = self._imported(module, ast.Module(lines, []))
        return found

    def _imported(self, module: Module, tree: ast.AST) -> set[str]:
        names = (name for _, name in imported_names(tree, module.name, module.path))
        return {self.module_of(name) for name in names} - {module.name, "alignment"}

    def module_of(self, dotted: str) -> str:
        """The module that a dotted name lies in: the name itself or the longest part of it that is a module."""
        while dotted not in self.modules and "." in dotted:
            dotted = dotted.rpartition(".")[0]
        return dotted

    @cached_property
    def bindings(self) -> dict[str, dict[str, Value | str]]:
        """Module -> name -> what a definition or an import anywhere in it binds; a string is a dotted name."""
        found: dict[str, dict[str, Value | str]] = {}
        for module in self.modules.values():
            names = found[module.name] = {}
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ImportFrom):
                    for alias, name in zip(node.names, _from_names(node, module.name, module.path), strict=True):
                        names[alias.asname or alias.name] = name
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        name = alias.asname or alias.name.split(".")[0]
                        names[name] = alias.name if alias.asname else name
            for node in definitions(module.tree.body):
                key = f"{module.name}:{node.name}"
                names[node.name] = self.classes.get(key) or self.functions[key]
        return found

    def lookup(self, module: str, name: str, hops: int = 9) -> Value | None:
        """What a name at the top of a module is, followed through re-exports."""
        bound = self.bindings.get(module, {}).get(name)
        if bound is None:
            return self.modules.get(f"{module}.{name}")
        if not isinstance(bound, str) or hops == 0:
            return None if isinstance(bound, str) else bound
        if bound in self.modules:
            return self.modules[bound]
        home, _, last = bound.rpartition(".")
        return self.lookup(home, last, hops - 1) if home in self.modules else None

    def closure(self, start: str, leave_out: str) -> list[str]:
        """Modules that are loaded with `start`, itself included, not going into the room `leave_out`."""
        found, todo = set(), [start]
        while todo:
            module = todo.pop()
            if module in found or room_of(module) == leave_out:
                continue
            found.add(module)
            todo.extend(self.imports_on_load[module])
        return sorted(found)


def _read(name: str, path: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    return Module(name, path, ast.parse(text), text.splitlines())


def module_files(directory: Path) -> dict[str, Path]:
    """Dotted name -> file of each module below a package's directory."""
    found = {}
    for path in sorted(directory.rglob("*.py")):
        parts = ["alignment", *path.relative_to(directory).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    """The first part of a module's name under the package: `alignment.data.chat` is in the room `data`."""
    return module.split(".")[1] if "." in module else "__init__"


def definitions(body: list[ast.stmt]) -> Iterator[FunctionNode | ast.ClassDef]:
    """Functions and classes defined by these statements, those under `if`, `try` and `with` too."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
        else:
            for part in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(node, part, [])
                yield from definitions([line for item in inner for line in getattr(item, "body", [item])])


def imported_names(tree: ast.AST, module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of the package's own modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = _from_names(node, module, path)
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "alignment" and "." in name)


def _from_names(node: ast.ImportFrom, module: str, path: Path) -> list[str]:
    around = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    above = around[: len(around) - node.level + 1] if node.level else []
    base = ".".join([*above, *([node.module] if node.module else [])])
    return [f"{base}.{alias.name}" for alias in node.names]


def wrong_imports(package: Package, floors: list[set[str]], beside: set[tuple[str, str]]) -> list[str]:
    """Imports that go up, or to a neighbour on the same floor that is not listed in `beside`.

    Raises:
        LookupError: a room without a floor.
    """

    def floor_of(room: str) -> int:
        for number, rooms in enumerate(floors):
            if room in rooms:
                return number
        raise LookupError(f"{room} has no floor: add it to FLOORS")

    problems = []
    for module in package.modules.values():
        room = room_of(module.name)
        for line, name in imported_names(module.tree, module.name, module.path):
            other = room_of(name)
            if other == "__version__" or room == other or (room, other) in beside:
                continue
            if floor_of(other) >= floor_of(room):
                where = f"{module.path.relative_to(package.directory)}:{line}"
                problems.append(f"{where}: {room} may not import {other}")
    return problems


def circles(package: Package) -> list[list[str]]:
    """Modules that import each other in a ring; a package stands for its __init__."""
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(package.imports[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in package.imports:
        visit(module, [])
    return found


def own_nodes(function: Function, always: bool = False) -> Iterator[ast.AST]:
    """The nodes of a function's defaults and body, without those of functions and classes inside it.

    Args:
        always: leave out what does not run in every call: branches of `if`, `match`, `and`, `or` and conditional
            expressions, `except`, `raise`.
    """
    todo: list[ast.AST] = [*function.node.args.defaults, *function.node.body]
    while todo:
        node = todo.pop()
        yield node
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                pass
            case ast.If(test=first) | ast.IfExp(test=first) | ast.Match(subject=first) if always:
                todo.append(first)
            case ast.BoolOp(values=[first, *_]) if always:
                todo.append(first)
            case ast.Raise() | ast.ExceptHandler() if always:
                pass
            case _:
                todo.extend(ast.iter_child_nodes(node))

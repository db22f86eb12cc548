"""Counts what keeps the code readable: the files behind one algorithm, words, holes in types, doubles, long functions.

    python scripts/house.py                                  # measure | counted | target
    python scripts/house.py --list any                       # what is behind a number
    python scripts/house.py --package OTHER/alignment        # of another checkout

The architecture test holds each number at its ceiling.
"""

import argparse
import ast
import io
import tokenize
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from house_calls import Calls, decorators
from house_code import Class, Function, Module, Package, circles, own_nodes, room_of
from house_words import unknown_words

ROOT = Path(__file__).resolve().parent.parent
MOST_POSITIONAL, MOST_LINES, SMALL_FILE = 5, 60, 60
MOST_COLUMNS = 120
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FORMULAS = {
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "kl_div", "log_softmax", "logsigmoid",
    "mse_loss", "nll_loss", "softplus",
}  # fmt: skip
STAGE = "alignment.algorithms.dpo.dpo:run"
ROOMS_WITHOUT_FORMULAS = ("algorithms", "evaluation", "judging", "statistics", "models")
VAGUE = {"found", "each", "number", "own", "told"}  # names that say nothing of what they hold


class House(Package):
    """A package and what is counted in it; every measure is the list of what it counts."""

    # DPO from the command to the loss

    @cached_property
    def calls(self) -> Calls:
        """The calls that `alignment dpo` reaches.

        They start from cli.py's function `dpo`; where commands are made in a loop, from the first function inside a
        function of cli.py that leads to the algorithm's `run`.
        """
        inner = [f.name for f in self.functions.values() if f.outer and f.module.name == "alignment.cli"]
        for start in ["alignment.cli:dpo"] if "alignment.cli:dpo" in self.functions else inner:
            calls = Calls(self, start, STAGE)
            if calls.path(STAGE):
                return calls
        raise LookupError(f"no command of cli.py was found to lead to {STAGE}")

    @cached_property
    def way(self) -> list[str]:
        """A shortest chain of calls from the command to `dpo_loss`; a function that was handed in counts as called."""
        end = next(name for name in self.functions if name.endswith(":dpo_loss"))
        found = self.calls.path(end)
        if not found:
            raise LookupError(f"no chain of calls from {self.calls.start} to {end} was found")
        return found

    def files_narrow(self) -> list[str]:
        """Files with a function of the way, one that it calls on every run, or one that this calls on every run.

        On every run: not in a branch, an `except` or a `raise`. Without models/.
        """
        return files_of(self.calls.around(self.way, 2))

    def files_called(self) -> list[str]:
        """Files with a function that can be reached from the command by calls, whatever the config. Without models/."""
        return files_of(self.calls.edges)

    def files_loaded(self, algorithm: str = "dpo.dpo") -> list[str]:
        """Files loaded with the algorithm's module: its imports, theirs, and so on. Without models/.

        Imports inside functions and under `if TYPE_CHECKING` are not counted, nor is a room's __init__ for a file in it.
        """
        return self.closure(f"alignment.algorithms.{algorithm}", leave_out="models")

    # Functions and classes

    def any_parameters(self) -> list[str]:
        """Parameters, `*args` and `**kwargs` aside, whose annotation has `Any` in it."""
        found = []
        for function in self.functions.values():
            given = function.node.args
            for item in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                if item.annotation is not None and "Any" in names_in(item.annotation):
                    found.append(f"{self.where(function)}: {function.node.name}({item.arg})")
        return found

    def many_positional(self) -> list[str]:
        """Functions with more than 5 positional parameters, `self` aside; commands of cli.py are called by typer."""
        found = []
        for function in self.functions.values():
            number = len(function.node.args.posonlyargs) + len(function.node.args.args)
            number -= function.owner is not None and "staticmethod" not in decorators(function.node)
            if number > MOST_POSITIONAL and not is_command(function):
                found.append(f"{self.where(function)}: {function.node.name}, {number}")
        return found

    def long_functions(self) -> list[str]:
        """Functions above 60 lines, signature and docstring included."""
        sizes = [(f, (f.node.end_lineno or 0) - f.node.lineno + 1) for f in self.functions.values()]
        return [f"{self.where(f)}: {f.node.name}, {lines}" for f, lines in sizes if lines > MOST_LINES]

    def doubled_names(self) -> list[str]:
        """Public functions and classes of one name in several modules; `run`, `*Config` and commands aside.

        `models/families/` counts as one module: each family has the same functions by design.
        """
        homes: dict[str, set[str]] = {}
        for name, known in {**self.functions, **self.classes}.items():
            module, _, plain = name.partition(":")
            open_to_all = "." not in plain and not plain.startswith("_")
            expected = plain == "run" or plain.endswith("Config") or (isinstance(known, Function) and is_command(known))
            if open_to_all and not expected:
                home = module.partition(".families")[0] + ".families" if ".families" in module else module
                homes.setdefault(plain, set()).add(home)
        return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(homes.items()) if len(found) > 1]

    def formulas(self) -> list[str]:
        """Formulas that are minimized in algorithms/, evaluation rooms and models/ and not named in losses/.

        Uses of torch's loss functions, and squares in a function that makes a LossSum; those within a dictionary are
        metrics.
        """
        found = []
        for function in self.functions.values():
            if room_of(function.module.name) not in ROOMS_WITHOUT_FORMULAS:
                continue
            nodes = list(own_nodes(function))
            in_metrics = {id(part) for node in nodes if isinstance(node, ast.Dict) for part in ast.walk(node)}
            makes_loss = any(isinstance(node, ast.Name) and node.id == "LossSum" for node in nodes)
            for node in nodes:
                named = isinstance(node, ast.Attribute | ast.Name) and names_in(node) & FORMULAS
                square = makes_loss and isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
                if isinstance(node, ast.expr) and (named or square) and id(node) not in in_metrics:
                    line = function.module.lines[node.lineno - 1].strip()
                    found.append(f"{function.module.path.relative_to(self.directory)}:{node.lineno}: {line}")
        return list(dict.fromkeys(found))

    # Files

    def loose_files(self) -> list[str]:
        """Files at the top of the package, its entrances aside."""
        return sorted(path.name for path in self.directory.glob("*.py") if not path.name.startswith("__"))

    def small_files(self) -> list[str]:
        """Files below 60 lines, families and entrances aside."""
        small = [module for module in self.modules.values() if len(module.lines) < SMALL_FILE]
        return [
            f"{module.path.relative_to(self.directory)}: {len(module.lines)}"
            for module in small
            if ".families." not in module.name and module.path.name[:2] != "__"
        ]

    def without_docstring(self) -> list[str]:
        """Modules that do not say what they hold."""
        return [str(module.path) for module in self.modules.values() if not ast.get_docstring(module.tree)]

    def circles(self) -> list[str]:
        """Rings of modules that import each other."""
        return [" -> ".join(ring) for ring in circles(self)]

    def tokens(self) -> int:
        """Python tokens of the package; comments, layout and docstrings are none."""
        return sum(tokens_read(module) for module in self.modules.values())

    def packed_assignments(self) -> list[str]:
        """Assignments of several values at once to as many names."""
        packed = []
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                values = node.value if isinstance(node, ast.Assign) else None
                if isinstance(values, ast.Tuple) and isinstance(node.targets[0], ast.Tuple):
                    packed.append(f"{module.path.relative_to(self.directory)}:{node.lineno}")
        return packed

    def nested_comprehensions(self) -> list[str]:
        """Comprehensions that hold another one."""
        nested = []
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                if (
                    isinstance(node, COMPREHENSIONS)
                    and sum(isinstance(part, COMPREHENSIONS) for part in ast.walk(node)) > 1
                ):
                    nested.append(f"{module.path.relative_to(self.directory)}:{node.lineno}")
        return nested

    def wide_lines(self) -> list[str]:
        """Lines above 120 columns."""
        return [
            f"{module.path.relative_to(self.directory)}:{line}"
            for module in self.modules.values()
            for line, text in enumerate(module.lines, 1)
            if len(text) > MOST_COLUMNS
        ]

    def format_skips(self) -> list[str]:
        """Lines that ruff does not format."""
        return [
            f"{module.path.relative_to(self.directory)}:{line}"
            for module in self.modules.values()
            for line, text in enumerate(module.lines, 1)
            if "# fmt: skip" in text or "# fmt: off" in text
        ]

    def vague_names(self) -> list[str]:
        """Assignments to names of `VAGUE`."""
        return [
            f"{module.path.relative_to(self.directory)}:{node.lineno}: {node.id}"
            for module in self.modules.values()
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
        ]

    def fullest_folder(self) -> list[str]:
        """Files of the folder that has the most."""
        folders: dict[Path, list[str]] = {}
        for module in self.modules.values():
            folders.setdefault(module.path.parent, []).append(str(module.path.relative_to(self.directory)))
        return max(folders.values(), key=len)

    def relative_clauses(self) -> list[str]:
        """Docstrings that begin with a relative clause without its noun."""
        found = []
        for module in self.modules.values():
            for node in ast.walk(module.tree):
                text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
                if (text or "").split(" ")[0] in ("What", "Whether", "Where", "Which", "How"):
                    line = getattr(node, "lineno", 1)
                    found.append(f"{module.path.relative_to(self.directory)}:{line}: {(text or '').splitlines()[0]}")
        return found

    def where(self, known: Function | Class) -> str:
        """File and line of a definition."""
        return f"{known.module.path.relative_to(self.directory)}:{known.node.lineno}"


class Measure(NamedTuple):
    """A line of the table: its key for --list, what it says, what it counts, its target, its number if not a length."""

    key: str
    title: str
    items: Callable[[House], Iterable[str]]
    target: str
    number: Callable[[House], int] | None = None


MEASURES = [
    Measure("narrow", "files of DPO on the way to the loss, and two calls around it", House.files_narrow, "20"),
    Measure("called", "files of DPO, every call", House.files_called, "60"),
    Measure("loaded", "files of DPO, import closure", House.files_loaded, "50"),
    Measure("any", "parameters of type Any", House.any_parameters, "60"),
    Measure("positional", "functions with more than 5 positional parameters", House.many_positional, "0"),
    Measure("long", "functions above 60 lines", House.long_functions, "0"),
    Measure("doubled", "public names defined twice", House.doubled_names, "0"),
    Measure("formulas", "minimized formulas outside losses/", House.formulas, "0"),
    Measure("circles", "circles of imports", House.circles, "0"),
    Measure("words", "words that a reader of torch does not know", unknown_words, "10"),
    Measure("clauses", "docstrings that begin with What, Whether, Where, Which or How", House.relative_clauses, "0"),
    Measure("loose", "loose files at the top", House.loose_files, "6"),
    Measure("small", "files below 60 lines", House.small_files, "15"),
    Measure("files", "files", lambda house: sorted(house.modules), "260"),
    Measure("tokens", "tokens, comments and docstrings aside", lambda _: [], "385000", House.tokens),
    Measure("packed", "assignments of several values at once", House.packed_assignments, "150"),
    Measure("nested", "comprehensions within comprehensions", House.nested_comprehensions, "120"),
    Measure("wide", "lines above 120 columns", House.wide_lines, "60"),
    Measure("skips", "lines that are not formatted", House.format_skips, "20"),
    Measure("vague", "assignments to found, each, number, own, told", House.vague_names, "120"),
    Measure("full", "files of the fullest folder", House.fullest_folder, "16"),
]


def tokens_read(module: Module) -> int:
    """Tokens of a module that a reader reads as code."""
    documented: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            documented.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    text = io.StringIO("\n".join(module.lines) + "\n")
    tokens = [token for token in tokenize.generate_tokens(text.readline) if token.type not in LAYOUT]
    return sum(token.type != tokenize.STRING or token.start[0] not in documented for token in tokens)


def files_of(functions: Iterable[str]) -> list[str]:
    """The modules of some functions, without those of models/."""
    return sorted({name.split(":")[0] for name in functions if room_of(name.split(":")[0]) != "models"})


def names_in(node: ast.AST) -> set[str]:
    """Every name and last part of a dotted name in a tree."""
    found = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return found | {part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute)}


def is_command(function: Function) -> bool:
    """Whether typer calls it: a function of cli.py with a decorator `command`."""
    return room_of(function.module.name) == "cli" and "command" in decorators(function.node)


def main() -> None:
    """Print the table, or what is behind one of its numbers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--package", type=Path, default=ROOT / "alignment", help="directory of the package")
    parser.add_argument("--list", choices=[measure.key for measure in MEASURES], help="print what a measure counts")
    arguments = parser.parse_args()
    house = House(arguments.package)
    if arguments.list:
        print("\n".join(next(measure for measure in MEASURES if measure.key == arguments.list).items(house)))
        return
    print(f"{'':10} {'measure':66} {'counted':>7} {'target':>7}")
    for measure in MEASURES:
        number = measure.number(house) if measure.number else len(list(measure.items(house)))
        print(f"{measure.key:10} {measure.title:66} {number:>7} {measure.target:>7}")


if __name__ == "__main__":
    main()

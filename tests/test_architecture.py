"""The house keeps its floors: imports go down only, no circles, light entrances, files that fit in a head."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "alignment"
FLOORS = [  # a room may import rooms on lower floors only, never one beside it
    {"errors", "files", "ragged", "losses"},
    {"models", "data", "training", "config"},
    {"adapters", "generation", "hotel_world", "loading", "reward_model"},
    {"algorithms", "evaluation", "analysis"},
    {"pipeline", "commands"},
    {"cli"},
    {"__main__", "__init__"},
]
BESIDE = {  # the neighbors on one floor that may be looked at
    ("files", "errors"), ("generation", "adapters"), ("loading", "adapters"), ("reward_model", "adapters"), ("reward_model", "loading"),
}  # fmt: skip
LONGEST_FILE = 400


def floor_of(room: str) -> int:
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    raise LookupError(f"{room} has no floor: add it to FLOORS")


def imported_names(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Line and dotted name of each import of the package's own modules, those inside functions and for types too."""
    around = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = around.split(".")[: len(around.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "alignment" and "." in name)


def modules(package: Path) -> dict[str, Path]:
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = ["alignment", *path.relative_to(package).with_suffix("").parts]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def wrong_imports(package: Path) -> list[str]:
    """Imports that go up, or to a neighbor."""
    problems = []
    for module, path in modules(package).items():
        room = room_of(module)
        for line, name in imported_names(path, module):
            other = room_of(name)
            if other == "__version__" or room == other or (room, other) in BESIDE:
                continue
            if floor_of(other) >= floor_of(room):
                problems.append(f"{path.relative_to(package)}:{line}: {room} may not import {other}")
    return problems


def circles(package: Path) -> list[list[str]]:
    """Modules that import each other in a ring, within a room too; a package stands for its __init__."""
    known = modules(package)
    edges: dict[str, set[str]] = {}
    for module, path in known.items():
        targets = set()
        for _, name in imported_names(path, module):
            while name not in known and "." in name:
                name = name.rpartition(".")[0]
            targets.add(name)
        edges[module] = targets - {module, "alignment"}
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(edges[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in edges:
        visit(module, [])
    return found


def test_imports_go_down_only():
    assert wrong_imports(PACKAGE) == []


def test_there_are_no_circles():
    assert circles(PACKAGE) == []


def test_every_module_says_what_it_holds():
    assert [str(path) for path in modules(PACKAGE).values() if not ast.get_docstring(ast.parse(path.read_text()))] == []


def test_a_reader_of_the_models_meets_no_long_file():
    found = modules(PACKAGE)
    lengths = {name: len(path.read_text().splitlines()) for name, path in found.items() if room_of(name) == "models"}
    assert [name for name, length in lengths.items() if length >= 300] == []


def test_no_file_is_too_long():
    assert [path.name for path in modules(PACKAGE).values() if len(path.read_text().splitlines()) > LONGEST_FILE] == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"models/a.py": "from alignment.algorithms import sft"}, "models/a.py:1: models may not import algorithms"),
        ({"models/a.py": "import alignment.data.text.chat"}, "models/a.py:1: models may not import data"),
        ({"losses/a.py": "from alignment import data"}, "losses/a.py:1: losses may not import data"),
        ({"algorithms/a.py": "import alignment.evaluation"}, "algorithms/a.py:1: algorithms may not import evaluation"),
        (
            {"adapters/a.py": "def f():\n    from ..hotel_world import gold"},
            "adapters/a.py:2: adapters may not import hotel_world",
        ),
        ({"errors.py": "from .pipeline import plan"}, "errors.py:1: errors may not import pipeline"),
        ({"data/a.py": "from alignment import load_model"}, "data/a.py:1: data may not import loading"),
    ],
)
def test_a_planted_wrong_import_is_found(tmp_path, files, problem):
    plant(tmp_path, files)
    if "load_model" in files.get("data/a.py", ""):
        with pytest.raises(LookupError, match="load_model has no floor"):
            wrong_imports(tmp_path)
    else:
        assert wrong_imports(tmp_path) == [problem]


def test_a_planted_circle_is_found_and_a_straight_line_is_none(tmp_path):
    plant(
        tmp_path, {"models/a.py": "from alignment.models.b import x", "models/b.py": "from alignment.errors import E"}
    )
    assert circles(tmp_path) == []
    plant(tmp_path, {"models/b.py": "from .c import x", "models/c.py": "import alignment.models.a"})
    assert circles(tmp_path) == [
        ["alignment.models.a", "alignment.models.b", "alignment.models.c", "alignment.models.a"]
    ]


def plant(package: Path, files: dict[str, str]) -> None:
    for name, text in {**dict.fromkeys(("errors.py", "pipeline.py"), ""), **files}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)


@pytest.mark.parametrize(
    "command",
    [
        "import alignment",
        "from alignment.cli import main; main(['--help'])",
        "from alignment.cli import main; main(['dpo', '--help'])",
        "from alignment.cli import main; main(['evaluate', '--help'])",
        "import alignment.pipeline.run, alignment.config.load",
    ],
)
def test_the_entrance_is_light(command):
    heavy = ["torch", "transformers", "datasets", "accelerate", "deepspeed", "peft", "trl", "matplotlib", "scipy"]
    check = f"import sys\n{command}\nassert not [name for name in {heavy!r} if name in sys.modules]\nprint('light')"
    result = subprocess.run(
        [sys.executable, "-c", check], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.endswith("light\n")


def test_what_the_package_names_is_there_on_first_use():
    check = "import alignment\nassert [name for name in alignment.__all__ if callable(getattr(alignment, name))]"
    result = subprocess.run(
        [sys.executable, "-c", check], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr

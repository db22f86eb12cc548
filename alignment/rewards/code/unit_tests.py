"""Python code as a verifiable answer: the share of unit tests that it passes in the sandbox."""

import ast
import re
import textwrap
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from alignment.rewards.code.sandbox import SandboxLimits, passes, run_program
from alignment.rewards.code.sandbox_program import names_of_tests
from alignment.rewards.combine import SampledTexts
from alignment.rewards.specs import CodeSpec

PYTHON = re.compile(  # first word of a fence that marks the answer, such as python, py3, python3.11, {.python}
    r"[{.]*(python3?|py3?|python3?\.\d+(\.\d+)?)}*([\s{,:].*)?", re.DOTALL
)
FENCE = re.compile(r"\s*(`{3,}|~{3,})\s*(.*)", re.DOTALL)


def extract_code(text: str) -> str:
    """The last fenced block that is marked Python, else the last without a language; the whole text without either.

    A block loses the indent of a list that it stands in. One without its closing fence, as in a response that was cut
    off, does not count.
    """
    blocks: dict[bool, str] = {}
    fence = ""
    info = ""
    lines = []
    for line in text.splitlines(keepends=True):
        match = FENCE.fullmatch(line)
        if fence and not (match and match[1].startswith(fence) and not match[2].strip()):
            lines.append(line)
        elif fence:
            if PYTHON.fullmatch(info) or not info:
                blocks[bool(info)] = textwrap.dedent("".join(lines))
            fence = ""
        elif match and not (match[1][0] == "`" and "`" in match[2]):  # ```x``` in one line is no fence
            fence = match[1]
            info = match[2].strip().lower()
            lines = []
    return blocks.get(True, blocks.get(False, text))


def passes_test(code: str, test: str | Mapping[str, str], limits: SandboxLimits) -> bool:
    """True where code passes one test: asserts, or `{input, output}` of a program.

    Outputs are compared without white space at the ends of their lines and empty lines at their end.
    """
    if isinstance(test, str):
        return passes(code, test, limits)
    printed = run_program(code, test["input"], limits)
    if printed is None:
        return False
    got, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, test["output"]))
    return got == wanted


def share_of_tests(
    code: str, tests: Sequence[str | Mapping[str, str]], limits: SandboxLimits, *, all_of_them: bool = False
) -> float:
    """Share of tests that code passes, each in processes of its own; with `all_of_them` 1 only if all pass, else 0."""
    if all_of_them:
        return float(all(passes_test(code, test, limits) for test in tests))
    return sum(passes_test(code, test, limits) for test in tests) / len(tests)


def code_rewards(spec: CodeSpec, samples: SampledTexts) -> list[float]:
    """The share of the tests of a column that each response's code passes, or 1 where it passes all."""

    def score(response: str, tests: object) -> float:
        code = extract_code(response)
        return share_of_tests(code, as_tests(tests), spec, all_of_them=spec.reward == "all") if code.strip() else 0.0

    with ThreadPoolExecutor(spec.processes) as pool:
        return list(pool.map(score, samples.responses, samples.column(spec.column)))


def failing_solutions(spec: CodeSpec, rows: Sequence[Mapping[str, object]]) -> list[int]:
    """Positions of the rows whose reference solution is missing or does not pass all tests; none without `solution`."""

    def fails(row: Mapping[str, object]) -> bool:
        code = row.get(str(spec.solution))
        tests = as_tests(row[spec.column])
        return not isinstance(code, str) or share_of_tests(extract_code(code), tests, spec, all_of_them=True) < 1

    with ThreadPoolExecutor(spec.processes) as pool:
        return [i for i, failed in enumerate(pool.map(fails, rows)) if failed] if spec.solution is not None else []


def as_tests(value: object) -> list[str | Mapping[str, str]]:
    """The tests of a column: a list of them, or one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]  # type: ignore[list-item]  # checked before


def tests_problem(value: object) -> str:
    """The fault of the tests of a column; '' without one."""
    tests = as_tests(value)
    if not tests:
        return "it holds no test"
    for test in tests:
        if isinstance(test, Mapping):
            if set(test) != {"input", "output"} or not all(isinstance(text, str) for text in test.values()):
                return "a test that is a mapping has the texts input and output"
        elif not isinstance(test, str):
            return "a test is a text of asserts, or a mapping of input and output"
        elif problem := _source_problem(test):
            return problem
    return ""


def _source_problem(test: str) -> str:
    try:
        tree = ast.parse(test)
        names = names_of_tests(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"a test is no Python ({type(error).__name__})"
    if not any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree)):
        return "a test without assert passes for any code"
    defines = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
    if all(isinstance(node, defines) for node in tree.body):
        return "a test that only defines functions or classes, and calls none, checks nothing"
    if names["helpers"]:
        return f"a test reads {names['helpers'][0]!r} without importing it, and the answer must not define it"
    if not names["builtins"] and not names["needed"]:
        return "a test that reads no name of the answer passes for any code"
    return ""

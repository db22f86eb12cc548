"""Python code as a verifiable answer: the share of unit tests that it passes in the sandbox."""

import ast
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from alignment.rewards.samples import SampledTexts, TextReward
from alignment.rewards.sandbox import SandboxLimits, passes, run_program
from alignment.rewards.specs import CodeSpec

LANGUAGES = {"", "python", "py", "python3", "py3"}  # of fenced blocks that may hold the answer


def extract_code(text: str) -> str:
    """The last fenced block of Python, or of no language, in a response; the whole response where there is none.

    A block without its closing fence, as in a response that was cut off, does not count.
    """
    found, language, lines = text, None, []
    for line in text.splitlines(keepends=True):
        if not line.lstrip().startswith("```"):
            lines.append(line)
        elif language is None:
            language, lines = line.strip().strip("`").strip().lower(), []
        else:
            found, language = "".join(lines) if language in LANGUAGES else found, None
    return found


def passes_test(code: str, test: str | Mapping[str, str], limits: SandboxLimits) -> bool:
    """Whether code passes one test: asserts, or `{input, output}` of a program.

    Outputs are compared without white space at the ends of their lines and empty lines at their end.
    """
    if isinstance(test, str):
        return passes(code, test, limits)
    printed = run_program(code, test["input"], limits)
    return printed is not None and _lines(printed) == _lines(test["output"])


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def share_of_tests(
    code: str, tests: Sequence[str | Mapping[str, str]], limits: SandboxLimits, *, all_of_them: bool = False
) -> float:
    """Share of the tests that code passes, each in processes of its own.

    Args:
        code: Python source, not trusted.
        tests: asserts, or mappings `{input, output}`.
        limits: of each test.
        all_of_them: 1 only where all pass, else 0; the first failure ends it.
    """
    if all_of_them:
        return float(all(passes_test(code, test, limits) for test in tests))
    return sum(passes_test(code, test, limits) for test in tests) / len(tests)


def code_reward(spec: CodeSpec) -> TextReward:
    """The share of the tests of a column that a response's code passes, or 1 where it passes all."""
    limits = SandboxLimits(spec.cpu_seconds, spec.wall_seconds, spec.memory_megabytes, spec.output_bytes)

    def reward(samples: SampledTexts) -> Sequence[float]:
        def score(row: int) -> float:
            tests = as_tests(samples.columns[row][spec.column])
            code = extract_code(samples.responses[row])
            return share_of_tests(code, tests, limits, all_of_them=spec.reward == "all") if code.strip() else 0.0

        with ThreadPoolExecutor(spec.processes) as pool:
            return list(pool.map(score, range(len(samples.responses))))

    return reward


def as_tests(value: object) -> list[str | Mapping[str, str]]:
    """The tests of a column: a list of them, or one."""
    return list(value) if isinstance(value, (list, tuple)) else [value]  # type: ignore[list-item]  # checked before


def tests_problem(value: object) -> str:
    """What is wrong with the tests of a column; empty where nothing is."""
    tests = as_tests(value)
    if not tests:
        return "it holds no test"
    for test in tests:
        if isinstance(test, Mapping):
            if set(test) != {"input", "output"} or not all(isinstance(each, str) for each in test.values()):
                return "a test that is a mapping has the texts input and output"
        elif not isinstance(test, str):
            return "a test is a text of asserts, or a mapping of input and output"
        elif problem := _source_problem(test):
            return problem
    return ""


def _source_problem(test: str) -> str:
    try:
        tree = ast.parse(test)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"a test is no Python ({type(error).__name__})"
    checks = any(isinstance(node, (ast.Assert, ast.Raise)) for node in ast.walk(tree))
    return "" if checks else "a test without assert passes for any code"

"""Code that is run against tests: ordinary right answers pass, and answers that look for a way round the tests do not."""

import json
import sys
import time
from pathlib import Path

import pytest
import yaml

from alignment.rewards.code import unit_tests
from alignment.rewards.code.sandbox import SandboxLimits, passes
from alignment.rewards.code.unit_tests import extract_code
from tests.conftest import DATA

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp is Linux's")

LIMITS = SandboxLimits(cpu_seconds=2, wall_seconds=5, memory_megabytes=256)
ANSWERS = yaml.safe_load(Path(__file__).with_name("code_cases.yaml").read_text(encoding="utf-8"))


def judged(kind, name, limits):
    return passes(ANSWERS[kind][name]["code"], ANSWERS[kind][name]["test"], limits)


@pytest.mark.parametrize("name", ANSWERS["right"])
def test_a_right_answer_passes(name):
    assert judged("right", name, LIMITS)


@pytest.mark.parametrize("name", ANSWERS["wrong"])
def test_an_answer_that_is_not_right_does_not_pass(name):
    assert judged("wrong", name, LIMITS) is False


@pytest.mark.parametrize("name", ANSWERS["endless"])
def test_an_answer_without_end_ends_at_the_deadline(name):
    began = time.monotonic()
    assert judged("endless", name, SandboxLimits(cpu_seconds=1, wall_seconds=0.6, memory_megabytes=256)) is False
    assert time.monotonic() - began < 4


CASES = DATA.parent / "cases" / "code_reward.jsonl"
AS_PYTHON = {"abs error check with nan"}  # `not abs(nan - 2) > 1e-6` holds in Python as well


@pytest.mark.real_data
def test_the_shared_cases():
    if not CASES.is_file():
        pytest.skip(f"no cases in {CASES}")
    cases = [json.loads(line) for line in CASES.read_text().splitlines()]
    wrong = [case["name"] for case in cases if passes(case["code"], case["test"], LIMITS) is not case["passes"]]
    assert set(wrong) <= AS_PYTHON


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\nx = 1\n```\nOutput:\n```\n1\n```\n", "x = 1\n"),
        ("```python3.11\nx\n```\n```\ny\n```", "x\n"),
        ('```python title="a"\nx\n```\n```bash\ny\n```', "x\n"),
        ("```{.python .numbered}\nx\n```", "x\n"),
        ("~~~py\nx\n```\ny\n~~~\n", "x\n```\ny\n"),
        ("1. so:\n   ```python\n   def f():\n       return 1\n   ```\n", "def f():\n    return 1\n"),
        ("```\nx\n```\n```\ny\n```\n", "y\n"),
        ("```pythonic\nx\n```\n", "```pythonic\nx\n```\n"),
        ("```python\nx\n```\n```python\ncut off", "x\n"),
        ("cut\n```python\nx = 1", "cut\n```python\nx = 1"),
        ("no fence", "no fence"),
    ],
)
def test_the_code_of_a_response(text, code):
    assert extract_code(text) == code


@pytest.mark.parametrize(
    ("test", "word"),
    [
        ("assert True", "no name of the answer"),
        ("import math\nx = 4\nassert math.sqrt(x) == 2", "no name of the answer"),
        ("def test_f():\n    assert f(1) == 2", "calls none"),
        ("assert approx(f(2), 4.0)", "'approx'"),
        ("assert np.allclose(f(2), 4.0)", "'np'"),
        ("assert f(2) == 4", ""),
        ("assert pow(2, 3) == 8", ""),
        ("assert math.isclose(f(2), 4.0)", ""),
        ("def approx(a, b):\n    return a == b\nassert approx(f(2), 4)", ""),
    ],
)
def test_tests_that_check_nothing_are_named_before_training(test, word):
    problem = unit_tests.tests_problem([test])
    assert word in problem and bool(problem) == bool(word)

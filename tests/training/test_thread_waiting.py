"""Idle OpenMP threads sleep soon, unless the user said how they should wait."""

import os
import subprocess
import sys

import pytest

from alignment.thread_waiting import SPINS, VARIABLES


def displayed(**variables: str) -> str:
    """What libgomp says of its settings when torch loads it after the package."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **variables}
    done = subprocess.run(
        [sys.executable, "-c", "import alignment, torch"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, SPINS), ({"GOMP_SPINCOUNT": "123"}, 123), ({"OMP_WAIT_POLICY": "passive"}, 0)],
    ids=["neither", "count", "policy"],
)
def test_threads_spin_shortly_unless_the_user_said_otherwise(variables, expected):
    shown = displayed(**variables)
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert f"GOMP_SPINCOUNT = '{expected}'" in shown

"""Idle OpenMP threads sleep soon on a busy machine, unless the user said how they should wait."""

import os
import subprocess
import sys

import pytest

from alignment import thread_waiting
from alignment.thread_waiting import SPINS, VARIABLES, is_busy, shorten_waiting


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
    [({"GOMP_SPINCOUNT": "123"}, 123), ({"OMP_WAIT_POLICY": "passive"}, 0)],
    ids=["count", "policy"],
)
def test_what_the_user_said_reaches_the_threads(variables, expected):
    shown = displayed(**variables)
    if "GOMP_SPINCOUNT" not in shown:
        pytest.skip("this torch has another OpenMP than GNU's")
    assert f"GOMP_SPINCOUNT = '{expected}'" in shown


@pytest.mark.parametrize("busy", [True, False])
def test_threads_spin_shortly_on_a_busy_machine_alone(busy, monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(thread_waiting, "is_busy", lambda: busy)
    shorten_waiting()
    assert os.environ.get("GOMP_SPINCOUNT") == (str(SPINS) if busy else None)
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)


@pytest.mark.parametrize(
    ("running", "threads", "expected"),
    [(1, "", False), (2, "", True), (2, "3", False), (3, "3", True), (2, "64", True)],
)
def test_a_machine_is_busy_where_others_need_the_processors_of_our_threads(
    running, threads, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    load = tmp_path / "loadavg"
    load.write_text(f"0.50 0.40 0.30 {running}/178 18081\n")
    assert is_busy(load) is expected


def test_a_system_that_does_not_say_is_not_busy(tmp_path):
    assert not is_busy(tmp_path / "loadavg")

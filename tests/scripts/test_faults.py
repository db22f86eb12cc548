"""The script of stops and kills finds nothing wrong, and says how many cells it tried."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.slow
def test_a_run_survives_a_few_stops_and_kills():
    command = [sys.executable, "scripts/faults.py", "--only", "sft/full", "--kills", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "7 cells, 0 failed"

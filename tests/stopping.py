"""A run that gets SIGTERM after it has logged a step, and what it goes on to, beside a run that was not stopped."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch.testing import assert_close

from alignment.training import Run
from tests.conftest import read_lines

OF_THE_CLOCK = ("second", "mfu")  # names of what differs from run to run


def run_stopped(run: Callable[[Any], Path], config: Any, step: int) -> int:
    """Run a stage that is told to stop once `step` is in its log.

    Returns:
        The exit code.
    """
    log = Run.log

    def log_and_stop(self: Run, logged: int, metrics: dict[str, float]) -> None:
        log(self, logged, metrics)
        if logged == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_code:
        patch.setattr(Run, "log", log_and_stop)
        run(config)
    assert isinstance(exit_code.value.code, int)
    return exit_code.value.code


def timeless(output: Path) -> list[dict[str, Any]]:
    """Metrics of a run without those of the clock."""
    lines = read_lines(output / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not any(name in k for name in OF_THE_CLOCK)} for line in lines]


def assert_same_runs(one: Path, other: Path) -> None:
    """Two models that runs have written have the same bits, and the runs logged the same."""
    for file in one.glob("*.safetensors"):
        assert_close(load_file(other / file.name), load_file(file), rtol=0, atol=0)
    assert timeless(one.parent) == timeless(other.parent)


def assert_goes_on(make: Callable[[str], tuple[Callable[[Any], Path], Any]], step: int, output: Path) -> Path:
    """A run that is stopped after a step and started again ends as one that is not, to the bit (I12); its model.

    Args:
        make: name of a run, its folder in `output` -> run function and config.
    """
    run, config = make("whole")
    whole = run(config)
    run, config = make("parts")
    assert run_stopped(run, config, step) == 143
    assert len(timeless(output / "parts")) == step and not (output / "parts" / "model").exists()
    parts = run(config)
    assert_same_runs(whole, parts)
    assert len(timeless(output / "parts")) > step
    return parts

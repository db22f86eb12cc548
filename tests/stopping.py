"""A run that gets SIGTERM after it has logged a step, for tests of how it goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from alignment.training import Run


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

"""A forked child that is killed between two file operations, for tests of what it leaves on the disk."""

import os
import signal
from collections.abc import Callable, Iterable
from typing import Any


def run_killed(action: Callable[[], object], after: int, operations: Iterable[str]) -> int:
    """Run `action` in a forked child that kills itself after `after` calls of these functions of `os`.

    Returns:
        The exit code: 0 where the action needed no more calls, else -SIGKILL.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def dying(real: Any) -> Any:
            def call(*arguments: Any, **options: Any) -> Any:
                nonlocal calls
                calls += 1
                if calls > after:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **options)

            return call

        for name in operations:
            setattr(os, name, dying(getattr(os, name)))
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

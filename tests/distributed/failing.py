"""What every rank runs where one of them differs: the command line from the rank's own directory. Started by the tests.

python -m tests.distributed.failing DIRECTORY FAULT arguments...     FAULT: none | raise | kill: what rank 1 does in update 2

DIRECTORY holds rank-0/ and rank-1/, from where the command line finds files of relative names.
"""

import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

from alignment import cli
from alignment.training import Engine


def fail_in_update_2(fault: str) -> None:
    """Let rank 1 raise or be killed in its second update."""
    update = Engine.update

    def failing(engine: Engine, *terms: Any) -> dict[str, float]:
        if engine.process_group.rank == 1 and engine.step == 1:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("no such luck")
        return update(engine, *terms)

    Engine.update = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=FutureWarning)
    directory, fault, *arguments = sys.argv[1:]
    os.chdir(Path(directory) / f"rank-{os.environ['RANK']}")
    if fault != "none":
        fail_in_update_2(fault)
    sys.exit(cli.main([argument.replace("RANK", os.environ["RANK"]) for argument in arguments]))

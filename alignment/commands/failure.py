"""What a failed command prints, and its exit code."""

import errno
import os
import re
import sys
from typing import get_args

from alignment.errors import UserError


def explain(error: Exception, *, debug: bool) -> int:
    """Print on standard error what went wrong, and return the exit code."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: usage
        error.show()  # type: ignore[attr-defined]
        if (unknown := re.fullmatch(r"No such command '(.+)'\.", str(error))) and (command := command_of(unknown[1])):
            print(f"{unknown[1]} is run by `{command}`", file=sys.stderr)
        return int(error.exit_code)  # type: ignore[attr-defined]
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = str(error.filename)
        print_error(f"{name[:40]}...: there is no such file: a name of {len(name):,} characters is too long for one")
        return 2
    if isinstance(error, UserError):
        print_error(str(error))
        return 2
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    if type(error).__name__ == "OutOfMemoryError":
        what += (
            "\nlower training.micro_batch_tokens (it changes no result), or set training.gradient_checkpointing=true"
        )
    print_error(what + ("" if debug else "\nrun again with --debug for the traceback"))
    return 1


def command_of(method: str) -> str:
    """The command that runs a method which another library has as a command of its own; empty where there is none."""
    from alignment.algorithms.ppo.config import Advantages
    from alignment.losses.preference_table import LOSSES

    if method in get_args(Advantages):
        return f"alignment ppo CONFIG advantages={method}"
    return f"alignment dpo CONFIG loss={method}" if method in LOSSES else ""


def print_error(text: str) -> None:
    """Print an error on standard error; of several processes with the rank, and once for all that have the same."""
    rank = ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from alignment.training.distributed import is_first_to_report

        if not is_first_to_report(text):
            return
        rank = f"rank {os.environ.get('RANK', '0')}: "
    print(f"error: {rank}{text}", file=sys.stderr)

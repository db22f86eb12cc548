"""What a failed command prints, and its exit code."""

import os
import sys

from alignment.errors import UserError


def explain(error: Exception, *, debug: bool) -> int:
    """Print on standard error what went wrong, and return the exit code."""
    if hasattr(error, "show") and hasattr(error, "exit_code"):  # typer's own: usage
        error.show()  # type: ignore[attr-defined]
        return int(error.exit_code)  # type: ignore[attr-defined]
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


def print_error(text: str) -> None:
    """Print an error on standard error; of several processes with the rank, and once for all that have the same."""
    rank = ""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from alignment.training.ranks import is_first_to_report

        if not is_first_to_report(text):
            return
        rank = f"rank {os.environ.get('RANK', '0')}: "
    print(f"error: {rank}{text}", file=sys.stderr)

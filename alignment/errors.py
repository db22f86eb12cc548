"""The one error a user can cause. Everything else is a defect of ours and keeps its own type."""

from collections.abc import Iterable


class UserError(ValueError):
    """The user's input is wrong: config, data, model directory or usage. The CLI prints it and exits with code 2.

    The text says what, where (file:line, key, row, tensor), why, and the way out.
    """


def raise_all(problems: Iterable[str], cap: int = 20) -> None:
    """Raise one `UserError` that lists every problem (up to `cap`), or return where there are none."""
    problems = list(problems)
    if not problems:
        return
    shown = problems[:cap]
    if len(problems) > cap:
        shown.append(f"... and {len(problems) - cap} more")
    raise UserError("\n".join(shown))

"""The one error that a user can cause, and suggestions for misspelled names. Any other exception is a bug."""

import difflib
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


def spelling_hint(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x' or 'y'?` with the names closest to a misspelled one; empty where none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """`spelling_hint`; where no name is close, the list of all."""
    known = sorted(known)
    return spelling_hint(name, known) or "known: " + (", ".join(known) or "none")

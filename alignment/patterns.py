"""Regular expressions from a config, searched within a time limit in texts and in the names of a model's parts."""

import re
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from alignment.errors import UserError

if TYPE_CHECKING:
    from regex import Pattern

PATTERN_SECONDS = 1.0  # for one text, or all names of a model; an ordinary pattern takes microseconds


def compile_pattern(pattern: str, *, dotall: bool = False) -> "Pattern[str]":
    """A pattern whose methods take `timeout=PATTERN_SECONDS` and then raise TimeoutError.

    Args:
        pattern: Python's regular expression.
        dotall: `.` matches line ends too.

    Raises:
        ValueError: it is no regular expression.
    """
    import regex  # `re` has no timeout, and (.*)*(.*)*! on one long name never ends

    try:
        return regex.compile(pattern, regex.DOTALL if dotall else 0)
    except regex.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error


def search_names(pattern: str, names: Sequence[str], setting: str) -> list[str]:
    """The names in which `pattern` is found anywhere, in their order.

    Args:
        setting: the config key and the pattern as the user wrote them, for the message.

    Raises:
        UserError: the pattern takes too long.
    """
    compiled, end = compile_pattern(pattern), time.monotonic() + PATTERN_SECONDS
    try:
        return [name for name in names if compiled.search(name, timeout=max(end - time.monotonic(), 1e-3))]
    except TimeoutError as error:
        raise UserError(
            f"{setting} takes more than {PATTERN_SECONDS:g} seconds on the names of the model; "
            "nest no repetitions, as in (a*)*"
        ) from error


def slow_pattern(pattern: str) -> str:
    """The reason where a pattern runs into the time limit on one text."""
    return f"pattern {pattern!r} takes more than {PATTERN_SECONDS:g} seconds; nest no repetitions, as in (a*)*"


def without_numbers(names: Iterable[str]) -> list[str]:
    """The names with * for each number between dots, every one once, sorted."""
    return sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})

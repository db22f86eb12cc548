"""Regular expressions from a config, searched in the names of a model's parts within a time limit."""

import re
import time
from collections.abc import Iterable, Sequence

from alignment.errors import UserError

PATTERN_SECONDS = 1.0  # for all names of a model; an ordinary pattern takes microseconds


def search_names(pattern: str, names: Sequence[str], setting: str) -> list[str]:
    """The names in which `pattern` is found anywhere, in their order.

    Args:
        setting: the config key and the pattern as the user wrote them, for the message.

    Raises:
        UserError: the pattern takes too long.
    """
    import regex  # `re` has no timeout, and (.*)*(.*)*! on one long name never ends

    compiled, end = regex.compile(pattern), time.monotonic() + PATTERN_SECONDS
    try:
        return [name for name in names if compiled.search(name, timeout=max(end - time.monotonic(), 1e-3))]
    except TimeoutError as error:
        raise UserError(
            f"{setting} takes more than {PATTERN_SECONDS:g} seconds on the names of the model; "
            "nest no repetitions, as in (a*)*"
        ) from error


def without_numbers(names: Iterable[str]) -> list[str]:
    """The names with * for each number between dots, every one once, sorted."""
    return sorted({re.sub(r"\.\d+(?=\.)", ".*", name) for name in names})

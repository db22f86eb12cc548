"""The one error that a user can cause, suggestions for misspelled names, and the values that no message or file shows.

Any other exception is a bug.
"""

import difflib
import re
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

# `hub_token` and `wandb_api_key` are credentials; `max_new_tokens` and `eos_token` are about text.
SECRET = re.compile(
    r"^(?!(?:bos|eos|pad|unk|sep|cls|mask|end|start|stop|special|end_of_turn)_token$)"
    r"(?:.*[_-])?(?:token|secret|password|passphrase|api_?key|access_key|credentials?)$",
    re.IGNORECASE,
)


class UserError(ValueError):
    """The user's input is wrong: config, data, model directory or usage. The CLI prints it and exits with code 2.

    The text says what, where (file:line, key, row, tensor), why, and the way out.
    """


def raise_all(problems: Iterable[str], cap: int = 20) -> None:
    """Raise one `UserError` that lists every problem (up to `cap`), or return where there are none."""
    if text := list_problems(problems, cap):
        raise UserError(text)


def list_problems(problems: Iterable[str], cap: int = 20) -> str:
    """One problem per line, up to `cap` of them, and how many more there are."""
    problems = list(problems)
    more = [f"... and {len(problems) - cap} more"] if len(problems) > cap else []
    return "\n".join([*problems[:cap], *more])


@cache
def warn_once(text: str) -> None:
    """Warn of something once in a process, however often the same file is read."""
    warnings.warn(text, stacklevel=3)


def install_advice(extra: str) -> str:
    """The command that installs an extra; the name is not PyPI's, where `alignment` is another project."""
    return f"pip install -e '.[{extra}]' in the folder of this library"


def spelling_hint(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x' or 'y'?` with the names closest to a misspelled one; empty where none is close."""
    close = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(map(repr, close))}?" if close else ""


def suggest(name: str, known: Iterable[str]) -> str:
    """`spelling_hint`; where no name is close, the list of all."""
    known = sorted(known)
    return spelling_hint(name, known) or "known: " + (", ".join(known) or "none")


def without_secrets(value: Any) -> Any:
    """Mappings, lists and scalars without the keys that hold secrets; a path becomes text."""
    if isinstance(value, dict):
        return {str(key): without_secrets(item) for key, item in value.items() if not SECRET.match(str(key))}
    if isinstance(value, (list, tuple)):
        return [without_secrets(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def is_hidden(key: Iterable[object]) -> bool:
    """True where the value of a key must not be shown."""
    return any(isinstance(part, str) and SECRET.match(part) for part in key)

"""A check of all documents against the model's positions before anything is computed."""

from collections.abc import Sequence
from typing import Any

from alignment.errors import UserError


def check_lengths(model: Any, lengths: Sequence[tuple[str, int]], way_out: str, new_tokens: int = 0) -> None:
    """Refuse documents that are longer than the model's positions.

    Args:
        model: one of ours or of transformers; a prefix or soft prompt takes positions too.
        lengths: name and number of tokens of each document.
        way_out: what the user can do, for the message.
        new_tokens: tokens that will follow each document.

    Raises:
        UserError: naming how many do not fit, and the longest.
    """
    taken = model.virtual_tokens()
    positions = model.spec.max_positions
    long = [(name, tokens) for name, tokens in lengths if taken + tokens + new_tokens > positions]
    if not long:
        return
    name, tokens = max(long, key=lambda item: item[1])
    follow = f", {new_tokens} new ones" if new_tokens else ""
    before = f", a prefix or soft prompt of {taken}" if taken else ""
    raise UserError(
        f"{len(long)} of {len(lengths)} documents do not fit the model's {positions} positions; the longest is {name} "
        f"({tokens} tokens{follow}{before}): {way_out}"
    )

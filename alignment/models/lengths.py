"""A check of all documents against the model's positions before anything is computed."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

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
    tokens = np.array([tokens for _, tokens in lengths], np.int64)
    check_row_lengths(model, tokens, lambda row: lengths[row][0], way_out, new_tokens)


def check_row_lengths(
    model: Any, lengths: np.ndarray, name_of: Callable[[int], str], way_out: str, new_tokens: int = 0
) -> None:
    """`check_lengths` of many documents, whose names are asked for only where they do not fit.

    Args:
        lengths: tokens of each document.
        name_of: number of a document -> its name.

    Raises:
        UserError: naming how many do not fit, and the longest.
    """
    taken = model.virtual_tokens()
    positions = model.spec.max_positions
    long = np.flatnonzero(lengths > positions - taken - new_tokens)
    if not len(long):
        return
    longest = int(long[lengths[long].argmax()])
    name, tokens = name_of(longest), int(lengths[longest])
    follow = f", {new_tokens} new ones" if new_tokens else ""
    before = f", a prefix or soft prompt of {taken}" if taken else ""
    raise UserError(
        f"{len(long)} of {len(lengths)} documents do not fit the model's {positions} positions; the longest is {name} "
        f"({tokens} tokens{follow}{before}): {way_out}"
    )

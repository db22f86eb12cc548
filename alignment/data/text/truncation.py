"""How much text fits beside special tokens, and how a longer text or pair is truncated."""

from collections.abc import Sequence
from itertools import pairwise

from alignment.errors import UserError


def text_budget(max_length: int, special_tokens: int, *, least: int = 2) -> int:
    """Tokens of text that fit into `max_length` beside the special ones.

    Raises:
        UserError: fewer than `least`.
    """
    if max_length - special_tokens < least:
        raise UserError(f"data.max_length {max_length} leaves no room beside {special_tokens} special tokens; raise it")
    return max_length - special_tokens


def truncate_pair(first: Sequence[int], second: Sequence[int], budget: int) -> tuple[list[int], list[int]]:
    """Two texts cut at their ends to `budget` tokens together: the longer one loses tokens first.

    Source: Devlin et al. 2019, google-research/bert, create_pretraining_data.py (truncate_seq_pair).
    """
    a, b = len(first), len(second)
    while a + b > budget:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return list(first[:a]), list(second[:b])


def even_slices(length: int, most: int) -> list[slice]:
    """Successive slices of `length` tokens, as few as possible, each of at most `most` and all of about equal size."""
    number = -(-length // most)
    edges = [length * edge // number for edge in range(number + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]

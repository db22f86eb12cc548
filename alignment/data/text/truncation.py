"""Room for text beside special tokens, and the cutting of longer texts, pairs and responses."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

from alignment.errors import UserError

PROMPT_FLOOR = 0.25  # share of max_length that a long prompt keeps, however long the response is

Value = TypeVar("Value")


def text_budget(max_length: int, special_tokens: int, *, least: int = 2) -> int:
    """Tokens of text that fit into `max_length` beside the special ones."""
    if max_length - special_tokens < least:
        raise UserError(f"data.max_length {max_length} leaves no room beside {special_tokens} special tokens; raise it")
    return max_length - special_tokens


def truncate_longest(texts: Sequence[Sequence[Value]], budget: int) -> list[list[Value]]:
    """Texts cut at their ends to `budget` tokens together: the longest one, of equals the last, loses tokens first.

    Source: Devlin et al. 2019, google-research/bert, create_pretraining_data.py (truncate_seq_pair).
    """
    sizes = [len(text) for text in reversed(texts)]
    while sum(sizes) > budget:
        sizes[sizes.index(max(sizes))] -= 1
    return [list(text[:size]) for text, size in zip(texts, reversed(sizes), strict=True)]


def even_slices(length: int, most: int) -> list[slice]:
    """Successive slices of `length` tokens, as few as possible, each of at most `most` and all of about equal size."""
    number = -(-length // most)
    edges = [length * edge // number for edge in range(number + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def split_document(ids: list[int], max_length: int, bos: int | None) -> list[list[int]]:
    """Successive pieces of at most `max_length` >= 2 ids, the later ones led in by `bos` or the token before."""
    cut = [ids[:max_length]]
    for start in range(max_length, len(ids), max_length - 1):
        lead = ids[start - 1] if bos is None else bos
        cut.append([lead, *ids[start : start + max_length - 1]])
    return cut


def truncate(
    prompt: list[int], responses: list[list[int]], max_length: int, bos: int | None
) -> tuple[list[int], list[list[int]]]:
    """Prompt and responses cut so that the prompt with each response has at most `max_length` tokens.

    The prompt gives way first, from its beginning, down to `PROMPT_FLOOR` of the length; then responses lose their
    ends. All responses keep the same prompt, and each keeps at least one token (`max_length` >= 2).
    """
    longest = max(map(len, responses))
    if len(prompt) + longest <= max_length:
        return prompt, responses
    floor = min(len(prompt), max(1, int(max_length * PROMPT_FLOOR)))
    room = min(len(prompt), max(floor, max_length - longest))
    return truncate_left(prompt, room, prompt[:1] == [bos]), [response[: max_length - room] for response in responses]


def truncate_left(values: list[Value], length: int, keep_first: bool) -> list[Value]:
    """The last `length` values; with `keep_first` (a BOS) the first and the last `length - 1`."""
    if len(values) <= length:
        return values
    lead = values[:1] if keep_first else []
    return lead + values[len(values) - (length - len(lead)) :]  # counted from the front: [-0:] would be everything

"""Examples of each kind of row, for tests that make them by hand."""

from collections.abc import Sequence
from typing import Any

import torch

from alignment.data.batches import Example
from alignment.data.rows.records import Demonstration, Messages, Tools
from alignment.data.text.chat import encode_dialogues
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError

example = Example.single


def pair_example(chosen: Example, rejected: Example, margin: float | None, row_id: str, source: int = 0) -> Example:
    """Two responses to one prompt."""
    return ranked_example((chosen, rejected), None, row_id, source, margin)


def ranked_example(
    responses: Sequence[Example], ranks: Sequence[int] | None, row_id: str, source: int = 0, margin: float | None = None
) -> Example:
    """K responses to one prompt, with their places."""
    values: dict[str, Any] = {} if ranks is None else {"ranks": list(ranks)}
    values |= {} if margin is None else {"margin": margin}
    documents = [ids for response in responses for ids in response.documents]
    masks = [mask for response in responses for mask in response.masks]
    return Example(documents, masks, row_id, source, values)


def labeled_example(response: Example, desirable: bool, row_id: str) -> Example:
    """A response that is desirable or not."""
    return Example(response.documents, response.masks, row_id, 0, {"desirable": desirable})


def step_example(ids: list[int], ends: Sequence[int], labels: Sequence[bool], row_id: str) -> Example:
    """A response in labeled steps."""
    return Example.single(ids, [False] * len(ids), row_id, ends=list(ends), labels=list(labels))


def prompt_example(
    ids: list[int], prompt: Any, extra: dict[str, Any], row_id: str, cut: bool = False, source: int = 0
) -> Example:
    """A prompt."""
    return Example.single(ids, [False] * len(ids), row_id, source, prompt=prompt, extra=extra, cut=cut)


def sides(row: Example) -> list[Example]:
    """Each document of an example as one of its own, without values."""
    return [
        Example.single(ids, mask, row.row_id, row.source) for ids, mask in zip(row.documents, row.masks, strict=True)
    ]


def chat_ids(
    tokenizer: Tokenizer, messages: Messages, trained: tuple[bool, ...] | None = None, tools: Tools | None = None
) -> tuple[list[int], list[bool]]:
    """Ids and mask of one dialogue, as `encode_dialogues`; a refusal is raised."""
    [encoded] = encode_dialogues(tokenizer, [Demonstration([], "", "", messages, trained, tools=tools)])
    if isinstance(encoded, UserError):
        raise encoded
    return encoded.ids, encoded.mask


def padded(
    rows: Sequence[Sequence[int]], side: str = "right", extra: int = 0, filler: int = 9
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask of a rectangle with `extra` more columns than the longest row, [B, T]."""
    width = max(map(len, rows)) + extra
    ids, mask = torch.full((len(rows), width), filler), torch.zeros(len(rows), width, dtype=torch.bool)
    for number, row in enumerate(rows):
        place = slice(width - len(row), width) if side == "left" else slice(len(row))
        ids[number, place], mask[number, place] = torch.tensor(row), True
    return ids, mask

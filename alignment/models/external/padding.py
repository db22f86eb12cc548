"""How documents lie in the padded rectangles that transformers' classes take, and how those are made to read them.

Always right-padded: under causal attention, and in any recurrence, what lies to the right of a token cannot touch it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from alignment.ragged import Ragged

# (input_ids [b, T], attention_mask [b, T], token_type_ids [b, T] or None, columns wanted [c] or None: all)
# -> [b, T or c, ...], or [b, ...] for documents
Read = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
IDLE_CELLS = 2048  # padding that costs less than one more call


class Rectangle(NamedTuple):
    """Some documents side by side.

    Attributes:
        ids: [b, T], a filler at padding.
        mask: 1 at real tokens, [b, T].
        segments: as `Ragged.segments`, 0 at padding, [b, T]; or None.
        places: index in the ragged batch of each real token, in the rectangle's order, [n].
    """

    ids: Tensor
    mask: Tensor
    segments: Tensor | None
    places: Tensor


def rectangle(batch: Ragged, filler: int, rows: Sequence[int] | None = None) -> Rectangle:
    """Documents `rows` (None: all) of a ragged batch as one rectangle."""
    rows = range(len(batch.lengths)) if rows is None else rows
    device = batch.tokens.device
    lengths = torch.tensor([batch.lengths[row] for row in rows], device=device)
    columns = torch.arange(int(lengths.max()), device=device)
    index = batch.starts.long()[torch.tensor(list(rows), device=device)][:, None] + columns
    real = columns < lengths[:, None]
    index = index.clamp(max=len(batch.tokens) - 1)
    segments = None if batch.segments is None else batch.segments[index] * real
    return Rectangle(torch.where(real, batch.tokens[index], filler), real.long(), segments, index[real])


def rectangles(batch: Ragged, filler: int) -> Iterator[tuple[list[int], Rectangle]]:
    """All documents in a few rectangles, documents of like length together."""
    for rows in alike(batch.lengths):
        yield rows, rectangle(batch, filler, rows)


def alike(lengths: Sequence[int]) -> list[list[int]]:
    """Row numbers in groups, longest first, such that little of a group's rectangle is padding."""
    groups: list[list[int]] = []
    real = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        real += lengths[row]
        padding = lengths[groups[-1][0]] * (len(groups[-1]) + 1) - real if groups else 0
        if not groups or padding > max(IDLE_CELLS, real // 4):
            groups.append([])
            real = lengths[row]
        groups[-1].append(row)
    return groups


def per_token(read: Read, batch: Ragged, filler: int, wanted: Tensor | None = None) -> Tensor:
    """What `read` says of the tokens at `wanted` (None: of all), [n, ...]."""
    chosen = torch.ones_like(batch.tokens, dtype=torch.bool)
    if wanted is not None:
        chosen = torch.zeros_like(chosen).index_fill(0, wanted, True)
    outputs, places = [], []
    for _, (ids, mask, segments, of_tokens) in rectangles(batch, filler):
        here = chosen[of_tokens]
        cells = torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask.bool(), here)  # row by row, as `of_tokens`
        columns = None if wanted is None else cells.any(0).nonzero().squeeze(1)
        found = read(ids, mask, segments, columns)
        outputs.append(found[cells if columns is None or found.shape[1] != len(columns) else cells[:, columns]])
        places.append(of_tokens[here])
    in_order = torch.cat(outputs)[torch.cat(places).argsort()]
    return in_order if wanted is None else in_order[(chosen.cumsum(0) - 1)[wanted]]


def per_document(read: Read, batch: Ragged, filler: int) -> Tensor:
    """What `read` says of each document, [B, ...]."""
    outputs, order = [], []
    for rows, (ids, mask, segments, _) in rectangles(batch, filler):
        outputs.append(read(ids, mask, segments, None))
        order += rows
    return torch.cat(outputs)[torch.tensor(order, device=batch.tokens.device).argsort()]


def takes(inner: Any, argument: str) -> bool:
    """Whether the forward of `inner` names this argument."""
    return argument in inspect.signature(inner.forward).parameters


def reads_every_token(inner: Any) -> bool:
    """Whether a sequence classifier is a linear map of each token's hidden state, read at the last one."""
    return isinstance(getattr(inner, "score", None), nn.Linear)


def reader(inner: Any, *fields: str) -> Read:
    """One field of what `inner` gives, or several as the last dimension."""

    def read(ids: Tensor, mask: Tensor, segments: Tensor | None, columns: Tensor | None) -> Tensor:
        options: dict[str, Any] = {"use_cache": False} if takes(inner, "use_cache") else {}
        if columns is not None and takes(inner, "logits_to_keep"):
            options["logits_to_keep"] = columns
        if segments is not None:
            options["token_type_ids"] = segments
        out = inner(input_ids=ids, attention_mask=mask, **options)
        parts = [getattr(out, field) for field in fields]
        return parts[0] if len(parts) == 1 else torch.stack(parts, dim=-1)

    return read


def score_reader(inner: Any) -> Read:
    """The score head on every token; transformers itself would show the last one's only, and look for it by its id."""

    def read(ids: Tensor, mask: Tensor, segments: Tensor | None, columns: Tensor | None) -> Tensor:
        hidden = inner.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):  # close scores must not become ties
            return inner.score(hidden.to(inner.score.weight.dtype))

    return read

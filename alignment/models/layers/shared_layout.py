"""Attention in batches with shared prompts: which keys each piece of the batch reads, in rectangles or end to end.

The pieces of a batch are its shared prompts and what each document has to itself (`Ragged.pieces`). A prompt reads itself;
a document's own tokens read its prompt and themselves. Linear layers and norms never see the difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.models.layers.padded_layout import (
    PaddedLayout,
    choose_columns,
    fill_slots,
    in_rectangles,
    layout_of,
    rectangle_mask,
    select_rows,
    visible,
)
from alignment.ragged import Ragged, SharedPrompts, runs


@dataclass(frozen=True)
class SharedKeys:
    """The tokens that each piece reads as keys, piece after piece, S in all.

    Attributes:
        lengths: tokens that each piece reads.
        starts: index of the first key of each piece, then S; int32.
        source: token that each key is of, [S].
        indices: index of each token's key in its own piece, [N].
        copies: indices of the shared prompts' tokens in the documents that begin with them: in the first documents, in
            the second ones, ...
    """

    lengths: tuple[int, ...]
    starts: Tensor
    source: Tensor
    indices: Tensor
    copies: tuple[Tensor, ...]

    def gather(self, x: Tensor) -> Tensor:
        """Keys or values of the tokens, [N, KV, K], as the pieces read them, [S, KV, K]."""
        return fill_slots(x, self.source, self.indices, self.copies)


def shared_keys(lengths: Sequence[int], shared: SharedPrompts, device: torch.device | str) -> SharedKeys:
    """The keys of a batch of documents with these `lengths`."""
    prompts = sum(shared.lengths)
    own = [length - before for length, before in zip(lengths, shared.of_each, strict=True)]
    firsts = [prompts + start for start in [0, *accumulate(lengths)]]  # index of each document's first key
    of_own = runs([first + before for first, before in zip(firsts, shared.of_each, strict=False)], own)
    all_lengths = (*shared.lengths, *lengths)
    keys = torch.arange(prompts)
    return SharedKeys(
        all_lengths,
        torch.tensor([0, *accumulate(all_lengths)], dtype=torch.int32).to(device, non_blocking=True),
        torch.cat([keys.to(device, non_blocking=True), shared.documents]),
        torch.cat([keys, of_own]).to(device, non_blocking=True),
        tuple(index.to(device, non_blocking=True) for index in _copies(shared, firsts)),
    )


def _copies(shared: SharedPrompts, firsts: Sequence[int]) -> list[Tensor]:
    """`SharedKeys.copies`; firsts: index of each document's first key."""
    found: list[list[int]] = [[] for _ in shared.lengths]
    for prompt, first in zip(shared.of_documents, firsts, strict=False):
        if prompt is not None:
            found[prompt].append(first)
    most = len(found[0])  # of the first prompt: see `SharedPrompts`
    rounds = [[each[number] for each in found if len(each) > number] for number in range(most)]
    return [runs(starts, shared.lengths[: len(starts)]) for starts in rounds]


class SharedRectangle(NamedTuple):
    """Pieces side by side: `rows` queries each, padded to `columns`, and their keys, padded to `keys`.

    Attributes:
        before: keys of each row that stand before its first query.
        queries: real queries of each row.
    """

    before: tuple[int, ...]
    queries: tuple[int, ...]
    columns: int
    keys: int


class SharedLayout(NamedTuple):
    """The pieces of a batch as rows of rectangles; rectangle i of queries and of keys holds the same pieces."""

    queries: PaddedLayout
    keys: PaddedLayout
    rectangles: list[SharedRectangle]


def shared_layout(
    lengths: Sequence[int], shared: SharedPrompts, heads: int, device: torch.device | str
) -> SharedLayout:
    """The layout of documents with these `lengths`, prompts and documents in rectangles of their own."""
    keys = shared_keys(lengths, shared, device)
    prompts = len(shared.lengths)
    before = [0] * prompts + list(shared.of_each)
    pieces = [length - less for length, less in zip(keys.lengths, before, strict=True)]
    rectangles = in_rectangles(choose_columns(shared.lengths, heads))
    for rows, _ in in_rectangles(choose_columns(lengths, heads)):
        rectangles.append(([prompts + row for row in rows], 0))
    query_columns = [(rows, max(pieces[row] for row in rows)) for rows, _ in rectangles]
    key_columns = [(rows, max(keys.lengths[row] for row in rows)) for rows, _ in rectangles]
    queries = layout_of(pieces, query_columns, device)
    in_slots = layout_of(keys.lengths, key_columns, device)
    assert in_slots.slots is not None and in_slots.source is not None
    key_layout = PaddedLayout(
        in_slots.groups,
        in_slots.lengths,
        in_slots.slots[keys.indices],
        keys.source[in_slots.source],
        tuple(in_slots.slots[index] for index in keys.copies),
    )
    made = [
        SharedRectangle(tuple(before[row] for row in rows), tuple(pieces[row] for row in rows), columns, wide)
        for (rows, columns), (_, wide) in zip(query_columns, key_columns, strict=True)
    ]
    return SharedLayout(queries, key_layout, made)


def continued_mask(
    rectangle: SharedRectangle, *, offset: int, window: int | None, bias: nn.Module | None, device: torch.device | str
) -> Tensor | None:
    """The causal mask or bias of a rectangle whose queries follow keys without queries; None where a flag suffices.

    Args:
        rectangle: which queries and keys.
        offset: prefix slots that come before all keys.
        window, bias: as for `rectangle_mask`.

    Returns:
        None, or [1 or B, 1 or H, columns, offset + keys].
    """
    before, queries, columns, keys = rectangle
    if not any(before):
        return rectangle_mask(queries, columns, offset=offset, causal=True, window=window, bias=bias, device=device)
    positions = torch.tensor(before)[:, None] + torch.arange(columns)
    if len(set(before)) == 1:
        positions = positions[:1]  # one mask for all rows: a padded query has the position of a padded key
    else:
        # A padded query takes the position of the last real one: it sees some key, for a softmax over nothing is NaN.
        last = torch.tensor([first + size - 1 for first, size in zip(before, queries, strict=True)])
        positions = torch.minimum(positions, last[:, None])
    relative = torch.arange(offset + keys) - (offset + positions)[..., None]  # [B, columns, offset + keys]
    relative = relative.to(device, non_blocking=True)
    seen = visible(relative, True, window)[:, None]
    return seen if bias is None else bias(relative).masked_fill(~seen, -torch.inf)


def piece_starts(batch: Ragged) -> Tensor:
    """Index of the first token of each piece, then N; int32."""
    assert batch.shared is not None
    prompts = torch.tensor([0, *accumulate(batch.shared.lengths)][:-1], dtype=batch.starts.dtype)
    return torch.cat([prompts.to(batch.starts.device, non_blocking=True), batch.starts])


class _SelectRepeatedRows(torch.autograd.Function):
    """Rows of x, of which `repeated` picks those that occur more than once; see `states_before_targets`."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, repeated: Tensor) -> Tensor:
        ctx.save_for_backward(index, repeated)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (index, repeated), (grad,) = ctx.saved_tensors, grad_outputs
        total = grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad)
        rows = index[repeated]
        total.index_fill_(0, rows, 0.0).index_add_(0, rows, grad[repeated])
        return total, None, None


def states_before_targets(states: Tensor, batch: Ragged) -> Tensor:
    """The hidden states that predict each target, [M, D]; a prompt's last one predicts the first token of each response."""
    if batch.shared is None:
        return select_rows(states, batch.before)
    return _SelectRepeatedRows.apply(states, batch.before, batch.shared.repeated)

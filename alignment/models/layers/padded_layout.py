"""Documents padded to rectangles for attention, and the masks of those rectangles (True: may attend).

Each document has a row of its own, so no mask is needed to keep documents apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

ROUND_TO = 16  # the CPU kernel works on tiles: 64 columns are faster than 60
CALL_COST = 32_000  # one more attention call costs about as much as this many attention weights (heads * T * T)


def relative_positions(queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """Key position minus query position, [queries, keys]; the last query has the position of the last key."""
    query_positions = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device) - query_positions[:, None]


def visible(relative: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a key at each relative position may be attended to; the shape of `relative`."""
    seen = relative <= 0 if causal else torch.ones_like(relative, dtype=torch.bool)
    return seen if window is None else seen & (relative.abs() < window)


def padding_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, 1, 1, width]: row b attends to its first `lengths[b]` keys."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None])[:, None, None]


def key_mask(lengths: Sequence[int], columns: int, device: torch.device | str) -> Tensor | None:
    """`padding_mask` of plain numbers, [B, 1, 1, columns]; None where no row is padded."""
    return None if min(lengths) == columns else padding_mask(torch.tensor(lengths).to(device), columns)


def rectangle_mask(
    lengths: Sequence[int],
    columns: int,
    *,
    offset: int,
    causal: bool,
    window: int | None,
    bias: nn.Module | None,
    device: torch.device | str,
) -> Tensor | None:
    """The mask or bias of a rectangle's scores beside the causal flag; None where the flag suffices.

    Args:
        lengths: real tokens of each row.
        columns: tokens of each row, padding included; `offset` prefix slots come before them as keys.
        bias: relative positions [Q, S] -> biases [H, Q, S].

    Returns:
        None, [1 or B, 1 or H, columns, offset + columns], or [B, 1, 1, columns].
    """
    keys = offset + columns
    windowed = window is not None and window < keys
    real = None if causal else key_mask([offset + length for length in lengths], keys, device)
    if not windowed and bias is None and not (causal and offset):
        return real
    relative = relative_positions(columns, keys, device)
    seen = visible(relative, causal, window)[None, None]
    if real is not None:
        # A padded query may be out of reach of every real key; it then sees itself, for a softmax over nothing is NaN.
        seen = (seen & real) | (relative == 0)
    return seen if bias is None else bias(relative)[None].masked_fill(~seen, -torch.inf)


@dataclass(frozen=True)
class PaddedLayout:
    """Documents as the rows of a few rectangles, each rectangle for documents of similar length, padded on the right.

    Right padding needs no mask under causal attention: a real token never looks that far.

    Attributes:
        groups: (documents, columns) of each rectangle.
        lengths: tokens of the documents of each rectangle, row by row.
        slots: index of each token when all rectangles lie end to end, [N]; None: the batch is one rectangle already.
        source: token that fills each slot; token 0, unseen, at padding, [S].
        copies: further slots of the first tokens, where documents share these; any number of them each.
    """

    groups: tuple[tuple[int, int], ...]
    lengths: tuple[tuple[int, ...], ...]
    slots: Tensor | None = None
    source: Tensor | None = None
    copies: tuple[Tensor, ...] = ()


def pad_layout(lengths: Sequence[int], heads: int, device: torch.device | str = "cpu") -> PaddedLayout:
    """The layout of documents with these `lengths` that costs least, by a greedy rule."""
    if min(lengths) == max(lengths):
        return PaddedLayout(((len(lengths), lengths[0]),), (tuple(lengths),))
    return layout_of(lengths, in_rectangles(choose_columns(lengths, heads)), device)


def pad_layouts(
    ours: Sequence[int], theirs: Sequence[int], heads: int, device: torch.device | str = "cpu"
) -> tuple[PaddedLayout, PaddedLayout]:
    """Layouts of two sets of documents such that rectangle i of both holds the same rows in the same order."""
    rectangles = in_rectangles(choose_columns([max(pair) for pair in zip(ours, theirs, strict=True)], heads))
    one, other = ([(rows, max(lengths[i] for i in rows)) for rows, _ in rectangles] for lengths in (ours, theirs))
    return layout_of(ours, one, device), layout_of(theirs, other, device)


def in_rectangles(columns: Sequence[int]) -> list[tuple[list[int], int]]:
    """Documents of equal `columns` together, widest first: (their numbers, the columns)."""
    order = sorted(range(len(columns)), key=columns.__getitem__, reverse=True)
    return [(list(rows), width) for width, rows in groupby(order, key=columns.__getitem__)]


def layout_of(
    lengths: Sequence[int], rectangles: Sequence[tuple[list[int], int]], device: torch.device | str
) -> PaddedLayout:
    """The layout with these rectangles: (numbers of its documents, columns) each."""
    firsts = [0] * len(lengths)
    first = 0
    for rows, width in rectangles:
        for row in rows:
            firsts[row], first = first, first + width
    starts = [0, *accumulate(lengths)]
    shifts = torch.tensor(firsts) - torch.tensor(starts[:-1])
    tokens = torch.arange(starts[-1])
    slots = tokens + torch.repeat_interleave(shifts, torch.tensor(lengths), output_size=starts[-1])
    source = torch.zeros(first, dtype=torch.long).index_copy_(0, slots, tokens)
    groups = tuple((len(rows), width) for rows, width in rectangles)
    sizes = tuple(tuple(lengths[row] for row in rows) for rows, _ in rectangles)
    return PaddedLayout(groups, sizes, slots.to(device, non_blocking=True), source.to(device, non_blocking=True))


def choose_columns(lengths: Sequence[int], heads: int) -> list[int]:
    """Width of the rectangle each document goes into: shorter ones get their own where that saves more than a call."""
    rounded = [-(-length // ROUND_TO) * ROUND_TO for length in lengths]
    width_of: dict[int, int] = {}
    current = 0
    for width in sorted(set(rounded), reverse=True):
        saved = rounded.count(width) * heads * (current**2 - width**2)
        if not current or saved > CALL_COST:
            current = width
        width_of[width] = current
    return [width_of[width] for width in rounded]


class _SelectRows(torch.autograd.Function):
    """`select_rows`: its backward writes rows where index_select's would add them up one by one."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (index,), (grad,) = ctx.saved_tensors, grad_outputs
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def select_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first axis; `index` names no row twice."""
    return _SelectRows.apply(x, index)


class _FillSlots(torch.autograd.Function):
    """`fill_slots`: the gradients of a token's copies are added up in one order, so that a run repeats bit for bit."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slots: Tensor, *copies: Tensor) -> Tensor:
        ctx.save_for_backward(slots, *copies)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (slots, *copies), (grad,) = ctx.saved_tensors, grad_outputs
        total = grad.index_select(0, slots)
        for more in copies:
            total[: len(more)] += grad.index_select(0, more)
        return total, None, None, *[None] * len(copies)


def fill_slots(x: Tensor, source: Tensor, slots: Tensor, copies: Sequence[Tensor] = ()) -> Tensor:
    """x[source] along the first axis, where no gradient comes back from padding, [S, ...].

    Args:
        x: tokens, [N, ...].
        source: token in each slot, [S].
        slots: a slot of each token, [N].
        copies: further slots of the first tokens; padding, whose token is any, is in none of these.
    """
    return _FillSlots.apply(x, source, slots, *copies)


def pad(x: Tensor, layout: PaddedLayout) -> tuple[Tensor, ...]:
    """Tokens [N, ...] as rectangles, one [documents, columns, ...] per group. `unpad` is the inverse without copies."""
    if layout.slots is not None:
        assert layout.source is not None
        x = fill_slots(x, layout.source, layout.slots, layout.copies)
    pieces = x.split([documents * columns for documents, columns in layout.groups])
    return tuple(piece.unflatten(0, group) for piece, group in zip(pieces, layout.groups, strict=True))


def unpad(rectangles: Sequence[Tensor], layout: PaddedLayout) -> Tensor:
    """Tokens [N, ...] of rectangles; the inverse of `pad`."""
    flat = [rectangle.flatten(0, 1) for rectangle in rectangles]
    x = flat[0] if len(flat) == 1 else torch.cat(flat)
    return x if layout.slots is None else select_rows(x, layout.slots)

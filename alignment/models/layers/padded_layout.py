"""Who may attend to whom, as booleans (True = may attend), and how documents lie side by side in an attention call.

Documents are kept apart by giving each its own row, not by a mask over all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor

ROUND_TO = 16  # the CPU kernel works on tiles: 64 columns are faster than 60
CALL_COST = 32_000  # one more attention call costs about as much as this many attention weights (heads * T * T)


def distances(queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
    """Key place minus query place, [queries, keys]; the last query stands where the last key does."""
    query_places = torch.arange(keys - queries, keys, device=device)
    return torch.arange(keys, device=device) - query_places[:, None]


def visible(distance: Tensor, causal: bool, window: int | None) -> Tensor:
    """Whether a key at each `distance` may be attended to; the same shape."""
    seen = distance <= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return seen if window is None else seen & (distance.abs() < window)


def seen_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, 1, 1, width]: row b sees its first `lengths[b]` keys."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None])[:, None, None]


@dataclass(frozen=True)
class PaddedLayout:
    """Documents as the rows of a few rectangles, each rectangle for documents of similar length, padded on the right.

    Right padding needs no mask under causal attention: a real token never looks that far.

    Attributes:
        groups: (documents, columns) of each rectangle.
        lengths: tokens of the documents of each rectangle, row by row.
        slots: place of each token when all rectangles lie end to end, [N]; None: the batch is the rectangle already.
        source: token that fills each place; token 0, unseen, where there is none, [S].
    """

    groups: tuple[tuple[int, int], ...]
    lengths: tuple[tuple[int, ...], ...]
    slots: Tensor | None = None
    source: Tensor | None = None


def pack(lengths: Sequence[int], heads: int, device: torch.device | str = "cpu") -> PaddedLayout:
    """The packing of documents with these `lengths` that costs least, by a greedy rule."""
    if min(lengths) == max(lengths):
        return PaddedLayout(((len(lengths), lengths[0]),), (tuple(lengths),))
    return _packing(lengths, _rectangles(_columns(lengths, heads)), device)


def pad_layouts(
    ours: Sequence[int], theirs: Sequence[int], heads: int, device: torch.device | str = "cpu"
) -> tuple[PaddedLayout, PaddedLayout]:
    """Packings of two sets of documents such that rectangle i of both holds the same rows in the same order."""
    rectangles = _rectangles(_columns([max(pair) for pair in zip(ours, theirs, strict=True)], heads))
    one, other = ([(rows, max(lengths[i] for i in rows)) for rows, _ in rectangles] for lengths in (ours, theirs))
    return _packing(ours, one, device), _packing(theirs, other, device)


def _rectangles(columns: Sequence[int]) -> list[tuple[list[int], int]]:
    """Documents of equal `columns` together, widest first: (their numbers, the columns)."""
    order = sorted(range(len(columns)), key=columns.__getitem__, reverse=True)
    return [(list(rows), width) for width, rows in groupby(order, key=columns.__getitem__)]


def _packing(
    lengths: Sequence[int], rectangles: Sequence[tuple[list[int], int]], device: torch.device | str
) -> PaddedLayout:
    """The packing with these rectangles: (documents, columns) each."""
    begins = [0] * len(lengths)
    begin = 0
    for rows, width in rectangles:
        for row in rows:
            begins[row], begin = begin, begin + width
    starts = [0, *accumulate(lengths)]
    shifts = torch.tensor(begins) - torch.tensor(starts[:-1])
    tokens = torch.arange(starts[-1])
    slots = tokens + torch.repeat_interleave(shifts, torch.tensor(lengths))
    source = torch.zeros(begin, dtype=torch.long).index_copy_(0, slots, tokens)
    groups = tuple((len(rows), width) for rows, width in rectangles)
    sizes = tuple(tuple(lengths[row] for row in rows) for rows, _ in rectangles)
    return PaddedLayout(groups, sizes, slots.to(device, non_blocking=True), source.to(device, non_blocking=True))


def _columns(lengths: Sequence[int], heads: int) -> list[int]:
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


class _Take(torch.autograd.Function):
    """`take`: its backward writes rows where index_select's would add them up one by one."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (index,) = ctx.saved_tensors
        return grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad), None


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[index] along the first axis; `index` names no row twice."""
    return _Take.apply(x, index)


class _Spread(torch.autograd.Function):
    """`spread`: what fills the gaps is never seen, so no gradient comes back from there."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slots,) = ctx.saved_tensors
        return grad.index_select(0, slots), None, None


def spread(x: Tensor, packing: PaddedLayout) -> tuple[Tensor, ...]:
    """Tokens [N, ...] as rectangles, one [documents, columns, ...] per group. `gather` is the way back."""
    if packing.slots is not None:
        x = _Spread.apply(x, packing.source, packing.slots)
    pieces = x.split([documents * columns for documents, columns in packing.groups])
    return tuple(piece.unflatten(0, group) for piece, group in zip(pieces, packing.groups, strict=True))


def gather(rectangles: Sequence[Tensor], packing: PaddedLayout) -> Tensor:
    """Rectangles as tokens again, [N, ...]."""
    flat = [rectangle.flatten(0, 1) for rectangle in rectangles]
    x = flat[0] if len(flat) == 1 else torch.cat(flat)
    return x if packing.slots is None else take(x, packing.slots)

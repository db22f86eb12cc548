"""Documents padded to rectangles for attention, and the masks of those rectangles (True: may attend).

Each document has a row of its own, so no mask is needed to keep documents apart. Queries and keys have a layout each,
whose rectangles hold the same rows: the same layout where documents read themselves alone; another for the keys where a
row also reads keys without queries: those of a shared prompt, or of a cache row. The last query of a row has the
position of its last key.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.ragged import Ragged, runs

ROUND_TO = 16  # the CPU kernel works on tiles: 64 columns are faster than 60
CALL_COST = 32_000  # one more attention call costs about as much as this many attention weights (heads * T * T)


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

    def fill(self, x: Tensor) -> Tensor:
        """Tokens [N, ...] in their slots, [S, ...]; no gradient comes back from padding."""
        return x if self.slots is None else _FillSlots.apply(x, self.source, self.slots, *self.copies)


class GlobalTokens(NamedTuple):
    """Tokens of a rectangle that see, and are seen by, their whole documents (Longformer)."""

    columns: Tensor  # the columns of each row's, [B, G]
    real: Tensor  # False where a row has fewer than G, [B, G]


def global_tokens(marked: Tensor, layout: PaddedLayout, most: int | None = None) -> list[GlobalTokens]:
    """The `marked` tokens [N] of each rectangle; `most` of a document, None: they are counted."""
    marked_tokens = []
    for rectangle, real in zip(pad(marked, layout), key_masks(layout, marked.device), strict=True):
        rectangle = rectangle if real is None else rectangle & real[:, 0, 0]
        columns = rectangle.long().argsort(dim=1, descending=True, stable=True)[
            :, : most or int(rectangle.sum(1).max())
        ]
        marked_tokens.append(GlobalTokens(columns, rectangle.gather(1, columns)))
    return marked_tokens


def pad_layout(lengths: Sequence[int], heads: int, device: torch.device | str = "cpu") -> PaddedLayout:
    """The layout of documents with these `lengths` that costs least, by a greedy rule."""
    if min(lengths) == max(lengths):
        return PaddedLayout(((len(lengths), lengths[0]),), (tuple(lengths),))
    return layout_of(lengths, choose_rectangles(lengths, heads), device)


def pad_layouts(
    ours: Sequence[int], theirs: Sequence[int], heads: int, device: torch.device | str = "cpu"
) -> tuple[PaddedLayout, PaddedLayout]:
    """Layouts of two sets of documents such that rectangle i of both holds the same rows in the same order."""
    rectangles = choose_rectangles([max(pair) for pair in zip(ours, theirs, strict=True)], heads)
    one, other = (layout_of(lengths, narrowed(rectangles, lengths), device) for lengths in (ours, theirs))
    return one, other


def shared_keys(batch: Ragged) -> PaddedLayout:
    """The keys that the pieces of a batch with shared prompts read, piece after piece without padding.

    The pieces are the shared prompts, which read themselves, and what each document has to itself, which reads its
    prompt and itself (`Ragged.pieces`).
    """
    shared = batch.shared
    device = batch.tokens.device
    assert shared is not None
    prompts = sum(shared.lengths)
    firsts = [prompts + start for start in [0, *accumulate(batch.lengths)][:-1]]  # index of each document's first key
    own_lengths = [length - before for length, before in zip(batch.lengths, shared.of_each, strict=True)]
    of_own = runs([first + before for first, before in zip(firsts, shared.of_each, strict=True)], own_lengths)
    keys = torch.arange(prompts)
    first_keys: list[list[int]] = [[] for _ in shared.lengths]  # of the documents that begin with each prompt
    for prompt, first in zip(shared.of_documents, firsts, strict=True):
        if prompt is not None:
            first_keys[prompt].append(first)
    most = len(first_keys[0])  # of the first prompt: see `SharedPrompts`
    rounds = [[indices[copy] for indices in first_keys if len(indices) > copy] for copy in range(most)]
    return PaddedLayout(
        ((1, prompts + sum(batch.lengths)),),
        ((*shared.lengths, *batch.lengths),),
        torch.cat([keys, of_own]).to(device, non_blocking=True),
        torch.cat([keys.to(device, non_blocking=True), shared.documents]),
        tuple(runs(starts, shared.lengths[: len(starts)]).to(device, non_blocking=True) for starts in rounds),
    )


def shared_layouts(batch: Ragged, heads: int) -> tuple[PaddedLayout, PaddedLayout]:
    """Layouts of queries and keys of a batch with shared prompts; prompts and documents have separate rectangles."""
    keys = shared_keys(batch)
    shared = batch.shared
    assert shared is not None
    [lengths] = keys.lengths
    rectangles = choose_rectangles(shared.lengths, heads)
    rectangles += [
        ([len(shared.lengths) + row for row in rows], columns)
        for rows, columns in choose_rectangles(batch.lengths, heads)
    ]
    queries, padded = (
        layout_of(sizes, narrowed(rectangles, sizes), batch.tokens.device) for sizes in (batch.pieces, lengths)
    )
    slots = padded.slots
    source = padded.source
    assert slots is not None and source is not None and keys.slots is not None and keys.source is not None
    return queries, PaddedLayout(
        padded.groups, padded.lengths, slots[keys.slots], keys.source[source], tuple(slots[x] for x in keys.copies)
    )


Rectangles = list[tuple[list[int], int]]  # the numbers of the documents in each rectangle, and its columns


def choose_rectangles(lengths: Sequence[int], heads: int) -> Rectangles:
    """Rectangles for documents of these lengths, widest first; short ones lie apart if that saves more than a call."""
    rounded = [-(-length // ROUND_TO) * ROUND_TO for length in lengths]
    width_of: dict[int, int] = {}
    current = 0
    for width in sorted(set(rounded), reverse=True):
        if not current or rounded.count(width) * heads * (current**2 - width**2) > CALL_COST:  # what a call would save
            current = width
        width_of[width] = current
    columns = [width_of[width] for width in rounded]
    order = sorted(range(len(columns)), key=columns.__getitem__, reverse=True)
    return [(list(rows), width) for width, rows in groupby(order, key=columns.__getitem__)]


def narrowed(rectangles: Rectangles, lengths: Sequence[int]) -> Rectangles:
    """The rectangles, each as wide as the longest of its documents."""
    return [(rows, max(lengths[row] for row in rows)) for rows, _ in rectangles]


def layout_of(lengths: Sequence[int], rectangles: Rectangles, device: torch.device | str) -> PaddedLayout:
    """The layout of documents with these `lengths` in these rectangles."""
    firsts = [0] * len(lengths)
    size = 0
    for rows, width in rectangles:
        for row in rows:
            firsts[row] = size
            size = size + width
    slots = runs(firsts, lengths)
    source = torch.zeros(size, dtype=torch.long).index_copy_(0, slots, torch.arange(len(slots)))
    return PaddedLayout(
        tuple((len(rows), width) for rows, width in rectangles),
        tuple(tuple(lengths[row] for row in rows) for rows, _ in rectangles),
        slots.to(device, non_blocking=True),
        source.to(device, non_blocking=True),
    )


class _FillSlots(torch.autograd.Function):
    """x[source]; the gradients of a token's copies are added up in one order, so that a run repeats bit for bit."""

    @staticmethod
    def forward(ctx, x: Tensor, source: Tensor, slots: Tensor, *copies: Tensor) -> Tensor:
        ctx.save_for_backward(slots, *copies)
        return x.index_select(0, source)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        slots, *copies = ctx.saved_tensors
        (grad,) = grad_outputs
        total = grad.index_select(0, slots)
        for more in copies:
            total[: len(more)] += grad.index_select(0, more)
        return total, None, None, *[None] * len(copies)


def pad(x: Tensor, layout: PaddedLayout) -> tuple[Tensor, ...]:
    """Tokens [N, ...] as rectangles, one [documents, columns, ...] per group. `unpad` is the inverse without copies."""
    pieces = layout.fill(x).split([documents * columns for documents, columns in layout.groups])
    return tuple(piece.unflatten(0, group) for piece, group in zip(pieces, layout.groups, strict=True))


def unpad(rectangles: Sequence[Tensor], layout: PaddedLayout) -> Tensor:
    """Tokens [N, ...] of rectangles; the inverse of `pad`."""
    flat = [rectangle.flatten(0, 1) for rectangle in rectangles]
    x = flat[0] if len(flat) == 1 else torch.cat(flat)
    return x if layout.slots is None else select_rows(x, layout.slots)


class _SelectRows(torch.autograd.Function):
    """x[index]; the backward writes rows where index_select's would add them up one by one."""

    @staticmethod
    def forward(ctx, x: Tensor, index: Tensor, repeated: Tensor | None) -> Tensor:
        ctx.save_for_backward(index, repeated)
        ctx.rows = len(x)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        index, repeated = ctx.saved_tensors
        (grad,) = grad_outputs
        total = grad.new_zeros(ctx.rows, *grad.shape[1:]).index_copy_(0, index, grad)
        if repeated is not None:
            rows = index[repeated]
            total.index_fill_(0, rows, 0.0).index_add_(0, rows, grad[repeated])
        return total, None, None


def select_rows(x: Tensor, index: Tensor, repeated: Tensor | None = None) -> Tensor:
    """x[index] along the first axis.

    Args:
        index: no row twice, but for those that `repeated` names.
        repeated: the places in `index` of all rows that come more than once.
    """
    return _SelectRows.apply(x, index, repeated)


def states_before_targets(states: Tensor, batch: Ragged) -> Tensor:
    """The hidden states that predict each target, [M, D]; a prompt's last one predicts each response's first token."""
    return select_rows(states, batch.before, None if batch.shared is None else batch.shared.repeated)


def visible(relative: Tensor, causal: bool, window: int | None) -> Tensor:
    """True where a key may be attended to; `relative`: key positions minus query positions."""
    seen = relative <= 0 if causal else torch.ones_like(relative, dtype=torch.bool)
    return seen if window is None else seen & (relative.abs() < window)


def padding_mask(lengths: Tensor, width: int) -> Tensor:
    """[B, 1, 1, width]: row b attends to its first `lengths[b]` keys."""
    return (torch.arange(width, device=lengths.device) < lengths[:, None])[:, None, None]


def key_mask(lengths: Sequence[int], columns: int, device: torch.device | str) -> Tensor | None:
    """`padding_mask` of plain numbers, [B, 1, 1, columns]; None where no row is padded."""
    return None if min(lengths) == columns else padding_mask(torch.tensor(lengths).to(device), columns)


def key_masks(layout: PaddedLayout, device: torch.device | str) -> list[Tensor | None]:
    """`key_mask` of each rectangle."""
    groups = zip(layout.lengths, layout.groups, strict=True)
    return [key_mask(lengths, columns, device) for lengths, (_, columns) in groups]


def attention_masks(
    queries: PaddedLayout,
    keys: PaddedLayout,
    *,
    offset: int = 0,
    causal: bool = True,
    window: int | None,
    bias: nn.Module | None,
    device: torch.device | str,
    in_prefix: Tensor | None = None,
) -> list[Tensor | None]:
    """The mask or bias of each rectangle's scores; None where the kernel's causal flag suffices.

    Args:
        queries, keys: layouts with the same rows.
        offset: prefix slots that come before all keys.
        window: as in `AttentionSpec`.
        bias: relative positions [..., Q, S] -> biases [..., H, Q, S].
        in_prefix: True for keys that all queries of their row may attend to, [tokens of the keys].

    Returns:
        For each rectangle None, [1 or B, 1 or H, columns, offset + key columns], or [B, 1, 1, key columns].
    """
    sizes = zip(queries.lengths, keys.lengths, strict=True)
    masks: list[Tensor | None] = []
    prefixes = [None] * len(keys.groups) if in_prefix is None else pad(in_prefix, keys)
    for prefix, (asking, read), (_, columns), (_, key_columns) in zip(
        prefixes, sizes, queries.groups, keys.groups, strict=True
    ):
        width = offset + key_columns
        # Keys before the first query.
        before = [total - query_length for query_length, total in zip(asking, read, strict=True)]
        real = None if causal and prefix is None else key_mask([offset + length for length in read], width, device)
        windowed = window is not None and window < width
        if not (any(before) or windowed or bias is not None or prefix is not None or (causal and offset)):
            masks.append(real)
            continue
        positions = torch.arange(offset + before[0], offset + before[0] + columns, device=device)[None]
        if len(set(before)) > 1:
            # A padded query takes the position of the last real one: it sees some key, for a softmax over nothing is
            # NaN.
            ends = [length - 1 for length in read]
            first, last = (torch.tensor(x).to(device, non_blocking=True)[:, None] for x in (before, ends))
            positions = offset + torch.minimum(first + torch.arange(columns, device=device), last)
        relative = torch.arange(width, device=device) - positions[..., None]  # [1 or B, columns, width]
        seen = visible(relative, causal, window)[:, None]
        if prefix is not None:
            seen = seen | nn.functional.pad(prefix, (offset, 0), value=True)[:, None, None]
        if real is not None:
            # A padded query may be out of reach of every real key; it then sees itself.
            seen = (seen & real) | (relative == 0)[:, None]
        masks.append(seen if bias is None else bias(relative).masked_fill(~seen, -torch.inf))
    return masks

"""Attention of chunks of queries on the keys near them: cost and memory grow with the length, not with its square.

Chunk c of a row holds the tokens c * chunk ... (c + 1) * chunk - 1. Its queries read the keys of the chunk, of `before`
tokens in front of it and of `after` tokens behind it; a mask says which of these each query sees. All keys of a query
are in one softmax, those that it reads besides its neighbors included. `attend_chunks` takes rows of any kind; layers
with a window run it on one row in which the documents of a batch lie end to end, without padding, and the mask keeps
them apart.
"""

from collections.abc import Sequence
from functools import cache as cached
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.attention import AttentionFn, AttentionSpec
from alignment.models.layers.padded_layout import ROUND_TO, PaddedLayout, select_rows, visible
from alignment.models.layers.sdpa import attend
from alignment.ragged import Ragged, runs

SMALLEST_CHUNK = 32  # tokens; what a call costs at least outweighs the keys that smaller ones would save
WINDOWS_THAT_PAY = 4  # longer documents are faster in chunks than under a mask of their length squared, measured


class ExtraKeys(NamedTuple):
    """Keys that queries read besides those near them: of global tokens, of chunks far away, of a prefix.

    Attributes:
        keys, values: of each chunk, [B or 1, chunks or 1, KV, E, K].
        mask: booleans or numbers as the mask of the near keys, [B or 1, chunks or 1, H or 1, chunk or 1, E].
    """

    keys: Tensor
    values: Tensor
    mask: Tensor


def chunked(x: Tensor, chunk: int, before: int = 0, after: int = 0) -> Tensor:
    """Chunks of a row and what is next to them, as overlapping views of one padded copy.

    Args:
        x: [B, H, T, K].
        chunk, before, after: tokens.

    Returns:
        [B, chunks, H, before + chunk + after, K], zeros where the row has no token; chunks = ceil(T / chunk).
    """
    missing = -x.shape[2] % chunk
    return F.pad(x, (0, 0, before, missing + after)).unfold(2, before + chunk + after, chunk).permute(0, 2, 1, 4, 3)


def relative_positions(chunk: int, before: int, after: int, device: torch.device | str) -> Tensor:
    """Key position minus query position inside every chunk, [chunk, before + chunk + after]."""
    return torch.arange(-before, chunk + after, device=device) - torch.arange(chunk, device=device)[:, None]


def attend_chunks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    mask: Tensor,
    chunk: int,
    before: int,
    after: int = 0,
    extra: ExtraKeys | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * q k + mask) v, over the keys near each query and the extra ones.

    Args:
        q: [B, H, T, K]; k, v: [B, KV, T, K].
        mask: booleans (True = may attend) or numbers added to the scores,
            [B or 1, chunks or 1, H or 1, chunk, before + chunk + after]. Every query sees some key, those behind the
            last token (T is filled up to whole chunks) too: a softmax over nothing is NaN.
        chunk, before, after: tokens.

    Returns:
        [B, H, T, K].

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 and appendix A (the chunks); Zaheer et al. 2020,
    arXiv:2007.14062, appendix D (extra keys in the same product).
    """
    queries = chunked(q, chunk)
    keys = chunked(k, chunk, before, after)
    values = chunked(v, chunk, before, after)
    if extra is not None:
        shape = torch.Size((*keys.shape[:3], -1, -1))
        keys = torch.cat([extra.keys.expand(shape), keys], 3)
        values = torch.cat([extra.values.expand(shape), values], 3)
        leading = torch.broadcast_shapes(extra.mask.shape[:-1], mask.shape[:-1])
        mask = torch.cat([part.expand(torch.Size((*leading, -1))) for part in (extra.mask, mask)], -1)
    mask = mask.expand(*queries.shape[:2], *mask.shape[2:]).flatten(0, 1)
    queries = queries.flatten(0, 1)
    keys = keys.flatten(0, 1)
    values = values.flatten(0, 1)
    mixed = attend(queries, keys, values, spec, mask=mask, dropout=dropout)
    return mixed.unflatten(0, (len(q), -1)).transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]]


class DocumentRow(NamedTuple):
    """The documents of a batch end to end, as layers with one window read them, S slots.

    Attributes:
        before: slots of the document in front of each, [S].
        after: slots of the document behind each, [S]; None: layers are causal and need no such number.
        layout: where tokens lie, for a batch with shared prompts; None: the batch is the row.
    """

    before: Tensor
    after: Tensor | None
    layout: PaddedLayout | None = None


def shared_row(batch: Ragged, reach: int) -> DocumentRow:
    """The row of a batch with shared prompts: these, then each document's own tokens behind its prompt's last ones.

    Args:
        reach: tokens in front of itself that a token may see; of a prompt no more are copied.
    """
    shared = batch.shared
    device = batch.tokens.device
    assert shared is not None
    prompts = len(shared.lengths)
    pieces = batch.pieces
    copied = [0] * prompts + [min(before, reach) for before in shared.of_each]
    sizes = [piece + count for piece, count in zip(pieces, copied, strict=True)]
    starts = list(accumulate(sizes, initial=0))
    tokens = list(accumulate(pieces, initial=0))
    spare = starts.pop()  # a slot that no token reads: that of the prompts' tokens that are not copied
    own_slots = runs([start + count for start, count in zip(starts, copied, strict=True)], pieces)
    source = torch.zeros(spare + 1, dtype=torch.long).index_copy_(0, own_slots, torch.arange(tokens[-1]))
    copies_of: list[list[Tensor]] = [[] for _ in shared.lengths]  # the slots of each prompt's tokens in its documents
    for prompt, start, count in zip(shared.of_documents, starts[prompts:], copied[prompts:], strict=True):
        if prompt is not None:
            slots = torch.arange(start, start + count)
            end = tokens[prompt + 1]
            copies_of[prompt].append(torch.cat([torch.full((shared.lengths[prompt] - count,), spare), slots]))
            source[slots] = torch.arange(end - count, end)
    most = len(copies_of[0])  # of the first prompt: see `SharedPrompts`
    rounds = [
        torch.cat([prompt_copies[copy] for prompt_copies in copies_of if len(prompt_copies) > copy])
        for copy in range(most)
    ]
    before = runs([0] * len(sizes) + [0], [*sizes, 1]).to(device)
    own_slots, source, *copies = (x.to(device, non_blocking=True) for x in (own_slots, source, *rounds))
    return DocumentRow(before, None, PaddedLayout(((1, spare + 1),), ((spare + 1,),), own_slots, source, tuple(copies)))


def chunk_size(window: int) -> int:
    """Tokens of a chunk: half the window, so that a third of the keys read is out of a causal query's sight."""
    return max(SMALLEST_CHUNK, -(-window // 2 // ROUND_TO) * ROUND_TO)


def windowed_attentions(
    specs: Sequence[object], batch: Ragged, bias: nn.Module | None, prefix: Tensor | None = None
) -> list[AttentionFn | None]:
    """Each layer's attention inside documents, in chunks; None where the layer has no window or chunks do not pay.

    They pay where a document is longer than four windows and than 128 tokens; all documents of the batch are then
    computed so.

    Args:
        bias: relative positions [..., Q, S] -> biases [..., H, Q, S], of the layers that have one.
        prefix: keys and values in front of every document, [layers, 2, P, KV, K].
    """
    offset = 0 if prefix is None else prefix.shape[2]

    @cached
    def masked_row(causal: bool, window: int, biased: bool) -> MaskedRow:
        row = plain_row(batch, causal) if batch.shared is None else shared_row(batch, window - 1)
        return masked(row, causal, window, bias if biased else None, offset)

    attends: list[AttentionFn | None] = []
    for layer, spec in enumerate(specs):
        reach = spec.reach if isinstance(spec, AttentionSpec) else None
        if reach is None or max(batch.lengths) <= WINDOWS_THAT_PAY * max(reach, SMALLEST_CHUNK):
            attends.append(None)
            continue
        assert isinstance(spec, AttentionSpec)
        row = masked_row(spec.causal, reach, spec.position_bias is not None)
        attends.append(row_attention(spec, row, None if prefix is None else prefix[layer]))
    return attends


def plain_row(batch: Ragged, causal: bool) -> DocumentRow:
    """The row of a batch without shared prompts: its tokens as they lie."""
    if causal:
        return DocumentRow(batch.positions, None)
    sizes = batch.sizes.repeat_interleave(batch.sizes, output_size=len(batch.tokens))
    return DocumentRow(batch.positions, sizes - 1 - batch.positions)


class MaskedRow(NamedTuple):
    """A row in chunks: keys that a query may see among those near it and in the prefix; masks as in `attend_chunks`."""

    row: DocumentRow
    chunk: int
    before: int
    after: int
    near: Tensor
    prefix: Tensor | None


def masked(row: DocumentRow, causal: bool, window: int, bias: nn.Module | None, offset: int) -> MaskedRow:
    """The row's masks for layers with this window, behind a prefix of `offset` slots."""
    chunk = chunk_size(window)
    reach = -(-(window - 1) // ROUND_TO) * ROUND_TO
    device = row.before.device
    ahead = 0 if causal else reach

    def by_chunk(x: Tensor) -> Tensor:  # behind the last slot: documents of one token, which see themselves
        return F.pad(x, (0, -len(x) % chunk)).view(-1, chunk, 1)

    def mask(relative: Tensor, seen: Tensor) -> Tensor:
        return (seen[:, None] if bias is None else bias(relative).masked_fill(~seen[:, None], -torch.inf))[None]

    relative = relative_positions(chunk, reach, ahead, device)
    before = by_chunk(row.before)
    seen = visible(relative, causal, window) & (relative >= -before)
    if row.after is not None:
        seen &= relative <= by_chunk(row.after)
    to_prefix = torch.arange(-offset, 0, device=device) - before
    front = mask(to_prefix, visible(to_prefix, causal, window)) if offset else None
    return MaskedRow(row, chunk, reach, ahead, mask(relative, seen), front)


def row_attention(spec: AttentionSpec, masked: MaskedRow, prefix: Tensor | None) -> AttentionFn:
    """Attention inside the documents of a row; prefix: keys and values in front of each, [2, P, KV, K]."""
    layout = masked.row.layout

    def attend_documents(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
        extra = None
        if layout is not None:
            query = layout.fill(query)
            key = layout.fill(key)
            value = layout.fill(value)
        if prefix is not None and masked.prefix is not None:
            keys, values = prefix.to(key.dtype).transpose(1, 2)[:, None, None]
            extra = ExtraKeys(keys, values, masked.prefix)
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        [mixed] = attend_chunks(
            q,
            k,
            v,
            spec,
            mask=masked.near,
            chunk=masked.chunk,
            before=masked.before,
            after=masked.after,
            extra=extra,
            dropout=dropout,
        ).transpose(1, 2)
        return mixed if layout is None or layout.slots is None else select_rows(mixed, layout.slots)

    return attend_documents

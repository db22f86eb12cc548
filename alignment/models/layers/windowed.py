"""Attention of chunks of queries on the keys near them: cost and memory grow with the length, not with its square.

Chunk c of a row holds the tokens c * chunk ... (c + 1) * chunk - 1. Its queries read the keys of the chunk, of `before`
tokens in front of it and of `after` tokens behind it; a mask says which of these each query sees. All keys of a query are in
one softmax, those that it reads besides its neighbours included.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.layers.attention import AttentionSpec
from alignment.models.layers.sdpa import attend


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
            [B or 1, chunks or 1, H or 1, chunk, before + chunk + after]. Every query sees some key, those behind the last
            token (T is filled up to whole chunks) too: a softmax over nothing is NaN.
        chunk, before, after: tokens.

    Returns:
        [B, H, T, K].

    Source: Beltagy et al. 2020, arXiv:2004.05150, section 3.1 and appendix A (the chunks); Zaheer et al. 2020,
    arXiv:2007.14062, appendix D (extra keys in the same product).
    """
    queries, keys, values = chunked(q, chunk), chunked(k, chunk, before, after), chunked(v, chunk, before, after)
    if extra is not None:
        shape = torch.Size((*keys.shape[:3], -1, -1))
        keys = torch.cat([extra.keys.expand(shape), keys], 3)
        values = torch.cat([extra.values.expand(shape), values], 3)
        leading = torch.broadcast_shapes(extra.mask.shape[:-1], mask.shape[:-1])
        mask = torch.cat([part.expand(torch.Size((*leading, -1))) for part in (extra.mask, mask)], -1)
    mask = mask.expand(*queries.shape[:2], *mask.shape[2:]).flatten(0, 1)
    mixed = attend(*(x.flatten(0, 1) for x in (queries, keys, values)), spec, mask=mask, dropout=dropout)
    return mixed.unflatten(0, queries.shape[:2]).transpose(1, 2).flatten(2, 3)[:, :, : q.shape[2]]

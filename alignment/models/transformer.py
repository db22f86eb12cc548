"""The decoder's trunk: embed, blocks, final norm; over documents end to end or one new token per row. No heads."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from alignment.errors import UserError
from alignment.models.attention import (
    Look,
    NewTokens,
    look_at_cache,
    look_at_documents,
    look_with_kernel,
    writing_to,
)
from alignment.models.cache import Cache
from alignment.models.masks import pack, seen_mask
from alignment.models.positions import LearnedPositions, RotaryPositions
from alignment.models.spec import TransformerSpec
from alignment.ragged import Ragged


class Transformer(nn.Module):
    """Token ids in, hidden states after the final norm out.

    Attributes:
        gradient_checkpointing: recompute each block in the backward pass instead of keeping its activations.
    """

    def __init__(
        self,
        spec: TransformerSpec,
        positions: LearnedPositions | RotaryPositions,
        blocks: Sequence[nn.Module],
        norm: Callable[[], nn.Module],
    ):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocabulary, spec.width)
        self.positions: LearnedPositions | RotaryPositions = positions
        self.dropout = nn.Dropout(spec.embedding_dropout) if spec.embedding_dropout else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.norm = norm()
        self.gradient_checkpointing = False

    def forward(
        self,
        batch: Ragged,
        *,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of whole documents.

        Args:
            batch: documents end to end, N tokens.
            prefix: keys and values in front of every document, [layers, 2, P, K, head_width]; places then start at P.
            cache: filled with the keys and values, for `step` to go on from; without gradient only.
            rows: cache row of each document, [B]; None: 0, 1, ...

        Returns:
            [N, D].

        Raises:
            UserError: a document is longer than the model can place.
        """
        offset = 0 if prefix is None else prefix.shape[2]
        longest = max(batch.lengths) + offset
        self._check_length(longest, batch, offset)
        looks = self._looks(batch, prefix)
        if cache is not None:
            rows = torch.arange(len(batch.lengths), device=batch.tokens.device) if rows is None else rows
            addresses = _reserve(cache, batch, rows, offset)
            _write_prefix(cache, prefix, rows)
            looks = [writing_to(cache, layer, addresses, look) for layer, look in enumerate(looks)]
        return self._run(batch.tokens, batch.positions + offset if offset else batch.positions, longest, looks)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Hidden states [B, D] of one new token per cache row [B]; each row of the cache is then one longer."""
        if cache.longest >= cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens per row and one row is full")
        places = cache.lengths
        width = cache.longest + 1
        addresses = cache.addresses(torch.arange(len(places), device=places.device), places)
        new = NewTokens(addresses, width, seen_mask(places + 1, width))
        looks = [look_at_cache(cache, layer, new) for layer in range(len(self.blocks))]
        hidden = self._run(tokens, places, width, looks)
        cache.lengths, cache.longest = places + 1, width
        return hidden

    def _run(self, tokens: Tensor, places: Tensor, longest: int, looks: Sequence[Look]) -> Tensor:
        x = self.dropout(self.positions.add(self.embed(tokens), places))
        rotation = self.positions.rotation(places, longest)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for block, look in zip(self.blocks, looks, strict=True):
            call = partial(checkpoint, block, use_reentrant=False) if recompute else block
            x = call(x, rotation, look)
        return self.norm(x)

    def _looks(self, batch: Ragged, prefix: Tensor | None) -> list[Look]:
        """How each layer sees the documents: the variable-length kernel where it applies, else padded rectangles."""
        attention = self.spec.blocks[0].attention
        dropout = self.training and any(block.attention.dropout for block in self.spec.blocks)
        if prefix is None and not dropout and _in_half_precision_on_cuda(self.embed.weight):
            return [look_with_kernel(batch.starts, max(batch.lengths))] * len(self.blocks)
        packing = pack(batch.lengths, attention.heads, batch.tokens.device)
        if prefix is None:
            return [look_at_documents(packing, None)] * len(self.blocks)
        return [look_at_documents(packing, layer) for layer in prefix]

    def _check_length(self, longest: int, batch: Ragged, offset: int) -> None:
        if longest <= self.spec.max_positions:
            return
        row = max(range(len(batch.lengths)), key=batch.lengths.__getitem__)
        name = f" (row {batch.row_ids[row]})" if batch.row_ids else ""
        prefix = f" after a prefix of {offset}" if offset else ""
        raise UserError(
            f"a document of {batch.lengths[row]} tokens{prefix}{name} does not fit the model's "
            f"{self.spec.max_positions} positions; lower max_length or take a model with a longer context"
        )


def _in_half_precision_on_cuda(weight: Tensor) -> bool:
    if not weight.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else weight.dtype
    return dtype in (torch.bfloat16, torch.float16)


def _reserve(cache: Cache, batch: Ragged, rows: Tensor, offset: int) -> Tensor:
    """Note the documents' lengths in the cache; returns the address of every token, [N * KV]."""
    if torch.is_grad_enabled():
        raise ValueError("a cache keeps no gradient: fill it under torch.no_grad()")
    longest = max(batch.lengths) + offset
    if longest > cache.capacity:
        raise ValueError(f"the cache holds {cache.capacity} tokens per row, a document needs {longest}")
    sizes = batch.starts.long().diff()
    cache.lengths[rows] = sizes + offset
    cache.longest = max(cache.longest, longest)
    rows_of_tokens = torch.repeat_interleave(rows, sizes, output_size=len(batch.tokens))
    return cache.addresses(rows_of_tokens, batch.positions + offset)


def _write_prefix(cache: Cache, prefix: Tensor | None, rows: Tensor) -> None:
    """The prefix into the first slots of `rows`."""
    if prefix is None:
        return
    slots = torch.arange(prefix.shape[2], device=rows.device)
    addresses = cache.addresses(rows.repeat_interleave(len(slots)), slots.repeat(len(rows)))
    for layer, (keys, values) in enumerate(prefix):
        cache.write(layer, addresses, keys.repeat(len(rows), 1, 1), values.repeat(len(rows), 1, 1))

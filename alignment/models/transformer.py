"""The trunk: embed, blocks, final norm; over documents end to end or one new token per row. Decoder or encoder; no heads."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.activation_checkpointing import Keep, recomputed
from alignment.models.layers.attention_context import (
    Bearings,
    check_original_context,
    document_looks,
    kernel_applies,
    kernel_looks,
    pack_documents,
    rotations,
    step_masks,
)
from alignment.models.layers.cross_attention import Source, look_at_memory, looks_across, remembering
from alignment.models.layers.kv_cache import Cache, CrossAttentionCache
from alignment.models.layers.padded_layout import seen_mask
from alignment.models.layers.sdpa import AttentionContext, look_at_cache, writing_to
from alignment.models.spec import TransformerSpec
from alignment.ragged import Ragged


class Parts(NamedTuple):
    """What a trunk is made of beside its blocks; None where its kind has no such part.

    Attributes:
        positions: places [N] -> what is added to the embedding, [N, E].
        bearings: angles of rotary layers, biases of distances.
        embedding_norm, norm: before the first block, after the last.
        project_in, project_out: between the width of the token table and that of the blocks.
        relative: gives DeBERTa's vectors of distances.
    """

    norm: nn.Module
    bearings: Bearings
    positions: nn.Module | None = None
    embedding_norm: nn.Module | None = None
    project_in: nn.Module | None = None
    project_out: nn.Module | None = None
    relative: nn.Module | None = None


class Transformer(nn.Module):
    """Token ids in, hidden states after the final norm out.

    Attributes:
        recompute: what of each block's activations is kept, the rest being computed again in the backward pass; None:
            all are kept and nothing is repeated.
    """

    def __init__(self, spec: TransformerSpec, blocks: Sequence[nn.Module], parts: Parts):
        super().__init__()
        self.spec = spec
        self.embed = nn.Embedding(spec.vocabulary, spec.projection.width if spec.projection else spec.width)
        self.positions = parts.positions
        self.segments = nn.Embedding(spec.segments, self.embed.embedding_dim) if spec.segments else None
        self.embedding_norm, self.project_in, self.project_out = (
            parts.embedding_norm,
            parts.project_in,
            parts.project_out,
        )
        self.dropout = nn.Dropout(spec.embedding_dropout) if spec.embedding_dropout else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.norm = parts.norm
        self.output_dropout = nn.Dropout(spec.output_dropout) if spec.output_dropout else nn.Identity()
        self.distance, self.relative = parts.bearings.distance, parts.relative
        self._rotaries = parts.bearings.rotaries
        self.recompute: Keep | None = None

    def forward(
        self,
        batch: Ragged,
        *,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        source: Source | None = None,
        router_logits: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of whole documents.

        Args:
            batch: documents end to end, N tokens.
            prefix: keys and values in front of every document, [layers, 2, P, K, head_dim]; places then start at P.
            cache: filled with the keys and values, for `step` to go on from; without gradient only.
            rows: cache row of each document, [B]; None: 0, 1, ...
            source: what an encoder read, one document for each of the batch's; with a cache, for all of its rows.
            router_logits: filled with what mixtures of experts say, for `experts.balance_loss`.

        Returns:
            [N, D].

        Raises:
            UserError: a document is longer than the model can place.
        """
        offset = 0 if prefix is None else prefix.shape[2]
        longest = max(batch.lengths) + offset
        self._check_length(longest, batch, offset)
        layers, bearings = self.spec.layers, Bearings(self._rotaries, self.distance)
        packing = None
        if prefix is None and kernel_applies(layers, self.embed.weight, self.training):
            looks = kernel_looks(layers, batch)
        else:
            packing = pack_documents(layers, batch)
            looks = document_looks(layers, bearings, batch, packing, prefix)
        if cache is not None:
            rows = torch.arange(len(batch.lengths), device=batch.tokens.device) if rows is None else rows
            addresses = _reserve(cache, batch, rows, offset)
            _write_prefix(cache, prefix, rows)
            looks = [writing_to(cache, layer, addresses, look) for layer, look in enumerate(looks)]
        places = batch.positions + offset if offset else batch.positions
        turns = rotations(layers, bearings, places, longest, lambda: _sizes(batch) + offset)
        across = [None] * len(layers) if source is None else self._looks_across(source, batch, cache)
        relative = None if self.relative is None else self.relative()
        routed: list[Tensor] = [] if router_logits is None else router_logits
        sights = [
            AttentionContext(look, turn, over, packing, relative, routed)
            for look, turn, over in zip(looks, turns, across, strict=True)
        ]
        return self._run(batch.tokens, places, batch.segments, sights)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Hidden states [B, D] of one new token per cache row [B]; each row of the cache is then one longer."""
        if cache.longest >= cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens per row and one row is full")
        places, width = cache.lengths, cache.longest + 1
        layers, bearings = self.spec.layers, Bearings(self._rotaries, self.distance)
        check_original_context(cache, layers)
        addresses = cache.addresses(torch.arange(len(places), device=places.device), places)
        turns = rotations(layers, bearings, places, width, lambda: places + 1)
        news = step_masks(layers, bearings, places, addresses, width)
        sights = [
            AttentionContext(
                look_at_cache(cache, layer, new, block.attention),  # type: ignore[arg-type]
                turn,
                None
                if cache.memory is None or block.cross is None
                else look_at_memory(cache.memory, layer, block.cross),
            )
            for layer, (block, turn, new) in enumerate(zip(layers, turns, news, strict=True))
        ]
        hidden = self._run(tokens, places, None, sights)
        cache.lengths, cache.longest = places + 1, width
        return hidden

    def _looks_across(self, source: Source, batch: Ragged, cache: Cache | None) -> list:
        specs = [layer.cross for layer in self.spec.layers if layer.cross is not None]
        looks = looks_across(specs, source, batch)
        if cache is None:
            return looks
        cache.memory = CrossAttentionCache(seen_mask(source.batch.sizes, max(source.batch.lengths)))
        return [remembering(cache.memory, source, look) for look in looks]

    def embedded(self, tokens: Tensor, places: Tensor, segments: Tensor | None) -> Tensor:
        """What the first block reads, [N, D]."""
        x = self.embed(tokens)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)  # rounded to x's type first, as Gemma does
        projection = self.spec.projection
        if self.project_in is not None and projection is not None and projection.before_positions:
            x = self.project_in(x)
        if self.segments is not None:
            alone = segments is None or self.spec.segments == 1  # RoBERTa has one vector, for every token
            x = x + (self.segments.weight[0] if alone else self.segments(segments))
        if self.positions is not None:
            x = x + self.positions(places).to(x.dtype)
        x = self.dropout(x if self.embedding_norm is None else self.embedding_norm(x))
        if self.project_in is not None and projection is not None and not projection.before_positions:
            x = self.project_in(x)
        return x

    def _run(
        self, tokens: Tensor, places: Tensor, segments: Tensor | None, sights: Sequence[AttentionContext]
    ) -> Tensor:
        x = self.embedded(tokens, places, segments)
        call = recomputed(self.recompute) if self.recompute and torch.is_grad_enabled() else None
        for layer, sight in enumerate(sights):
            block = self.blocks[layer if self.spec.order is None else self.spec.order[layer]]
            x = block(x, sight) if call is None else call(block, x, sight)
        x = self.output_dropout(self.norm(x))
        return x if self.project_out is None else self.project_out(x)

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


def _sizes(batch: Ragged) -> Tensor:
    """Tokens of the document each token belongs to, [N]."""
    sizes = batch.sizes
    return sizes.repeat_interleave(sizes, output_size=len(batch.tokens))


def _reserve(cache: Cache, batch: Ragged, rows: Tensor, offset: int) -> Tensor:
    """Note the documents' lengths in the cache; returns the address of every token, [N * KV]."""
    if torch.is_grad_enabled():
        raise ValueError("a cache keeps no gradient: fill it under torch.no_grad()")
    longest = max(batch.lengths) + offset
    if longest > cache.capacity:
        raise ValueError(f"the cache holds {cache.capacity} tokens per row, a document needs {longest}")
    sizes = batch.sizes
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

"""The trunk of a decoder or encoder: embedding, blocks, final norm; over whole documents or one new token per row."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.activation_checkpointing import Keep, checkpointed
from alignment.models.frozen_weights import like_hidden_states
from alignment.models.heads import LanguageHeadSpec
from alignment.models.init_weights import FanInInitSpec, InitSpec
from alignment.models.layers.attention import AttentionContext, AttentionSpec
from alignment.models.layers.block import BlockSpec, selects_tokens
from alignment.models.layers.disentangled import RelativeEmbedding
from alignment.models.layers.kv_cache import Cache, TokenSlots
from alignment.models.layers.layer_contexts import GlobalRule, PositionModules, decoding_contexts, training_contexts
from alignment.models.layers.norms import NoNormSpec, NormSpec
from alignment.models.layers.positions import PositionsSpec
from alignment.models.layers.rotary import Rotary
from alignment.models.layers.sdpa import Source, given_attention
from alignment.ragged import Ragged, refuse_shared

UNLIMITED = 2**31  # tokens: more than any document has; `max_positions` where an architecture sets no limit


@dataclass(frozen=True)
class ProjectionSpec:
    """A linear layer from a token table of `width` columns to D (factorised embeddings)."""

    width: int
    bias: bool
    before_positions: bool  # positions are D wide and added after it (OPT); else all that is added is narrow (ALBERT)


@dataclass(frozen=True)
class TransformerSpec:
    """A whole decoder or encoder. Blocks are listed one by one, so they may differ.

    Attributes:
        width: D, of the residual stream.
        max_positions: longest document, tokens, prefix or soft prompt included.
        positions: vectors added to the token embedding; rotary angles and position biases belong to `AttentionSpec`.
        norm: after the last block; `output_dropout` acts on its output.
        tied_head: the language head shares the token embedding's weight.
        order: number of the block of each layer; None: each its own (ALBERT runs one block in every layer).
        projection: where the token table is narrower than D.
        output_width: columns of a last linear layer before the head; None: there is none.
        embedding_scale: factor on token vectors.
        segments: number of segment embeddings (token types).
        dropout_before_norm: the embedding's dropout acts before its norm.
        global_tokens: tokens that see, and are seen by, all of their document (Longformer), where `Ragged.global_mask`
            does not mark them: marked: no others. first: each first one. A token's id: those before the first such
            token. None: the architecture has none.
        relative: relative positions with a vector that DeBERTa's layers share; 2 * relative rows, normed by
            `relative_norm`.
    """

    vocabulary: int
    width: int
    max_positions: int
    blocks: tuple[BlockSpec, ...]
    norm: NormSpec
    init: InitSpec | FanInInitSpec
    tied_head: bool
    positions: PositionsSpec | None = None
    embedding_dropout: float = 0.0
    output_dropout: float = 0.0
    head: LanguageHeadSpec = field(default_factory=LanguageHeadSpec)
    order: tuple[int, ...] | None = None
    projection: ProjectionSpec | None = None
    output_width: int | None = None
    embedding_scale: float = 1.0
    embedding_norm: NormSpec | None = None
    segments: int = 0
    dropout_before_norm: bool = False
    global_tokens: GlobalRule | None = None
    relative: int = 0
    relative_norm: NormSpec = field(default_factory=NoNormSpec)

    @property
    def layers(self) -> tuple[BlockSpec, ...]:
        """The block of each layer, in the order they act."""
        return self.blocks if self.order is None else tuple(self.blocks[i] for i in self.order)

    @property
    def causal(self) -> bool:
        """True for a decoder, whose tokens see only those before them."""
        return self.blocks[0].attention.causal

    def build(self) -> "Transformer":
        """The trunk, its weights not initialized."""
        return Transformer(self)


def _position_modules(blocks: Sequence[BlockSpec]) -> PositionModules:
    """The rotary tables of all layers and the position bias that they share."""
    specs = [block.attention for block in blocks if isinstance(block.attention, AttentionSpec)]
    biases = {(spec.position_bias, spec.heads, spec.causal) for spec in specs if spec.position_bias is not None}
    if len(biases) > 1:
        raise ValueError(f"layers share one position bias, and these differ: {biases}")
    rotaries = {attention.rotary: Rotary(attention.rotary) for attention in specs if attention.rotary is not None}
    if not biases:
        return PositionModules(rotaries, None)
    [(bias, heads, causal)] = biases
    return PositionModules(rotaries, bias.build(heads, causal))  # type: ignore[union-attr]


class Transformer(nn.Module):
    """Token ids in, hidden states after the final norm out.

    Attributes:
        kept_activations: with activation checkpointing, the activations of each block that are kept, the others being
            recomputed in the backward pass; None: no checkpointing, all are kept.
        compiled: True where the blocks run through torch.compile.
    """

    def __init__(self, spec: TransformerSpec):
        super().__init__()
        self.spec = spec
        width = spec.width
        projection = spec.projection
        blocks = [block.build(spec.width) for block in spec.blocks]
        narrow = width if projection is None else projection.width
        project_in = None if projection is None else nn.Linear(narrow, width, bias=projection.bias)
        project_out = None if spec.output_width is None else nn.Linear(width, spec.output_width, bias=False)
        positions_width = width if projection is None or projection.before_positions else narrow
        self.embed = _embedding(spec.vocabulary, narrow)
        self.positions = None if spec.positions is None else spec.positions.build(positions_width)
        self.segments = _embedding(spec.segments, narrow) if spec.segments else None
        self.embedding_norm = None if spec.embedding_norm is None else spec.embedding_norm.build(narrow)
        self.project_in = project_in
        self.project_out = project_out
        self.dropout = nn.Dropout(spec.embedding_dropout) if spec.embedding_dropout else nn.Identity()
        self.blocks = nn.ModuleList(blocks)
        self.norm = spec.norm.build(width)
        self.output_dropout = nn.Dropout(spec.output_dropout) if spec.output_dropout else nn.Identity()
        self._rotaries, self.distance = _position_modules(spec.blocks)
        self.relative = None
        if spec.relative:
            self.relative = RelativeEmbedding(2 * spec.relative, width, spec.relative_norm.build(width))
        self.kept_activations: Keep | None = None
        self.compiled = False

    def forward(
        self,
        batch: Ragged,
        *,
        prefix: Tensor | None = None,
        prompt: tuple[Tensor, Tensor] | None = None,
        keys_values: tuple[Tensor, Tensor] | None = None,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        source: Source | None = None,
        select: Callable[[Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Hidden states of whole documents.

        Args:
            batch: documents end to end, N tokens.
            prefix: keys and values in front of every document, [layers, 2, P, K, head_dim]; positions then start at P.
            prompt: indices of the tokens that a soft prompt takes the place of, [n], and its vectors for them, [n, E].
            keys_values: indices of the tokens that a prefix takes the place of, [n], and its keys and values for them
                in every layer, [layers, 2, n, K, head_dim].
            cache: filled with the keys and values, for `step` to go on from; without gradient only.
            rows: cache row of each document, [B]; None: 0, 1, ...
            source: documents that an encoder read, one for each of the batch's; with a cache, for all of its rows.
            select: keeps the needed tokens, [N, ...] -> [M, ...]; the last layer then computes no others.

        Returns:
            [N, D], or [M, D] of the selected tokens.

        Raises:
            UserError: a document is longer than `max_positions`.
        """
        if cache is not None or source is not None:
            refuse_shared(batch, "a forward that fills a cache or reads an encoder's states")
        offset = 0 if prefix is None else prefix.shape[2]
        self._check_length(batch, offset, {"soft prompt": prompt, "prefix": keys_values})
        slots = None if cache is None else _reserve(cache, batch, rows, prefix)
        contexts = training_contexts(
            self.spec.layers,
            self.position_modules,
            batch,
            parameter=like_hidden_states(self.embed),
            training=self.training,
            prefix=prefix,
            relative=None if self.relative is None else self.relative(),
            source=source,
            global_rule=self.spec.global_tokens,
            cache=cache,
            slots=slots,
        )
        positions = batch.positions + offset if offset else batch.positions
        if keys_values is not None:
            contexts = [
                replace(context, attend=given_attention(keys_values[0], given, context.attend))
                for context, given in zip(contexts, keys_values[1], strict=True)
            ]
        if select is not None and not self.compiled and selects_tokens(self.blocks[-1]) and not self.spec.order:
            contexts[-1] = replace(contexts[-1], select=select)
            select = None
        states = self._run(self.embedded(batch.tokens, positions, batch.segments, prompt), contexts)
        return states if select is None else select(states)

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Hidden states [B, D] of one new token per cache row [B]; each row of the cache is then one longer."""
        if cache.longest >= cache.capacity:
            raise ValueError(f"the cache holds {cache.capacity} tokens per row and one row is full")
        positions = cache.lengths
        contexts = decoding_contexts(self.spec.layers, self.position_modules, cache)
        hidden = self._run(self.embedded(tokens, positions, None), contexts)
        cache.lengths = positions + 1
        cache.longest = cache.longest + 1
        return hidden

    @property
    def position_modules(self) -> PositionModules:
        """The rotary tables and the position bias of all layers."""
        return PositionModules(self._rotaries, self.distance)

    def token_vectors(self, tokens: Tensor) -> Tensor:
        """Rows of the token table, scaled, [N, E]; without segments and positions."""
        x = self.embed(tokens)
        if self.spec.embedding_scale != 1.0:
            x = x * torch.tensor(self.spec.embedding_scale, dtype=x.dtype)  # rounded to x's type first, as Gemma does
        return x

    def embedded(
        self,
        tokens: Tensor,
        positions: Tensor,
        segments: Tensor | None,
        prompt: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The input of the first block, [N, D]; `prompt`: indices of the tokens of a soft prompt, and their vectors."""
        x = self.token_vectors(tokens)
        if prompt is not None:
            x = x.index_copy(0, prompt[0], prompt[1].to(x.dtype))
        projection = self.spec.projection
        if self.project_in is not None and projection is not None and projection.before_positions:
            x = self.project_in(x)
        if self.segments is not None:
            alone = segments is None or self.spec.segments == 1  # RoBERTa has one vector, for every token
            x = x + (self.segments.weight[0] if alone else self.segments(segments))
        if self.positions is not None:
            x = x + self.positions(positions).to(x.dtype)
        if self.spec.dropout_before_norm:
            x = self.dropout(x)
        x = x if self.embedding_norm is None else self.embedding_norm(x)
        x = x if self.spec.dropout_before_norm else self.dropout(x)
        if self.project_in is not None and projection is not None and not projection.before_positions:
            x = self.project_in(x)
        return x

    def _run(self, x: Tensor, contexts: Sequence[AttentionContext]) -> Tensor:
        """The states after the final norm, of the blocks' input [N, D]."""
        if self.compiled:
            contexts = [context.outside_graphs() for context in contexts]
        call = checkpointed(self.kept_activations) if self.kept_activations and torch.is_grad_enabled() else None
        for layer, context in enumerate(contexts):
            block = self.blocks[layer if self.spec.order is None else self.spec.order[layer]]
            x = block(x, context) if call is None else call(block, x, context)
        x = self.output_dropout(self.norm(x))
        return x if self.project_out is None else self.project_out(x)

    def _check_length(self, batch: Ragged, prefix: int, virtual: Mapping[str, tuple[Tensor, Tensor] | None]) -> None:
        if max(batch.lengths) + prefix <= self.spec.max_positions:
            return
        row = max(range(len(batch.lengths)), key=batch.lengths.__getitem__)
        name = f" (row {batch.row_ids[row]})" if batch.row_ids else ""
        length = batch.lengths[row]
        before = f" after a prefix of {prefix}" if prefix else ""
        for kind, given in virtual.items():
            behind = [] if given is None else (given[0] - batch.firsts[row]).tolist()
            if count := len(list(takewhile(behind.__contains__, range(length)))):
                length = length - count
                before = f" after a {kind} of {count}"
        raise UserError(
            f"a document of {length} tokens{before}{name} does not fit the model's "
            f"{self.spec.max_positions} positions; lower max_length or take a model with a longer context"
        )


def _embedding(count: int, width: int) -> nn.Embedding:
    """A table of vectors. On the meta device nothing is drawn: there normal_ would load torch's compiler, a second."""
    weight = torch.empty(count, width)
    return nn.Embedding(count, width, _weight=weight if weight.is_meta else None)


def _reserve(cache: Cache, batch: Ragged, rows: Tensor | None, prefix: Tensor | None) -> list[TokenSlots]:
    """Note the documents' lengths in the cache and write the prefix; returns the slots of the tokens in each layer."""
    if torch.is_grad_enabled():
        raise ValueError("a cache keeps no gradient: fill it under torch.no_grad()")
    offset = 0 if prefix is None else prefix.shape[2]
    longest = max(batch.lengths) + offset
    if longest > cache.capacity:
        raise ValueError(f"the cache holds {cache.capacity} tokens per row, a document needs {longest}")
    sizes = batch.sizes
    rows = torch.arange(len(sizes), device=sizes.device) if rows is None else rows
    cache.lengths[rows] = sizes + offset
    cache.longest = max(cache.longest, longest)
    if prefix is not None:
        positions = torch.arange(offset, device=rows.device).repeat(len(rows))
        slots = cache.places(rows.repeat_interleave(offset), positions, [offset] * len(rows))
        for layer, (keys, values) in enumerate(prefix):
            cache.write(layer, slots[layer], keys.repeat(len(rows), 1, 1), values.repeat(len(rows), 1, 1))
    rows_of_tokens = torch.repeat_interleave(rows, sizes, output_size=len(batch.tokens))
    return cache.places(rows_of_tokens, batch.positions + offset, batch.lengths)

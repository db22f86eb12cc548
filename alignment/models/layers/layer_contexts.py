"""Builds every layer's `AttentionContext` for one forward: masks, angles and biases that layers share are made once.

There are three kinds of forward: whole documents (training and prefill), one new token for every row of a cache
(decoding), and several new tokens behind some of its rows (a prompt whose beginning is cached).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache as cached
from functools import partial
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.models.layers.attention import AttentionContext, AttentionFn, AttentionSpec
from alignment.models.layers.block import BlockSpec
from alignment.models.layers.kv_cache import Cache, CrossAttentionCache, TokenSlots
from alignment.models.layers.norms import on_gpu
from alignment.models.layers.padded_layout import (
    GlobalTokens,
    PaddedLayout,
    attention_masks,
    global_tokens,
    pad_layout,
    padding_mask,
    shared_keys,
    shared_layouts,
    visible,
)
from alignment.models.layers.rotary import LongScaling, Rotary, RotarySpec, Rotation
from alignment.models.layers.sdpa import (
    Source,
    cached_attention,
    cached_cross_attention,
    cross_attentions,
    filling_attention,
    padded_attention,
    varlen_applies,
    varlen_attention,
)
from alignment.models.layers.windowed import windowed_attentions
from alignment.ragged import Ragged

WIDTH_STEP = 64  # tokens, of the part of a cache that is read on a GPU
NO_PREFIX = "attention with scores of its own (DeBERTa, Longformer, BigBird) takes no prefix; use LoRA instead"
GlobalRule = Literal["marked", "first"] | int  # see `TransformerSpec.global_tokens`
Masks = Callable[[bool, int | None, bool], list[Tensor | None]]  # (causal, window, with a bias) -> of each rectangle


class PositionModules(NamedTuple):
    """Modules that turn positions into angles and relative positions into biases, shared by all layers of a trunk."""

    rotaries: Mapping[RotarySpec, Rotary]
    bias: nn.Module | None

    def rotations(
        self, layers: Sequence[BlockSpec], positions: Tensor, longest: int, sizes: Callable[[], Tensor]
    ) -> list[Rotation | None]:
        """The rotation of each layer's queries and keys; layers with one spec share it. Arguments as for `Rotary`."""
        made = {spec: rotary(positions, longest, sizes) for spec, rotary in self.rotaries.items()}
        return [made.get(getattr(layer.attention, "rotary", None)) for layer in layers]  # type: ignore[arg-type]

    def masks(
        self,
        queries: PaddedLayout,
        keys: PaddedLayout,
        offset: int,
        device: torch.device,
        *,
        in_prefix: Tensor | None = None,
    ) -> Masks:
        """`attention_masks` of these layouts, made once for all layers that need the same."""

        @cached
        def masks(causal: bool, window: int | None, biased: bool) -> list[Tensor | None]:
            bias = self.bias if biased else None
            return attention_masks(
                queries,
                keys,
                offset=offset,
                causal=causal,
                window=window,
                bias=bias,
                device=device,
                in_prefix=in_prefix,
            )

        return masks


def training_contexts(
    layers: Sequence[BlockSpec],
    modules: PositionModules,
    batch: Ragged,
    *,
    parameter: Tensor,
    training: bool,
    prefix: Tensor | None = None,
    relative: Tensor | None = None,
    global_rule: GlobalRule | None = None,
    source: Source | None = None,
    cache: Cache | None = None,
    slots: Sequence[TokenSlots] | None = None,
) -> list[AttentionContext]:
    """Each layer's context for whole documents, in training and in prefill.

    Args:
        parameter: any of the model's, for its type and device.
        training: True where dropout acts.
        prefix: keys and values in front of every document, [layers, 2, P, KV, K]; positions then start at P.
        relative: DeBERTa's vectors of relative positions, [2 * S, D].
        global_rule: which tokens are global; see `TransformerSpec`.
        source: what an encoder read, one document for each of the batch's.
        cache, slots: filled with keys and values, at the `Cache.places` of the tokens.
    """
    _refuse_two_directions(layers, batch)
    offset = 0 if prefix is None else prefix.shape[2]
    layout = None
    specs = [layer.attention for layer in layers]
    if prefix is None and batch.prefix_lengths is None and varlen_applies(specs, parameter, training):
        attends = varlen_attentions(layers, batch)
    else:
        heads = layers[0].attention.heads
        device = batch.tokens.device
        if batch.shared is None:
            queries = keys = layout = pad_layout(batch.lengths, heads, device)
        else:
            queries, keys = shared_layouts(batch, heads)
        in_chunks = windowed_attentions(specs, batch, modules.bias, prefix)
        masks = modules.masks(queries, keys, offset, device, in_prefix=batch.in_prefix)
        attends = padded_attentions(layers, queries, keys, masks, prefix, in_chunks=in_chunks)
    marked = _global_tokens(batch, layout, global_rule)
    if cache is not None and slots is not None:
        attends = [filling_attention(cache, layer, slots[layer], attend) for layer, attend in enumerate(attends)]
    positions = batch.positions + offset if offset else batch.positions
    turns = modules.rotations(layers, positions, max(batch.lengths) + offset, partial(_token_sizes, batch, offset))
    across = [None] * len(layers)
    if source is not None:
        memory = None
        if cache is not None:
            memory = CrossAttentionCache(padding_mask(source.batch.sizes, max(source.batch.lengths)))
            cache.memory = memory
        across = cross_attentions([layer.cross for layer in layers if layer.cross is not None], source, batch, memory)
    return [
        AttentionContext(attend, turn, cross, layout, relative, marked)
        for attend, turn, cross in zip(attends, turns, across, strict=True)
    ]


def _refuse_two_directions(layers: Sequence[BlockSpec], batch: Ragged) -> None:
    """Refuse shared prompts, and layers with a window, where tokens see what follows them."""
    if batch.shared is not None and (batch.prefix_lengths is not None or not shares_prompts(layers)):
        raise ValueError("this model's tokens see what follows them, so that no prompt is the same for two responses")
    if batch.prefix_lengths is not None and any(getattr(layer.attention, "window", None) for layer in layers):
        raise UserError("a layer that attends within a window cannot read a prefix in both directions")


def _global_tokens(batch: Ragged, layout: PaddedLayout | None, rule: GlobalRule | None) -> list[GlobalTokens] | None:
    """The global tokens of each rectangle: those that the batch marks, else those of the rule."""
    marked = batch.global_mask
    most = None
    if rule is None and marked is not None:
        raise UserError("global_attention_mask: only a Longformer has global tokens; leave it out")
    if marked is None and rule == "first":
        marked = batch.positions == 0
        most = 1
    elif marked is None and isinstance(rule, int):
        marked = up_to_first(batch, rule) & (batch.tokens != rule)
    return None if marked is None or layout is None else global_tokens(marked, layout, most)


def up_to_first(batch: Ragged, token: int) -> Tensor:
    """True up to the first `token` of each document, that one included, [N]: a question and the separator after it."""
    separators = batch.tokens == token
    before = separators.cumsum(0) - separators.long()  # in this document and those before it
    before = before - before[batch.firsts].repeat_interleave(batch.sizes, output_size=len(separators))
    question = before == 0
    if bool((question & ~separators)[batch.last].any()):
        raise UserError(
            f"a document has no separator {token} between question and context; the model's sep_token_id must be the "
            "tokenizer's"
        )
    return question


def shares_prompts(layers: Sequence[BlockSpec]) -> bool:
    """True if tokens see only what is before them in every layer: a prompt is then the same for all its responses."""
    return all(isinstance(layer.attention, AttentionSpec) and layer.attention.causal for layer in layers)


def padded_attentions(
    layers: Sequence[BlockSpec],
    queries: PaddedLayout,
    keys: PaddedLayout,
    masks: Masks,
    prefix: Tensor | None = None,
    *,
    in_chunks: Sequence[AttentionFn | None] | None = None,
) -> list[AttentionFn]:
    """Each layer's attention inside documents padded to rectangles, but for those that are given `in_chunks`."""
    attends: list[AttentionFn] = []
    for layer, spec in enumerate(block.attention for block in layers):
        if in_chunks is not None and (given := in_chunks[layer]) is not None:
            attends.append(given)
        elif isinstance(spec, AttentionSpec):
            layer_masks = masks(spec.causal, spec.window, spec.position_bias is not None)
            attends.append(
                padded_attention(spec, queries, keys, layer_masks, None if prefix is None else prefix[layer])
            )
        elif prefix is not None:
            raise UserError(NO_PREFIX)
        else:
            attends.append(_no_attention)
    return attends


def _no_attention(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> Tensor:
    raise ValueError("this attention computes its own scores and does not call `attend`")


def varlen_attentions(layers: Sequence[BlockSpec], batch: Ragged) -> list[AttentionFn]:
    """Each layer's attention inside whole documents through the variable-length kernel."""
    keys = None
    lengths = batch.lengths
    starts = batch.starts
    key_starts = starts
    if batch.shared is not None:
        keys = shared_keys(batch)
        device = batch.tokens.device
        [lengths] = keys.lengths
        starts, key_starts = (
            torch.tensor([0, *accumulate(sizes)], dtype=torch.int32).to(device, non_blocking=True)
            for sizes in (batch.pieces, lengths)
        )
    longest = max(batch.pieces), max(lengths)
    specs = [layer.attention for layer in layers if isinstance(layer.attention, AttentionSpec)]
    return [varlen_attention(spec, starts, longest[0], key_starts, longest[1], keys=keys) for spec in specs]


def _token_sizes(batch: Ragged, offset: int) -> Tensor:
    """Tokens of the document of each token, prefix included; of the longest one for a shared prompt's tokens, [N]."""
    sizes = batch.sizes
    pieces = batch.sizes
    if batch.shared is not None:
        longest = [0] * len(batch.shared.lengths)
        for prompt, length in zip(batch.shared.of_documents, batch.lengths, strict=True):
            if prompt is not None:
                longest[prompt] = max(longest[prompt], length)
        sizes, pieces = (torch.tensor(x).to(batch.tokens.device) for x in ([*longest, *batch.lengths], batch.pieces))
    return sizes.repeat_interleave(pieces, output_size=len(batch.tokens)) + offset


def decoding_contexts(layers: Sequence[BlockSpec], modules: PositionModules, cache: Cache) -> list[AttentionContext]:
    """Each layer's context for one new token per row of the cache, at position `cache.lengths`."""
    check_original_context(cache, layers)
    positions = cache.lengths
    width = decoding_width(cache)
    memory = cache.memory
    slots = cache.places(torch.arange(len(positions), device=positions.device), positions)
    turns = modules.rotations(layers, positions, width, lambda: positions + 1)
    masks = decoding_masks(layers, modules, positions, width, dtype=cache.keys[0].dtype, slots=cache.slots)
    contexts = []
    for layer, (block, turn, mask) in enumerate(zip(layers, turns, masks, strict=True)):
        assert isinstance(block.attention, AttentionSpec)
        attend = filling_attention(cache, layer, slots[layer], cached_attention(cache, layer, block.attention, mask))
        cross = None if memory is None or block.cross is None else cached_cross_attention(memory, layer, block.cross)
        contexts.append(AttentionContext(attend, turn, cross))
    return contexts


def decoding_width(cache: Cache) -> int:
    """Slots that the next step reads: up to the longest row's new token, and on a GPU some more.

    A GPU chooses its kernels, and a graph is captured, for one width; so it grows in steps.
    """
    longest = cache.longest + 1
    return min(-(-longest // WIDTH_STEP) * WIDTH_STEP, cache.capacity) if on_gpu(cache.lengths) else longest


def decoding_masks(
    layers: Sequence[BlockSpec],
    modules: PositionModules,
    positions: Tensor,
    width: int,
    *,
    dtype: torch.dtype | None = None,
    slots: Sequence[int] | None = None,
) -> list[Tensor]:
    """Each layer's mask of a row's slots for one new token per row, at `positions` [B]; broadcast to [B, H, 1, width].

    Args:
        width: tokens of the longest row, the new one included, or more.
        dtype: of masks that are added to the scores; None: they are booleans.
        slots: of each layer, which a longer row fills again from the first on; None: no row is longer.
    """
    last = positions[:, None, None]

    @cached
    def mask(count: int, window: int | None, biased: bool) -> Tensor:
        relative = torch.arange(min(count, width), device=positions.device) - last  # [B, 1, slots]
        if count < width:
            relative = -(-relative % count)  # of the last token that came to the slot
            relative = relative.masked_fill(relative < -last, 1)  # none came yet: the slot is as unseen as the future
        seen = visible(relative, True, window)[:, None]
        if biased and modules.bias is not None:
            return modules.bias(relative).masked_fill(~seen, -torch.inf)
        if dtype is None:
            return seen
        # What the kernel would make of booleans, once for all layers.
        return torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)

    specs = [layer.attention for layer in layers if isinstance(layer.attention, AttentionSpec)]
    counts = [width] * len(specs) if slots is None else slots
    return [mask(count, spec.window, spec.position_bias is not None) for count, spec in zip(counts, specs, strict=True)]


def check_original_context(cache: Cache, layers: Sequence[BlockSpec]) -> None:
    """Refuse a row's first token beyond the original context of LongRoPE scaling (Phi-3).

    The keys of the row have other angles than those of a document of the new length.
    """
    scalings = {getattr(getattr(layer.attention, "rotary", None), "scaling", None) for layer in layers}
    for original in (scaling.original_positions for scaling in scalings if isinstance(scaling, LongScaling)):
        if cache.longest >= original and (cache.lengths == original).any():
            raise UserError(
                f"a document that began within the model's original {original} positions cannot be continued beyond "
                "them, because there all its positions have other angles; shorten the prompt or lower max_new_tokens "
                f"so that both fit into {original}, or give more than {original} tokens to begin with"
            )

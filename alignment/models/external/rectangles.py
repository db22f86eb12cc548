"""Ragged batches in padded rectangles that transformers' classes read, their outputs without the padding, and caches.

Padding is on the right: under causal attention, and in any recurrence, it cannot change a token before it. While
decoding, all rows share one of transformers' caches, left-padded, where that is exact: where the class lets a row have
its own position ids, and every layer is attention. Otherwise the documents are read again at every step: slow, but
always right.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.errors import UserError
from alignment.ragged import Ragged, Seq2Seq, refuse_shared

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

CHEAP_PADDING = 2048  # positions of padding that cost less than one more forward


class VirtualTokens(NamedTuple):
    """A soft prompt (of an encoder-decoder before the source), a prefix (there before the target), or neither."""

    prompt: Tensor | None = None  # [P, E]
    prefix: Tensor | None = None  # keys and values, [layers, 2, P, K, head_dim]

    @property
    def prompt_size(self) -> int:
        """Tokens of the soft prompt."""
        return 0 if self.prompt is None else len(self.prompt)

    @property
    def prefix_size(self) -> int:
        """Tokens of the prefix."""
        return 0 if self.prefix is None else self.prefix.shape[2]

    def inputs(self, inner: "PreTrainedModel", ids: Tensor, mask: Tensor) -> dict[str, Any]:
        """Arguments for the forward of `inner` on a rectangle [B, T], padded on the right, behind these tokens."""
        if self.prompt is not None:
            vectors = inner.get_input_embeddings()(ids)
            prompt = self.prompt.to(vectors.dtype).expand(len(ids), *self.prompt.shape)
            mask = F.pad(mask, (self.prompt_size, 0), value=1)
            return {"inputs_embeds": torch.cat([prompt, vectors], dim=1), "attention_mask": mask}
        if self.prefix is not None:
            mask = F.pad(mask, (self.prefix_size, 0), value=1)
            past = self.decoder_cache(inner, len(ids))
            return {"input_ids": ids, "attention_mask": mask, "past_key_values": past}
        return {"input_ids": ids, "attention_mask": mask}

    def decoder_cache(self, inner: "PreTrainedModel", rows: int) -> "DynamicCache":
        """A cache that holds the prefix, for a decoder to go on from; gradients go through it."""
        from transformers.cache_utils import DynamicCache

        assert self.prefix is not None
        embedding: Any = inner.get_input_embeddings()
        # frozen weights may be of a lower type
        prefix = self.prefix.to(getattr(embedding, "compute_dtype", embedding.weight.dtype))
        layers = prefix.transpose(2, 3)[:, :, None].expand(-1, -1, rows, -1, -1, -1)  # [layers, 2, B, K, P, head_dim]
        return DynamicCache([(keys, values) for keys, values in layers])

    def target_cache(self, inner: "PreTrainedModel", rows: int) -> "EncoderDecoderCache":
        """The same for the decoder of an encoder-decoder, whose cross-attention has nothing before the source."""
        from transformers.cache_utils import DynamicCache, EncoderDecoderCache

        return EncoderDecoderCache(self.decoder_cache(inner, rows), DynamicCache())


NO_VIRTUAL_TOKENS = VirtualTokens()


class PaddedRows(NamedTuple):
    """Some documents of a ragged batch as one rectangle, padded on the right."""

    ids: Tensor  # token ids, the padding token elsewhere, [b, T]
    mask: Tensor  # 1 at tokens, 0 at padding, [b, T]
    segments: Tensor | None  # as `Ragged.segments`, 0 at padding, [b, T]; or None.
    token_index: Tensor  # index in the ragged batch of each token, row by row, [n]


def pad_rows(batch: Ragged, padding_id: int | None, rows: Sequence[int] | None = None) -> PaddedRows:
    """Documents `rows` (None: all) of a ragged batch as one rectangle."""
    refuse_shared(batch, "a model that runs as transformers' class")
    if batch.global_mask is not None:
        raise UserError("global_attention_mask: a model that runs as transformers' class takes none; leave it out")
    rows = range(len(batch.lengths)) if rows is None else rows
    device = batch.tokens.device
    lengths = torch.tensor([batch.lengths[row] for row in rows], device=device)
    columns = torch.arange(int(lengths.max()), device=device)
    index = batch.starts.long()[torch.tensor(list(rows), device=device)][:, None] + columns
    real = columns < lengths[:, None]
    index = index.clamp(max=len(batch.tokens) - 1)
    segments = None if batch.segments is None else batch.segments[index] * real
    return PaddedRows(torch.where(real, batch.tokens[index], padding_id or 0), real.long(), segments, index[real])


def groups_with_little_padding(lengths: Sequence[int], padding_id: int | None = 0) -> list[list[int]]:
    """Row numbers in groups, longest first; at most a fifth of a group's rectangle, or 2048 positions, is padding.

    Nothing is padding where `padding_id` is None.
    """
    groups: list[list[int]] = []
    tokens = 0
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens += lengths[row]
        padding = lengths[groups[-1][0]] * (len(groups[-1]) + 1) - tokens if groups else 0
        if not groups or padding > (0 if padding_id is None else max(CHEAP_PADDING, tokens // 4)):
            groups.append([])
            tokens = lengths[row]
        groups[-1].append(row)
    return groups


def forward_tokens(
    forward: Callable[[PaddedRows, Tensor | None], Tensor],
    batch: Ragged,
    padding_id: int | None,
    token_index: Tensor | None = None,
) -> Tensor:
    """The outputs of `forward` at the tokens `token_index` [n] (None: all) of a ragged batch, [n, ...].

    forward: (rectangle of b rows, columns wanted [c] or None: all) -> [b, T or c, ...].
    """
    wanted = torch.ones_like(batch.tokens, dtype=torch.bool)
    if token_index is not None:
        wanted = torch.zeros_like(wanted).index_fill(0, token_index, True)
    outputs = []
    indices = []
    for rows in groups_with_little_padding(batch.lengths, padding_id):
        padded = pad_rows(batch, padding_id, rows)
        mask = padded.mask
        index = padded.token_index
        here = wanted[index]
        cells = torch.zeros_like(mask, dtype=torch.bool).masked_scatter(mask.bool(), here)  # row by row, like `index`
        columns = None if token_index is None else cells.any(0).nonzero().squeeze(1)
        output = forward(padded, columns)
        outputs.append(output[cells if columns is None or output.shape[1] != len(columns) else cells[:, columns]])
        indices.append(index[here])
    in_order = torch.cat(outputs)[torch.cat(indices).argsort()]
    return in_order if token_index is None else in_order[(wanted.cumsum(0) - 1)[token_index]]


def forward_documents(forward: Callable[[PaddedRows], Tensor], batch: Ragged, padding_id: int | None) -> Tensor:
    """The output of `forward` for each document of a ragged batch, [B, ...]."""
    outputs = []
    order = []
    for rows in groups_with_little_padding(batch.lengths, padding_id):
        outputs.append(forward(pad_rows(batch, padding_id, rows)))
        order += rows
    return torch.cat(outputs)[torch.tensor(order, device=batch.tokens.device).argsort()]


def accepts(inner: "PreTrainedModel", argument: str) -> bool:
    """True where the forward of a transformers model has an argument of this name."""
    return argument in inspect.signature(inner.forward).parameters


def scores_every_token(inner: "PreTrainedModel") -> bool:
    """True for sequence classifiers that apply one linear layer to each hidden state and read it at the last token."""
    return isinstance(getattr(inner, "score", None), nn.Linear)


def run_padded(inner: "PreTrainedModel", virtual: VirtualTokens, rows: PaddedRows, **options: object) -> Any:
    """The output of `inner` on a rectangle behind the virtual tokens."""
    ids, mask, segments, _ = rows
    if accepts(inner, "use_cache"):
        options["use_cache"] = False
    if segments is not None and accepts(inner, "token_type_ids") and getattr(inner.config, "type_vocab_size", 2) > 1:
        options["token_type_ids"] = F.pad(segments, (virtual.prompt_size, 0))  # type 0 for the prompt
    return inner(**virtual.inputs(inner, ids, mask), **options)


# Decoding caches


def can_share_cache(inner: "PreTrainedModel", virtual: VirtualTokens = NO_VIRTUAL_TOKENS) -> bool:
    """True where rows of different lengths may share one cache without changing each other's results."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if not (accepts(inner, "position_ids") and accepts(inner, "past_key_values")):
        return False
    rope = getattr(inner.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # angles that depend on the longest row of the batch
        return False
    # A prefix lies before a row's padding, which windows would count.
    kinds = (DynamicLayer, DynamicSlidingWindowLayer) if virtual.prefix is None else (DynamicLayer,)
    return all(type(layer) in kinds for layer in DynamicCache(config=inner.config).layers)  # none: plain attention


class ExternalCache:
    """Base of the caches.

    Attributes:
        fill: (inner, batch) -> logits [B, V] after each document of the batch, which is read.
        step: (inner, tokens [B]) -> logits [B, V] after one more token of each row.
        reorder: (rows [n]) makes row `rows[i]` the row i; a row may be repeated or dropped.
        capacity: most tokens one document may have.
        lengths: tokens of each row, virtual ones included, [rows].
    """

    fill: Callable[..., Tensor]
    step: Callable[..., Tensor]
    reorder: Callable[[Tensor], None]

    def __init__(self, rows: int, capacity: int, virtual: VirtualTokens = NO_VIRTUAL_TOKENS):
        self.capacity = capacity
        self.lengths = torch.zeros(rows, dtype=torch.long)
        self._virtual = virtual
        self._past: Any = None

    @property
    def rows(self) -> int:
        """Number of documents in the cache."""
        return len(self.lengths)

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. rows: indices, or one boolean per row, [n]."""
        self.reorder(rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows)


class SharedCache(ExternalCache):
    """One of transformers' caches for all rows, which are left-padded in it.

    A soft prompt stands between the padding and the document, a prefix before the padding.
    """

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        from transformers.cache_utils import DynamicCache

        virtual = self._virtual
        width = max(batch.lengths)
        device = batch.tokens.device
        padding = torch.tensor([width - length for length in batch.lengths], device=device)[:, None]
        mask = torch.arange(width, device=device) >= padding
        ids = torch.zeros_like(mask, dtype=torch.long).masked_scatter(mask, batch.tokens)  # row by row, as in the batch
        inputs = {"input_ids": ids}
        if virtual.prompt is not None:
            size = virtual.prompt_size
            prompt = virtual.prompt
            vectors = inner.get_input_embeddings()(F.pad(ids, (size, 0)))
            columns = (padding + torch.arange(size, device=device))[..., None].expand(-1, -1, vectors.shape[-1])
            prompt = prompt.to(vectors.dtype).expand(len(ids), -1, -1)
            inputs = {"inputs_embeds": vectors.scatter(1, columns, prompt)}
            mask = torch.arange(width + size, device=device) >= padding
        no_prefix = virtual.prefix is None
        self._past = DynamicCache(config=inner.config) if no_prefix else virtual.decoder_cache(inner, len(ids))
        self._mask = F.pad(mask.long(), (virtual.prefix_size, 0), value=1)
        self.lengths = self._mask.sum(1)
        positions = (self._mask.cumsum(1) - 1).clamp(min=0)[:, virtual.prefix_size :]
        last_only = {"logits_to_keep": 1} if accepts(inner, "logits_to_keep") else {}
        return self._forward(inner, inputs, positions, **last_only)

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        self._mask = torch.cat([self._mask, torch.ones_like(tokens)[:, None]], dim=1)
        logits = self._forward(inner, {"input_ids": tokens[:, None]}, self.lengths[:, None])
        self.lengths = self.lengths + 1
        return logits

    def _forward(
        self, inner: "PreTrainedModel", inputs: dict[str, Tensor], positions: Tensor, **options: int
    ) -> Tensor:
        output = inner(
            **inputs,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._past,
            use_cache=True,
            **options,
        )
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        self._past.batch_select_indices(rows)
        self._mask = self._mask[rows]
        self.lengths = self.lengths[rows]


class RereadCache(ExternalCache):
    """The documents themselves, read again at every step."""

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        self._ids, mask, _, _ = pad_rows(batch, 0)
        self._own = mask.sum(1)
        return self._forward(inner)

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        longer = torch.cat([self._ids, torch.zeros_like(tokens)[:, None]], dim=1)
        self._ids = longer.scatter(1, self._own[:, None], tokens[:, None])
        self._own = self._own + 1
        return self._forward(inner)

    def _forward(self, inner: "PreTrainedModel") -> Tensor:
        virtual = self._virtual
        self.lengths = self._own + virtual.prompt_size + virtual.prefix_size
        mask = torch.arange(self._ids.shape[1], device=self._ids.device) < self._own[:, None]
        logits = inner(**virtual.inputs(inner, self._ids, mask.long()), use_cache=False).logits
        return logits[torch.arange(len(logits), device=logits.device), virtual.prompt_size + self._own - 1]

    def reorder(self, rows: Tensor) -> None:
        self._ids = self._ids[rows]
        self._own = self._own[rows]
        self.lengths = self.lengths[rows]


class Seq2SeqCache(ExternalCache):
    """An encoder's output and its decoder's cache; `lengths` are of targets, which begin with equally many tokens."""

    def fill(self, inner: "PreTrainedModel", batch: Seq2Seq) -> Tensor:
        if len(set(batch.decoder.lengths)) > 1:
            raise ValueError("decoding with this class begins with targets of one length, a start token each")
        virtual = self._virtual
        ids, mask, _, _ = pad_rows(batch.encoder, inner.config.pad_token_id or 0)
        self._past = None if virtual.prefix is None else virtual.target_cache(inner, len(ids))
        source = virtual._replace(prefix=None).inputs(inner, ids, mask)
        self._source_mask = source["attention_mask"]
        self._encoded = inner.get_encoder()(**source).last_hidden_state
        self.lengths = torch.full((len(ids),), virtual.prefix_size, dtype=torch.long, device=ids.device)
        return self._forward(inner, batch.decoder.tokens.view(len(ids), -1))

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        return self._forward(inner, tokens[:, None])

    def _forward(self, inner: "PreTrainedModel", ids: Tensor) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        output = inner(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded),
            attention_mask=self._source_mask,
            decoder_input_ids=ids,
            past_key_values=self._past,
            use_cache=True,
        )
        self._past = output.past_key_values
        self.lengths = self.lengths + ids.shape[1]
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        for part in (self._past.self_attention_cache, self._past.cross_attention_cache):
            part.batch_select_indices(rows)
        self._encoded = self._encoded[rows]
        self._source_mask = self._source_mask[rows]
        self.lengths = self.lengths[rows]

"""Decoding caches of transformers' classes.

All rows share one of transformers' caches where that is exact: where the class lets a left-padded row have its own
position ids, and every layer is attention. Otherwise the documents are stored and read again at every step, which is
slow but right for every architecture.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.errors import UserError
from alignment.models.external.padding import accepts, pad_rows
from alignment.models.external.virtual_tokens import NO_VIRTUAL_TOKENS, VirtualTokens
from alignment.ragged import Ragged, Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def can_share_cache(inner: "PreTrainedModel", virtual: VirtualTokens = NO_VIRTUAL_TOKENS) -> bool:
    """Whether rows of different lengths may share one cache without changing each other's results."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if not (accepts(inner, "position_ids") and accepts(inner, "past_key_values")):
        return False
    rope = getattr(inner.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # angles that depend on the longest row of the batch
        return False
    layers = DynamicCache(config=inner.config).layers  # empty where all layers are plain attention
    if virtual.prefix is not None:  # lies before a row's padding, which windows would count
        return all(type(layer) is DynamicLayer for layer in layers)
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def check_capacity(capacity: int, limit: int) -> None:
    """Refuse to decode beyond the last position.

    Raises:
        UserError: `capacity` tokens are more than the model's `limit`.
    """
    if capacity > limit:
        raise UserError(
            f"{capacity} tokens (prompt, prefix and new tokens) do not fit the model's {limit} positions; lower "
            "max_new_tokens or shorten the prompts"
        )


class ExternalCache(ABC):
    """Base of the caches.

    Attributes:
        capacity: most tokens one document may have.
        lengths: tokens of each row, virtual ones included, [rows].
    """

    def __init__(self, rows: int, capacity: int, virtual: VirtualTokens = NO_VIRTUAL_TOKENS):
        self.capacity, self.lengths = capacity, torch.zeros(rows, dtype=torch.long)
        self._virtual = virtual

    @property
    def rows(self) -> int:
        """Number of documents in the cache."""
        return len(self.lengths)

    @abstractmethod
    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        """Append one token per row [B] and return the logits [B, V] after it."""

    @abstractmethod
    def reorder(self, rows: Tensor) -> None:
        """Make row `rows[i]` the row i; a row may be repeated or dropped. rows: indices, [n]."""

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order. rows: indices, or one boolean per row, [n]."""
        self.reorder(rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows)


class SharedCache(ExternalCache):
    """One of transformers' caches for all rows, which are left-padded in it.

    A soft prompt stands between the padding and the document, a prefix before the padding.
    """

    def __init__(self, rows: int, capacity: int, virtual: VirtualTokens = NO_VIRTUAL_TOKENS):
        super().__init__(rows, capacity, virtual)
        self._mask = torch.empty(rows, 0, dtype=torch.long)
        self._past: Any = None

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        """Read the documents and return the logits [B, V] after each."""
        from transformers.cache_utils import DynamicCache

        virtual, width, device = self._virtual, max(batch.lengths), batch.tokens.device
        columns = torch.tensor([width - length + i for length in batch.lengths for i in range(length)], device=device)
        rows = torch.repeat_interleave(torch.tensor(batch.lengths)).to(device)
        ids = torch.zeros(len(batch.lengths), width, dtype=torch.long, device=device)
        ids[rows, columns] = batch.tokens
        mask = torch.zeros_like(ids)
        mask[rows, columns] = 1
        if virtual.prefix is None:
            self._past = DynamicCache(config=inner.config)
        else:
            self._past = virtual.decoder_cache(inner, len(ids))
            mask = torch.cat([mask.new_ones(len(ids), virtual.prefix_size), mask], dim=1)
        inputs = {"input_ids": ids}
        if virtual.prompt is not None:
            inputs, mask = self._behind_prompt(inner, ids, mask)
        self._mask = mask
        self.lengths = mask.sum(1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, virtual.prefix_size :]
        last_only = {"logits_to_keep": 1} if accepts(inner, "logits_to_keep") else {}
        return self._forward(inner, inputs, positions, **last_only)

    def _behind_prompt(self, inner: "PreTrainedModel", ids: Tensor, mask: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Vectors of left-padded rows with the soft prompt before each document, and their mask."""
        prompt, size = self._virtual.prompt, self._virtual.prompt_size
        assert prompt is not None
        padding = (mask == 0).sum(1)[:, None]
        columns = padding + torch.arange(size, device=ids.device)
        vectors = inner.get_input_embeddings()(F.pad(ids, (size, 0)))
        vectors = vectors.scatter(
            1, columns[..., None].expand(-1, -1, vectors.shape[-1]), prompt.to(vectors.dtype).expand(len(ids), -1, -1)
        )
        behind = torch.arange(ids.shape[1] + size, device=ids.device) >= padding
        return {"inputs_embeds": vectors}, behind.long()

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        """Append one token per row [B] and return the logits [B, V] after it."""
        self._mask = torch.cat([self._mask, torch.ones_like(tokens)[:, None]], dim=1)
        logits = self._forward(inner, {"input_ids": tokens[:, None]}, self.lengths[:, None])
        self.lengths = self.lengths + 1
        return logits

    def _forward(
        self, inner: "PreTrainedModel", inputs: dict[str, Tensor], positions: Tensor, **options: int
    ) -> Tensor:
        output = inner(
            **inputs, attention_mask=self._mask, position_ids=positions, past_key_values=self._past, use_cache=True,
            **options,
        )  # fmt: skip
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Make row `rows[i]` the row i; a row may be repeated or dropped. rows: indices, [n]."""
        self._past.batch_select_indices(rows)
        self._mask, self.lengths = self._mask[rows], self.lengths[rows]


class RereadCache(ExternalCache):
    """The documents themselves, read again at every step."""

    def __init__(self, rows: int, capacity: int, virtual: VirtualTokens = NO_VIRTUAL_TOKENS):
        super().__init__(rows, capacity, virtual)
        self._ids = torch.empty(rows, 0, dtype=torch.long)

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        """Read the documents and return the logits [B, V] after each."""
        self._ids, mask, _, _ = pad_rows(batch, 0)
        self.lengths = mask.sum(1) + self._virtual_size
        return self._forward(inner)

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        """Append one token per row [B] and return the logits [B, V] after it."""
        longer = torch.cat([self._ids, torch.zeros_like(tokens)[:, None]], dim=1)
        self._ids = longer.scatter(1, (self.lengths - self._virtual_size)[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self._forward(inner)

    def _forward(self, inner: "PreTrainedModel") -> Tensor:
        own_lengths = self.lengths - self._virtual_size
        mask = torch.arange(self._ids.shape[1], device=self._ids.device) < own_lengths[:, None]
        logits = inner(**self._virtual.inputs(inner, self._ids, mask.long()), use_cache=False).logits
        last = self._virtual.prompt_size + own_lengths - 1
        return logits[torch.arange(len(logits), device=logits.device), last]

    @property
    def _virtual_size(self) -> int:
        return self._virtual.prompt_size + self._virtual.prefix_size

    def reorder(self, rows: Tensor) -> None:
        """Make row `rows[i]` the row i; a row may be repeated or dropped. rows: indices, [n]."""
        self._ids, self.lengths = self._ids[rows], self.lengths[rows]


class EncoderDecoderCache(ExternalCache):
    """The encoder's output and the decoder's cache. All targets begin with the same number of tokens.

    Attributes:
        capacity: most tokens one target may have.
        lengths: target tokens of each row, a prefix included, [rows].
    """

    def __init__(self, rows: int, capacity: int, virtual: VirtualTokens = NO_VIRTUAL_TOKENS):
        super().__init__(rows, capacity, virtual)
        self._past: Any = None

    def fill(self, inner: "PreTrainedModel", batch: Seq2Seq) -> Tensor:
        """Read sources and targets and return the logits [B, V] after each target."""
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
        """Append one token per row [B] and return the logits [B, V] after it."""
        return self._forward(inner, tokens[:, None])

    def _forward(self, inner: "PreTrainedModel", ids: Tensor) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        output = inner(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded), attention_mask=self._source_mask,
            decoder_input_ids=ids, past_key_values=self._past, use_cache=True,
        )  # fmt: skip
        self._past, self.lengths = output.past_key_values, self.lengths + ids.shape[1]
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Make row `rows[i]` the row i; a row may be repeated or dropped. rows: indices, [n]."""
        for part in (self._past.self_attention_cache, self._past.cross_attention_cache):
            part.batch_select_indices(rows)
        self._encoded, self._source_mask = self._encoded[rows], self._source_mask[rows]
        self.lengths = self.lengths[rows]

"""Decoding caches of transformers' classes.

All rows share one of transformers' caches where that is exact: where the class lets a left-padded row have its own
position ids, and every layer is attention. Otherwise the documents are stored and read again at every step, which is
slow but right for every architecture.
"""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.models.external.padding import accepts, pad_rows
from alignment.ragged import Ragged, Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def can_share_cache(inner: "PreTrainedModel") -> bool:
    """Whether rows of different lengths may share one cache without changing each other's results."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if not (accepts(inner, "position_ids") and accepts(inner, "past_key_values")):
        return False
    rope = getattr(inner.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # angles that depend on the longest row of the batch
        return False
    layers = DynamicCache(config=inner.config).layers  # empty where all layers are plain attention
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def check_capacity(capacity: int, limit: int) -> None:
    """Refuse to decode beyond the last position.

    Raises:
        UserError: `capacity` tokens are more than the model's `limit`.
    """
    if capacity > limit:
        raise UserError(
            f"{capacity} tokens (prompt and new tokens) do not fit the model's {limit} positions; lower "
            "max_new_tokens or shorten the prompts"
        )


class ExternalCache(ABC):
    """Base of the caches.

    Attributes:
        capacity: most tokens one document may have.
        lengths: tokens of each row, [rows].
    """

    def __init__(self, rows: int, capacity: int):
        self.capacity, self.lengths = capacity, torch.zeros(rows, dtype=torch.long)

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
    """One of transformers' caches for all rows, which are left-padded in it."""

    def __init__(self, rows: int, capacity: int):
        super().__init__(rows, capacity)
        self._mask = torch.empty(rows, 0, dtype=torch.long)
        self._past: Any = None

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        """Read the documents and return the logits [B, V] after each."""
        from transformers.cache_utils import DynamicCache

        self._past = DynamicCache(config=inner.config)
        width = max(batch.lengths)
        device = batch.tokens.device
        columns = torch.tensor([width - length + i for length in batch.lengths for i in range(length)], device=device)
        rows = torch.repeat_interleave(torch.tensor(batch.lengths)).to(device)
        ids = torch.zeros(len(batch.lengths), width, dtype=torch.long, device=device)
        ids[rows, columns] = batch.tokens
        self._mask = torch.zeros_like(ids)
        self._mask[rows, columns] = 1
        self.lengths = self._mask.sum(1)
        last_only = {"logits_to_keep": 1} if accepts(inner, "logits_to_keep") else {}
        return self._forward(inner, ids, (self._mask.cumsum(1) - 1).clamp(min=0), **last_only)

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        """Append one token per row [B] and return the logits [B, V] after it."""
        self._mask = torch.cat([self._mask, torch.ones_like(tokens)[:, None]], dim=1)
        logits = self._forward(inner, tokens[:, None], self.lengths[:, None])
        self.lengths = self.lengths + 1
        return logits

    def _forward(self, inner: "PreTrainedModel", ids: Tensor, positions: Tensor, **options: int) -> Tensor:
        output = inner(
            input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._past,
            use_cache=True, **options,
        )  # fmt: skip
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Make row `rows[i]` the row i; a row may be repeated or dropped. rows: indices, [n]."""
        self._past.batch_select_indices(rows)
        self._mask, self.lengths = self._mask[rows], self.lengths[rows]


class RereadCache(ExternalCache):
    """The documents themselves, read again at every step."""

    def __init__(self, rows: int, capacity: int):
        super().__init__(rows, capacity)
        self._ids = torch.empty(rows, 0, dtype=torch.long)

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        """Read the documents and return the logits [B, V] after each."""
        self._ids, mask, _, _ = pad_rows(batch, 0)
        self.lengths = mask.sum(1)
        return self._forward(inner)

    def step(self, inner: "PreTrainedModel", tokens: Tensor) -> Tensor:
        """Append one token per row [B] and return the logits [B, V] after it."""
        longer = torch.cat([self._ids, torch.zeros_like(tokens)[:, None]], dim=1)
        self._ids = longer.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self._forward(inner)

    def _forward(self, inner: "PreTrainedModel") -> Tensor:
        mask = torch.arange(self._ids.shape[1], device=self._ids.device) < self.lengths[:, None]
        logits = inner(input_ids=self._ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[torch.arange(len(logits), device=logits.device), self.lengths - 1]

    def reorder(self, rows: Tensor) -> None:
        """Make row `rows[i]` the row i; a row may be repeated or dropped. rows: indices, [n]."""
        self._ids, self.lengths = self._ids[rows], self.lengths[rows]


class EncoderDecoderCache(ExternalCache):
    """The encoder's output and the decoder's cache. All targets begin with the same number of tokens.

    Attributes:
        capacity: most tokens one target may have.
        lengths: target tokens of each row, [rows].
    """

    def __init__(self, rows: int, capacity: int):
        super().__init__(rows, capacity)
        self._past: Any = None

    def fill(self, inner: "PreTrainedModel", batch: Seq2Seq) -> Tensor:
        """Read sources and targets and return the logits [B, V] after each target."""
        if len(set(batch.decoder.lengths)) > 1:
            raise ValueError("decoding with this class begins with targets of one length, a start token each")
        self._past = None
        ids, self._source_mask, _, _ = pad_rows(batch.encoder, inner.config.pad_token_id or 0)
        self._encoded = inner.get_encoder()(input_ids=ids, attention_mask=self._source_mask).last_hidden_state
        self.lengths = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
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

"""Decoding caches of transformers' classes.

All rows share one of transformers' caches where that is exact: where the class lets a left-padded row have its own
position ids, and every layer is attention. Otherwise the documents are stored and read again at every step, which is
slow but right for every architecture.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.external.padding import NO_VIRTUAL_TOKENS, VirtualTokens, accepts, pad_rows
from alignment.ragged import Ragged, Seq2Seq

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def can_share_cache(inner: "PreTrainedModel", virtual: VirtualTokens = NO_VIRTUAL_TOKENS) -> bool:
    """True where rows of different lengths may share one cache without changing each other's results."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if not (accepts(inner, "position_ids") and accepts(inner, "past_key_values")):
        return False
    rope = getattr(inner.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # angles that depend on the longest row of the batch
        return False
    kinds: list[type] = [DynamicLayer]
    if virtual.prefix is None:  # one lies before a row's padding, which windows would count
        kinds.append(DynamicSlidingWindowLayer)
    return all(type(layer) in kinds for layer in DynamicCache(config=inner.config).layers)  # none: plain attention


class ExternalCache(ABC):
    """Base of the caches.

    Attributes:
        fill: (inner, batch) -> logits [B, V] after each document of the batch, which is read.
        capacity: most tokens one document may have.
        lengths: tokens of each row, virtual ones included, [rows].
    """

    fill: Callable[..., Tensor]

    def __init__(self, rows: int, capacity: int, virtual: VirtualTokens = NO_VIRTUAL_TOKENS):
        self.capacity, self.lengths = capacity, torch.zeros(rows, dtype=torch.long)
        self._virtual = virtual
        self._past: Any = None

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

    def fill(self, inner: "PreTrainedModel", batch: Ragged) -> Tensor:
        from transformers.cache_utils import DynamicCache

        virtual, width, device = self._virtual, max(batch.lengths), batch.tokens.device
        padding = torch.tensor([width - length for length in batch.lengths], device=device)[:, None]
        mask = torch.arange(width, device=device) >= padding
        ids = torch.zeros_like(mask, dtype=torch.long).masked_scatter(mask, batch.tokens)  # row by row, as in the batch
        inputs = {"input_ids": ids}
        if virtual.prompt is not None:
            size, prompt = virtual.prompt_size, virtual.prompt
            vectors = inner.get_input_embeddings()(F.pad(ids, (size, 0)))
            columns = (padding + torch.arange(size, device=device))[..., None].expand(-1, -1, vectors.shape[-1])
            prompt = prompt.to(vectors.dtype).expand(len(ids), -1, -1)
            inputs = {"inputs_embeds": vectors.scatter(1, columns, prompt)}
            mask = torch.arange(width + size, device=device) >= padding
        if virtual.prefix is None:
            self._past = DynamicCache(config=inner.config)
        else:
            self._past = virtual.decoder_cache(inner, len(ids))
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
            **inputs, attention_mask=self._mask, position_ids=positions, past_key_values=self._past, use_cache=True,
            **options,
        )  # fmt: skip
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        self._past.batch_select_indices(rows)
        self._mask, self.lengths = self._mask[rows], self.lengths[rows]


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
        self._ids, self._own, self.lengths = self._ids[rows], self._own[rows], self.lengths[rows]


class Seq2SeqCache(ExternalCache):
    """An encoder's output and the cache of its decoder; `lengths` are of the targets, which begin with equally many tokens."""

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
            encoder_outputs=BaseModelOutput(last_hidden_state=self._encoded), attention_mask=self._source_mask,
            decoder_input_ids=ids, past_key_values=self._past, use_cache=True,
        )  # fmt: skip
        self._past, self.lengths = output.past_key_values, self.lengths + ids.shape[1]
        return output.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        for part in (self._past.self_attention_cache, self._past.cross_attention_cache):
            part.batch_select_indices(rows)
        self._encoded, self._source_mask = self._encoded[rows], self._source_mask[rows]
        self.lengths = self.lengths[rows]

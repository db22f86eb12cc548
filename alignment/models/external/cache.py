"""What decoding with transformers' classes remembers. All rows share one of transformers' caches where that is exact.

It is exact where the class lets a left-padded row say its positions, and where every layer is attention. Where not, the
documents are kept and read again at every step: slow, and the same for every architecture.
"""

from typing import Any

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.models.external.padding import rectangle, takes
from alignment.ragged import Ragged, Seq2Seq


def shares_well(inner: Any) -> bool:
    """Whether rows of different lengths may share one cache without touching each other's results."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if not (takes(inner, "position_ids") and takes(inner, "past_key_values")):
        return False
    rope = getattr(inner.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # angles that change with the longest row alive
        return False
    layers = DynamicCache(config=inner.config).layers  # none yet where all of them are plain
    return all(type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) for layer in layers)


def check_capacity(capacity: int, limit: int) -> None:
    """Refuse to decode past the last position.

    Raises:
        UserError: `capacity` tokens are more than the model's `limit`.
    """
    if capacity > limit:
        raise UserError(
            f"{capacity} tokens (prompt and new tokens) do not fit the model's {limit} positions; lower "
            "max_new_tokens or shorten the prompts"
        )


def picked(rows: Tensor) -> Tensor:
    """Row numbers, of numbers or of one boolean per row."""
    return rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows


class SharedCache:
    """One of transformers' caches for all rows, which lie left-padded in it.

    Attributes:
        capacity: most tokens one document may have.
        lengths: tokens of each row, [rows].
    """

    def __init__(self, rows: int, capacity: int):
        self.capacity, self.lengths = capacity, torch.zeros(rows, dtype=torch.long)
        self._mask = torch.empty(rows, 0, dtype=torch.long)
        self._past: Any = None

    @property
    def rows(self) -> int:
        """Documents held."""
        return len(self.lengths)

    def fill(self, inner: Any, batch: Ragged) -> Tensor:
        """Read the documents; logits [B, V] after each."""
        from transformers.cache_utils import DynamicCache

        self._past = DynamicCache(config=inner.config)
        width = max(batch.lengths)
        places = [width - length + i for length in batch.lengths for i in range(length)]
        rows = torch.repeat_interleave(torch.tensor(batch.lengths)).to(batch.tokens.device)
        columns = torch.tensor(places, device=batch.tokens.device)
        ids = torch.zeros(len(batch.lengths), width, dtype=torch.long, device=batch.tokens.device)
        ids[rows, columns] = batch.tokens
        self._mask = torch.zeros_like(ids)
        self._mask[rows, columns] = 1
        self.lengths = self._mask.sum(1)
        last_only = {"logits_to_keep": 1} if takes(inner, "logits_to_keep") else {}
        return self._read(inner, ids, (self._mask.cumsum(1) - 1).clamp(min=0), **last_only)

    def step(self, inner: Any, tokens: Tensor) -> Tensor:
        """Read one more token per row [B]; logits [B, V] after it."""
        self._mask = torch.cat([self._mask, torch.ones_like(tokens)[:, None]], dim=1)
        logits = self._read(inner, tokens[:, None], self.lengths[:, None])
        self.lengths = self.lengths + 1
        return logits

    def _read(self, inner: Any, ids: Tensor, positions: Tensor, **options: int) -> Tensor:
        out = inner(
            input_ids=ids, attention_mask=self._mask, position_ids=positions, past_key_values=self._past,
            use_cache=True, **options,
        )  # fmt: skip
        return out.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """Put row `rows[i]` at place i; a row may come several times, or not at all. rows: indices, [n]."""
        self._past.batch_select_indices(rows)
        self._mask, self.lengths = self._mask[rows], self.lengths[rows]

    def keep(self, rows: Tensor) -> None:
        """Hold only these rows from now on, in this order; rows: indices, or one boolean per row, [n]."""
        self.reorder(picked(rows))


class RereadCache:
    """The documents themselves, read anew at every step.

    Attributes:
        capacity: most tokens one document may have.
        lengths: tokens of each row, [rows].
    """

    def __init__(self, rows: int, capacity: int):
        self.capacity, self.lengths = capacity, torch.zeros(rows, dtype=torch.long)
        self._ids = torch.empty(rows, 0, dtype=torch.long)

    rows = SharedCache.rows

    def fill(self, inner: Any, batch: Ragged) -> Tensor:
        """Read the documents; logits [B, V] after each."""
        self._ids, mask, _, _ = rectangle(batch, 0)
        self.lengths = mask.sum(1)
        return self._read(inner)

    def step(self, inner: Any, tokens: Tensor) -> Tensor:
        """Read one more token per row [B]; logits [B, V] after it."""
        longer = torch.cat([self._ids, torch.zeros_like(tokens)[:, None]], dim=1)
        self._ids = longer.scatter(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self._read(inner)

    def _read(self, inner: Any) -> Tensor:
        mask = torch.arange(self._ids.shape[1], device=self._ids.device) < self.lengths[:, None]
        logits = inner(input_ids=self._ids, attention_mask=mask.long(), use_cache=False).logits
        return logits[torch.arange(len(logits), device=logits.device), self.lengths - 1]

    def reorder(self, rows: Tensor) -> None:
        """As `SharedCache.reorder`."""
        self._ids, self.lengths = self._ids[rows], self.lengths[rows]

    keep = SharedCache.keep


class PairCache:
    """An encoder's output and the decoder's cache; all targets of one length, as beginnings of responses are.

    Attributes:
        capacity: most tokens one target may have.
        lengths: target tokens of each row, [rows].
    """

    def __init__(self, rows: int, capacity: int):
        self.capacity, self.lengths = capacity, torch.zeros(rows, dtype=torch.long)
        self._past: Any = None

    rows = SharedCache.rows

    def fill(self, inner: Any, batch: Seq2Seq) -> Tensor:
        """Read sources and targets; logits [B, V] after each target."""
        if len(set(batch.decoder.lengths)) > 1:
            raise ValueError("decoding with this class begins with targets of one length, a start token each")
        self._past = None
        ids, self._source_mask, _, _ = rectangle(batch.encoder, inner.config.pad_token_id or 0)
        self._memory = inner.get_encoder()(input_ids=ids, attention_mask=self._source_mask).last_hidden_state
        self.lengths = torch.zeros(len(ids), dtype=torch.long, device=ids.device)
        return self._read(inner, batch.decoder.tokens.view(len(ids), -1))

    def step(self, inner: Any, tokens: Tensor) -> Tensor:
        """Read one more token per row [B]; logits [B, V] after it."""
        return self._read(inner, tokens[:, None])

    def _read(self, inner: Any, ids: Tensor) -> Tensor:
        from transformers.modeling_outputs import BaseModelOutput

        out = inner(
            encoder_outputs=BaseModelOutput(last_hidden_state=self._memory), attention_mask=self._source_mask,
            decoder_input_ids=ids, past_key_values=self._past, use_cache=True,
        )  # fmt: skip
        self._past, self.lengths = out.past_key_values, self.lengths + ids.shape[1]
        return out.logits[:, -1]

    def reorder(self, rows: Tensor) -> None:
        """As `SharedCache.reorder`."""
        for part in (self._past.self_attention_cache, self._past.cross_attention_cache):
            part.batch_select_indices(rows)
        self._memory, self._source_mask = self._memory[rows], self._source_mask[rows]
        self.lengths = self.lengths[rows]

    keep = SharedCache.keep

"""Keys and values already seen, one row per document being continued. A prefix is a cache row that starts non-empty.

The slot of a token is its place in the document, prefix first; nothing is moved when rows have different lengths. A
layer with a window has as many slots as the window, and a token beyond them takes the slot of the one that falls out of
it. Decoding spends its time on reading them back, so a head's slots lie together.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.ragged import runs


class CachedDocument(NamedTuple):
    """A copy of a row: each layer's keys and values [K, length, head_dim], of the last tokens where it has a window."""

    keys: list[Tensor]
    values: list[Tensor]
    length: int


class CrossAttentionCache:
    """Keys and values of encoded documents, one row per document being continued.

    Attributes:
        keys, values: one [rows, K, S, head_dim] per layer.
        mask: True at real tokens, [rows, 1, 1, S].
        owners: index of the encoded document in each row, [rows].
    """

    def __init__(self, mask: Tensor):
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.mask = mask
        self.owners = torch.arange(len(mask), device=mask.device)

    def append(self, key: Tensor, value: Tensor, lengths: Sequence[int]) -> None:
        """Add the keys and values of the next layer, [M, K, head_dim], for documents of these lengths."""
        for store, x in ((self.keys, key), (self.values, value)):
            rows = torch.nn.utils.rnn.pad_sequence(list(x.split(list(lengths))), batch_first=True)
            store.append(rows.transpose(1, 2).contiguous())

    def select(self, rows: Tensor) -> None:
        """Hold these rows from now on, in this order; a row may come more than once."""
        owners = self.owners[rows]
        # Reordered beams have the same source: comparing costs a GPU less than copying keys and values.
        if torch.equal(owners, self.owners):
            return
        self.owners = owners
        self.mask = self.mask[rows]
        self.keys = [x[rows] for x in self.keys]
        self.values = [x[rows] for x in self.values]


class TokenSlots(NamedTuple):
    """Addresses for `Cache.write` of the heads of n tokens [n * K], and the tokens' indices [n]; None: all in turn."""

    addresses: Tensor
    tokens: Tensor | None = None


class Cache:
    """Preallocated keys and values of every layer.

    Attributes:
        capacity: most tokens one document may have.
        windows: most tokens that each layer keeps of a document; None: all.
        keys, values: one [rows, K, slots, head_dim] per layer; more rows than documents may be allocated.
        lengths: filled slots of each row, [rows].
        longest: the largest of `lengths`, as a plain number; after `reorder` perhaps more than that.
        memory: an encoder's states as keys and values, where the decoder has cross-attention.
    """

    def __init__(
        self,
        layers: int,
        rows: int,
        capacity: int,
        key_value_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        windows: Sequence[int | None] | None = None,
    ):
        self.capacity = capacity
        self.windows = [None] * layers if windows is None else windows
        shapes = [(rows, key_value_heads, slots, head_dim) for slots in self._slots(capacity)]
        # Zeros, not uninitialized memory: a masked slot is multiplied by 0, and 0 * NaN is NaN.
        self.keys, self.values = ([torch.zeros(x, dtype=dtype, device=device) for x in shapes] for _ in range(2))
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.memory: CrossAttentionCache | None = None

    @property
    def rows(self) -> int:
        """Documents held."""
        return len(self.lengths)

    @property
    def slots(self) -> list[int]:
        """Tokens of a document that each layer has room for."""
        return self._slots(self.capacity)

    def _slots(self, capacity: int) -> list[int]:
        return [capacity if window is None else min(window, capacity) for window in self.windows]

    def places(self, rows: Tensor, positions: Tensor, lengths: Sequence[int] = (1,)) -> list[TokenSlots]:
        """Each layer's slots of tokens at `rows` [n] and `positions` [n], successive runs of `lengths` in one row each.

        Of a run that is longer than a layer has slots the last tokens stay.
        """
        heads = self.keys[0].shape[1]
        heads_of_rows = rows[:, None] * heads + torch.arange(heads, device=rows.device)
        made: dict[int, TokenSlots] = {}
        for slots in set(self.slots):
            places = positions % slots if slots < self.capacity else positions
            addresses = heads_of_rows * slots + places[:, None]
            tokens = None
            if max(lengths) > slots:
                kept = [min(length, slots) for length in lengths]
                firsts = [end - count for end, count in zip(accumulate(lengths), kept, strict=True)]
                tokens = runs(firsts, kept).to(rows.device, non_blocking=True)
                addresses = addresses[tokens]
            made[slots] = TokenSlots(addresses.flatten(), tokens)
        return [made[slots] for slots in self.slots]

    def write(self, layer: int, slots: TokenSlots, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, K, head_dim] of tokens into their slots."""
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            kept = new if slots.tokens is None else new[slots.tokens]
            where = slots.addresses.view(kept.shape[:2])
            store.flatten(0, 2).index_put_((where,), kept.to(store.dtype))

    def read(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` slots of every row, [rows, K, width, head_dim], without a copy."""
        return self.keys[layer][: self.rows, :, :width], self.values[layer][: self.rows, :, :width]

    def reserve(self, rows: int, capacity: int) -> None:
        """Hold `rows` documents (at least those held now; the new ones are empty) of up to `capacity` tokens each."""
        allocated = max(rows, len(self.keys[0]))
        if allocated > len(self.keys[0]) or capacity > self.capacity:
            self.capacity = max(capacity, self.capacity)
            used = self.rows
            for stores in (self.keys, self.values):
                for layer, (store, slots) in enumerate(zip(stores, self.slots, strict=True)):
                    width = min(self.longest, store.shape[2])
                    wider = store.new_zeros(allocated, store.shape[1], slots, store.shape[3])
                    wider[:used, :, :width] = store[:used, :, :width]
                    stores[layer] = wider
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(rows - self.rows)])

    def copy(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """Make rows `targets` [n] copies of rows `sources` [n], none of them a target, with up to `width` tokens."""
        self._copy(sources, targets, width)
        self.lengths[targets] = self.lengths[sources]

    def _copy(self, sources: Tensor, targets: Tensor, width: int) -> None:
        for store in (*self.keys, *self.values):
            store[targets, :, :width] = store[sources, :, :width]

    def save(self, row: int, length: int) -> CachedDocument:
        """A copy of a row of `length` tokens; not of its beginning, which a layer with a window may no longer have."""
        keys, values = ([store[row, :, :length].clone() for store in stores] for stores in (self.keys, self.values))
        return CachedDocument(keys, values, length)

    def load(self, row: int, document: CachedDocument) -> None:
        """Put a saved document into a row."""
        for store, part in zip((*self.keys, *self.values), (*document.keys, *document.values), strict=True):
            store[row, :, : part.shape[1]] = part
        self.lengths[row] = document.length
        self.longest = max(self.longest, document.length)

    def keep(self, rows: Tensor) -> None:
        """Hold only these rows from now on, in this order.

        Args:
            rows: indices without repetition, or one boolean per row; [n]. Those that stay where they are cost nothing
                if the indices lie on the CPU.
        """
        rows = rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows
        device = self.lengths.device
        targets = torch.arange(len(rows), device=rows.device)
        sources = rows
        if not rows.is_cuda:
            moved = (rows != targets).nonzero().squeeze(1)
            sources = rows[moved].to(device)
            targets = moved.to(device)
        if len(targets):
            self._copy(sources, targets, self.longest)
        self._set_rows(rows.to(device))
        self.longest = int(self.lengths.max()) if len(rows) else 0

    def reorder(self, rows: Tensor) -> None:
        """Put row `rows[i]` at position i, for all rows at once; a row may come several times, or not at all.

        For beam search, where two beams may continue the same one. Only rows that change are copied, so a hypothesis
        that stays where it is costs nothing.

        Args:
            rows: indices, [n]; n need not be the number of rows held now.
        """
        dropped = len(rows) != self.rows  # the search is done with whole documents
        if dropped or rows.is_cuda:  # there, asking which rows change would stall the GPU
            for stores in (self.keys, self.values):
                for layer, store in enumerate(stores):
                    stores[layer] = store[rows]
        else:
            moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
            self._copy(rows[moved], moved, self.longest)
        self._set_rows(rows)
        if dropped:
            self.longest = int(self.lengths.max()) if len(rows) else 0

    def _set_rows(self, rows: Tensor) -> None:
        self.lengths = self.lengths[rows]
        if self.memory is not None:
            self.memory.select(rows)

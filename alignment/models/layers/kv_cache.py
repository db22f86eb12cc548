"""Keys and values already seen, one row per document being continued. A prefix is a cache row that starts non-empty.

The slot of a token is its place in the document, prefix first; nothing is moved when rows have different lengths.
Decoding spends its time on reading them back, so a head's slots lie together.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class CachedDocument(NamedTuple):
    """A copy of a row: for each layer keys and values [K, length, head_dim]."""

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
        self.owners, self.mask = owners, self.mask[rows]
        self.keys = [x[rows] for x in self.keys]
        self.values = [x[rows] for x in self.values]


class Cache:
    """Preallocated keys and values of every layer.

    Attributes:
        keys, values: one [rows, K, capacity, head_dim] per layer; more rows than documents may be allocated.
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
    ):
        shape = (rows, key_value_heads, capacity, head_dim)
        # Zeros, not uninitialized memory: a masked slot is multiplied by 0, and 0 * NaN is NaN.
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)]
        self.lengths = torch.zeros(rows, dtype=torch.long, device=device)
        self.longest = 0
        self.memory: CrossAttentionCache | None = None

    @property
    def rows(self) -> int:
        """Documents held."""
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        """Most tokens one document may have."""
        return self.keys[0].shape[2]

    def addresses(self, rows: Tensor, slots: Tensor) -> Tensor:
        """Addresses, for `write`, of the heads of tokens at `rows` [n] and `slots` [n], [n * K]; the same for all layers."""
        heads = self.keys[0].shape[1]
        heads_of_rows = rows[:, None] * heads + torch.arange(heads, device=rows.device)
        return (heads_of_rows * self.capacity + slots[:, None]).flatten()

    def write(self, layer: int, addresses: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, K, head_dim] at `addresses` [n * K]."""
        for store, new in ((self.keys[layer], keys), (self.values[layer], values)):
            store.flatten(0, 2).index_copy_(0, addresses, new.flatten(0, 1).to(store.dtype))

    def read(self, layer: int, width: int) -> tuple[Tensor, Tensor]:
        """The first `width` slots of every row, [rows, K, width, head_dim], without a copy."""
        return self.keys[layer][: self.rows, :, :width], self.values[layer][: self.rows, :, :width]

    def reserve(self, rows: int, capacity: int) -> None:
        """Hold `rows` documents (at least those held now; the new ones are empty) of up to `capacity` tokens each."""
        allocated = max(rows, len(self.keys[0]))
        if allocated > len(self.keys[0]) or capacity > self.capacity:
            used, width = self.rows, self.longest
            for stores in (self.keys, self.values):
                for layer, store in enumerate(stores):
                    wider = store.new_zeros(allocated, store.shape[1], max(capacity, self.capacity), store.shape[3])
                    wider[:used, :, :width] = store[:used, :, :width]
                    stores[layer] = wider
        self.lengths = torch.cat([self.lengths, self.lengths.new_zeros(rows - self.rows)])

    def copy(self, sources: Tensor, targets: Tensor, width: int) -> None:
        """Make rows `targets` [n] copies of rows `sources` [n], none of them a target, that hold up to `width` tokens."""
        self._copy(sources, targets, width)
        self.lengths[targets] = self.lengths[sources]

    def _copy(self, sources: Tensor, targets: Tensor, width: int) -> None:
        for store in (*self.keys, *self.values):
            store[targets, :, :width] = store[sources, :, :width]

    def save(self, row: int, length: int) -> CachedDocument:
        """A copy of the first `length` slots of a row."""
        keys, values = ([store[row, :, :length].clone() for store in stores] for stores in (self.keys, self.values))
        return CachedDocument(keys, values, length)

    def load(self, row: int, document: CachedDocument) -> None:
        """Put a saved document into a row."""
        for store, part in zip((*self.keys, *self.values), (*document.keys, *document.values), strict=True):
            store[row, :, : document.length] = part
        self.lengths[row] = document.length
        self.longest = max(self.longest, document.length)

    def keep(self, rows: Tensor) -> None:
        """Hold only these rows from now on, in this order.

        Args:
            rows: indices without repetition, or one boolean per row; [n]. Those that stay where they are cost nothing if
                the indices lie on the CPU.
        """
        rows = rows.nonzero().squeeze(1) if rows.dtype == torch.bool else rows
        device, targets, sources = self.lengths.device, torch.arange(len(rows), device=rows.device), rows
        if not rows.is_cuda:
            moved = (rows != targets).nonzero().squeeze(1)
            sources, targets = rows[moved].to(device), moved.to(device)
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

"""Several adapters over one base in one batch: each document has an adapter of its own, or none. For inference.

A low-rank update is added by a hook of its linear layer, which knows the adapter of each token. A prefix or soft prompt
stands in front of its documents as virtual tokens, whose keys and values, or vectors, are the adapter's: documents with
prefixes of different lengths are documents of different lengths to masks, positions and cache. `adapters.load_adapters`
makes them.

Source: Li and Liang 2021, arXiv:2101.00190, section 8.2 (users with a prefix each in one batch); Sheng et al. 2023,
arXiv:2311.03285, section 4 (LoRAs in one batch, beside the base's product).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.padded_layout import select_rows
from alignment.models.native_model import DocumentStates
from alignment.models.transformer import Transformer
from alignment.ragged import Ragged, runs, with_virtual_tokens

LowRank = tuple[Tensor, Tensor]  # A [rank, inputs] and scale * B^T [rank, outputs]


class RowAdapter(NamedTuple):
    """The weights of one adapter; what it does not have is empty.

    Attributes:
        updates: low-rank updates by the names of their linear layers.
        prefix: keys and values of P virtual tokens, [layers, 2, P, K, head_dim].
        prompt: vectors of P virtual tokens, [P, E].
    """

    updates: Mapping[str, LowRank] = {}
    prefix: Tensor | None = None
    prompt: Tensor | None = None

    @property
    def virtual_tokens(self) -> int:
        """Virtual tokens in front of a document."""
        return (0 if self.prefix is None else self.prefix.shape[2]) + (0 if self.prompt is None else len(self.prompt))


class RowAdapters:
    """Adapters of one base; `Model.using_adapters` says which document has which.

    Attributes:
        weights: the adapters by name, without their updates, which their layers hold. The number of one is its place,
            from 1 on; 0: none.
        documents: number of each document's adapter; empty: no document has one.
        groups: tokens of the present forward: the first and the last number that they have; their indices, None: all;
            their numbers, None: the first.
    """

    def __init__(self, model: nn.Module, weights: Mapping[str, RowAdapter]):
        """Hook the adapters into their base, on whose device they lie."""
        self.weights = {name: adapter._replace(updates={}) for name, adapter in weights.items()}
        self._each = [RowAdapter(), *self.weights.values()]
        self.documents: list[int] = []
        self.groups: list[tuple[int, int, Tensor | None, Tensor | None]] = []
        self._device = next(model.parameters()).device
        for layer in {layer for adapter in weights.values() for layer in adapter.updates}:
            updates = [None, *(adapter.updates.get(layer) for adapter in weights.values())]
            model.get_submodule(layer).register_forward_hook(StackedUpdates(self, updates, self._device))

    @contextmanager
    def using(self, names: Sequence[str | None]) -> Iterator[None]:
        """Within the block document i, or row i of a cache, is read with the adapter `names[i]`."""
        places = [None, *self.weights]
        numbers = [places.index(name) for name in names]
        if any(numbers):
            of_rows = torch.tensor(numbers).to(self._device, non_blocking=True)
            self.documents = numbers
            self.groups = [(min(filter(None, numbers)), max(numbers), None, of_rows)]
        try:
            yield
        finally:
            self.documents = []
            self.groups = []

    def read(
        self, stack: Transformer, batch: Ragged, *, select: Callable[[Tensor], Tensor] | None, **options: Any
    ) -> DocumentStates:
        """`NativeModel.read` of documents that have the adapters of the present `using` block."""
        if len(batch.lengths) != len(self.documents):
            raise ValueError(f"{len(self.documents)} adapters are named for {len(batch.lengths)} documents")
        adapters = [self._each[adapter_number] for adapter_number in self.documents]
        of_rows = self.groups
        counts = [adapter.virtual_tokens for adapter in adapters]
        batch, own_tokens, virtual = with_virtual_tokens(batch, counts)
        places = list(zip(virtual.split(counts), adapters, strict=True))
        prompt = _joined([(place, row_adapter.prompt) for place, row_adapter in places], 0)
        keys_values = _joined([(place, row_adapter.prefix) for place, row_adapter in places], 2)
        self.groups = [self._tokens_of(adapter_number, batch) for adapter_number in set(self.documents) - {0}]
        # Selected after the stack, and not in its last layer: the hooks count on all tokens.
        states = select_rows(stack(batch, prompt=prompt, keys_values=keys_values, **options), own_tokens)
        self.groups = of_rows
        return DocumentStates(states if select is None else select(states), batch, None)

    def _tokens_of(self, number: int, batch: Ragged) -> tuple[int, int, Tensor, None]:
        """The group of all tokens of the documents that have an adapter."""
        mine = [document for document, adapter_number in enumerate(self.documents) if adapter_number == number]
        starts = [0, *accumulate(batch.lengths)]
        index = runs([starts[document] for document in mine], [batch.lengths[document] for document in mine])
        return number, number, index.to(self._device, non_blocking=True), None


def _joined(parts: Sequence[tuple[Tensor, Tensor | None]], dim: int) -> tuple[Tensor, Tensor] | None:
    """Indices and what stands there, of all documents that have it together; None: none has."""
    there = [(place, given) for place, given in parts if given is not None]
    return (torch.cat([place for place, _ in there]), torch.cat([given for _, given in there], dim)) if there else None


class StackedUpdates:
    """The low-rank updates of one layer by all adapters, their ranks one after another; a hook of the layer.

    Whole documents have many tokens and take one product for each adapter. Decoding steps have few and take one product
    for all adapters between the first and the last in use, in which those of other rows count as 0.
    """

    def __init__(self, adapters: RowAdapters, updates: Sequence[LowRank | None], device: torch.device):
        there = [update for update in updates if update]
        ranks = [0 if update is None else len(update[0]) for update in updates]
        self._adapters = adapters
        self._ends = [0, *accumulate(ranks)]
        self._down, self._up = (torch.cat(side).to(device) for side in zip(*there, strict=True))
        self._owners = torch.arange(len(ranks)).repeat_interleave(torch.tensor(ranks)).to(device)

    def __call__(self, layer: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        """The output [N, outputs] plus scale * B A x of each token's adapter, x being the input [N, inputs]."""
        for first, last, index, numbers in self._adapters.groups:
            part = slice(self._ends[first], self._ends[last + 1])
            if part.start == part.stop:
                continue
            x = args[0] if index is None else args[0][index]
            inner = F.linear(x.to(self._down.dtype), self._down[part])
            if numbers is not None:
                inner = torch.where(numbers[:, None] == self._owners[part], inner, 0.0)
            added = (inner @ self._up[part]).to(output.dtype)
            output = output + added if index is None else output.index_add(0, index, added)
        return output

"""Batches without padding: documents end to end in one tensor. The `Batch` protocol is what training needs of any batch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor

Row = TypeVar("Row")
Self = TypeVar("Self")
Moved = TypeVar("Moved", bound="DeviceBatch")


class Batch(Protocol):
    """A micro-batch, as the training engine sees it.

    Attributes:
        weight: what the batch counts for in the mean of its term (tokens, pairs, ...), over this batch alone.
        lengths: tokens of each document that the model reads.
        row_ids: name of the data row behind each document, for messages; may be empty.
    """

    @property
    def weight(self) -> float: ...
    @property
    def lengths(self) -> tuple[int, ...]: ...
    @property
    def row_ids(self) -> tuple[str, ...]: ...
    def to(self: Self, device: torch.device | str) -> Self: ...


@dataclass(frozen=True)
class DeviceBatch:
    """Base of the batch classes: moves all tensors among the fields to a device."""

    def to(self: Moved, device: torch.device | str) -> Moved:
        """A copy on `device`; the batch itself where every tensor is there already."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        held = {name: value for name, value in held.items() if isinstance(value, Tensor | DeviceBatch)}
        moved = {
            name: value.to(device) if isinstance(value, DeviceBatch) else value.to(device, non_blocking=True)
            for name, value in held.items()
        }
        return self if all(moved[name] is held[name] for name in held) else replace(self, **moved)


@dataclass(frozen=True)
class Ragged(DeviceBatch):
    """Tokens of B documents lying end to end, N in all, of which M are predictions that count.

    Attributes:
        tokens: token ids, [N].
        positions: position of each token in its own document, from 0, [N].
        starts: index of each document's first token, then N; int32 as variable-length kernels want it, [B + 1].
        lengths: tokens of each document, as plain numbers, so that no shape has to be fetched from a device.
        target_index: indices into `tokens` of the tokens to predict, [M]; a document's first token only in masked text.
        target_rows: document of each target, [M].
        weight: what the batch counts for in the mean of its term (tokens, pairs, ...), over this batch alone.
        row_ids: name of the data row behind each document, for messages.
        labels: ids to predict at the targets, where they differ from `tokens` (masked text), [M].
        segments: sentence of a pair that each token belongs to, 0 or 1, [N].
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    lengths: tuple[int, ...]
    target_index: Tensor
    target_rows: Tensor
    weight: float
    row_ids: tuple[str, ...] = ()
    labels: Tensor | None = None
    segments: Tensor | None = None

    @classmethod
    def build(
        cls,
        documents: Sequence[Sequence[int]],
        target_masks: Sequence[Sequence[bool]] | None = None,
        *,
        weight: float | None = None,
        row_ids: Sequence[str] = (),
    ) -> "Ragged":
        """Lay documents end to end.

        Args:
            documents: token ids, each at least one token.
            target_masks: True where a token is a prediction that counts; None: every token but each first one.
            weight: None: the number of targets.
            row_ids: one name per document, or none.
        """
        lengths = tuple(len(document) for document in documents)
        if not lengths or min(lengths) == 0:
            raise ValueError("a ragged batch needs at least one document, and no empty one")
        size = torch.tensor(lengths)
        starts = torch.cat([torch.zeros(1, dtype=torch.long), size.cumsum(0)])
        rows = torch.repeat_interleave(torch.arange(len(lengths)), size)
        positions = torch.arange(int(starts[-1])) - starts[rows]
        counts = positions > 0
        if target_masks is not None:
            counts &= torch.tensor([flag for mask in target_masks for flag in mask], dtype=torch.bool)
        targets = counts.nonzero().squeeze(1)
        return cls(
            tokens=torch.tensor([token for document in documents for token in document], dtype=torch.long),
            positions=positions,
            starts=starts.to(torch.int32),
            lengths=lengths,
            target_index=targets,
            target_rows=rows[targets],
            weight=float(len(targets)) if weight is None else float(weight),
            row_ids=tuple(row_ids),
        )

    @cached_property
    def firsts(self) -> Tensor:
        """Index of each document's first token, [B]."""
        return self.starts[:-1].long()

    @cached_property
    def last(self) -> Tensor:
        """Index of each document's last token, [B]."""
        return self.starts[1:].long() - 1

    @cached_property
    def sizes(self) -> Tensor:
        """Tokens of each document, on the device of the tokens, [B]."""
        return self.starts.long().diff()


@dataclass(frozen=True)
class RaggedBatch(DeviceBatch):
    """Base of the batches that carry more than tokens."""

    ragged: Ragged

    @property
    def weight(self) -> float:
        """What the batch counts for in the mean of its term."""
        return self.ragged.weight

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return self.ragged.lengths

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Name of the data row behind each document."""
        return self.ragged.row_ids


@dataclass(frozen=True)
class Seq2Seq(DeviceBatch):
    """Documents for an encoder, and for each the document of its decoder.

    Attributes:
        encoder: what the encoder reads.
        decoder: what the decoder writes; each document begins with the decoder's start token, which is no target.
    """

    encoder: Ragged
    decoder: Ragged

    @property
    def weight(self) -> float:
        """Tokens of the decoder that count."""
        return self.decoder.weight

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, the encoder's first."""
        return self.encoder.lengths + self.decoder.lengths

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Name of the data row behind each pair."""
        return self.decoder.row_ids


def with_virtual_tokens(batch: Ragged, count: int) -> tuple[Ragged, Tensor]:
    """The documents with `count` more tokens (of id 0) in front of each, and the indices of their own tokens there, [N].

    Targets stay the same tokens. The new tokens stand for the vectors of a soft prompt.
    """
    device, documents = batch.tokens.device, len(batch.lengths)
    size = len(batch.tokens) + count * documents
    starts = batch.starts.long() + count * torch.arange(documents + 1, device=device)
    firsts = torch.repeat_interleave(starts[:-1], starts.diff(), output_size=size)
    shifts = count * torch.arange(1, documents + 1, device=device)
    own = torch.arange(len(batch.tokens), device=device)
    own = own + torch.repeat_interleave(shifts, batch.sizes, output_size=len(own))

    def longer(x: Tensor) -> Tensor:
        return x.new_zeros(size).index_copy(0, own, x)

    expanded = replace(
        batch,
        tokens=longer(batch.tokens),
        positions=torch.arange(size, device=device) - firsts,
        starts=starts.to(batch.starts.dtype),
        lengths=tuple(length + count for length in batch.lengths),
        target_index=own[batch.target_index],
        segments=None if batch.segments is None else longer(batch.segments),
    )
    return expanded, own


def group_by_length(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Row numbers in groups of similar length, from short to long, each of at most `limit` tokens.

    Args:
        lengths: tokens of each row; a row longer than `limit` is a group of its own.
        limit: tokens that one group may hold.
    """
    return fill_groups(sorted(range(len(lengths)), key=lambda row: lengths[row]), lengths, limit)


def group_rows_by_length(rows: Sequence[Row], lengths: Sequence[int], limit: int) -> list[list[Row]]:
    """The rows themselves in the groups of `group_by_length`, the longest group first, where memory peaks."""
    return [[rows[number] for number in group] for group in reversed(group_by_length(lengths, limit))]


def fill_groups(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Row numbers in the given order, cut into groups before their tokens exceed `limit`."""
    groups: list[list[int]] = []
    filled = 0
    for row in order:
        if not groups or filled + lengths[row] > limit:
            groups.append([])
            filled = 0
        groups[-1].append(row)
        filled += lengths[row]
    return groups

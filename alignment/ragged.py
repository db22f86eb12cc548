"""The batch form: documents end to end, no padding; alone, or as pairs of source and target. Made by `data`, read by
`models`, weighed by `training`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ragged:
    """Tokens of B documents lying end to end, N in all, of which M are predictions that count.

    Attributes:
        tokens: token ids, [N].
        positions: place of each token in its own document, from 0, [N].
        starts: index of each document's first token, then N; int32 as variable-length kernels want it, [B + 1].
        lengths: tokens of each document, as plain numbers, so that no shape has to be fetched from a device.
        targets: indices into `tokens` of the tokens to predict, [M]; never a document's first token, but in masked text.
        target_rows: document of each target, [M].
        weight: what the batch counts for in the mean of its term (tokens, pairs, ...), over this batch alone.
        row_ids: name of the data row behind each document, for messages.
        labels: what should stand at the targets, where that is not what stands there (masked text), [M].
        segments: sentence of a pair that each token belongs to, 0 or 1, [N].
    """

    tokens: Tensor
    positions: Tensor
    starts: Tensor
    lengths: tuple[int, ...]
    targets: Tensor
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
            targets=targets,
            target_rows=rows[targets],
            weight=float(len(targets)) if weight is None else float(weight),
            row_ids=tuple(row_ids),
        )

    @cached_property
    def last(self) -> Tensor:
        """Index of each document's last token, [B]."""
        return self.starts[1:].long() - 1

    def to(self, device: torch.device | str) -> "Ragged":
        """The same batch on another device; itself where it already is there."""
        if self.tokens.device == torch.device(device):
            return self
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "positions", "starts", "targets", "target_rows", "labels", "segments")
            if getattr(self, name) is not None
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Seq2Seq:
    """Documents for an encoder, and for each the one its decoder writes.

    Attributes:
        source: what is read.
        target: what is written; each document begins with the token that starts the decoder, which is never a target.
    """

    source: Ragged
    target: Ragged

    @property
    def weight(self) -> float:
        """Target tokens that count."""
        return self.target.weight

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document, sources first."""
        return self.source.lengths + self.target.lengths

    @property
    def row_ids(self) -> tuple[str, ...]:
        """Name of the data row behind each pair."""
        return self.target.row_ids

    def to(self, device: torch.device | str) -> "Seq2Seq":
        """The same batch on another device."""
        return Seq2Seq(self.source.to(device), self.target.to(device))


def groups_of(lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Row numbers in groups of like length, each of at most `limit` tokens; a longer row stands alone.

    Args:
        lengths: tokens of each row.
        limit: tokens that one group may hold.
    """
    groups: list[list[int]] = []
    held = 0
    for row in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if not groups or held + lengths[row] > limit:
            groups.append([])
            held = 0
        groups[-1].append(row)
        held += lengths[row]
    return groups

"""Padded input_ids to documents end to end, which all models run on, and per-token outputs back to the rectangle."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.outputs import ValueOutput, value_output
from alignment.ragged import Ragged


class Padded(NamedTuple):
    """Documents that lay in a padded rectangle.

    Attributes:
        batch: the documents end to end.
        indices: of their tokens in the flat rectangle, [N]; None: all.
        shape: of the rectangle, [B, T].
    """

    batch: Ragged
    indices: Tensor | None
    shape: torch.Size

    def restore(self, x: Tensor) -> Tensor:
        """Tokens [N, ...] back in their rectangle [B, T, ...], zeros elsewhere."""
        if self.indices is not None:
            x = x.new_zeros(self.shape.numel(), *x.shape[1:]).index_copy(0, self.indices, x)
        return x.unflatten(0, tuple(self.shape))

    def value_output(self, outputs: Tensor) -> ValueOutput:
        """The output of a scalar model's padded call from the outputs of each token, [N, k]."""
        plain = value_output(outputs)
        members = None if plain.members is None else self.restore(plain.members)
        return ValueOutput(self.restore(plain.values), outputs[self.batch.last], members)


def from_padded(input_ids: Tensor | None, attention_mask: Tensor | None, segments: Tensor | None = None) -> Padded:
    """A padded rectangle [B, T] as documents end to end.

    Raises:
        ValueError: no `input_ids`, or a row without tokens.
    """
    if input_ids is None:
        raise ValueError("a model call needs input_ids or batch")
    rows, columns = input_ids.shape
    device = input_ids.device
    real = torch.ones(rows, columns, dtype=torch.bool, device=device) if attention_mask is None else attention_mask > 0
    lengths = tuple(real.sum(1).tolist())
    if not rows or min(lengths) == 0:
        raise ValueError(f"attention_mask marks no token in row {lengths.index(0) if rows else 0}")
    indices = None if min(lengths) == columns else real.flatten().nonzero().squeeze(1)

    def kept(x: Tensor) -> Tensor:
        return x.flatten() if indices is None else x.flatten()[indices]

    nothing = torch.empty(0, dtype=torch.long, device=device)
    batch = Ragged(
        tokens=kept(input_ids),
        positions=kept(real.cumsum(1) - 1),
        starts=F.pad(real.sum(1).cumsum(0), (1, 0)).to(torch.int32),
        lengths=lengths,
        target_index=nothing,
        target_rows=nothing,
        weight=0.0,
        segments=None if segments is None else kept(segments),
    )
    return Padded(batch, indices, input_ids.shape)

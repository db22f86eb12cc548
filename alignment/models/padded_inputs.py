"""Padded input_ids to documents end to end, which all models run on, and per-token outputs back to the rectangle."""

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.models.outputs import ValueOutput, value_output
from alignment.ragged import Ragged


def from_padded(
    input_ids: Tensor, attention_mask: Tensor | None, segments: Tensor | None = None
) -> tuple[Ragged, Tensor | None]:
    """A padded rectangle as documents end to end, and the flat indices [N] of its tokens (None: all)."""
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
    return batch, indices


def to_padded(x: Tensor, indices: Tensor | None, shape: torch.Size) -> Tensor:
    """Tokens [N, ...] back in their rectangle [B, T, ...], zeros elsewhere; the inverse of `from_padded`."""
    if indices is not None:
        x = x.new_zeros(shape.numel(), *x.shape[1:]).index_copy(0, indices, x)
    return x.unflatten(0, tuple(shape))


def padded_value_output(outputs: Tensor, batch: Ragged, indices: Tensor | None, shape: torch.Size) -> ValueOutput:
    """The output of a scalar model's padded call.

    Args:
        outputs: of each token of the batch, [N, k].
        batch: the rows without padding.
        indices: of the tokens in the padded rectangle, from `from_padded`; None: all.
        shape: of the rectangle, [B, T].
    """
    plain = value_output(outputs)
    members = None if plain.members is None else to_padded(plain.members, indices, shape)
    return ValueOutput(to_padded(plain.values, indices, shape), outputs[batch.last], members)


def require_input_ids(input_ids: Tensor | None) -> Tensor:
    """`input_ids`, which a call without `batch` must have."""
    if input_ids is None:
        raise ValueError("a model call needs input_ids or batch")
    return input_ids

"""Where a token stands: learned vectors (GPT-2), rotary angles (Llama) and their scalings. No sinusoids, no bias.

Both kinds answer the same two questions: what is added to the embedding (`add`), and by what angle queries and keys are
turned (`rotation`, or None).
"""

import math

import torch
from torch import Tensor, nn

from alignment.models.spec import LinearScaling, Llama3Scaling, RotaryPositionsSpec

Rotation = tuple[Tensor, Tensor]  # cosines [N, 1, K] and sines [N, 1, K / 2] of one forward, fp32


class LearnedPositions(nn.Module):
    """One trained vector per place."""

    def __init__(self, count: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(count, width))

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [N, D], positions: [N] -> [N, D]."""
        return x + nn.functional.embedding(positions, self.weight)

    def rotation(self, positions: Tensor, longest: int) -> Rotation | None:
        """Nothing is turned."""
        return None


class RotaryPositions(nn.Module):
    """Angles for `rotate`, read from a table that grows with the longest document seen.

    The table is no buffer: `model.to(bfloat16)` would round it, and 8 bits do not tell position 255 from 256.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, in the half-split layout of Hugging Face checkpoints.
    """

    def __init__(self, spec: RotaryPositionsSpec, head_width: int):
        super().__init__()
        self.frequencies = rotary_frequencies(spec, head_width)
        self.table: Rotation | None = None

    def add(self, x: Tensor, positions: Tensor) -> Tensor:
        """Nothing is added."""
        return x

    def rotation(self, positions: Tensor, longest: int) -> Rotation:
        """Cosines [N, 1, K] and sines [N, 1, K / 2] at `positions` [N], all of which lie below `longest`."""
        if self.table is None or self.table[0].device != positions.device or len(self.table[0]) < longest:
            self.table = _rotary_table(self.frequencies.to(positions.device), 2 ** math.ceil(math.log2(longest)))
        cosines, sines = self.table
        return cosines.index_select(0, positions), sines.index_select(0, positions)


# A table first needed inside `torch.inference_mode` must still be usable in training afterwards.
@torch.inference_mode(False)
@torch.no_grad()
def _rotary_table(frequencies: Tensor, count: int) -> Rotation:
    """Cosines [count, 1, K], each frequency twice, and sines [count, 1, K / 2]."""
    angles = torch.arange(count, device=frequencies.device, dtype=torch.float32)[:, None] * frequencies
    cosines = angles.cos()
    return torch.cat([cosines, cosines], dim=-1)[:, None], angles.sin()[:, None]


def rotary_frequencies(spec: RotaryPositionsSpec, head_width: int) -> Tensor:
    """Radians per position of each pair of coordinates, fp32 on the CPU, [K / 2].

    frequency_i = theta^(-2 i / K), then the scaling.
    """
    exponents = torch.arange(0, head_width, 2, dtype=torch.float32, device="cpu") / head_width
    frequencies = 1.0 / spec.theta**exponents
    match spec.scaling:
        case None:
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3_frequencies(frequencies, spec.scaling)


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies that turn less than `low` times over the original context are divided; above `high` they are kept."""
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


class _Rotate(torch.autograd.Function):
    """`rotate` whose backward is the turn the other way; it keeps the angles and not the vectors."""

    @staticmethod
    def forward(ctx, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, 1.0)

    @staticmethod
    def backward(ctx, grad: Tensor):
        cosines, sines = ctx.saved_tensors
        return _turn(grad, cosines, sines, -1.0), None, None


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, direction: float) -> Tensor:
    """Rotate every pair (x_i, x_{i + K/2}) by its angle, in fp32 at least."""
    half = x.shape[-1] // 2
    wide = x.float() if x.element_size() < 4 else x
    turned = wide * cosines
    turned[..., :half].addcmul_(wide[..., half:], sines, value=-direction)
    turned[..., half:].addcmul_(wide[..., :half], sines, value=direction)
    return turned.to(x.dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys turned by their position's angles.

    Args:
        x: [N, heads, K].
        rotation: from `RotaryPositions.rotation`.

    Returns:
        [N, heads, K], in x's type.
    """
    return _Rotate.apply(x, *rotation) if torch.is_grad_enabled() else _turn(x, *rotation, 1.0)

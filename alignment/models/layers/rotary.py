"""Rotary angles and the scalings that stretch them; turning queries and keys by them. Nothing is trained here."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.models.layers.norms import on_gpu
from alignment.ragged import on_float64_device


@dataclass(frozen=True)
class LinearScaling:
    """Every rotary frequency divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """The base grows with a document that is longer than the model was trained for ("dynamic NTK").

    Source: transformers, `rope_type="dynamic"`.
    """

    factor: float
    original_positions: int


@dataclass(frozen=True)
class YarnScaling:
    """Slow pairs divided by `factor`, fast ones kept, a ramp between; all scores a little larger.

    Attributes:
        attention_factor: on cosines and sines, so that scores grow by its square.
        beta_fast, beta_slow: rotations over the original context where the ramp begins and ends.
        truncate: round the ends of the ramp to whole pairs.

    Source: Peng et al. 2023, arXiv:2309.00071, section 3.
    """

    factor: float
    original_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths divided by `factor`, short ones kept, a smooth step between.

    Source: transformers, `rope_type="llama3"`; Dubey et al. 2024, arXiv:2407.21783, section 3.4.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_positions: int


@dataclass(frozen=True)
class LongScaling:
    """Each pair divided by its own number; other numbers beyond the original context (Phi-3).

    Source: Ding et al. 2024, arXiv:2402.13753; transformers, `rope_type="longrope"`.
    """

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_positions: int
    attention_factor: float


RotaryScaling = LinearScaling | DynamicScaling | YarnScaling | Llama3Scaling | LongScaling


@dataclass(frozen=True)
class RotarySpec:
    """Queries and keys rotated by an angle that grows with the position."""

    theta: float
    width: int  # leading coordinates of each head that are rotated; the rest stay ("partial rotary")
    scaling: RotaryScaling | None = None


Rotation = tuple[Tensor, Tensor]  # cosines [N, 1, W] and sines [N, 1, W / 2] of one forward, fp32; W coordinates turn


class Rotary(nn.Module):
    """Angles for `rotate`, read from a table that grows with the longest document seen.

    The table is no buffer: `model.to(bfloat16)` would round it, and 8 bits do not tell position 255 from 256.

    Source: Su et al. 2021, arXiv:2104.09864, eq. 34, in the half-split layout of Hugging Face checkpoints.
    """

    def __init__(self, spec: RotarySpec):
        super().__init__()
        self.spec = spec
        self.table: Rotation | None = None

    def forward(self, positions: Tensor, longest: int, sizes: Callable[[], Tensor]) -> Rotation:
        """Cosines [N, 1, W] and sines [N, 1, W / 2].

        Args:
            positions: of each token in its document, all below `longest`, [N].
            longest: tokens of the longest document.
            sizes: gives the tokens of the document each token belongs to, [N]; few scalings ask.
        """
        scaling = self.spec.scaling
        if isinstance(scaling, DynamicScaling | LongScaling) and longest > scaling.original_positions:
            return _rotation(positions[:, None] * scaled_frequencies(self.spec, sizes()), self.spec)
        if self.table is None or self.table[0].device != positions.device or len(self.table[0]) < longest:
            self.table = _table(self.spec, 2 ** math.ceil(math.log2(longest)), positions.device)
        cosines, sines = self.table
        return cosines.index_select(0, positions), sines.index_select(0, positions)


# A table first needed inside `torch.inference_mode` must still be usable in training afterwards.
@torch.inference_mode(False)
@torch.no_grad()
def _table(spec: RotarySpec, count: int, device: torch.device) -> Rotation:
    positions = torch.arange(count, device=device, dtype=torch.float32)
    return _rotation(positions[:, None] * rotary_frequencies(spec).to(device), spec)


def _rotation(angles: Tensor, spec: RotarySpec) -> Rotation:
    """angles [N, W / 2] -> cosines [N, 1, W], each twice, and sines [N, 1, W / 2]."""
    factor = getattr(spec.scaling, "attention_factor", 1.0)
    cosines = angles.cos() * factor
    return torch.cat([cosines, cosines], dim=-1)[:, None], (angles.sin() * factor)[:, None]


def equal_angles(spec: RotarySpec, lengths: Sequence[int]) -> bool:
    """True where documents of these lengths turn the tokens that they begin with by the same angles."""
    match spec.scaling:
        case DynamicScaling(original_positions=original):
            return len({max(length, original) for length in lengths}) == 1
        case LongScaling(original_positions=original):
            return len({length > original for length in lengths}) == 1
        case _:
            return True


def rotary_frequencies(spec: RotarySpec) -> Tensor:
    """Radians per position of each pair of coordinates, within the original context, fp32 on the CPU, [W / 2].

    frequency_i = theta^(-2 i / W), then the scaling.
    """
    frequencies = 1.0 / spec.theta ** _exponents(spec)
    match spec.scaling:
        case None | DynamicScaling():
            return frequencies
        case LinearScaling(factor=factor):
            return frequencies / factor
        case Llama3Scaling():
            return _llama3_frequencies(frequencies, spec.scaling)
        case YarnScaling():
            return _yarn_frequencies(frequencies, spec, spec.scaling)
        case LongScaling(short_factors=factors):
            return frequencies / torch.tensor(factors)


def scaled_frequencies(spec: RotarySpec, sizes: Tensor) -> Tensor:
    """Radians per position for documents of these `sizes`, [N, W / 2]; those of a document depend on its size alone."""
    exponents = _exponents(spec).to(sizes.device)
    match spec.scaling:
        case DynamicScaling(factor=factor, original_positions=original):
            exponents = on_float64_device(exponents)
            lengths = on_float64_device(sizes)
            growth = factor * lengths.clamp(min=original).double() / original - (factor - 1)
            base = spec.theta * growth ** (spec.width / (spec.width - 2))
            return (1.0 / base[:, None] ** exponents.double()).float().to(sizes.device)
        case LongScaling():
            short = torch.tensor(spec.scaling.short_factors, device=sizes.device)
            long = torch.tensor(spec.scaling.long_factors, device=sizes.device)
            beyond = (sizes > spec.scaling.original_positions)[:, None]
            return 1.0 / (torch.where(beyond, long, short) * spec.theta**exponents)
        case _:
            raise ValueError(f"{spec.scaling} does not depend on a document's size")


def _exponents(spec: RotarySpec) -> Tensor:
    return torch.arange(0, spec.width, 2, dtype=torch.float32, device="cpu") / spec.width


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Frequencies that turn less than `low` times over the original context are divided; above `high` they are kept."""
    low = scaling.low_frequency_factor
    high = scaling.high_frequency_factor
    turns = scaling.original_positions / (2 * math.pi / frequencies)
    kept_share = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept_share) * frequencies / scaling.factor + kept_share * frequencies


def _yarn_frequencies(frequencies: Tensor, spec: RotarySpec, scaling: YarnScaling) -> Tensor:
    """Pairs up to the one that turns `beta_fast` times are kept, those after `beta_slow` divided, a ramp between."""

    def pair_turning(turns: float) -> float:
        return spec.width * math.log(scaling.original_positions / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = pair_turning(scaling.beta_fast)
    high = pair_turning(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, spec.width - 1)
    high += 0.001 * (low == high)  # a ramp of no width
    divided_share = ((torch.arange(spec.width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return divided_share * frequencies / scaling.factor + (1 - divided_share) * frequencies


class _Rotate(torch.autograd.Function):
    """`rotate` whose backward is the turn the other way; it keeps the angles and not the vectors."""

    @staticmethod
    def forward(ctx, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turn(x, cosines, sines, 1.0)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        cosines, sines = ctx.saved_tensors
        return _turn(grad_outputs[0], cosines, sines, -1.0), None, None


def _turn(x: Tensor, cosines: Tensor, sines: Tensor, direction: float) -> Tensor:
    """Rotate every pair (x_i, x_{i + W/2}) of the first W coordinates by its angle, in fp32 at least."""
    turning = cosines.shape[-1]
    part = x if turning == x.shape[-1] else x[..., :turning]
    half = turning // 2
    if x.element_size() < 4 and on_gpu(x):  # kernels that widen what they read and round what they write
        wide = part * cosines
        turned = torch.empty_like(part)
        torch.addcmul(wide[..., :half], part[..., half:], sines, value=-direction, out=turned[..., :half])
        torch.addcmul(wide[..., half:], part[..., :half], sines, value=direction, out=turned[..., half:])
    else:
        wide = part.float() if x.element_size() < 4 else part
        turned = wide * cosines
        turned[..., :half].addcmul_(wide[..., half:], sines, value=-direction)
        turned[..., half:].addcmul_(wide[..., :half], sines, value=direction)
        turned = turned.to(x.dtype)
    return turned if part is x else torch.cat([turned, x[..., turning:]], dim=-1)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Queries or keys turned by the angles of their positions.

    Args:
        x: [N, heads, K].
        rotation: from `Rotary`; coordinates beyond its width stay as they are.

    Returns:
        [N, heads, K], in x's type.
    """
    return _Rotate.apply(x, *rotation) if torch.is_grad_enabled() else _turn(x, *rotation, 1.0)

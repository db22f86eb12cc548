"""Attributions of a number to the vectors that it was computed from: gradient x input, and integrated gradients.

Both take any function of vectors; saliency.py makes one of a model and its token embeddings.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Value = Callable[[Tensor], Tensor]  # vectors of S documents [S, T, E] -> a number of each, [S], with a gradient

PIECES, POINTS = 4, 8  # of the path at the start, and points in each of its pieces


class Attribution(NamedTuple):
    """Integrated gradients of one document."""

    values: Tensor  # of each token, [T]
    baseline_value: float
    value: float
    residual: float  # sum of the values less (value - baseline_value); 0 where the integral is exact
    gradients: int  # computed on the way

    def is_complete(self, tolerance: float = 0.01) -> bool:
        """True where the residual is at most this share of value - baseline_value."""
        return abs(self.residual) <= _allowed(self.value - self.baseline_value, tolerance)


def _allowed(change: float, tolerance: float) -> float:
    return tolerance * max(abs(change), 1e-3)  # below, rounding is larger


def gradient_times_input(value: Value, inputs: Tensor) -> Tensor:
    """sum_e x_te * d value / d x_te for each token; inputs x [T, E] -> [T].

    Source: Shrikumar et al. 2016, arXiv:1605.01713, section 1.
    """
    x = inputs.detach()[None].clone().requires_grad_()
    [gradient] = torch.autograd.grad(value(x).sum(), x)
    return (gradient * x.detach())[0].sum(-1)


def integrated_gradients(
    value: Value, inputs: Tensor, baseline: Tensor, *, tolerance: float = 0.01, max_gradients: int = 2048
) -> Attribution:
    """Gradients integrated along the straight path from a baseline x' to the inputs x, [T, E] -> one number per token.

    attribution_t = sum_e (x_te - x'_te) * integral over a in [0, 1] of d value(x' + a (x - x')) / d x_te

    The path is cut into pieces, each with Gauss-Legendre points. As the gradients of a piece have to sum to the change of
    the value along it, the error of each piece is known: the worst is halved until all errors, signs aside, sum to at most
    `tolerance` of the whole change, or `max_gradients` are computed. Steep places, as a norm has them near vectors of
    zeros, get the points so.

    Source: Sundararajan et al. 2017, arXiv:1703.01365, section 3 (eq. 1), proposition 1 (completeness).
    """
    nodes, weights = (torch.tensor(each).to(inputs) for each in np.polynomial.legendre.leggauss(POINTS))
    inputs, baseline = inputs.detach(), baseline.detach()

    def at(places: Tensor) -> Tensor:
        return baseline + places[:, None, None] * (inputs - baseline)

    def integrate(start: float, stop: float, change: float) -> tuple[float, float, float, Tensor]:
        half = (stop - start) / 2
        path = at(start + half * (nodes + 1)).requires_grad_()
        [gradient] = torch.autograd.grad(value(path).sum(), path)
        found = torch.einsum("s,ste,te->t", half * weights, gradient, inputs - baseline).double()
        return abs(found.sum().item() - change), start, stop, found

    @torch.no_grad()
    def changes(*places: float) -> list[float]:
        return value(at(torch.tensor(places).to(inputs))).double().diff().tolist()

    ends = np.linspace(0, 1, PIECES + 1).tolist()
    pieces = [integrate(*each) for each in zip(ends, ends[1:], changes(*ends), strict=False)]
    with torch.no_grad():
        first, last = value(at(torch.tensor([0.0, 1.0]).to(inputs))).tolist()
    while sum(piece[0] for piece in pieces) > _allowed(last - first, tolerance):
        if POINTS * len(pieces) >= max_gradients:
            break
        pieces.sort(key=lambda piece: piece[0])
        _, start, stop, _ = pieces.pop()
        middle = (start + stop) / 2
        left, right = changes(start, middle, stop)
        pieces += [integrate(start, middle, left), integrate(middle, stop, right)]
    values = torch.stack([piece[-1] for piece in pieces]).sum(0)
    return Attribution(values, first, last, values.sum().item() - (last - first), POINTS * len(pieces))

"""Attributions of a number to the vectors that it was computed from: gradient x input, and integrated gradients.

Both take any function of vectors; saliency.py makes one of a model and its token embeddings.
"""

from collections.abc import Callable, Sequence
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
    complete: bool  # the errors of all parts of the path, signs aside, sum to at most the tolerance


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
    def values_at(*places: float) -> list[float]:
        return value(at(torch.tensor(places).to(inputs))).double().tolist()

    def integrate_between(places: Sequence[float]) -> list[tuple[float, float, float, Tensor]]:
        known = values_at(*places)
        return [integrate(places[i], places[i + 1], known[i + 1] - known[i]) for i in range(len(places) - 1)]

    first, last = values_at(0, 1)
    allowed = tolerance * max(abs(last - first), 1e-3)  # below, rounding is larger
    pieces = integrate_between(np.linspace(0, 1, PIECES + 1).tolist())
    while (error := sum(piece[0] for piece in pieces)) > allowed and POINTS * len(pieces) < max_gradients:
        pieces.sort(key=lambda piece: piece[0])
        _, start, stop, _ = pieces.pop()
        pieces += integrate_between([start, (start + stop) / 2, stop])
    values = torch.stack([piece[-1] for piece in pieces]).sum(0)
    residual = values.sum().item() - (last - first)
    return Attribution(values, first, last, residual, POINTS * len(pieces), error <= allowed)

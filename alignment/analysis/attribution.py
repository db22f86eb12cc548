"""Attributions of a number to the vectors that it was computed from: gradient x input, and integrated gradients.

Both take any function of vectors; saliency.py makes one of a model and its token embeddings.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

Value = Callable[[Tensor], Tensor]  # vectors of S documents [S, T, E] -> a number of each, [S], with a gradient

# of the path at the start, and points in each of its pieces
PIECES = 4
POINTS = 8
HALVED = 8  # a piece with more than this part of the error allowed in all is halved


class Attribution(NamedTuple):
    """Integrated gradients of one document."""

    values: Tensor  # of each token, [T]
    baseline_value: float
    value: float
    residual: float  # sum of the values less (value - baseline_value); 0 where the integral is exact
    gradients: int  # computed on the way
    complete: bool  # the residual is at most the tolerance


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

    The path is cut into pieces, each with Gauss-Legendre points. As the gradients of a piece have to sum to the change
    of the value along it, the error of each piece is known: one whose error is large is halved, unless `max_gradients`
    are computed. Steep places, as a norm has them near vectors of zeros, get the points so.

    Args:
        tolerance: of the residual, relative to the change of the value.

    Source: Sundararajan et al. 2017, arXiv:1703.01365, section 3 (eq. 1), proposition 1 (completeness).
    """
    nodes, weights = np.polynomial.legendre.leggauss(POINTS)
    places = torch.tensor([0, *(nodes + 1) / 2, 1]).to(inputs)  # the ends tell the change of the value
    weights = torch.tensor([0, *weights / 2, 0]).to(inputs)
    inputs = inputs.detach()
    baseline = baseline.detach()
    with torch.no_grad():
        first, last = value(torch.stack([baseline, inputs])).tolist()
    allowed = tolerance * max(abs(last - first), 1e-3)  # below, rounding is larger
    values = torch.zeros(len(inputs)).double()
    gradients = 0
    pieces = [(i / PIECES, 1 / PIECES) for i in range(PIECES)]
    while pieces:
        start, size = pieces.pop()
        path = (baseline + (start + size * places)[:, None, None] * (inputs - baseline)).requires_grad_()
        along = value(path)
        [gradient] = torch.autograd.grad(along.sum(), path)
        shares = size * torch.einsum("s,ste,te->t", weights, gradient, inputs - baseline).cpu().double()
        gradients += POINTS
        if abs(shares.sum().item() - (along[-1] - along[0]).item()) > allowed / HALVED and gradients < max_gradients:
            pieces += [(start, size / 2), (start + size / 2, size / 2)]
        else:
            values += shares
    residual = values.sum().item() - (last - first)
    return Attribution(values, first, last, residual, gradients, abs(residual) <= allowed)

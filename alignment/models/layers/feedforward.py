"""Feed-forward layers, plain and gated, and the activations by their Hugging Face names."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,  # GPT-2's own formula is the tanh approximation
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
    "elu": F.elu,
    "selu": F.selu,
    "sigmoid": torch.sigmoid,  # with a gate: GLU
    "linear": lambda x: x,  # with a gate: the bilinear layer
}


@dataclass(frozen=True)
class PlainFeedForwardSpec:
    """down(activation(up(x))); `dropout` acts on the input of `down`."""

    width: int
    activation: str
    bias: bool
    dropout: float = 0.0

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return FeedForward(width, self.width, ACTIVATIONS[self.activation], self.bias, self.dropout)


@dataclass(frozen=True)
class GatedFeedForwardSpec:
    """down(activation(gate(x)) * up(x)); `dropout` acts on the input of `down`."""

    width: int
    activation: str
    bias: bool
    dropout: float = 0.0

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return GatedFeedForward(width, self.width, ACTIVATIONS[self.activation], self.bias, self.dropout)


class FeedForward(nn.Module):
    """down(activation(up(x)))."""

    def __init__(
        self, width: int, inner: int, activation: Callable[[Tensor], Tensor], bias: bool, dropout: float = 0.0
    ):
        super().__init__()
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, D] -> [N, D]."""
        return self.down(self.dropout(self.activation(self.up(x))))


class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) * up(x)).

    Source: Shazeer 2020, arXiv:2002.05202, eqs. 5 and 6: GLU (sigmoid), ReGLU (ReLU), GeGLU (GELU), SwiGLU (SiLU).
    """

    def __init__(
        self, width: int, inner: int, activation: Callable[[Tensor], Tensor], bias: bool, dropout: float = 0.0
    ):
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=bias)
        self.up = nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, D] -> [N, D]."""
        return self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))

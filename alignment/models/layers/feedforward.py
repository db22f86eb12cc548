"""Feed-forward layers, plain and gated, and the activations by their Hugging Face names."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,  # GPT-2's own formula is the tanh approximation
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
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
        return FeedForward(self, width)


@dataclass(frozen=True)
class GatedFeedForwardSpec:
    """down(activation(gate(x)) * up(x)); `dropout` acts on the input of `down`."""

    width: int
    activation: str
    bias: bool
    dropout: float = 0.0

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return FeedForward(self, width)


class FeedForward(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)).

    Source: Shazeer 2020, arXiv:2002.05202, eqs. 5 and 6: GLU (sigmoid), ReGLU (ReLU), GeGLU (GELU), SwiGLU (SiLU).
    """

    def __init__(self, spec: PlainFeedForwardSpec | GatedFeedForwardSpec, width: int):
        super().__init__()
        gated = isinstance(spec, GatedFeedForwardSpec)
        self.gate = nn.Linear(width, spec.width, bias=spec.bias) if gated else None
        self.up = nn.Linear(width, spec.width, bias=spec.bias)
        self.down = nn.Linear(spec.width, width, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, D] -> [N, D]."""
        hidden = self.activation(self.up(x) if self.gate is None else self.gate(x))
        return self.down(self.dropout(hidden if self.gate is None else hidden * self.up(x)))

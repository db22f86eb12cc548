"""Feed-forward layers: plain, gated, and a mixture of experts. No expert has a capacity limit: no token is dropped.

Source of the mixture: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961 (Switch, one expert
per token); Jiang et al. 2024, arXiv:2401.04088 (Mixtral, two).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.layers.norms import computed_in, on_gpu

_gelu_tanh = partial(F.gelu, approximate="tanh")

ACTIVATIONS = {  # by their Hugging Face names
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
    "softplus": F.softplus,
    "sigmoid": torch.sigmoid,  # with a gate: GLU
    "linear": lambda x: x,  # with a gate: the bilinear layer
}


@dataclass(frozen=True)
class _FeedForwardSpec:
    width: int
    activation: str
    bias: bool
    dropout: float = 0.0

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return FeedForward(self, width)


class PlainFeedForwardSpec(_FeedForwardSpec):
    """down(activation(up(x))); `dropout` acts on the input of `down`."""


class GatedFeedForwardSpec(_FeedForwardSpec):
    """down(activation(gate(x)) * up(x)); `dropout` acts on the input of `down`."""


class FeedForward(nn.Module):
    """down(activation(up(x))), or with a gate down(activation(gate(x)) * up(x)).

    Attributes:
        joined: weight and bias of gate and up as one product, as in `Attention`.

    Source: Shazeer 2020, arXiv:2002.05202, eqs. 5 and 6: GLU (sigmoid), ReGLU (ReLU), GeGLU (GELU), SwiGLU (SiLU).
    """

    joined: tuple[Tensor, Tensor | None] | None = None

    def __init__(self, spec: _FeedForwardSpec, width: int):
        super().__init__()
        self.gate = nn.Linear(width, spec.width, bias=spec.bias) if isinstance(spec, GatedFeedForwardSpec) else None
        self.up = nn.Linear(width, spec.width, bias=spec.bias)
        self.down = nn.Linear(spec.width, width, bias=spec.bias)
        self.activation = ACTIVATIONS[spec.activation]
        self.dropout = nn.Dropout(spec.dropout) if spec.dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, D] -> [N, D]."""
        x = computed_in(x)
        if self.gate is None:
            return self.down(self.dropout(self.activation(self.up(x))))
        gate, up = (self.gate(x), self.up(x)) if self.joined is None else F.linear(x, *self.joined).chunk(2, dim=-1)
        gate = gate if on_gpu(gate) else gate.contiguous()  # a CPU's activations of a view have other last bits
        return self.down(self.dropout(self.activation(gate) * up))


@dataclass(frozen=True)
class ExpertsSpec:
    """Several feed-forward layers, of which each token goes through the `experts_per_token` of highest probability.

    Attributes:
        normalized: the weights of a token's experts are made to sum to 1 (Mixtral); else they are the router's
            probabilities (Switch).
        balance_coef: factor on the load-balancing loss, in training only.
    """

    expert: PlainFeedForwardSpec | GatedFeedForwardSpec
    count: int
    experts_per_token: int
    normalized: bool = True
    balance_coef: float = 0.0

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        return Experts(self, width)


FeedForwardSpec = PlainFeedForwardSpec | GatedFeedForwardSpec | ExpertsSpec


class Experts(nn.Module):
    """sum over a token's experts e of weight_e * e(x); the weights are the router's probabilities."""

    data_dependent_shapes = True  # torch.compile leaves its forward out; see compilation.py

    def __init__(self, spec: ExpertsSpec, width: int):
        super().__init__()
        experts = [spec.expert.build(width) for _ in range(spec.count)]
        self.router = nn.Linear(width, spec.count, bias=False)
        self.experts = nn.ModuleList(experts)
        self.spec = spec

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, D] -> [N, D]."""
        count = self.spec.experts_per_token
        weights, picked = self.router(x).float().softmax(-1).topk(count, dim=-1)  # [N, experts per token]
        if self.spec.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        # Pairs of token and choice sorted by expert: each expert reads its tokens as one matrix.
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = order // count
        pieces = x.index_select(0, rows).split(counts)
        mixed = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        mixed = mixed * weights.flatten().index_select(0, order).unsqueeze(-1).to(mixed.dtype)
        return torch.zeros_like(x).index_add(0, rows, mixed.to(x.dtype))


@contextmanager
def recorded_router_logits(trunk: nn.Module) -> Iterator[list[Tensor]]:
    """Within the `with` block, every forward of an `Experts` layer leaves its router's logits [N, E] in the list.

    Forward hooks record them, as in transformers; they are removed before activation checkpointing runs a layer again.
    """
    logits: list[Tensor] = []

    def record(router: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        logits.append(output)

    hooks = [layer.router.register_forward_hook(record) for layer in trunk.modules() if isinstance(layer, Experts)]
    try:
        yield logits
    finally:
        for hook in hooks:
            hook.remove()


def balance_loss(router_logits: Sequence[Tensor], experts_per_token: int) -> Tensor:
    """Load-balancing loss of the tokens of all layers; `experts_per_token` where they are evenly distributed.

    loss = E * sum_e (share of choices that went to e, times `experts_per_token`) * (mean probability of e)

    Args:
        router_logits: of each layer, [N, E].
        experts_per_token: experts that each token went through.

    Returns:
        Scalar; its gradient goes through the probabilities only.

    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4, for several choices as in transformers' Mixtral.
    """
    probabilities = torch.cat(list(router_logits)).float().softmax(-1)
    experts = probabilities.shape[-1]
    picked = probabilities.topk(experts_per_token, dim=-1).indices
    share = picked.flatten().bincount(minlength=experts).to(probabilities.dtype) / len(probabilities)
    return experts * (share * probabilities.mean(0)).sum()

"""Mixture of experts: a router sends each token through a few feed-forwards of many. No capacity limit: none is dropped.

Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961 (Switch, one expert per token);
Jiang et al. 2024, arXiv:2401.04088 (Mixtral, two).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from alignment.models.layers.feedforward import GatedFeedForwardSpec, PlainFeedForwardSpec


@dataclass(frozen=True)
class ExpertsSpec:
    """Several feed-forward layers, of which each token goes through `experts_per_token`.

    Attributes:
        normalized: the weights of a token's experts are made to sum to 1.
        balance_coef: factor on the load-balancing loss, in training only.
    """

    expert: PlainFeedForwardSpec | GatedFeedForwardSpec
    count: int
    experts_per_token: int
    normalized: bool = True
    balance_coef: float = 0.0

    def build(self, width: int) -> nn.Module:
        """x [N, width] -> [N, width]."""
        experts = [self.expert.build(width) for _ in range(self.count)]
        return Experts(width, experts, self.experts_per_token, self.normalized)


FeedForwardSpec = PlainFeedForwardSpec | GatedFeedForwardSpec | ExpertsSpec


class Experts(nn.Module):
    """sum over a token's experts e of weight_e * e(x); the weights are the router's probabilities.

    Attributes:
        experts_per_token: how many experts each token goes through, those of highest probability.
        normalized: a token's weights sum to 1 (Mixtral), or are the probabilities as they are (Switch).
    """

    data_dependent_shapes = True  # torch.compile leaves its forward out; see outside_graphs.py

    def __init__(self, width: int, experts: Sequence[nn.Module], experts_per_token: int, normalized: bool):
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.experts_per_token, self.normalized = experts_per_token, normalized

    def forward(self, x: Tensor) -> Tensor:
        """x: [N, D] -> [N, D]."""
        logits = self.router(x)
        weights, picked = logits.float().softmax(-1).topk(self.experts_per_token, dim=-1)  # [N, experts per token]
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        # Pairs of token and choice sorted by expert: each expert reads its tokens as one matrix.
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = order // self.experts_per_token
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
    """How unevenly the tokens of all layers are distributed over the experts; `experts_per_token` where evenly.

    loss = E * sum_e (share of choices that went to e, times `experts_per_token`) * (mean probability of e)

    Args:
        router_logits: of each layer, [N, E].
        experts_per_token: how many experts each token went through.

    Returns:
        Scalar; its gradient goes through the probabilities only.

    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4, for several choices as in transformers' Mixtral.
    """
    probabilities = torch.cat(list(router_logits)).float().softmax(-1)
    experts = probabilities.shape[-1]
    picked = probabilities.topk(experts_per_token, dim=-1).indices
    share = picked.flatten().bincount(minlength=experts).to(probabilities.dtype) / len(probabilities)
    return experts * (share * probabilities.mean(0)).sum()

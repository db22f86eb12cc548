"""Mixture of experts: a router sends each token through a few feed-forwards of many. No capacity limit: none is dropped.

Source: Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961 (Switch, one expert per token);
Jiang et al. 2024, arXiv:2401.04088 (Mixtral, two).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from alignment.models.layers.sdpa import AttentionContext


class Experts(nn.Module):
    """sum over the chosen experts e of weight_e * e(x); the weights are the router's probabilities.

    Attributes:
        chosen: experts per token.
        normalized: the weights of the chosen sum to 1 (Mixtral), or are the probabilities as they are (Switch).
        balanced: leave the router's logits in `sight.router_logits`, for `balance_loss`.
    """

    def __init__(self, width: int, experts: Sequence[nn.Module], chosen: int, normalized: bool, balanced: bool):
        super().__init__()
        self.router = nn.Linear(width, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.chosen, self.normalized, self.balanced = chosen, normalized, balanced

    def forward(self, x: Tensor, sight: "AttentionContext | None" = None) -> Tensor:
        """x: [N, D] -> [N, D]."""
        logits = self.router(x)
        if self.balanced and sight is not None and torch.is_grad_enabled():
            sight.router_logits.append(logits)
        weights, picked = logits.float().softmax(-1).topk(self.chosen, dim=-1)  # [N, chosen]
        if self.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        # Places (token, choice) sorted by expert: each expert reads its tokens as one matrix.
        order = picked.flatten().argsort(stable=True)
        counts = picked.flatten().bincount(minlength=len(self.experts)).tolist()
        rows = order // self.chosen
        pieces = x.index_select(0, rows).split(counts)
        mixed = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True)])
        mixed = mixed * weights.flatten().index_select(0, order).unsqueeze(-1).to(mixed.dtype)
        return torch.zeros_like(x).index_add(0, rows, mixed.to(x.dtype))


def balance_loss(router_logits: Sequence[Tensor], chosen: int) -> Tensor:
    """How unevenly tokens are spread over experts, over all layers together; `chosen` where they are even.

    loss = E * sum_e (share of choices that went to e, times `chosen`) * (mean probability of e)

    Args:
        router_logits: of each layer, [N, E].
        chosen: experts per token.

    Returns:
        Scalar; its gradient goes through the probabilities only.

    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4, for several choices as in transformers' Mixtral.
    """
    probabilities = torch.cat(list(router_logits)).float().softmax(-1)
    experts = probabilities.shape[-1]
    picked = probabilities.topk(chosen, dim=-1).indices
    share = picked.flatten().bincount(minlength=experts).to(probabilities.dtype) / len(probabilities)
    return experts * (share * probabilities.mean(0)).sum()

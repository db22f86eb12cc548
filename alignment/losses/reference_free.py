"""Losses of pairs that need no reference: SimPO and ORPO on means over tokens, CPO on sums.

All take the log-probabilities of the chosen and of the rejected response, nats, [B], and give the unreduced cost, [B].
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.preference import smoothed_loss

LOG_TWO = 0.6931471805599453


def simpo_loss(policy_chosen_mean: Tensor, policy_rejected_mean: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Cost of the pair's mean log-probabilities with a margin that the chosen one must lead by, one value per pair.

    cost = softplus(gamma - beta * (policy_chosen_mean - policy_rejected_mean))

    Args:
        policy_chosen_mean: the mean over the response's tokens and end token.
        beta: scale of the reward, > 0; 2 to 10 in the paper, since means are small.
        gamma: reward by which the chosen response should lead, >= 0.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}; 2 is usual for SimPO")
    return F.softplus(gamma - beta * (policy_chosen_mean - policy_rejected_mean))


def orpo_loss(policy_chosen_mean: Tensor, policy_rejected_mean: Tensor) -> Tensor:
    """ORPO's odds-ratio term alone, one value per pair; the whole loss adds the chosen response's -log p per token.

    log odds(p) = log p - log(1 - p),  p the geometric mean of the token probabilities
    cost        = softplus(-(log odds of chosen - log odds of rejected))

    Both means are < 0. The cost is log 2 where both are as likely.

    Source: Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 7; their lambda weights this term.
    """
    chosen = policy_chosen_mean - log_one_minus_exp(policy_chosen_mean)
    rejected = policy_rejected_mean - log_one_minus_exp(policy_rejected_mean)
    return F.softplus(rejected - chosen)


def weighted_orpo_loss(policy_chosen_mean: Tensor, policy_rejected_mean: Tensor, *, beta: float) -> Tensor:
    """`orpo_loss` times its weight beta, the paper's lambda; [B]."""
    return beta * orpo_loss(policy_chosen_mean, policy_rejected_mean)


def cpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """CPO's preference term, DPO with a uniform reference, one value per pair; the whole loss adds the chosen one's -log p.

    margin = beta * (policy_chosen - policy_rejected)
    cost   = (1 - eps) * softplus(-margin) + eps * softplus(margin)

    Args:
        beta: > 0.
        label_smoothing: eps, the share of labels assumed flipped, in [0, 0.5).

    Source: Xu et al. 2024, arXiv:2401.08417, eq. 3.
    """
    return smoothed_loss(beta * (policy_chosen - policy_rejected), beta, label_smoothing)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends: by log1p far from 0, by expm1 near it.

    At x = 0, to which the log-probability of a certain token rounds, it is the lowest finite one, without a gradient.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    far = x < -LOG_TWO
    # Each branch sees a harmless number where the other one counts: gradients of both are formed.
    return torch.where(far, torch.log1p(-x.where(far, -1.0).exp()), (-x.where(~far, -LOG_TWO).expm1()).log())

"""Losses of single responses that someone found desirable or not: KTO, and APO-zero without pairs."""

import torch
from torch import Tensor


def kto_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    kl: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Cost of a response by how a human would value its gain over the reference point, one value per response.

    gain = beta * (policy - reference - kl), the sign turned for an undesirable response
    cost = weight * (1 - sigmoid(gain))

    Args:
        policy: log-probability of each whole response, the sum over its tokens and end token, nats, [B].
        reference: under the reference, [B].
        desirable: True where the response is a good one, bool, [B].
        kl: the reference point z0, an estimate of KL(policy || reference) >= 0 in nats without gradient, a scalar: the
            mean log-ratio of responses after prompts they do not belong to.
        beta: pull towards the reference, > 0.
        desirable_weight, undesirable_weight: of the two kinds; with n of each they should keep
            desirable_weight * n_desirable / (undesirable_weight * n_undesirable) in [1, 4/3].

    Returns:
        Unreduced cost in [0, weight], [B]: weight / 2 where the policy equals the reference.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}; 0.1 is usual")
    gain = beta * (policy - reference - kl)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    return weight * torch.where(desirable, -gain, gain).sigmoid()


def apo_zero_unpaired_loss(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """`apo_zero_loss` of responses without partners: `kto_loss` whose reference point is 0.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7, each response by itself.
    """
    return kto_loss(
        policy, reference, desirable, 0.0,
        beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight,
    )  # fmt: skip


def kl_reference_point(log_ratios_sum: Tensor, count: Tensor) -> Tensor:
    """KTO's reference point from responses after prompts they do not belong to: max(0, mean log-ratio), a scalar.

    Args:
        log_ratios_sum: sum of (policy - reference) over such responses, nats, without gradient, a scalar.
        count: how many they are; with none the point is 0.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    return (log_ratios_sum / count.clamp(min=1)).clamp(min=0)

"""Losses over pairs, a chosen and a rejected response each: Bradley-Terry and DPO. K-way rankings are not here."""

import torch.nn.functional as F
from torch import Tensor


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None) -> Tensor:
    """Cost of a reward model's scores for pairs with a known preference, one value per pair.

    cost = -log sigmoid(chosen - rejected - margin) = softplus(margin - (chosen - rejected))

    Args:
        chosen: score of the preferred response, [B].
        rejected: score of the other one, [B].
        margin: by how much the preferred one should lead, [B] or a number; None: 0.

    Returns:
        Unreduced cost, [B]: log 2 at equal scores and no margin.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    lead = chosen - rejected
    return F.softplus(-lead if margin is None else margin - lead)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cost of ranking each pair the way its label says, one value per pair.

    margin = beta * [(policy - reference) of chosen - (policy - reference) of rejected]
    cost   = (1 - eps) * softplus(-margin) + eps * softplus(margin)

    Args:
        policy_chosen: log-probability of the whole chosen response, the sum over its tokens and end token, nats, [B].
            The other three likewise.
        beta: pull towards the reference, > 0.
        label_smoothing: eps, the share of labels assumed flipped, in [0, 0.5).

    Returns:
        Unreduced cost, [B]: log 2 where the policy equals the reference.

    Raises:
        ValueError: beta or label_smoothing outside its range.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7 (their y_w is chosen, y_l rejected); label smoothing: Mitchell
        2023, "A note on DPO with noisy preferences", eq. 3.
    """
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}; 0.1 is usual")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}: at 0.5 labels say nothing")
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return (1 - label_smoothing) * F.softplus(-margin) + label_smoothing * F.softplus(margin)

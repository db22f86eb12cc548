"""Losses over pairs, a chosen and a rejected response each: Bradley-Terry and DPO; and the metrics of both."""

import torch
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


def center_penalty(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Penalty that holds a reward model's scores near 0, one value per pair: (chosen + rejected)^2.

    Args:
        chosen: score of the preferred response, [B].
        rejected: score of the other one, [B].

    Returns:
        Unreduced cost, [B].

    Source: Eisenstein et al. 2023, arXiv:2312.09244, section 3.
    """
    return (chosen + rejected) ** 2


def implicit_rewards(policy: Tensor, reference: Tensor, beta: float) -> Tensor:
    """Reward that DPO's policy stands for: beta * (log p - log p_ref), up to a constant per prompt.

    Args:
        policy: log-probability of each whole response under the policy, nats, [B].
        reference: under the reference, [B].
        beta: pull towards the reference, > 0.

    Returns:
        [B].

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 5.
    """
    return beta * (policy - reference)


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Bradley-Terry loss of the pair's implicit rewards, one value per pair.

    margin = beta * [(policy - reference) of chosen - (policy - reference) of rejected]
    cost   = -(1 - eps) * log sigmoid(margin) - eps * log sigmoid(-margin)

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
    # beta is taken out of the difference of the implicit rewards: one rounding less
    margin = beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))
    return smoothed_loss(margin, beta, label_smoothing)


def smoothed_loss(margin: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """Bradley-Terry loss of margins, [B], which beta has scaled already, with a share of labels assumed flipped, [B].

    Raises:
        ValueError: beta or label_smoothing outside its range.
    """
    if beta <= 0:
        raise ValueError(f"beta must be above 0, got {beta}; 0.1 is usual")
    check_flip_rate(label_smoothing)
    zero = torch.zeros_like(margin)
    right, flipped = bradley_terry_loss(margin, zero), bradley_terry_loss(zero, margin)
    return (1 - label_smoothing) * right + label_smoothing * flipped


def check_flip_rate(label_smoothing: float) -> None:
    """Refuse a share of flipped labels at which labels say nothing.

    Raises:
        ValueError: it is outside [0, 0.5).
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in [0, 0.5), got {label_smoothing}: at 0.5 labels say nothing")


def preference_metrics(margins: Tensor) -> dict[str, Tensor]:
    """Sums over pairs of accuracy (a tie counts half), ties and margin; margins: [B]."""
    margins = margins.detach().float()
    ties = (margins == 0).float()
    return {"accuracy": ((margins > 0).float() + ties / 2).sum(), "ties": ties.sum(), "margin": margins.sum()}

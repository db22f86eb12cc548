"""Losses over K ranked responses to one prompt, and over labeled steps; pairs are in preference.py.

A whole batch of groups is one call: scores, ranks and mask [..., K], padded to the largest K, give one value per group.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def ranking_loss(scores: Tensor, ranks: Tensor, *, mask: Tensor | None = None, margin: Tensor | None = None) -> Tensor:
    """Mean of the Bradley-Terry costs of a prompt's ordered pairs, so that each prompt counts once whatever its K.

    cost = mean over pairs (i, j) with rank_i < rank_j of -log sigmoid(score_i - score_j - margin)

    Args:
        scores: of the responses to each prompt, [..., K].
        ranks: place of each, smaller is better, [..., K]; equal ranks form no pair.
        mask: False where a row has fewer than K responses, [..., K]; None: all have K.
        margin: by how much the better one of each pair should lead, [...]; None: 0.

    Returns:
        Cost of each prompt, [...]; a scalar for one prompt; 0 where all ranks are equal.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 1 (1 / (K choose 2) before the sum over a prompt's pairs).
    """
    lead = scores.unsqueeze(-1) - scores.unsqueeze(-2)  # [..., K, K]
    cost = F.softplus(-lead if margin is None else margin[..., None, None] - lead)
    return _mean_over(cost, is_preferred(ranks, mask))


def plackett_luce_loss(scores: Tensor, ranks: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Cost of a whole ranking, in which each response is chosen from those that are left.

    cost = sum over i of -log( exp(score_i) / (exp(score_i) + sum over j with rank_j > rank_i of exp(score_j)) )

    Without ties this is -log of the ranking's probability: K factors, the last of which is 1. Tied responses are not
    compared with each other: each has the probability of coming before all that are placed below it, as its factor.
    For K = 2 it is the Bradley-Terry loss.

    Args:
        scores, ranks, mask: as for `ranking_loss`.

    Returns:
        Cost of each prompt, [...]; 0 where all ranks are equal.

    Source: Plackett 1975, "The analysis of permutations", eq. 1; Luce 1959. The rule for ties follows from Luce's
        axiom, by which a choice does not depend on what else could have been chosen.
    """
    diagonal = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    ordered = is_preferred(ranks, mask)
    left = scores.unsqueeze(-2).expand(ordered.shape).masked_fill(~(ordered | diagonal), -torch.inf)
    cost = left.logsumexp(-1) - scores  # [..., K]; 0 where nothing is placed below
    return torch.where(ordered.any(-1), cost, 0.0).sum(-1)


def ranked_dpo_loss(log_ratios: Tensor, ranks: Tensor, *, mask: Tensor | None = None, beta: float) -> Tensor:
    """DPO on whole rankings: the Plackett-Luce cost of the responses' implicit rewards, beta * log-ratio.

    For K = 2 it is `dpo_loss`. A constant added to all log-ratios of one prompt changes nothing.

    Args:
        log_ratios: log-probability of each whole response under the policy minus that under the reference, nats, [...,
            K].
        ranks, mask: as for `ranking_loss`; ties as in `plackett_luce_loss`.
        beta: pull towards the reference, > 0.

    Returns:
        Cost of each prompt, [...]: log K! where the policy equals the reference and none of K responses tie.

    Source: Rafailov et al. 2023, arXiv:2305.18290, appendix A.3.
    """
    return plackett_luce_loss(beta * log_ratios, ranks, mask=mask)


def rao_kupper_loss(scores: Tensor, ranks: Tensor, *, theta: float, mask: Tensor | None = None) -> Tensor:
    """Mean cost of a prompt's pairs, ties among them.

    cost = mean over pairs of -log P(the better one wins), or -log P(tie) where the ranks are equal

    With p = exp(score): P(first wins) = p1 / (p1 + theta p2), P(second wins) = p2 / (theta p1 + p2),
    P(tie) = (theta^2 - 1) p1 p2 / ((p1 + theta p2) (theta p1 + p2)).

    Args:
        scores, ranks, mask: as for `ranking_loss`.
        theta: how easily two responses tie, above 1; at 1 there are no ties, and a pair without one costs what it does
            in the Bradley-Terry model.

    Returns:
        Cost of each prompt, [...].

    Raises:
        ValueError: theta is not above 1.

    Source: Rao and Kupper 1967, "Ties in paired-comparison experiments", eq. 2.3-2.4.
    """
    if theta <= 1:
        raise ValueError(f"theta must be above 1, got {theta}: at 1 no two responses tie; 2 is a start")
    log_theta = torch.tensor(theta, dtype=scores.dtype, device=scores.device).log()
    lead = scores.unsqueeze(-1) - scores.unsqueeze(-2)
    win = F.softplus(log_theta - lead)
    tie = F.softplus(log_theta - lead) + F.softplus(log_theta + lead) - torch.log(torch.expm1(2 * log_theta))
    equal = _pairs(ranks, mask) & (ranks.unsqueeze(-1) == ranks.unsqueeze(-2))
    equal = equal & torch.ones_like(equal).triu(1)  # each tie once
    return _mean_over(torch.where(equal, tie, win), is_preferred(ranks, mask) | equal)


def step_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Cost of a process reward model's scores of single steps: binary cross-entropy of each, one value per step.

    cost = softplus(-score) for a right step, softplus(score) for a wrong one

    Args:
        scores: logit that a step is right, read at the step's last token, [S].
        labels: whether it is, [S], bool.

    Returns:
        Unreduced cost, [S].

    Source: Lightman et al. 2023, arXiv:2305.20050, section 2.6 (likelihood of each step's label at its last token).
    """
    return F.binary_cross_entropy_with_logits(scores, labels.to(scores.dtype), reduction="none")


def center_scores_penalty(scores: Tensor, mask: Tensor) -> Tensor:
    """Penalty that holds the scores of K responses near 0: the square of their sum over pairs, averaged over the pairs.

    For K = 2 it is `center_penalty`, (chosen + rejected)^2.

    Args:
        scores, mask: as for `ranking_loss`.

    Returns:
        Cost of each prompt, [...].

    Source: Eisenstein et al. 2023, arXiv:2312.09244, section 3.
    """
    pairs = mask.unsqueeze(-1) & mask.unsqueeze(-2)
    return _mean_over((scores.unsqueeze(-1) + scores.unsqueeze(-2)) ** 2, pairs & torch.ones_like(pairs).triu(1))


def is_preferred(ranks: Tensor, mask: Tensor | None = None) -> Tensor:
    """True at [..., i, j] where response i is placed before response j, [..., K, K]."""
    return _pairs(ranks, mask) & (ranks.unsqueeze(-1) < ranks.unsqueeze(-2))


def ordered_pair_metrics(scores: Tensor, ranks: Tensor, mask: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Accuracy, ties and margin over all ordered pairs, and top-1 accuracy over prompts that have any: (sum, number).

    Two equal scores count half in the accuracy. Of several best scores each counts its share in `top1`, which is right
    where the response is one of those placed first.

    Args:
        scores, ranks, mask: [B, K], as for `ranking_loss`.
    """
    scores = scores.detach().float()
    ordered = is_preferred(ranks, mask)
    lead = scores.unsqueeze(-1) - scores.unsqueeze(-2)
    pair_count = ordered.sum().float()
    ties = (lead == 0) & ordered
    right = ((lead > 0) & ordered).sum().float() + ties.sum().float() / 2
    best = scores.masked_fill(~mask, -torch.inf)
    best = mask & (best == best.amax(-1, keepdim=True))
    first = ranks.masked_fill(~mask, torch.iinfo(ranks.dtype).max)
    first = mask & (first == first.amin(-1, keepdim=True))
    judged = ordered.flatten(-2).any(-1)
    top = ((best & first).sum(-1) / best.sum(-1).clamp(min=1))[judged]
    return {
        "accuracy": (right, pair_count),
        "ties": (ties.sum().float(), pair_count),
        "margin": ((lead * ordered).sum(), pair_count),
        "top1": (top.sum(), judged.sum().float()),
    }


def prompt_accuracy(scores: Tensor, ranks: Tensor, mask: Tensor) -> Tensor:
    """Share of each prompt's ordered pairs that the scores order right, equal scores by half, [B]; 0 where none is."""
    ordered = is_preferred(ranks, mask)
    scores = scores.detach().float()
    lead = scores.unsqueeze(-1) - scores.unsqueeze(-2)
    return _mean_over((lead > 0).float() + (lead == 0).float() / 2, ordered)


def step_metrics(scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Sums over steps of accuracy (a score of 0 counts half), ties, and the share of steps labeled right; [S] each."""
    signed = torch.where(labels, scores, -scores).detach().float()
    ties = (signed == 0).float()
    return {"accuracy": ((signed > 0).float() + ties / 2).sum(), "ties": ties.sum(), "right": labels.float().sum()}


def _pairs(ranks: Tensor, mask: Tensor | None) -> Tensor:
    """True at [..., i, j] where both responses exist."""
    mask = torch.ones_like(ranks, dtype=torch.bool) if mask is None else mask
    return mask.unsqueeze(-1) & mask.unsqueeze(-2)


def _mean_over(cost: Tensor, pairs: Tensor) -> Tensor:
    """Mean of the costs at `pairs`, both [..., K, K]; 0 where there is none."""
    total = torch.where(pairs, cost, 0.0).sum((-2, -1))
    return total / pairs.sum((-2, -1)).clamp(min=1)

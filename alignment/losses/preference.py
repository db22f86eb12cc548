"""Losses of preferences: Bradley-Terry on a reward model's scores, DPO and its variants on a policy's log-ratios.

A log-ratio is the log-probability of a whole response under the policy minus that under the reference, nats; beta times
it is DPO's implicit reward. Losses of pairs take those of the chosen and of the rejected responses, [B] each, and
return the unreduced cost of each pair, [B]. In formulas margin = chosen - rejected; beta > 0; eps is `label_smoothing`,
the share of labels assumed flipped, in [0, 0.5). Configs check these ranges. `losses.preference_table` has the losses
by name.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
OffsetScale = Literal["log", "linear"]

LOG_TWO = 0.6931471805599453


def bradley_terry_loss(chosen: Tensor, rejected: Tensor, margin: Tensor | float | None = None) -> Tensor:
    """Cost of a reward model's scores for pairs with a known preference, one value per pair.

    cost = -log sigmoid(chosen - rejected - margin) = softplus(margin - (chosen - rejected))

    Args:
        chosen, rejected: scores of the preferred response and of the other one, [B].
        margin: by how much the preferred one should lead, [B] or a number; None: 0.

    Returns:
        Unreduced cost, [B]: log 2 at equal scores and no margin.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; margin: Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    lead = chosen - rejected
    return F.softplus(-lead if margin is None else margin - lead)


def center_penalty(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Penalty that holds a reward model's scores, [B] each, near 0, one value per pair: (chosen + rejected)^2.

    Source: Eisenstein et al. 2023, arXiv:2312.09244, section 3.
    """
    return (chosen + rejected) ** 2


def preference_metrics(margins: Tensor) -> dict[str, Tensor]:
    """Sums over pairs of accuracy (a tie counts half), ties and margin; margins: [B]."""
    margins = margins.detach().float()
    ties = (margins == 0).float()
    return {"accuracy": ((margins > 0).float() + ties / 2).sum(), "ties": ties.sum(), "margin": margins.sum()}


class Measured(NamedTuple):
    """Metrics of a micro-batch."""

    sums: dict[str, Tensor]  # over what the batch's weight counts
    means: dict[str, tuple[Tensor, Tensor]]  # (sum, weight) of metrics with a weight of their own
    accuracy: Tensor  # of each thing that the weight counts, [B]


# Pairs of log-ratios


def dpo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """Bradley-Terry loss of the pair's implicit rewards, one value per pair.

    margin = beta * (chosen - rejected)
    cost   = -(1 - eps) * log sigmoid(margin) - eps * log sigmoid(-margin)

    Args:
        chosen, rejected: log-ratios of the whole responses, end token included, nats, [B].
        beta: pull towards the reference, > 0.
        label_smoothing: eps, the share of labels assumed flipped, in [0, 0.5).

    Returns:
        Unreduced cost, [B]: log 2 where the policy equals the reference.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7 (their y_w is chosen, y_l rejected); label smoothing: Mitchell
        2023, "A note on DPO with noisy preferences", eq. 3.
    """
    return smoothed_loss(beta * (chosen - rejected), label_smoothing)


def smoothed_loss(margin: Tensor, label_smoothing: float) -> Tensor:
    """Bradley-Terry loss of margins of rewards, [B], with a share of labels assumed flipped, [B]."""
    return (1 - label_smoothing) * F.softplus(-margin) + label_smoothing * F.softplus(margin)


def ipo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Squared distance of the margin from a fixed target, nats squared, [B].

    cost = (margin - 1 / (2 beta))^2

    A bounded target: where labels never contradict each other, the policy still stays near the reference. Log-ratios
    are of whole responses, as in the paper's equation, or means over tokens, as its authors ran it and as TRL does, so
    that the target does not depend on the length.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17 (their tau is beta).
    """
    return (chosen - rejected - 1 / (2 * beta)).square()


def hinge_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Hinge cost of the implicit rewards, [B]: max(0, 1 - beta * margin); 0 from a margin of 1 / beta nats on.

    Source: Zhao et al. 2023, arXiv:2305.10425 (SLiC-HF), in the form with a reference of Liu et al. 2023,
        arXiv:2309.06657 (their gamma is beta).
    """
    return F.relu(1 - beta * (chosen - rejected))


def robust_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """DPO's cost of the true labels, estimated without bias from labels of which a known share is flipped, [B].

    cost = [(1 - eps) * softplus(-beta * margin) - eps * softplus(beta * margin)] / (1 - 2 eps)

    The expectation over flips of probability eps is `dpo_loss` of the true label. It can be negative.

    Source: Chowdhury et al. 2024, arXiv:2403.00409, the unbiased loss of noisy labels.
    """
    margin = beta * (chosen - rejected)
    right = F.softplus(-margin)
    flipped = F.softplus(margin)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def exo_loss(chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """Reverse KL from the labels' distribution over the pair to the policy's, [B]; 0 where both are the same.

    q    = sigmoid(beta * margin)
    cost = q * log(q / (1 - eps)) + (1 - q) * log((1 - q) / eps)

    Here eps is the probability that the labels give to the rejected response, in (0, 0.5): at 0 the divergence is
    infinite.

    Source: Ji et al. 2024, arXiv:2402.00856, eq. 16, with K = 2.
    """
    margin = beta * (chosen - rejected)
    log_chosen = -F.softplus(-margin)
    log_rejected = -F.softplus(margin)
    cost_of_chosen = log_chosen.exp() * (log_chosen - math.log1p(-label_smoothing))
    return cost_of_chosen + log_rejected.exp() * (log_rejected - math.log(label_smoothing))


def nca_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Noise-contrastive cost of the two implicit rewards, each held against 0, [B].

    cost = softplus(-beta * chosen) + [softplus(beta * chosen) + softplus(beta * rejected)] / 2

    It acts on the rewards themselves and not on their difference alone, so that the chosen one's does not fall. It is
    2 log 2 where the policy equals the reference.

    Source: Chen et al. 2024, arXiv:2402.05369, its form for pairs.
    """
    chosen = beta * chosen
    rejected = beta * rejected
    return F.softplus(-chosen) + (F.softplus(chosen) + F.softplus(rejected)) / 2


def bco_loss(chosen: Tensor, rejected: Tensor, *, beta: float, shift: Tensor | float = 0.0) -> Tensor:
    """Cost of a binary classifier of the two responses by their implicit rewards, [B].

    cost = softplus(-(beta * chosen - shift)) + softplus(beta * rejected - shift)

    Args:
        shift: the reward that counts as neither good nor bad, without gradient: the mean of the chosen and the rejected
            responses' mean rewards. 0 (TRL's `bco_pair`) leaves it out. A run takes the mean over all updates so far,
            as the paper's moving average and TRL's trainer of BCO do, and keeps it in its checkpoints.

    Source: Jung et al. 2024, arXiv:2404.04656 (their delta is shift).
    """
    return F.softplus(shift - beta * chosen) + F.softplus(beta * rejected - shift)


def sppo_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Squared distances of the log-ratios from what a step of self-play would make them, nats squared, [B].

    cost = (chosen - 1 / (2 beta))^2 + (rejected + 1 / (2 beta))^2

    The hard form: the chosen response is taken to win against the policy with probability 1, the rejected one with 0.
    The reference is the policy of the iteration before; 1 / beta is the paper's step size eta.

    Source: Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with P = 1 and 0.
    """
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Anchored cost that raises the chosen and lowers the rejected response, [B]: for data better than the policy.

    cost = 1 - sigmoid(beta * chosen) + sigmoid(beta * rejected), in (0, 2); 1 where the policy equals the reference

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7, plus the constant 1.
    """
    return (-(beta * chosen)).sigmoid() + (beta * rejected).sigmoid()


def apo_down_loss(chosen: Tensor, rejected: Tensor, *, beta: float) -> Tensor:
    """Anchored cost that lowers both responses, the rejected one more, [B]: for a policy better than the data.

    cost = sigmoid(beta * chosen) + 1 - sigmoid(beta * margin), in (0, 2); 1 where the policy equals the reference

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8, plus the constant 1.
    """
    return (beta * chosen).sigmoid() + (-beta * (chosen - rejected)).sigmoid()


def discopop_loss(chosen: Tensor, rejected: Tensor, *, beta: float, tau: float) -> Tensor:
    """Log-ratio modulated loss, which a language model found: logistic and exponential cost, mixed by the margin, [B].

    m    = beta * margin
    s    = sigmoid(m / tau)
    cost = (1 - s) * softplus(-m) + s * exp(-m)

    It is not convex: around a margin of 0 it falls when the rejected response gains, at beta = tau between margins of
    -2.37 and 1.44 nats. tau > 0 is the width of the change from one cost to the other; the paper's is 0.05.

    Source: Lu et al. 2024, arXiv:2406.08414, eq. 5.
    """
    margin = beta * (chosen - rejected)
    share = (margin / tau).sigmoid()
    return (1 - share) * F.softplus(-margin) + share * torch.exp(-margin)


def odpo_loss(
    chosen: Tensor,
    rejected: Tensor,
    margins: Tensor,
    *,
    beta: float,
    offset_coef: float = 1.0,
    offset_scale: OffsetScale = "log",
) -> Tensor:
    """DPO's cost with an offset: a response that is much better has to lead by more, [B].

    offset = offset_coef * log(margin of the scores), or offset_coef * margin of the scores
    cost   = softplus(offset - beta * margin)

    Args:
        margins: by how much the chosen response's score exceeds the rejected one's, > 0 for "log", [B].
        offset_coef: weight of the offset; 0 is DPO.
        offset_scale: "log" (the paper's choice) or "linear".

    Source: Amini et al. 2024, arXiv:2402.10571 (their alpha is offset_coef, their f the scale).
    """
    offset = offset_coef * (margins.log() if offset_scale == "log" else margins)
    return F.softplus(offset - beta * (chosen - rejected))


def rdpo_loss(
    chosen: Tensor, rejected: Tensor, length_difference: Tensor, *, beta: float, length_penalty: float
) -> Tensor:
    """DPO's cost for a reward from which a penalty per token is taken: a longer chosen response need not lead, [B].

    cost = softplus(-(beta * margin + length_penalty * length_difference))

    Args:
        length_difference: tokens of the chosen minus tokens of the rejected response, [B].
        length_penalty: reward taken away for each token, >= 0; 0 is DPO.

    Source: Park et al. 2024, arXiv:2403.19159 (their alpha is length_penalty).
    """
    return F.softplus(-(beta * (chosen - rejected) + length_penalty * length_difference))


def f_divergence_scores(log_ratios: Tensor, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """The log-ratios' replacement in a loss of pairs, when another divergence holds the policy near the reference.

    With u = exp(log-ratio), the derivative f'(u) of the divergence's generator, up to a constant:
    reverse_kl: log u      forward_kl: 1 - 1 / u      js: log(2 u / (1 + u))      alpha: (1 - u^-alpha) / alpha

    Args:
        log_ratios: any shape.
        divergence: "reverse_kl" is DPO's own.
        alpha: of "alpha", in (0, 1]: towards 0 the reverse, at 1 the forward KL.

    Returns:
        Same shape. Large negative log-ratios would overflow in forward_kl and alpha; their exponents stop at 80.

    Source: Wang et al. 2023, arXiv:2309.16240.
    """
    if divergence == "forward_kl":
        return -torch.expm1((-log_ratios).clamp(max=80))
    if divergence == "js":
        return math.log(2) - F.softplus(-log_ratios)
    if divergence == "alpha":
        return -torch.expm1((-alpha * log_ratios).clamp(max=80)) / alpha
    return log_ratios


# Pairs without a reference: log-probabilities of the responses, nats, [B], in place of log-ratios


def simpo_loss(policy_chosen_mean: Tensor, policy_rejected_mean: Tensor, *, beta: float, gamma: float) -> Tensor:
    """Cost of the pair's mean log-probabilities with a margin that the chosen one must lead by, one value per pair.

    cost = softplus(gamma - beta * (policy_chosen_mean - policy_rejected_mean))

    Args:
        policy_chosen_mean, policy_rejected_mean: means over a response's tokens and end token, [B].
        beta: scale of the reward, > 0; 2 to 10 in the paper, since means are small.
        gamma: reward by which the chosen response should lead, >= 0.

    Source: Meng et al. 2024, arXiv:2405.14734, eq. 6.
    """
    return F.softplus(gamma - beta * (policy_chosen_mean - policy_rejected_mean))


def orpo_loss(policy_chosen_mean: Tensor, policy_rejected_mean: Tensor) -> Tensor:
    """ORPO's odds-ratio term alone, one value per pair; the whole loss adds the chosen response's -log p per token.

    log odds(p) = log p - log(1 - p),  p the geometric mean of the token probabilities
    cost        = softplus(-(log odds of chosen - log odds of rejected)), log 2 where both are as likely

    Both means, [B], are < 0.

    Source: Hong et al. 2024, arXiv:2403.07691, eqs. 4 and 7; their lambda weights this term.
    """
    chosen = policy_chosen_mean - log_one_minus_exp(policy_chosen_mean)
    rejected = policy_rejected_mean - log_one_minus_exp(policy_rejected_mean)
    return F.softplus(rejected - chosen)


def cpo_loss(policy_chosen: Tensor, policy_rejected: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """CPO's preference term, one value per pair: `dpo_loss` with a uniform reference.

    The whole loss adds the chosen -log p.

    Source: Xu et al. 2024, arXiv:2401.08417, eq. 3.
    """
    return dpo_loss(policy_chosen, policy_rejected, beta=beta, label_smoothing=label_smoothing)


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0, exact at both ends: by log1p far from 0, by expm1 near it.

    At x = 0, to which the log-probability of a certain token rounds, it is the lowest finite one, without a gradient.

    Source: Maechler 2012, "Accurately computing log(1 - exp(-|a|))".
    """
    x = x.clamp(max=-torch.finfo(x.dtype).tiny)
    far = x < -LOG_TWO
    # Each branch sees a harmless number where the other one counts: gradients of both are formed.
    return torch.where(far, torch.log1p(-x.where(far, -1.0).exp()), (-x.where(~far, -LOG_TWO).expm1()).log())


# Single responses that someone found desirable or not


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
        policy, reference: log-probabilities of each whole response, nats, [B].
        desirable: True where the response is a good one, bool, [B].
        kl: the reference point z0, an estimate of KL(policy || reference) >= 0 in nats without gradient, a scalar: the
            mean log-ratio of responses after prompts they do not belong to. 0 is APO-zero of single responses.
        beta: pull towards the reference, > 0.
        desirable_weight, undesirable_weight: of the two kinds; with n of each they should keep
            desirable_weight * n_desirable / (undesirable_weight * n_undesirable) in [1, 4/3].

    Returns:
        Unreduced cost in [0, weight], [B]: weight / 2 where the policy equals the reference.

    Source: Ethayarajh et al. 2024, arXiv:2402.01306; with kl = 0: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7.
    """
    gain = beta * (policy - reference - kl)
    weight = torch.where(desirable, desirable_weight, undesirable_weight)
    return weight * torch.where(desirable, -gain, gain).sigmoid()


# Distributions over a whole batch (AOT)


class BatchOrder(NamedTuple):
    """Values of a whole batch computed in parts, without gradient, and where a part's values are among them.

    Attributes:
        first, second: all values of each kind, [n].
        positions: of the part's values among them, [B].
    """

    first: Tensor
    second: Tensor
    positions: Tensor


def aot_paired_loss(
    policy_margins: Tensor,
    reference_margins: Tensor,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    order: BatchOrder | None = None,
) -> Tensor:
    """Cost of a policy whose margins do not dominate the reference's, quantile by quantile, [B].

    lead = beta * (k-th smallest policy margin - k-th smallest reference margin)
    cost = (1 - eps) * softplus(-lead) + eps * softplus(lead)

    Args:
        policy_margins: log-probability of the chosen minus that of the rejected response, nats, [B].
        reference_margins: the same under the reference, [B].
        order: margins of policy and reference of the whole batch; None: these pairs are the batch.

    Returns:
        Each cost at the place of the pair whose policy margin is the k-th smallest.

    Source: Melnyk et al. 2024, arXiv:2406.05882 ("AOT paired").
    """
    order = order or _whole_batch(policy_margins, reference_margins)
    others, shares = rank_matches(order.positions, order.first, order.second)
    return (shares * smoothed_loss(beta * (policy_margins - others), label_smoothing)).sum(0)


def aot_unpaired_loss(
    chosen: Tensor, rejected: Tensor, *, beta: float, label_smoothing: float = 0.0, order: BatchOrder | None = None
) -> Tensor:
    """Cost of chosen responses' log-ratios that do not dominate the rejected ones', quantile by quantile, [B].

    lead = beta * (k-th smallest log-ratio of chosen - k-th smallest log-ratio of rejected)
    cost = (1 - eps) * softplus(-lead) + eps * softplus(lead)

    Args:
        order: log-ratios of the chosen and the rejected responses of the whole batch; None: these pairs are the batch.
            That two responses share a row says nothing.

    Returns:
        Each cost at the place of the chosen response of the k-th smallest log-ratio. The rejected response's
        gradient is that of the sum over the batch.

    Source: Melnyk et al. 2024, arXiv:2406.05882 ("AOT unpaired").
    """
    order = order or _whole_batch(chosen, rejected)
    others, shares = rank_matches(order.positions, order.first, order.second)
    of_chosen = (shares * smoothed_loss(beta * (chosen - others), label_smoothing)).sum(0)
    others, shares = rank_matches(order.positions, order.second, order.first)
    of_rejected = (shares * smoothed_loss(beta * (others - rejected), label_smoothing)).sum(0)
    return of_chosen + of_rejected - of_rejected.detach()  # the same sum twice, for the other side's gradient


def _whole_batch(first: Tensor, second: Tensor) -> BatchOrder:
    return BatchOrder(first.detach(), second.detach(), torch.arange(len(first), device=first.device))


def rank_matches(positions: Tensor, among: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """For some values of `among`, each the k-th smallest of them, the k-th smallest of `others`; without gradient.

    Values that are equal, of which T is the largest number, have the others of all their ranks, in equal shares.

    Args:
        positions: of the values in `among`, [B]. Values that are computed again differ in their last bits, and would
            not be found by what they are.
        among, others: all values of their kind, [n].

    Returns:
        The others and their shares, which add up to 1, [T, B] each.
    """
    ordered = among.detach().sort().values
    theirs = others.detach().sort().values
    values = among.detach()[positions]
    first = torch.searchsorted(ordered, values).clamp(max=len(theirs) - 1)
    tie_count = (torch.searchsorted(ordered, values, right=True) - first).clamp(min=1)
    step = torch.arange(int(tie_count.max()), device=values.device)[:, None]
    return theirs[(first + step).clamp(max=len(theirs) - 1)], (step < tie_count) / tie_count

"""Losses of pairs against a reference, DPO's kin: a policy's log-ratios to a reference are its implicit rewards.

All take the same four log-probabilities as `dpo_loss` (preference.py): of the whole chosen and of the whole rejected
response under policy and reference, nats, [B]. They give the unreduced cost of each pair, [B]. In their formulas, margin is
`log_ratio_margin`; beta is > 0, and eps, the parameter `label_smoothing`, the share of flipped labels, in [0, 0.5).

Losses that sort a whole batch are in sorted_pairs.py, those without a reference in reference_free.py, those of single
responses in unpaired.py.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from alignment.losses.preference import check_flip_rate, dpo_loss

Divergence = Literal["reverse_kl", "forward_kl", "js", "alpha"]
OffsetScale = Literal["log", "linear"]


def log_ratio_margin(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor
) -> Tensor:
    """By how much the chosen response's log-ratio exceeds the rejected one's, nats, [B].

    margin = (policy - reference) of chosen - (policy - reference) of rejected
    """
    return (policy_chosen - reference_chosen) - (policy_rejected - reference_rejected)


def ipo_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Squared distance of the pair's log-ratio margin from a fixed target, nats squared, [B].

    cost = (margin - 1 / (2 beta))^2

    A bounded target: where labels never contradict each other, the policy still stays near the reference. The function
    takes the log-probabilities as they are given: sums, as in the paper's equation, or means over tokens, as its authors
    ran it and as TRL does, so that the target does not depend on the length.

    Args:
        beta: > 0; the larger, the nearer the reference.

    Source: Azar et al. 2023, arXiv:2310.12036, eq. 17 (their tau is beta).
    """
    margin = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return (margin - 1 / (2 * _positive(beta))).square()


def hinge_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Hinge cost of the pair's implicit rewards, [B]: max(0, 1 - beta * margin).

    Args:
        beta: > 0; 1 / beta is the margin in nats above which a pair costs nothing.

    Source: Zhao et al. 2023, arXiv:2305.10425 (SLiC-HF), in the form with a reference of Liu et al. 2023,
        arXiv:2309.06657 (their gamma is beta).
    """
    margin = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return F.relu(1 - _positive(beta) * margin)


def robust_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """DPO's cost of the true labels, estimated without bias from labels of which a known share is flipped, [B].

    cost = [(1 - eps) * softplus(-beta * margin) - eps * softplus(beta * margin)] / (1 - 2 eps)

    The expectation over flips of probability eps is `dpo_loss` of the true label. It can be negative.

    Source: Chowdhury et al. 2024, arXiv:2403.00409, the unbiased loss of noisy labels.
    """
    check_flip_rate(label_smoothing)
    margin = _positive(beta) * log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    right, flipped = F.softplus(-margin), F.softplus(margin)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def exo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    label_smoothing: float,
) -> Tensor:
    """Reverse KL from the labels' distribution over the pair to the policy's, [B].

    q    = sigmoid(beta * margin)
    cost = q * log(q / (1 - eps)) + (1 - q) * log((1 - q) / eps)

    Here eps is the probability that the labels give to the rejected response, in (0, 0.5). The cost, in nats, is 0 where
    the policy has the labels' distribution.

    Raises:
        ValueError: label_smoothing is 0, at which the divergence is infinite.

    Source: Ji et al. 2024, arXiv:2402.00856, eq. 16, with K = 2.
    """
    if not 0 < label_smoothing < 0.5:
        raise ValueError(f"label_smoothing must be in (0, 0.5) for EXO, got {label_smoothing}; 1e-3 is the paper's")
    margin = _positive(beta) * log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    log_chosen, log_rejected = -F.softplus(-margin), -F.softplus(margin)
    chosen = log_chosen.exp() * (log_chosen - math.log1p(-label_smoothing))
    return chosen + log_rejected.exp() * (log_rejected - math.log(label_smoothing))


def nca_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Noise-contrastive cost of the two implicit rewards, each held against 0, [B].

    reward = beta * (policy - reference), of each response
    cost   = softplus(-reward of chosen) + [softplus(reward of chosen) + softplus(reward of rejected)] / 2

    It acts on the rewards themselves and not on their difference alone, so that the chosen one's does not fall. It is
    2 log 2 where the policy equals the reference.

    Source: Chen et al. 2024, arXiv:2402.05369, its form for pairs.
    """
    chosen = _positive(beta) * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    return F.softplus(-chosen) + (F.softplus(chosen) + F.softplus(rejected)) / 2


def bco_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    shift: Tensor | float = 0.0,
) -> Tensor:
    """Cost of a binary classifier of the two responses by their implicit rewards, [B].

    reward = beta * (policy - reference), of each response
    cost   = softplus(-(reward of chosen - shift)) + softplus(reward of rejected - shift)

    Args:
        shift: the reward that counts as neither good nor bad, without gradient: the mean of the chosen and the rejected
            responses' mean rewards. 0 (TRL's `bco_pair`) leaves it out. A run takes the mean over all updates so far, as
            the paper's moving average and TRL's trainer of BCO do, and keeps it in its checkpoints.

    Source: Jung et al. 2024, arXiv:2404.04656 (their delta is shift).
    """
    chosen = _positive(beta) * (policy_chosen - reference_chosen)
    rejected = beta * (policy_rejected - reference_rejected)
    return F.softplus(shift - chosen) + F.softplus(rejected - shift)


def sppo_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Squared distances of the log-ratios from what a step of self-play would make them, nats squared, [B].

    cost = (log-ratio of chosen - 1 / (2 beta))^2 + (log-ratio of rejected + 1 / (2 beta))^2

    The hard form: the chosen response is taken to win against the policy with probability 1, the rejected one with 0. The
    reference is the policy of the iteration before.

    Args:
        beta: > 0; 1 / beta is the paper's step size eta.

    Source: Wu et al. 2024, arXiv:2405.00675, eq. 4.7 with P = 1 and 0.
    """
    target = 0.5 / _positive(beta)
    return (policy_chosen - reference_chosen - target).square() + (
        policy_rejected - reference_rejected + target
    ).square()


def apo_zero_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Anchored cost that raises the chosen and lowers the rejected response, [B]: for data better than the policy.

    cost = 1 - sigmoid(beta * log-ratio of chosen) + sigmoid(beta * log-ratio of rejected)

    It lies in (0, 2), and is 1 where the policy equals the reference.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7, plus the constant 1.
    """
    chosen = _positive(beta) * (policy_chosen - reference_chosen)
    return (-chosen).sigmoid() + (beta * (policy_rejected - reference_rejected)).sigmoid()


def apo_down_loss(
    policy_chosen: Tensor, policy_rejected: Tensor, reference_chosen: Tensor, reference_rejected: Tensor, *, beta: float
) -> Tensor:
    """Anchored cost that lowers both responses, the rejected one more, [B]: for a policy better than the data.

    cost = sigmoid(beta * log-ratio of chosen) + 1 - sigmoid(beta * margin)

    It lies in (0, 2), and is 1 where the policy equals the reference.

    Source: D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8, plus the constant 1.
    """
    margin = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return (_positive(beta) * (policy_chosen - reference_chosen)).sigmoid() + (-beta * margin).sigmoid()


def discopop_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    tau: float,
) -> Tensor:
    """Log-ratio modulated loss, which a language model found: a logistic and an exponential cost, mixed by the margin, [B].

    m    = beta * margin
    s    = sigmoid(m / tau)
    cost = (1 - s) * softplus(-m) + s * exp(-m)

    It is not convex: around a margin of 0 it falls when the rejected response gains, at beta = tau between log-ratio
    margins of -2.37 and 1.44 nats.

    Args:
        tau: width of the change from one cost to the other, > 0; the paper's is 0.05.

    Source: Lu et al. 2024, arXiv:2406.08414, eq. 5.
    """
    margin = _positive(beta) * log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    share = (margin / _positive(tau, "tau")).sigmoid()
    return (1 - share) * F.softplus(-margin) + share * torch.exp(-margin)


def odpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    margins: Tensor,
    *,
    beta: float,
    offset_coef: float = 1.0,
    offset_scale: OffsetScale = "log",
) -> Tensor:
    """DPO's cost with an offset: a response that is much better has to lead by more, [B].

    offset = offset_coef * log(margin of the scores), or offset_coef * margin
    cost   = softplus(offset - beta * margin of the log-ratios)

    Args:
        margins: by how much the chosen response's score exceeds the rejected one's, > 0 for "log", [B].
        offset_coef: weight of the offset; 0 is DPO.
        offset_scale: "log" (the paper's choice) or "linear".

    Source: Amini et al. 2024, arXiv:2402.10571 (their alpha is offset_coef, their f the scale).
    """
    if offset_scale not in get_args(OffsetScale):
        raise ValueError(f"offset_scale must be one of {', '.join(get_args(OffsetScale))}, got {offset_scale!r}")
    offset = offset_coef * (margins.log() if offset_scale == "log" else margins)
    margin = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return F.softplus(offset - _positive(beta) * margin)


def rdpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    length_difference: Tensor,
    *,
    beta: float,
    length_penalty: float,
) -> Tensor:
    """DPO's cost for a reward from which a penalty per token is taken: a longer chosen response need not lead, [B].

    cost = softplus(-(beta * margin + length_penalty * length_difference))

    Args:
        length_difference: tokens of the chosen minus tokens of the rejected response, [B].
        length_penalty: reward taken away for each token, >= 0; 0 is DPO.

    Source: Park et al. 2024, arXiv:2403.19159 (their alpha is length_penalty).
    """
    margin = log_ratio_margin(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    return F.softplus(-(_positive(beta) * margin + length_penalty * length_difference))


def f_divergence_scores(log_ratios: Tensor, divergence: Divergence, alpha: float = 0.5) -> Tensor:
    """What takes the place of the log-ratio in a loss of pairs, when another divergence holds the policy near the reference.

    With u = exp(log-ratio), the derivative f'(u) of the divergence's generator, up to a constant:
    reverse_kl: log u      forward_kl: 1 - 1 / u      js: log(2 u / (1 + u))      alpha: (1 - u^-alpha) / alpha

    Args:
        log_ratios: log-probability under the policy minus that under the reference, nats, any shape.
        divergence: "reverse_kl" is DPO's own.
        alpha: of "alpha", in (0, 1): towards 0 the reverse, at 1 the forward KL.

    Returns:
        Same shape. Large negative log-ratios would overflow in forward_kl and alpha; their exponents stop at 80.

    Source: Wang et al. 2023, arXiv:2309.16240.
    """
    if divergence == "reverse_kl":
        return log_ratios
    if divergence == "forward_kl":
        return -torch.expm1((-log_ratios).clamp(max=80))
    if divergence == "js":
        return math.log(2) - F.softplus(-log_ratios)
    if divergence == "alpha":
        return -torch.expm1((-_positive(alpha, "alpha") * log_ratios).clamp(max=80)) / alpha
    raise ValueError(f"divergence must be one of {', '.join(get_args(Divergence))}, got {divergence!r}")


def f_dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    divergence: Divergence,
    alpha: float = 0.5,
) -> Tensor:
    """DPO under another divergence than the reverse KL, [B].

    cost = softplus(-beta * [f'(ratio of chosen) - f'(ratio of rejected)])

    It is log 2 where the policy equals the reference. divergence and alpha are as for `f_divergence_scores`.

    Source: Wang et al. 2023, arXiv:2309.16240.
    """
    chosen = f_divergence_scores(policy_chosen - reference_chosen, divergence, alpha)
    rejected = f_divergence_scores(policy_rejected - reference_rejected, divergence, alpha)
    zero = torch.zeros_like(chosen)
    return dpo_loss(chosen, rejected, zero, zero, beta=beta)


def _positive(value: float, name: str = "beta") -> float:
    """The value itself, if it is above 0."""
    if value <= 0:
        raise ValueError(f"{name} must be above 0, got {value}")
    return value

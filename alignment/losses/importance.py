"""Truncated importance sampling: weights of tokens that another distribution than the trained policy's has sampled."""

import torch
from torch import Tensor


@torch.no_grad()
def importance_weights(log_probs: Tensor, sampled_log_probs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """Truncated importance weight of each response token, without gradient; a factor of its policy loss.

    weight_t = min(exp(log p_t - log q_t), cap)

    q is what sampled the token: the policy's distribution cut by top-k, top-p or min-p, the policy before its last
    updates, or another engine's rounding of it. The factor makes the gradient, which is taken of responses of q, one of
    responses of p, up to the cap; PPO's own ratio, which begins at 1, stays within its clip range beside it.

    Args:
        log_probs: log p, of the response tokens under the policy before the update, [B, R].
        sampled_log_probs: log q, of the same tokens when they were drawn, [B, R].
        mask: True at response tokens, [B, R].
        cap: C, the largest weight, > 0; infinity does not truncate.

    Returns:
        [B, R]; 0 where mask is False.

    Source: Ionides 2008, "Truncated importance sampling"; behaviour and proximal policy apart: Hilton et al. 2021,
        arXiv:2110.00641, eq. 2; for samples of another engine: Yao et al. 2025, "Your efficient RL framework secretly
        brings you off-policy RL training".
    """
    log_ratio = torch.where(mask, log_probs - sampled_log_probs, 0.0)
    return torch.where(mask, log_ratio.exp().clamp(max=cap), 0.0)


@torch.no_grad()
def sequence_importance_weights(log_probs: Tensor, sampled_log_probs: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """As `importance_weights`, with one weight for all tokens of a response: the product over the response, truncated.

    weight = min(exp(sum over t of (log p_t - log q_t)), cap)

    Source: as `importance_weights`; for ratios of whole responses, as in Zheng et al. 2025, arXiv:2507.18071.
    """
    log_ratio = torch.where(mask, log_probs - sampled_log_probs, 0.0).sum(1, keepdim=True)
    return torch.where(mask, log_ratio.exp().clamp(max=cap), 0.0)

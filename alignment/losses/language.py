"""What a language model says of tokens: log-probabilities and entropy. Which tokens count is the caller's affair."""

import torch
from torch import Tensor


def token_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probability of each token under its logits, in nats.

    log p(token) = logit(token) - log sum_v exp(logit(v))

    Args:
        logits: [..., V], of any floating type; -inf rules a token out.
        tokens: ids in [0, V), [...].

    Returns:
        [...], float32 at least: bfloat16 keeps 8 bits, and sums over 500 tokens would drift by whole nats.
    """
    return _log_softmax(logits).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution, in nats: log V where it is uniform, 0 where one token has all.

    entropy = - sum_v p(v) log p(v)

    Args:
        logits: [..., V]; -inf rules a token out.

    Returns:
        [...], float32 at least, never negative.
    """
    log_probs = _log_softmax(logits)
    impossible = log_probs == -torch.inf  # 0 * -inf would be NaN, in the gradient too
    return -(log_probs.exp() * log_probs.masked_fill(impossible, 0.0)).sum(-1)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))

"""Pure functions: tensors in, unreduced tensors out. The losses of classification heads, sums over labels, are in
`alignment.losses.classification`.
"""

from alignment.losses.distillation import distillation_loss, hidden_cosine_loss
from alignment.losses.language import (
    chunked_token_log_probs,
    entropy,
    log_softmax,
    mean_language_loss,
    token_log_probs,
)
from alignment.losses.policy import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    gae,
    kl_estimates,
    shape_rewards,
    whiten,
)
from alignment.losses.preference import bradley_terry_loss, center_penalty, dpo_loss, implicit_rewards

__all__ = [
    "bradley_terry_loss",
    "center_penalty",
    "chunked_token_log_probs",
    "clipped_policy_loss",
    "clipped_tokens",
    "clipped_value_loss",
    "distillation_loss",
    "dpo_loss",
    "entropy",
    "gae",
    "hidden_cosine_loss",
    "implicit_rewards",
    "kl_estimates",
    "log_softmax",
    "mean_language_loss",
    "shape_rewards",
    "token_log_probs",
    "whiten",
]

"""Pure functions: tensors in, unreduced tensors out. The losses of classification heads, sums over labels, are in
`alignment.losses.classification`.
"""

from alignment.losses.advantages import (
    dr_grpo_advantages,
    grpo_advantages,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
)
from alignment.losses.direct_preference import (
    apo_down_loss,
    apo_zero_loss,
    bco_loss,
    discopop_loss,
    exo_loss,
    f_divergence_scores,
    f_dpo_loss,
    hinge_loss,
    ipo_loss,
    nca_loss,
    odpo_loss,
    rdpo_loss,
    robust_loss,
    sppo_loss,
)
from alignment.losses.distillation import distillation_loss, hidden_cosine_loss
from alignment.losses.language import (
    TokenLoss,
    chunked_token_log_probs,
    entropy,
    log_softmax,
    mean_language_loss,
    regularized_token_loss,
    token_log_probs,
    token_log_probs_and_entropy,
)
from alignment.losses.policy import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    gae,
    kl_estimates,
    sequence_log_ratios,
    shape_rewards,
    whiten,
)
from alignment.losses.preference import bradley_terry_loss, center_penalty, dpo_loss, implicit_rewards
from alignment.losses.ranking import plackett_luce_loss, ranked_dpo_loss, ranking_loss, rao_kupper_loss, step_loss
from alignment.losses.reference_free import cpo_loss, orpo_loss, simpo_loss
from alignment.losses.sorted_pairs import aot_paired_loss, aot_unpaired_loss
from alignment.losses.unpaired import apo_zero_unpaired_loss, kto_loss

__all__ = [
    "TokenLoss",
    "aot_paired_loss",
    "aot_unpaired_loss",
    "apo_down_loss",
    "apo_zero_loss",
    "apo_zero_unpaired_loss",
    "bco_loss",
    "bradley_terry_loss",
    "center_penalty",
    "chunked_token_log_probs",
    "clipped_policy_loss",
    "clipped_tokens",
    "clipped_value_loss",
    "cpo_loss",
    "discopop_loss",
    "distillation_loss",
    "dpo_loss",
    "dr_grpo_advantages",
    "entropy",
    "exo_loss",
    "f_divergence_scores",
    "f_dpo_loss",
    "gae",
    "grpo_advantages",
    "hidden_cosine_loss",
    "hinge_loss",
    "implicit_rewards",
    "ipo_loss",
    "kl_estimates",
    "kto_loss",
    "log_softmax",
    "mean_language_loss",
    "nca_loss",
    "odpo_loss",
    "orpo_loss",
    "plackett_luce_loss",
    "ranked_dpo_loss",
    "ranking_loss",
    "rao_kupper_loss",
    "rdpo_loss",
    "regularized_token_loss",
    "remax_advantages",
    "rewards_to_go",
    "rloo_advantages",
    "robust_loss",
    "sequence_log_ratios",
    "shape_rewards",
    "simpo_loss",
    "sppo_loss",
    "step_loss",
    "token_log_probs",
    "token_log_probs_and_entropy",
    "whiten",
]

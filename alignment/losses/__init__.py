"""Pure functions: tensors in, unreduced tensors out. The losses of classification heads, sums over labels, are in
`alignment.losses.language`.
"""

from alignment.losses.language import (
    TokenLoss,
    chunked_token_log_probs,
    distillation_loss,
    entropy,
    hidden_cosine_loss,
    log_softmax,
    mean_language_loss,
    reverse_kl,
    smoothed_token_loss,
    token_log_probs,
    token_log_probs_and_entropy,
)  # fmt: skip
from alignment.losses.policy import (
    clipped_policy_loss,
    clipped_tokens,
    clipped_value_loss,
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    importance_weights,
    kl_estimates,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    sequence_log_ratios,
    shape_rewards,
    whiten,
)  # fmt: skip
from alignment.losses.preference import (
    aot_paired_loss,
    aot_unpaired_loss,
    apo_down_loss,
    apo_zero_loss,
    bco_loss,
    bradley_terry_loss,
    center_penalty,
    cpo_loss,
    discopop_loss,
    dpo_loss,
    exo_loss,
    f_divergence_scores,
    hinge_loss,
    ipo_loss,
    kto_loss,
    nca_loss,
    odpo_loss,
    orpo_loss,
    rdpo_loss,
    robust_loss,
    simpo_loss,
    sppo_loss,
)  # fmt: skip
from alignment.losses.ranking import (
    plackett_luce_loss,
    ranked_dpo_loss,
    ranking_loss,
    rao_kupper_loss,
    step_loss,
)  # fmt: skip

__all__ = [
    "TokenLoss", "aot_paired_loss", "aot_unpaired_loss", "apo_down_loss", "apo_zero_loss", "bco_loss",
    "bradley_terry_loss", "center_penalty", "chunked_token_log_probs", "clipped_policy_loss", "clipped_tokens",
    "clipped_value_loss", "cpo_loss", "discopop_loss", "distillation_loss", "dpo_loss", "dr_grpo_advantages",
    "entropy", "exo_loss", "f_divergence_scores", "gae", "grpo_advantages", "hidden_cosine_loss", "hinge_loss",
    "importance_weights", "ipo_loss", "kl_estimates", "kto_loss", "log_softmax", "mean_language_loss", "nca_loss",
    "odpo_loss", "orpo_loss", "plackett_luce_loss", "ranked_dpo_loss", "ranking_loss", "rao_kupper_loss", "rdpo_loss",
    "remax_advantages", "reverse_kl", "rewards_to_go", "rloo_advantages", "robust_loss", "sequence_log_ratios",
    "shape_rewards", "simpo_loss", "smoothed_token_loss", "sppo_loss", "step_loss", "token_log_probs",
    "token_log_probs_and_entropy", "whiten",
]  # fmt: skip

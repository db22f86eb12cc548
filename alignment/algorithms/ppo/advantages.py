"""Advantages of a rollout: what each token's update is multiplied by."""

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.controllers import ScoreNormalizer
from alignment.algorithms.ppo.rollout import Rollout
from alignment.losses.policy import gae, shape_rewards, whiten


def add_advantages(
    rollout: Rollout,
    config: PPOConfig,
    normalizer: ScoreNormalizer,
    kl_coef: float,
    reduce: Callable[[Tensor], Tensor],
) -> Rollout:
    """The rollout with its rewards, advantages and returns.

    reward_t = -kl_coef * (log p - log p_ref)_t + [t last] * (scale * score + shift - [not ended] * missing_end_penalty)

    Args:
        normalizer: gives `scale` and `shift`; not read where several rewards were shaped one by one.
        kl_coef: penalty per token.
        reduce: adds a tensor over all ranks, for whitening.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2; GAE Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    shaped = rollout.shaped_scores
    scores = normalizer.scale * rollout.scores + normalizer.shift if shaped is None else shaped
    scores = scores - config.missing_end_penalty * (~rollout.ended).float()
    rewards = shape_rewards(scores, rollout.log_probs, rollout.reference_log_probs, rollout.mask, kl_coef=kl_coef)
    advantages, returns = gae(rewards, rollout.values, rollout.mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    whitened = whiten(advantages, rollout.mask, reduce=reduce)
    return replace(rollout, rewards=rewards, advantages=whitened, returns=returns)

"""Advantages of a rollout, by which each token's update is multiplied, and importance weights of off-policy samples."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.state import PPOState, ScoreNormalizer
from alignment.algorithms.rollouts.rollout import Baseline, Rollout, sample
from alignment.data.batches import Example
from alignment.generation import SamplingConfig
from alignment.losses.policy import (
    dr_grpo_advantages,
    gae,
    grpo_advantages,
    importance_weights,
    remax_advantages,
    rewards_to_go,
    rloo_advantages,
    shape_rewards,
    whiten,
)
from alignment.rewards.combine import Rewards, as_scores

GROUP_ADVANTAGES = {"rloo": rloo_advantages, "grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages}


def add_advantages(
    rollout: Rollout,
    config: PPOConfig,
    normalizer: ScoreNormalizer,
    kl_coef: float,
    reduce: Callable[[Tensor], Tensor],
) -> Rollout:
    """The rollout with its rewards, advantages and returns, and importance weights where it needs them.

    reward_t = -kl_coef * (log p - log p_ref)_t + [t last] * (scale * score + shift - [not ended] * penalty)

    The penalty is missing_end_penalty deviations of what it is taken off: 1 with `normalizer`, else `score_deviation`.

    The KL penalty has `kl_estimator`, and stands in the rewards unless kl_in=loss. rloo, grpo and dr_grpo compare the
    sums of whole responses, and all tokens of a response have the same advantage. Responses without a score are in no
    mean and no deviation; their rewards, advantages and returns are 0.

    Args:
        normalizer: gives `scale` and `shift`; not read where several rewards were shaped one by one.
        kl_coef: penalty per token.
        reduce: adds a tensor over all ranks, for whitening.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2; GAE Schulman et al. 2016, arXiv:1506.02438, eq. 16; the others:
    see `alignment.losses.policy`.
    """
    assert rollout.reference_log_probs is not None
    mask = rollout.learned_mask
    normalized = rollout.shaped_scores is None and normalizer.fitted
    penalty = config.missing_end_penalty * (1.0 if normalized else rollout.score_deviation)
    rewards = shape_rewards(
        shaped_scores(rollout, normalizer, penalty),
        rollout.log_probs,
        rollout.reference_log_probs,
        rollout.mask,
        kl_coef=kl_coef if config.kl_in == "reward" else 0.0,
        kl_estimator=config.kl_estimator,
    )
    rewards = torch.where(mask, rewards, 0.0)
    if config.whiten_rewards:
        rewards = whiten(rewards, mask, shift_mean=False, reduce=reduce)
    if config.advantages == "gae":
        assert rollout.values is not None
        advantages, returns = gae(rewards, rollout.values, mask, gamma=config.gamma, gae_lambda=config.gae_lambda)
    else:
        returns = rewards_to_go(rewards, mask, gamma=config.gamma)
        advantages = without_value_model(rewards, rollout, config, normalizer, penalty)
    if config.whitens_advantages:
        advantages = whiten(advantages, mask, reduce=reduce)
    weights = correction_weights(rollout, config)
    return replace(rollout, rewards=rewards, advantages=advantages, returns=returns, weights=weights)


def without_value_model(
    rewards: Tensor, rollout: Rollout, config: PPOConfig, normalizer: ScoreNormalizer, penalty: float
) -> Tensor:
    """Advantages of rewards [B, R] by comparison with other responses, not whitened, [B, R]."""
    mask = rollout.learned_mask
    if config.advantages == "reinforce++":
        return rewards_to_go(rewards, mask, gamma=config.gamma)
    if config.advantages == "remax":
        assert rollout.baseline is not None
        baselines = shaped_scores(rollout.baseline, normalizer, penalty)
        return remax_advantages(rewards, mask, baselines, gamma=config.gamma)
    sums = rewards.sum(1).masked_fill(~rollout.learned, math.nan)
    of_responses = GROUP_ADVANTAGES[config.advantages](sums, config.responses_per_prompt)
    return torch.where(mask, of_responses.unsqueeze(1), 0.0)


def shaped_scores(scored: Rollout | Baseline, normalizer: ScoreNormalizer, penalty: float) -> Tensor:
    """Scores as they are learned from, normalized and less the penalty of responses that did not end, [B]."""
    shaped = scored.shaped_scores
    scores = normalizer.scale * scored.scores + normalizer.shift if shaped is None else shaped
    return scores - penalty * (~scored.ended).float()


def correction_weights(rollout: Rollout, config: PPOConfig) -> Tensor | None:
    """The importance weight of each token; None if sampler and policy are one distribution or nothing is corrected."""
    if config.importance_cap is None or not (config.samples_differ or config.servers):
        return None
    tokens = (rollout.log_probs, rollout.sampled_log_probs, rollout.mask)
    return importance_weights(*tokens, cap=config.importance_cap, sequence=config.ratio == "sequence")


@torch.no_grad()
def greedy_baseline(rollout: Rollout, state: PPOState, config: PPOConfig, prompts: Sequence[Example]) -> Baseline:
    """Scores of the greedy response to each row's prompt; they are in no statistics of the rewards."""
    group = state.process_group
    count = config.responses_per_prompt
    local = prompts[group.rank :: group.size]
    numbers = rollout.numbers[::count]
    greedy = SamplingConfig(config.max_new_tokens, temperature=0.0)
    responses = sample(state, greedy, [list(prompt.ids) for prompt in local], numbers, config.micro_rollout_batch_size)
    judge = state.score.judge if isinstance(state.score, Rewards) else state.score
    with state.policy.backend.autocast():
        scores = as_scores(judge(local, responses.token_ids, responses.ended))

    def of_rows(values: Tensor) -> Tensor:
        return values.to(group.device).repeat_interleave(count)

    shaped = None if scores.shaped is None else of_rows(scores.shaped)
    return Baseline(of_rows(scores.total), of_rows(torch.tensor(responses.ended)), shaped)

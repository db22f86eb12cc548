"""What PPO learns from: sampled responses with everything known about them. The update itself is in ppo.py."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from alignment.data.tokenize import PromptExample
from alignment.generation import SamplingConfig, decode_responses
from alignment.losses import gae, shape_rewards, whiten
from alignment.ragged import Ragged, RaggedBatch, group_by_length

# prompts, token ids of the responses, whether each ended by itself -> scores [B]
Scorer = Callable[[Sequence[PromptExample], Sequence[Sequence[int]], Sequence[bool]], Tensor]


@dataclass(frozen=True)
class Rollout:
    """B sampled responses of at most R tokens; frames are [B, R], zero where `mask` is False.

    Attributes:
        prompts, responses: token ids.
        numbers: global number of each row over the whole run.
        mask: True at each response token.
        log_probs: of the policy that sampled, per token, as training computes them.
        sampled_log_probs: the same as the sampler computed them.
        reference_log_probs: of the reference, same tokens and temperature.
        values: the critic's estimate before each token.
        scores: what the reward model says of the whole response, raw, [B].
        ended: True where the response stopped by itself, [B].
        rewards, advantages, returns: filled in by `with_advantages`.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    numbers: list[int]
    mask: Tensor
    log_probs: Tensor
    sampled_log_probs: Tensor
    reference_log_probs: Tensor
    values: Tensor
    scores: Tensor
    ended: Tensor
    rewards: Tensor | None = None
    advantages: Tensor | None = None
    returns: Tensor | None = None


@dataclass(frozen=True)
class RolloutBatch(RaggedBatch):
    """Some rows of a rollout for one forward: the ragged tokens and, for each response token, what was known of it, [M]."""

    log_probs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


def ragged_of(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], numbers: Sequence[int]) -> Ragged:
    """Prompt + response of each row; every response token is a target."""
    pairs = list(zip(prompts, responses, strict=True))
    return Ragged.build(
        [[*prompt, *response] for prompt, response in pairs],
        [[False] * len(prompt) + [True] * len(response) for prompt, response in pairs],
        row_ids=[f"rollout {number}" for number in numbers],
    )


@torch.no_grad()
def collect(
    sampler: Any,
    policy: Callable[..., Any],
    reference: Callable[..., Any],
    critic: Callable[..., Any],
    score: Scorer,
    prompts: Sequence[PromptExample],
    numbers: Sequence[int],
    sampling: SamplingConfig,
    stop_ids: Sequence[int],
    *,
    device: torch.device,
    micro_batch_tokens: int,
    micro_rollout_batch_size: int = 256,
) -> Rollout:
    """Sample a response to each prompt and ask reference, critic and reward model about it.

    Args:
        sampler: the bare policy, for decoding.
        policy: the same as it is called in training. Its log-probabilities are the ones kept: with a cache and without
            one the same sum is rounded differently, and the first ratio must be 1.
        reference, critic: called as `model(batch=ragged)`.
        score: the reward model.
        numbers: global number of each row, which fixes its draws.
        micro_rollout_batch_size: responses sampled side by side; changes memory and speed, and no response.

    Returns:
        A rollout without rewards or advantages.
    """
    ids = [list(prompt.ids) for prompt in prompts]
    drawn = decode_responses(sampler, ids, sampling, stop_ids, rows=numbers, batch_size=micro_rollout_batch_size)
    mask = torch.zeros(len(ids), max(map(len, drawn.token_ids)), dtype=torch.bool, device=device)
    for row, tokens in enumerate(drawn.token_ids):
        mask[row, : len(tokens)] = True
    sampled = torch.tensor([value for values in drawn.log_probs for value in values], device=device)
    frames = {name: torch.zeros(mask.shape, device=device) for name in ("log_probs", "reference_log_probs", "values")}
    lengths = [len(prompt) + len(response) for prompt, response in zip(ids, drawn.token_ids, strict=True)]
    for group in group_by_length(lengths, micro_batch_tokens):
        rows = torch.tensor(group, device=device)
        batch = ragged_of([ids[i] for i in group], [drawn.token_ids[i] for i in group], [numbers[i] for i in group])
        batch = batch.to(device)
        answers = {
            "log_probs": policy(batch=batch, temperature=sampling.temperature).log_probs,
            "reference_log_probs": reference(batch=batch, temperature=sampling.temperature).log_probs,
            "values": critic(batch=batch).values[batch.target_index - 1],  # the state before the token
        }
        for name, answer in answers.items():
            frames[name][rows] = _frame(answer.float(), mask[rows])
    return Rollout(
        prompts=ids,
        responses=drawn.token_ids,
        numbers=list(numbers),
        mask=mask,
        sampled_log_probs=_frame(sampled, mask),
        scores=score(prompts, drawn.token_ids, drawn.ended).to(device),
        ended=torch.tensor(drawn.ended, device=device),
        **frames,
    )


def with_advantages(
    rollout: Rollout,
    *,
    kl_coef: float,
    gain: float,
    bias: float,
    missing_end_penalty: float,
    gamma: float,
    gae_lambda: float,
    reduce: Callable[[Tensor], Tensor],
) -> Rollout:
    """Rewards, advantages and returns of a rollout.

    reward_t = -kl_coef * (log p - log p_ref)_t + [t last] * (gain * score + bias - [not ended] * missing_end_penalty)

    Args:
        gain, bias: normalize the reward model's scores.
        reduce: adds a tensor over all ranks, for whitening.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2; GAE Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    scores = gain * rollout.scores + bias - missing_end_penalty * (~rollout.ended).float()
    rewards = shape_rewards(scores, rollout.log_probs, rollout.reference_log_probs, rollout.mask, kl_coef=kl_coef)
    advantages, returns = gae(rewards, rollout.values, rollout.mask, gamma=gamma, gae_lambda=gae_lambda)
    return replace(
        rollout, rewards=rewards, advantages=whiten(advantages, rollout.mask, reduce=reduce), returns=returns
    )


def rollout_batches(rollout: Rollout, rows: Sequence[int], micro_batch_tokens: int) -> list[RolloutBatch]:
    """Micro-batches of the given rows of a rollout that has its advantages."""
    if rollout.advantages is None or rollout.returns is None:
        raise ValueError("the rollout has no advantages yet: see with_advantages")
    lengths = [len(rollout.prompts[i]) + len(rollout.responses[i]) for i in rows]
    batches = []
    for group in group_by_length(lengths, micro_batch_tokens):
        chosen = [rows[i] for i in group]
        mask = rollout.mask[chosen]
        ragged = ragged_of(
            [rollout.prompts[i] for i in chosen],
            [rollout.responses[i] for i in chosen],
            [rollout.numbers[i] for i in chosen],
        )
        frames = (rollout.log_probs, rollout.values, rollout.advantages, rollout.returns)
        batches.append(RolloutBatch(ragged.to(mask.device), *(frame[chosen][mask] for frame in frames)))
    return batches


def _frame(flat: Tensor, mask: Tensor) -> Tensor:
    """Values of the True places of `mask`, row by row [M], laid out as [B, R] with zeros elsewhere."""
    return torch.zeros(mask.shape, device=mask.device).masked_scatter(mask, flat)

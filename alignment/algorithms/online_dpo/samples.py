"""Samples: several responses of the policy to each prompt, with what judge and reference say of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from alignment.algorithms.online_dpo.config import OnlineDPOConfig
from alignment.algorithms.online_dpo.setup import OnlineDPOState
from alignment.algorithms.ppo.metrics import distinct_share, global_means, kl_columns, score_means, text_metrics
from alignment.algorithms.ppo.rollout import (
    draw_samples,
    equally_many,
    group_rollouts,
    ragged_of,
    response_mask,
    to_rectangle,
)
from alignment.data.examples import PromptExample
from alignment.rewards.combine import as_scores, part_metrics


@dataclass(frozen=True)
class JudgedSamples:
    """This rank's responses, K to each prompt side by side: N in all, of at most R tokens.

    Attributes:
        rows: prompt of each response.
        prompts, responses: token ids.
        numbers: global number of each response over the whole run.
        ended: True where the response stopped by itself, [N].
        scores: as they are compared, [N]: less the penalty of those that did not end; of several rewards each normalized,
            clipped and weighed. Not a number: there is no score.
        raw_scores: as the judge gave them, [N]; of several rewards the sum of weight * part.
        mask: True at each response token, [N, R].
        log_probs: as the sampler computed them, at the temperature of the samples, [N, R].
        reference_log_probs: of the reference, same tokens and temperature, [N, R]; None without a reference.
        seconds: time of sampling, and of scoring by judge and reference.
        score_parts: number of each reward by its name, not weighed, [N]; not a number where it does not apply. Empty
            without `rewards`.
    """

    rows: list[PromptExample]
    prompts: list[list[int]]
    responses: list[list[int]]
    numbers: list[int]
    ended: Tensor
    scores: Tensor
    raw_scores: Tensor
    mask: Tensor
    log_probs: Tensor
    reference_log_probs: Tensor | None
    seconds: dict[str, float]
    score_parts: dict[str, Tensor] = field(default_factory=dict)


@torch.no_grad()
def sample_and_judge(
    state: OnlineDPOState, config: OnlineDPOConfig, prompts: Sequence[PromptExample], step: int
) -> JudgedSamples:
    """K responses to each of this rank's prompts, with what judge and reference say of them."""
    began = time.perf_counter()
    group = state.process_group
    samples = draw_samples(state, config, prompts, step)
    rows, numbers, sampled = samples.prompts, samples.numbers, samples.responses
    ids = [list(row.ids) for row in rows]
    sampled_at = time.perf_counter()
    mask = response_mask(sampled.token_ids, group.device)
    log_probs = torch.tensor([value for row in sampled.log_probs for value in row], device=group.device)
    ended = torch.tensor(sampled.ended, device=group.device)
    with state.policy.backend.autocast():
        given = as_scores(state.score(rows, sampled.token_ids, sampled.ended))
        raw = given.total.to(group.device).float()
        shaped = raw if given.shaped is None else given.shaped.to(group.device).float()
        reference = None
        if state.reference is not None:
            reference = torch.zeros(mask.shape, device=group.device)
            groups = group_rollouts(ids, sampled.token_ids, config.training.tokens_per_forward, state.share_prompts)
            for members in equally_many(groups, state):
                documents = [ids[i] for i in members], [sampled.token_ids[i] for i in members]
                batch = ragged_of(*documents, [numbers[i] for i in members], state.share_prompts).to(group.device)
                found = state.reference(batch=batch, temperature=config.temperature).log_probs.float()
                index = torch.tensor(members, device=group.device)
                reference[index] = to_rectangle(found, mask[index])
    return JudgedSamples(
        rows, ids, sampled.token_ids, numbers, ended,
        scores=shaped - config.missing_end_penalty * given.deviation(group.sum) * (~ended).float(),
        raw_scores=raw,
        mask=mask,
        log_probs=to_rectangle(log_probs, mask),
        reference_log_probs=reference,
        seconds={"seconds_sampling": sampled_at - began, "seconds_scoring": time.perf_counter() - sampled_at},
        score_parts={name: part.to(group.device) for name, part in given.parts.items()},
    )  # fmt: skip


def sample_metrics(samples: JudgedSamples, state: OnlineDPOState) -> dict[str, float]:
    """Means over all ranks' responses: score before penalties and its parts, KL from the reference, length."""
    group = state.process_group
    columns = {"response_tokens": samples.mask.float().sum(1), "ended_share": samples.ended.float()}
    if samples.reference_log_probs is not None:
        columns |= kl_columns(samples.log_probs, samples.reference_log_probs, samples.mask)
    metrics = score_means(samples.raw_scores, group.sum) | global_means(columns, group.sum)
    metrics["distinct_share"] = distinct_share(samples, group.gather_objects)
    metrics |= part_metrics(samples.score_parts, group.sum)
    return text_metrics(samples, dict(state.metrics), state.start.tokenizer, group) | metrics

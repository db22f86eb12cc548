"""The evaluation of a PPO run on held-out prompts, and which weights become its result."""

import time
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.held_out import HeldOut
from alignment.algorithms.ppo.metrics import kl_columns
from alignment.algorithms.ppo.rollout import ask_in_batches, exact_token_kl, response_mask, sample
from alignment.algorithms.ppo.samples import DrawnResponses
from alignment.algorithms.ppo.setup import PPOState
from alignment.errors import UserError
from alignment.ragged import Ragged
from alignment.rewards.combine import Rewards, as_scores
from alignment.training.loop import is_due
from alignment.training.result import Result
from alignment.training.run.directory import Run


class HeldOutScores(NamedTuple):
    """What was found of the responses to all held-out prompts.

    Attributes:
        scores: of each, in the order of the prompts; not a number: there is none.
        kl: their mean KL from the reference, nats: its k1 estimate, or the exact KL of their tokens where the sampler's
            distribution is not the policy's.
        unscored: share to which a reward gave no number.
    """

    scores: list[float]
    kl: float
    unscored: float = 0.0


def evaluate_held_out(
    state: PPOState, config: PPOConfig, held_out: HeldOut, result: Result, *, step: int
) -> dict[str, float]:
    """Metrics of the policy on the held-out prompts after `step` iterations; the best weights so far are kept.

    Weights beyond the KL budget are not kept. A collective operation.

    Returns:
        `held_out_score`, `held_out_win_rate`, `held_out_kl`, `held_out_unscored_share`, `seconds_held_out` and what
        `Result.add` says of the best.
    """
    began = time.perf_counter()
    found = judge_held_out(state, config, held_out)
    metrics = held_out.take_in(found.scores, found.kl, step) | {"held_out_unscored_share": found.unscored}
    if not held_out.ended_by:
        metrics |= result.add(step, metrics)
    return metrics | {"seconds_held_out": time.perf_counter() - began}


@torch.no_grad()
def judge_held_out(state: PPOState, config: PPOConfig, held_out: HeldOut) -> HeldOutScores:
    """Sample a response to every held-out prompt, and let the judge score them. A collective operation."""
    group = state.process_group
    numbers = list(range(group.rank, len(held_out.prompts), group.size))
    prompts = [held_out.prompts[number] for number in numbers]
    ids = [list(prompt.ids) for prompt in prompts]
    responses = sample(state, held_out.sampling, ids, numbers, config.micro_rollout_batch_size)
    samples = DrawnResponses(prompts, numbers, responses)
    mask = response_mask(responses.token_ids, group.device)

    def ask(batch: Ragged) -> dict[str, Tensor]:
        log_probs = state.policy.model(batch=batch, temperature=config.temperature).log_probs
        reference = state.reference(batch=batch, temperature=config.temperature).log_probs
        return {"log_probs": log_probs, "reference_log_probs": reference}

    with state.policy.backend.autocast():
        if config.sampler_differs:
            kl = exact_token_kl(state, state.reference, config, samples, mask).sum(1)
        else:
            found = ask_in_batches(ask, state, config, samples, mask)
            kl = kl_columns(found["log_probs"], found["reference_log_probs"], mask)["kl"]
        judge = held_out.score.judge if isinstance(held_out.score, Rewards) else held_out.score
        scores = as_scores(judge(prompts, responses.token_ids, responses.ended))
    missing = torch.zeros(len(prompts), dtype=torch.bool)
    for values in scores.parts.values():
        missing |= values.isnan()
    own = list(zip(numbers, scores.total.tolist(), kl.tolist(), missing.tolist(), strict=True))
    _, totals, kls, unscored = zip(*sorted(row for part in group.gather_objects(own) for row in part), strict=True)
    return HeldOutScores(list(totals), sum(kls) / len(kls), sum(unscored) / len(unscored))


def note_start(state: PPOState, config: PPOConfig, result: Result, run: Run) -> None:
    """Evaluate the starting policy, which later evaluations are compared with, and which is the first best one.

    Raises:
        UserError: it lies beyond the KL budget already.
    """
    if state.held_out is None or state.held_out.start_scores:
        return
    metrics = evaluate_held_out(state, config, state.held_out, result, step=0)
    if state.held_out.ended_by:
        raise UserError(
            f"held_out.kl_budget: the starting policy's held_out_kl is {metrics['held_out_kl']:.4g} nats, beyond the budget "
            f"of {state.held_out.kl_budget:g} before anything is learned; raise it, or leave `reference` out"
        )
    run.note(
        f"held-out prompts: {len(state.held_out.prompts)}; the starting policy's responses score "
        f"{metrics['held_out_score']:.4g} on average, at a KL of {metrics['held_out_kl']:.4g} nats"
    )


def is_over(state: PPOState, result: Result) -> bool:
    """Whether the run ends before its last iteration: its KL budget is spent, or the evaluation no longer improves."""
    return result.exhausted or (state.held_out is not None and bool(state.held_out.ended_by))


def evaluate_if_due(state: PPOState, config: PPOConfig, result: Result, run: Run, *, step: int) -> dict[str, float]:
    """Metrics of the held-out prompts after `step` iterations, where an evaluation is due; ends the run where it is over."""
    if state.held_out is None or not is_due(step, config.training.evaluate_every_steps, run.total):
        return {}
    metrics = evaluate_held_out(state, config, state.held_out, result, step=step)
    if is_over(state, result):
        run.total = step
        run.note(f"the run ends after iteration {step}: {reason(state.held_out, config, result)}")
    return metrics


def reason(held_out: HeldOut, config: PPOConfig, result: Result) -> str:
    """Why a run that is over ends."""
    stopping = config.training.early_stopping
    if held_out.ended_by or stopping is None or result.best is None:
        return held_out.ended_by
    return (
        f"{stopping.metric} has not improved by more than {stopping.min_delta:g} in {stopping.patience} evaluations; its "
        f"best was {result.best.value:.4g} after iteration {result.best.step}"
    )

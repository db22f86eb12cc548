"""The loop of methods that learn from their own samples (PPO, online DPO), and its evaluation on held-out prompts.

Source: how far to optimize against a learned reward: Gao et al. 2023, arXiv:2210.10760; ensembles as judges: Coste et
al.
    2023, arXiv:2310.02743.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from alignment.algorithms.policies import note_balance, note_dropout_off, note_memory, save_policy
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.metrics import kl_columns, report
from alignment.algorithms.rollouts.rollout import Rollout, ask_in_batches, exact_token_kl, response_mask, sample
from alignment.algorithms.rollouts.setup import RolloutData, choose_rollout_weights
from alignment.algorithms.rollouts.state import HeldOut, SampledResponses, SamplingState
from alignment.data.batches import Example
from alignment.errors import UserError
from alignment.ragged import Ragged
from alignment.rewards.combine import Rewards, as_scores
from alignment.training import TrainingConfig, load_run_state, save_run_state
from alignment.training.loop import is_due, note_warmup
from alignment.training.result import Result
from alignment.training.run.directory import Run

State = TypeVar("State", bound=SamplingState)
Config = TypeVar("Config", bound=SamplingSettings)
Iteration = Callable[[State, Config, Sequence[Example], int], tuple[dict[str, float], Rollout]]


def update_on_rollouts(
    run: Run, config: Config, data: RolloutData, state: State, iterate: Iteration[State, Config]
) -> None:
    """Take all iterations from the newest checkpoint on, log and save each, and write the result at the end.

    The run ends early where its KL budget is spent, or where the evaluation on held-out prompts no longer improves.
    """
    run.show_first_rows(data.prompts.rows_at)
    training = config.training
    held_out = state.held_out
    save = partial(save_policy, state.policy, state.start, run.output, max_shard_size=training.max_shard_size)
    result = Result(run, state.policy, training, save, evaluated=held_out is not None)
    note_dropout_off(state.start, run)
    note_balance(run, state.start.model)
    note_warmup(run, state.engines.values())
    state.rollout_weights = choose_rollout_weights(config, data.prompts.rows, state, run)
    note_memory(run, state.roles)
    saved = load_run_state(run, state.engines, training)
    result.restore(saved)
    first = 0 if saved is None else saved["step"]
    if saved is not None:
        state.restore(saved)
    if held_out is not None and not held_out.start_scores:
        note_start(state, config, held_out, result, run)
    last = first if is_over(held_out, result) else data.iterations
    if first == last:  # a finished run again: its model may be gone
        result.write(first)
    for step in run.steps(first, last):
        began = time.perf_counter()
        metrics, rollout = iterate(state, config, data.prompts.rows_at(step), step)
        seconds = time.perf_counter() - began
        if step + 1 == last and result.best is None:  # here a signal waits until the model is written
            result.write(last)
        if held_out is not None and is_due(step + 1, training.evaluate_every_steps, run.total):
            metrics |= evaluate_held_out(state, config, held_out, result, step=step + 1)
            if is_over(held_out, result):
                run.total = step + 1
                run.note(f"the run ends after iteration {step + 1}: {reason(held_out, training, result)}")
        report(run, state, metrics, rollout, step=step + 1, seconds=seconds)
        save_run_state(run, state.engines, training, step + 1, result.state() | state.saved())
        if step + 1 == run.total and (step + 1 < last or result.best is not None):
            result.write(step + 1)


# Held-out prompts


class HeldOutScores(NamedTuple):
    """Numbers of the responses to all held-out prompts.

    Attributes:
        scores: of each, in the order of the prompts; not a number: there is none.
        kl: their mean KL from the reference, nats: its k1 estimate, or the exact KL of their tokens where the sampler's
            distribution is not the policy's.
        unscored: share to which a reward gave no number.
    """

    scores: list[float]
    kl: float
    unscored: float = 0.0


@torch.no_grad()
def judge_held_out(state: SamplingState, config: SamplingSettings, held_out: HeldOut) -> HeldOutScores:
    """Sample a response to every held-out prompt, and let the judge score them. A collective operation."""
    group = state.process_group
    reference = state.reference
    assert reference is not None
    numbers = list(range(group.rank, len(held_out.prompts), group.size))
    prompts = [held_out.prompts[index] for index in numbers]
    ids = [list(prompt.ids) for prompt in prompts]
    responses = sample(state, held_out.sampling, ids, numbers, config.micro_rollout_batch_size)
    samples = SampledResponses(prompts, numbers, responses)
    mask = response_mask(responses.token_ids, group.device)

    def ask(batch: Ragged) -> dict[str, Tensor]:
        networks = {"log_probs": state.policy.model, "reference_log_probs": reference}
        return {name: net(batch=batch, temperature=config.temperature).log_probs for name, net in networks.items()}

    with state.policy.backend.autocast():
        if config.sampler_differs:
            kl = exact_token_kl(state, reference, config, samples, mask).sum(1)
        else:
            kl = kl_columns(**ask_in_batches(ask, state, config, samples, mask), mask=mask)["kl"]
        judge = held_out.score.judge if isinstance(held_out.score, Rewards) else held_out.score
        scores = as_scores(judge(prompts, responses.token_ids, responses.ended))
    missing = torch.zeros(len(prompts), dtype=torch.bool)
    for values in scores.parts.values():
        missing |= values.isnan()
    local = list(zip(numbers, scores.total.tolist(), kl.tolist(), missing.tolist(), strict=True))
    _, totals, kls, unscored = zip(*sorted(row for part in group.gather_objects(local) for row in part), strict=True)
    return HeldOutScores(list(totals), sum(kls) / len(kls), sum(unscored) / len(unscored))


def evaluate_held_out(
    state: SamplingState, config: SamplingSettings, held_out: HeldOut, result: Result, *, step: int
) -> dict[str, float]:
    """Metrics of the policy on the held-out prompts after `step` iterations; the best weights so far are kept.

    Weights beyond the KL budget are not kept. A collective operation.
    """
    began = time.perf_counter()
    evaluation = judge_held_out(state, config, held_out)
    metrics = held_out.add(evaluation.scores, evaluation.kl, step) | {"held_out_unscored_share": evaluation.unscored}
    if not held_out.ended_by:
        metrics |= result.add(step, metrics)
    return metrics | {"seconds_held_out": time.perf_counter() - began}


def note_start(state: SamplingState, config: SamplingSettings, held_out: HeldOut, result: Result, run: Run) -> None:
    """Evaluate the starting policy, which later evaluations are compared with, and which is the first best one."""
    metrics = evaluate_held_out(state, config, held_out, result, step=0)
    if held_out.ended_by:
        raise UserError(
            f"held_out.kl_budget: the starting policy's held_out_kl is {metrics['held_out_kl']:.4g} nats, beyond the "
            f"budget of {held_out.kl_budget:g} before anything is learned; raise it, or leave `reference` out"
        )
    run.note(
        f"held-out prompts: {len(held_out.prompts)}; the starting policy's responses score "
        f"{metrics['held_out_score']:.4g} on average, at a KL of {metrics['held_out_kl']:.4g} nats"
    )


def is_over(held_out: HeldOut | None, result: Result) -> bool:
    """True where the run ends before its last iteration: its KL budget is spent, or its evaluation improves no more."""
    return result.exhausted or (held_out is not None and bool(held_out.ended_by))


def reason(held_out: HeldOut, training: TrainingConfig, result: Result) -> str:
    """Why a run that is over ends."""
    stopping = training.early_stopping
    if held_out.ended_by or stopping is None or result.best is None:
        return held_out.ended_by
    return (
        f"{stopping.metric} has not improved by more than {stopping.min_delta:g} in {stopping.patience} evaluations; "
        f"its best was {result.best.value:.4g} after iteration {result.best.step}"
    )

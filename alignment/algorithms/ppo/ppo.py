"""Proximal policy optimization: the run and its iteration.

Left out of the textbook algorithm: dropout, which is off in policy and value model, so that the first ratio is 1.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.algorithms.ppo.advantages import add_advantages, greedy_baseline
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.loss_functions import (
    RolloutBatch,
    normalized_batches,
    policy_loss_fn,
    rollout_batches,
    value_loss_fn,
)
from alignment.algorithms.ppo.metrics import rollout_metrics, utilization
from alignment.algorithms.ppo.setup import build_state, read_data, warn_nonzero_initial_kl
from alignment.algorithms.ppo.state import PPOState
from alignment.algorithms.rollouts.loop import update_on_rollouts
from alignment.algorithms.rollouts.rollout import Rollout, collect
from alignment.algorithms.runs import open_run
from alignment.algorithms.sft import language_loss_fn
from alignment.data.batches import Example
from alignment.errors import UserError
from alignment.rewards.functions import function_files
from alignment.training import Term, ZeroWeightBatch
from alignment.training.distributed import ProcessGroup
from alignment.training.speed import PhaseClock


def run(config: PPOConfig) -> Path:
    """Train a policy by PPO, or with other advantages, and return its directory, `output/model`.

    Each iteration samples `responses_per_prompt` responses to each of `training.batch_size` prompts, then takes
    `epochs` passes over them in `minibatches` updates each.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155, section 3.5 and eq. 2;
        details Huang et al. 2024, arXiv:2403.17031. Other advantages: see `alignment.losses.policy`.
    """
    parents = [config.policy, *config.judging_models, config.reference]
    files = function_files(config.rewards)
    with open_run(config, "ppo", parents, value_optim=config.value_optim, files=files) as run:
        if not run.finished:
            data = read_data(config, run)  # prompts, held-out prompts, text of the pretraining mix
            state = build_state(config, data)  # policy, value model, reference, rewards, KL controller
            warn_nonzero_initial_kl(config, run)
            update_on_rollouts(run, config, data, state, iterate)
        return run.output / "model"


def iterate(
    state: PPOState, config: PPOConfig, prompts: Sequence[Example], step: int
) -> tuple[dict[str, float], Rollout]:
    """One iteration: sample, score, compute advantages, learn, adapt the KL coefficient.

    Args:
        state: networks and controllers; changed in place.
        prompts: of all ranks; each rank takes its share.
        step: number of the iteration, from 0; fixes what is sampled.

    Returns:
        Metrics over all ranks, and this rank's rollout.
    """
    reduce = state.process_group.sum
    rollout = collect(state, config, prompts, step)  # responses, log-probs, reference log-probs, values, scores
    if config.advantages == "remax":
        rollout = replace(rollout, baseline=greedy_baseline(rollout, state, config, prompts))
    if not reduce(rollout.learned.sum()):
        raise UserError("rewards: no response of this iteration has a score, so there is nothing to learn from")
    rollout = add_advantages(rollout, config, state.normalizer.fit(rollout.scores, reduce), state.kl.coef, reduce)
    metrics = rollout_metrics(rollout, state, config) | update_policy_and_value(state, config, rollout, step)
    documents = [len(p) + len(r) for p, r in zip(rollout.prompts, rollout.responses, strict=True)]
    metrics |= utilization(metrics, config, state.roles, state.process_group, documents=documents)
    state.kl.update(metrics["kl"], len(prompts) * config.responses_per_prompt)
    return metrics, rollout


def update_policy_and_value(state: PPOState, config: PPOConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Epochs of minibatch updates on one rollout; the mean of each metric over the updates.

    Once an update finds the policy further than `target_kl` from the one that sampled, the rest are left out: on all
    ranks, because the metrics of an update are those of all ranks.
    """
    history: list[dict[str, float]] = []
    first_ratio_errors: list[Tensor] = []
    warming_up = step < config.value_warmup_steps
    clock = PhaseClock(state.process_group.device)
    for batches in minibatches(rollout, config, state.process_group, step):
        ratio_errors: list[Tensor] = []
        with clock("policy"):
            metrics = {} if warming_up else update_on_minibatch(state, config, batches, ratio_errors)
        if state.value is not None:
            with clock("value"):
                value = state.value.update(Term(batches, value_loss_fn(state.value.model, config)))
            metrics |= {"value_loss": value["loss"], "value_grad_norm": value["grad_norm"]}
        state.num_updates += 1
        history.append(metrics)
        first_ratio_errors = first_ratio_errors or ratio_errors
        if config.target_kl is not None and metrics.get("approx_kl", 0.0) > config.target_kl:
            break
    mean = {key: float(np.mean([metrics[key] for metrics in history])) for key in history[0]}
    if config.target_kl is not None:
        mean["updates"] = float(len(history))
    if first_ratio_errors:
        mean["first_ratio_error"] = float(state.process_group.max(torch.stack(first_ratio_errors).max()))
    return mean | {f"seconds_{phase}": seconds for phase, seconds in clock.seconds.items()}


def update_on_minibatch(
    state: PPOState,
    config: PPOConfig,
    batches: Sequence[RolloutBatch | ZeroWeightBatch],
    ratio_errors: list[Tensor],
) -> dict[str, float]:
    """One update of the policy, with the pretraining mix if there is one and the value head if it is on its trunk."""
    terms = [Term(batches, policy_loss_fn(state.policy.model, config, ratio_errors, kl_coef=state.kl.coef))]
    if state.pretraining is not None:
        texts = state.pretraining(state.num_updates)
        terms.append(Term(texts, language_loss_fn(state.policy.model), config.pretrain_coef, "pretrain"))
    return state.policy.update(*terms)


def minibatches(
    rollout: Rollout, config: PPOConfig, group: ProcessGroup, step: int
) -> Iterator[Sequence[RolloutBatch | ZeroWeightBatch]]:
    """This rank's micro-batches of each minibatch of each pass, in an order that seed and iteration fix.

    Responses that are not learned from are in none, so that each loss is divided by what the others count.
    """
    count = config.responses_per_prompt
    local_rows = rollout.learned.nonzero().flatten().tolist()
    numbers = [(row // count * group.size + group.rank) * count + row % count for row in local_rows]
    learned = np.sort([row for rows in group.gather_objects(numbers) for row in rows])
    for epoch in range(config.epochs):
        # Of the rows of all ranks, so that who is in a minibatch does not depend on the number of ranks.
        order = np.random.default_rng([config.training.seed, step, epoch]).permutation(len(learned))
        for rows in np.array_split(learned[order], min(config.minibatches, len(learned))):
            yield local_batches(rollout, rows.tolist(), group, config)


def local_batches(
    rollout: Rollout, rows: Sequence[int], group: ProcessGroup, config: PPOConfig
) -> Sequence[RolloutBatch | ZeroWeightBatch]:
    """This rank's micro-batches of a minibatch.

    A rank with no row in this minibatch runs one of its other rows with weight 0, to join the collectives.
    """
    count = config.responses_per_prompt
    local_rows = [
        row // count // group.size * count + row % count for row in rows if row // count % group.size == group.rank
    ]
    batches = normalized_batches(
        rollout_batches(rollout, local_rows or [0], config.training.tokens_per_forward), config
    )
    return batches if local_rows else [ZeroWeightBatch(batch) for batch in batches]

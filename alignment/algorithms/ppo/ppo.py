"""The PPO run and its iteration.

Left out of the textbook algorithm: no early stop on KL, no trunk shared by policy and value model, no entropy bonus.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.algorithms.memory_notes import note_memory
from alignment.algorithms.policies import language_loss_fn, note_dropout_off, save_policy
from alignment.algorithms.ppo.advantages import add_advantages
from alignment.algorithms.ppo.metrics import report, rollout_metrics
from alignment.algorithms.ppo.rollout import Rollout, RolloutBatch, collect, rollout_batches
from alignment.algorithms.ppo.rollout_weights import choose_rollout_weights
from alignment.algorithms.ppo.setup import (
    PPOConfig,
    PPOState,
    build_state,
    load_ppo_state,
    read_data,
    save_ppo_state,
)
from alignment.algorithms.runs import open_run
from alignment.data.examples import PromptExample
from alignment.losses.policy import clipped_policy_loss, clipped_tokens, clipped_value_loss
from alignment.models.classifiers import values_before_targets
from alignment.models.protocols import GenerativeModel, ScoringModel
from alignment.training import LossFn, LossSum, Term, ZeroWeightBatch
from alignment.training.distributed import ProcessGroup


def run(config: PPOConfig) -> Path:
    """Train a policy by PPO and return its directory, `output/model`.

    Each iteration samples one response to each of `training.batch_size` prompts, then takes `epochs` passes over them
    in `minibatches` updates each.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155, section 3.5 and eq. 2;
        details Huang et al. 2024, arXiv:2403.17031.
    """
    parents = [config.policy, *config.reward_models, config.reference]
    with open_run(config, "ppo", parents, value_optim=config.value_optim) as run:
        data = read_data(config, run)
        state = build_state(config, data)
        save = partial(
            save_policy, state.policy, state.start, run.output, max_shard_size=config.training.max_shard_size
        )
        note_dropout_off(state.start, run)
        state.rollout_weights = choose_rollout_weights(config, data.prompts.rows, state, run)
        note_memory(run, state.roles)
        first = load_ppo_state(state, config, run)
        if first == data.iterations:  # a finished run again: its model may be gone
            save()
        for step in run.steps(first, data.iterations):
            began = time.perf_counter()
            prompts = data.prompts.rows_at(step)
            metrics, rollout = iterate(state, config, prompts, step)
            report(run, state, config, metrics, rollout, step=step + 1, seconds=time.perf_counter() - began)
            if step + 1 == data.iterations:  # here a signal waits until the model is written
                save()
            save_ppo_state(state, config, run, step + 1)
        return run.output / "model"


def iterate(
    state: PPOState, config: PPOConfig, prompts: Sequence[PromptExample], step: int
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
    rollout = add_advantages(rollout, config, state.normalizer.fit(rollout.scores, reduce), state.kl.coef, reduce)
    metrics = rollout_metrics(rollout, state, config) | update_policy_and_value(state, config, rollout, step)
    state.kl.update(metrics["kl"], len(prompts))
    return metrics, rollout


def update_policy_and_value(state: PPOState, config: PPOConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Epochs of minibatch updates on one rollout; the mean of each metric over the updates."""
    group, seed = state.process_group, config.training.seed
    history: list[dict[str, float]] = []
    first_ratio_error = 0.0
    num_rows = int(group.sum(torch.tensor(len(rollout.prompts))))
    for epoch in range(config.epochs):
        # Of the rows of all ranks, so that who is in a minibatch does not depend on the number of ranks.
        order = np.random.default_rng([seed, step, epoch]).permutation(num_rows)
        for rows in np.array_split(order, config.minibatches):
            batches = local_batches(rollout, rows.tolist(), group, config.training.tokens_per_forward)
            ratio_errors: list[Tensor] = []
            terms = [Term(batches, policy_loss_fn(state.policy.model, config, ratio_errors))]
            if state.pretraining is not None:
                texts = state.pretraining(state.num_updates)
                terms.append(Term(texts, language_loss_fn(state.policy.model), config.pretrain_coef, "pretrain"))
            metrics = state.policy.update(*terms)
            value = state.value.update(Term(batches, value_loss_fn(state.value.model, config)))
            state.num_updates += 1
            if not history:
                first_ratio_error = float(group.max(torch.stack(ratio_errors).max()))
            history.append(metrics | {"value_loss": value["loss"], "value_grad_norm": value["grad_norm"]})
    mean = {key: float(np.mean([metrics[key] for metrics in history])) for key in history[0]}
    return mean | {"first_ratio_error": first_ratio_error}


def local_batches(
    rollout: Rollout, rows: Sequence[int], group: ProcessGroup, micro_batch_tokens: int
) -> Sequence[RolloutBatch | ZeroWeightBatch]:
    """This rank's micro-batches of a minibatch; a rank without any of its rows takes one of its own at weight 0.

    Args:
        rollout: of this rank, which holds every process_group.size-th row of the iteration.
        rows: numbers of the minibatch's rows within the iteration, over all ranks.
    """
    local_rows = [row // group.size for row in rows if row % group.size == group.rank]
    batches = rollout_batches(rollout, local_rows or [0], micro_batch_tokens)
    return batches if local_rows else [ZeroWeightBatch(batch) for batch in batches]


def policy_loss_fn(policy: GenerativeModel, config: PPOConfig, ratio_errors: list[Tensor]) -> LossFn:
    """Loss function of the policy: the clipped surrogate, summed over response tokens.

    Args:
        ratio_errors: each batch's largest |ratio - 1| is appended.
    """

    def loss_fn(batch: RolloutBatch) -> LossSum:
        output = policy(batch=batch.ragged, temperature=config.temperature, entropy=True)
        tokens = (output.log_probs, batch.log_probs, batch.advantages)
        assert output.entropy is not None
        cost = clipped_policy_loss(*tokens, clip_range=config.clip_range)
        if batch.weights is not None:
            cost = cost * batch.weights
        change = (output.log_probs - batch.log_probs).detach()
        clipped = clipped_tokens(*tokens, clip_range=config.clip_range)
        ratio_errors.append((change.exp() - 1).abs().max())
        metrics = {
            "policy_loss": cost.detach().sum(),
            "approx_kl": (change**2).sum() / 2,
            "clip_fraction": clipped.float().sum(),
            "entropy": output.entropy.sum(),
        }
        return LossSum(cost.sum(), metrics)

    return loss_fn


def value_loss_fn(value_model: ScoringModel, config: PPOConfig) -> LossFn:
    """Loss function of the value model: the clipped squared error, summed over response tokens."""

    def loss_fn(batch: RolloutBatch) -> LossSum:
        values = values_before_targets(value_model, batch.ragged)
        cost = clipped_value_loss(values, batch.values, batch.returns, clip_range=config.value_clip_range)
        return LossSum(cost.sum(), {})

    return loss_fn

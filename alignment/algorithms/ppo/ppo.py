"""Proximal policy optimization against a reward model, with a KL penalty and InstructGPT's pretraining mix.

Left out of the textbook algorithm: no early stop on KL, no trunk shared by policy and critic, no entropy bonus.
Sampling and advantages are in rollout.py, models and state in setup.py, the formulas in losses/policy.py.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from alignment.algorithms.policies import language_loss_fn, note_dropout_off, save_policy
from alignment.algorithms.ppo.config import PPOConfig
from alignment.algorithms.ppo.rollout import Rollout, RolloutBatch, collect, rollout_batches, with_advantages
from alignment.algorithms.ppo.setup import Parts, build_parts, read_data, restore, store
from alignment.algorithms.runs import open_run
from alignment.data.tokenize import PromptExample
from alignment.generation import SamplingConfig, response_text
from alignment.losses import clipped_policy_loss, clipped_tokens, clipped_value_loss, kl_estimates
from alignment.training import Engine, LossSum, Run, Term, ZeroWeightBatch

__all__ = ["PPOConfig", "iterate", "run"]


def run(config: PPOConfig) -> Path:
    """Train a policy by PPO and return its directory, `output/model`.

    Each iteration samples one response to each of `training.batch_size` prompts, then takes `epochs` passes over them
    in `minibatches` updates each.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Schulman et al. 2017, arXiv:1707.06347; Ouyang et al. 2022, arXiv:2203.02155, section 3.5 and eq. 2;
        details Huang et al. 2024, arXiv:2403.17031.
    """
    with open_run(config, "ppo", parents=[config.policy, config.reward_model, config.reference]) as run_directory:
        data = read_data(config, run_directory)
        parts = build_parts(config, data)
        save = partial(save_policy, parts.policy, parts.start, config.output)
        note_dropout_off(parts.start, run_directory)
        first = restore(parts, config, run_directory)
        if first == data.iterations:  # a finished run again: its model may be gone
            save()
        for step in run_directory.steps(first, data.iterations):
            metrics, rollout = iterate(parts, config, data.prompts.rows_at(step), step)
            run_directory.log(step + 1, metrics)
            log_sample(run_directory, step + 1, parts.tokenizer, rollout)
            if step + 1 == data.iterations:  # here a signal waits until the model is written
                save()
            store(parts, config, run_directory, step + 1)
        return Path(config.output) / "model"


def iterate(
    parts: Parts, config: PPOConfig, prompts: list[PromptExample], step: int
) -> tuple[dict[str, float], Rollout]:
    """One iteration: sample, score, shape, learn, adapt the KL coefficient.

    Args:
        parts: models and state; the engines and the controller are changed in place.
        prompts: of all ranks; this rank takes its share.
        step: number of the iteration, from 0; fixes the draws.

    Returns:
        Metrics over all ranks, and this rank's rollout.
    """
    began = time.perf_counter()
    engine = parts.policy
    mine = list(range(engine.process_group.rank, len(prompts), engine.process_group.size))
    # Ranks have unequal work here: whole models, so that nobody waits for another one's weights.
    with engine.backend.full_parameters(), parts.value.backend.full_parameters():
        rollout = collect(
            engine.backend.unwrapped,
            engine.model,
            parts.reference,
            parts.value.model,
            parts.score,
            [prompts[i] for i in mine],
            [step * config.training.batch_size + i for i in mine],
            SamplingConfig(config.max_new_tokens, config.temperature, seed=config.training.seed),
            parts.stop_ids,
            device=engine.process_group.device,
            micro_batch_tokens=config.training.micro_batch_tokens,
            micro_rollout_batch_size=config.micro_rollout_batch_size,
        )
    sampled = time.perf_counter()
    parts.normalizer.fit_once(rollout.scores, engine.process_group.sum)
    rollout = with_advantages(
        rollout,
        kl_coef=parts.controller.coef,
        gain=parts.normalizer.gain,
        bias=parts.normalizer.bias,
        missing_end_penalty=config.missing_end_penalty,
        gamma=config.gamma,
        gae_lambda=config.gae_lambda,
        reduce=engine.process_group.sum,
    )
    metrics = rollout_metrics(rollout, engine.process_group.sum)
    metrics |= {"kl_coef": parts.controller.coef, "sampling_error": sampling_error(rollout, engine.process_group.max)}
    metrics["distinct_share"] = distinct_share(rollout, engine.process_group.gather_objects)
    if config.watch == "gold":
        metrics["gold_score"] = mean_gold(parts.tokenizer, rollout, engine.process_group.sum)
    metrics |= improve(parts, config, rollout, step)
    parts.controller.update(metrics["kl"], len(prompts))
    ended = time.perf_counter()
    metrics |= {"seconds_rollout": sampled - began, "seconds_update": ended - sampled}
    metrics["tokens_per_second"] = metrics["response_tokens"] * len(prompts) / (ended - began)
    return metrics, rollout


def improve(parts: Parts, config: PPOConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Epochs of minibatch updates on one rollout; the mean of each metric over the updates."""
    history: list[dict[str, float]] = []
    first_ratio_error = 0.0
    prompts = int(parts.policy.process_group.sum(torch.tensor(len(rollout.prompts))))
    for epoch in range(config.epochs):
        # Of the rows of all ranks, so that who is in a minibatch does not depend on the number of ranks.
        order = np.random.default_rng([config.training.seed, step, epoch]).permutation(prompts)
        for rows in np.array_split(order, config.minibatches):
            batches = share_of(rollout, rows.tolist(), parts.policy, config.training.micro_batch_tokens)
            ratio_errors: list[Tensor] = []
            terms = [Term(batches, policy_loss(parts.policy.model, config, ratio_errors))]
            if parts.pretraining is not None:
                texts = parts.pretraining(parts.updates)
                terms.append(Term(texts, language_loss_fn(parts.policy.model), config.pretrain_coef, "pretrain"))
            metrics = parts.policy.update(*terms)
            value = parts.value.update(Term(batches, value_loss(parts.value.model, config)))
            parts.updates += 1
            if not history:
                first_ratio_error = float(parts.policy.process_group.max(torch.stack(ratio_errors).max()))
            history.append(metrics | {"value_loss": value["loss"], "value_grad_norm": value["grad_norm"]})
    mean = {key: float(np.mean([metrics[key] for metrics in history])) for key in history[0]}
    return mean | {"first_ratio_error": first_ratio_error}


def share_of(rollout: Rollout, rows: list[int], engine: Engine, micro_batch_tokens: int) -> list[Any]:
    """This rank's micro-batches of a minibatch; a rank that owns none of its rows borrows one at weight 0.

    Args:
        rollout: of this rank, which owns every world_size-th row of the iteration.
        rows: numbers of the minibatch's rows within the iteration, over all ranks.
    """
    mine = [
        row // engine.process_group.size for row in rows if row % engine.process_group.size == engine.process_group.rank
    ]
    batches = rollout_batches(rollout, mine or [0], micro_batch_tokens)
    return batches if mine else [ZeroWeightBatch(batch) for batch in batches]


def policy_loss(policy: Any, config: PPOConfig, ratio_errors: list[Tensor]) -> Callable[[RolloutBatch], LossSum]:
    """The clipped surrogate, summed over response tokens; appends each batch's largest |ratio - 1| to `ratio_errors`."""

    def loss_fn(batch: RolloutBatch) -> LossSum:
        answer = policy(batch=batch.ragged, temperature=config.temperature, entropy=True)
        cost = clipped_policy_loss(answer.log_probs, batch.log_probs, batch.advantages, clip_range=config.clip_range)
        change = (answer.log_probs - batch.log_probs).detach()
        clipped = clipped_tokens(answer.log_probs, batch.log_probs, batch.advantages, clip_range=config.clip_range)
        ratio_errors.append((change.exp() - 1).abs().max())
        metrics = {
            "policy_loss": cost.detach().sum(),
            "approx_kl": (change**2).sum() / 2,
            "clip_fraction": clipped.float().sum(),
            "entropy": answer.entropy.sum(),
        }
        return LossSum(cost.sum(), metrics)

    return loss_fn


def value_loss(critic: Any, config: PPOConfig) -> Callable[[RolloutBatch], LossSum]:
    """The clipped squared error of the critic, summed over response tokens."""

    def loss_fn(batch: RolloutBatch) -> LossSum:
        values = critic(batch=batch.ragged).values[batch.ragged.target_index - 1]
        cost = clipped_value_loss(values, batch.values, batch.returns, clip_range=config.value_clip_range)
        return LossSum(cost.sum(), {})

    return loss_fn


def rollout_metrics(rollout: Rollout, add: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Means over all ranks' responses of what was sampled; `kl` is the k1 estimate summed over a response, in nats."""
    kl = kl_estimates(rollout.log_probs, rollout.reference_log_probs)
    zero = torch.zeros_like(rollout.log_probs)
    per_response = {
        "score": rollout.scores,
        "kl": torch.where(rollout.mask, kl["k1"], zero).sum(1),
        "kl_k3": torch.where(rollout.mask, kl["k3"], zero).sum(1),
        "response_tokens": rollout.mask.float().sum(1),
        "ended_share": rollout.ended.float(),
    }
    count = torch.ones_like(rollout.scores)
    sums = add(torch.stack([column.float().sum() for column in (count, *per_response.values())])).tolist()
    metrics = {name: total / sums[0] for name, total in zip(per_response, sums[1:], strict=True)}
    return metrics | {"explained_variance": explained_variance(rollout, add)}


def distinct_share(rollout: Rollout, gather: Callable[[Any], list[Any]]) -> float:
    """Distinct responses / responses, of all ranks; `gather` gives the value of every rank."""
    responses = [tuple(response) for part in gather(rollout.responses) for response in part]
    return len(set(responses)) / len(responses)


def mean_gold(tokenizer: Any, rollout: Rollout, add: Callable[[Tensor], Tensor]) -> float:
    """Mean gold reward of all ranks' responses: what the reward model stands for, and may be led away from."""
    from alignment.hotel_world.gold import score

    pairs = zip(rollout.prompts, rollout.responses, rollout.ended.tolist(), strict=True)
    golds = [
        score(tokenizer.decode(prompt, skip_special_tokens=True), response_text(tokenizer, response, end)).total
        for prompt, response, end in pairs
    ]
    total, count = add(torch.tensor([sum(golds), len(golds)], dtype=torch.float64)).tolist()
    return total / count


def sampling_error(rollout: Rollout, largest: Callable[[Tensor], Tensor]) -> float:
    """Largest difference, nats, between a token's log-probability when it was drawn and the one training computes."""
    return float(largest((rollout.sampled_log_probs - rollout.log_probs).abs().max()))


def explained_variance(rollout: Rollout, add: Callable[[Tensor], Tensor]) -> float:
    """1 - var(returns - values) / var(returns) over all ranks' response tokens: 1 is a perfect critic, 0 a constant one."""
    if rollout.returns is None:
        raise ValueError("the rollout has no returns yet: see with_advantages")
    returns = rollout.returns[rollout.mask].double()
    columns = torch.stack([returns, returns - rollout.values[rollout.mask].double()])  # [2, tokens]
    *sums, count = add(torch.cat([columns.sum(1), columns.new_tensor([len(returns)])])).tolist()
    means = columns.new_tensor(sums).unsqueeze(1) / count
    spread, left = add(((columns - means) ** 2).sum(1)).tolist()
    return 1 - left / spread if count > 1 and spread > 0 else 0.0


def log_sample(run: Run, step: int, tokenizer: Any, rollout: Rollout, count: int = 2) -> None:
    """Keep a few of an iteration's responses as text."""
    for row in range(min(count, len(rollout.prompts))):
        run.sample(
            step,
            prompt=tokenizer.decode(rollout.prompts[row], skip_special_tokens=True),
            response=response_text(tokenizer, rollout.responses[row], bool(rollout.ended[row])),
            score=float(rollout.scores[row]),
        )

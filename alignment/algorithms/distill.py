"""On-policy distillation: a student learns from a teacher's distribution at every token of its own responses.

The rollout is PPO's, without scores. An iteration: the student responds, and learns to be less far from the teacher at the
prefixes that it has written itself, whereas a student of the teacher's texts never sees its own mistakes.

Left out: mixtures with the teacher's or a data set's responses (GKD's lambda below 1), divergences other than the reverse KL.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from alignment.algorithms.policies import Reference, Role, reference_of
from alignment.algorithms.ppo.config import SamplingSettings
from alignment.algorithms.ppo.loop import update_on_rollouts
from alignment.algorithms.ppo.metrics import load_metrics, sample_metrics
from alignment.algorithms.ppo.rollout import Rollout, collect
from alignment.algorithms.ppo.servers import ServerSampler
from alignment.algorithms.ppo.setup import RolloutData, load_start, policy_engine, read_data
from alignment.algorithms.ppo.state import SamplingState
from alignment.algorithms.runs import open_run
from alignment.data.batches import Example, collate
from alignment.data.text.chat import stop_token_ids
from alignment.errors import UserError
from alignment.loading import load_tokenizer, same_vocabulary
from alignment.losses.language import reverse_kl
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.ragged import Ragged
from alignment.settings import PositiveInt, Rule
from alignment.training import LossFn, LossSum, Run, Term, shard_rows
from alignment.training.distributed import shares_weights


@dataclass(frozen=True, kw_only=True)
class DistillConfig(SamplingSettings):
    """Settings of one run of on-policy distillation: the keys of `SamplingSettings`, and its own.

    `training.max_steps` or `training.epochs` count iterations over the prompts. `kl` is the KL of a response from the
    teacher, by its drawn tokens; `reverse_kl` that of a token, over the vocabulary, which is learned from.

    Attributes:
        policy: the student.
        teacher: checkpoint whose distribution it learns, with the same tokenizer.
        likeliest: the student's likeliest tokens that are compared one by one, all others being compared as one; null: all
            tokens one by one.
    """

    teacher: str
    likeliest: PositiveInt | None = None

    RULES = (
        Rule(
            "reference",
            lambda c: c.reference is not None,
            "has no effect: the student is compared with its teacher; leave it out",
        ),
        Rule(
            "rewards",
            lambda c: c.reward_model is not None or c.rewards,
            "are not learned from, nor reward_model; leave them out, or take alignment ppo with the teacher as `reference`",
        ),
        Rule(
            "data.evaluation",
            lambda c: c.data.evaluates,
            "is not read, nor evaluation_share; compare the results by `alignment evaluate winrate`, and leave it out",
        ),
        Rule(
            "training.keep_best",
            lambda c: c.training.best_metric is not None,
            "has no effect, nor early_stopping: nothing is evaluated while it runs; leave it out",
        ),
    )


@dataclass
class DistillState(SamplingState):
    """Everything that an iteration reads and changes; `reference` is the teacher."""

    _: KW_ONLY
    loss_fn: LossFn


def run(config: DistillConfig) -> Path:
    """Train a student on its own responses and return its directory, `output/model`.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Agarwal et al. 2023, arXiv:2306.13649, algorithm 1 with lambda = 1 and the reverse KL; Gu et al. 2023,
        arXiv:2306.08543, for the reverse KL.
    """
    with open_run(config, "distill", [config.policy, config.teacher]) as run:
        if not run.finished:
            data = read_data(config, run)
            update_on_rollouts(run, config, data, build_state(config, data, run), respond_and_learn)
        return run.output / "model"


def respond_and_learn(
    state: DistillState, config: DistillConfig, prompts: Sequence[Example], step: int
) -> tuple[dict[str, float], Rollout]:
    """One iteration: responses of the student, then updates that bring it nearer to the teacher at each of their tokens."""
    rollout = collect(state, config, prompts, step)
    metrics = sample_metrics(rollout, state)
    unscored = ("score", "unscored_share")
    metrics = {name: value for name, value in metrics.items() if name not in unscored}
    return metrics | learn(state, config, rollout, step), rollout


def learn(state: DistillState, config: DistillConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Epochs of minibatch updates on the responses of all ranks; the mean of each metric over the updates."""
    group, history = state.process_group, []
    local = [
        (number, Example.answered(prompt, [response], row.row_id, row.source))
        for number, prompt, response, row in zip(
            rollout.numbers, rollout.prompts, rollout.responses, rollout.rows, strict=True
        )
    ]
    rows = [
        row for _, row in sorted((each for part in group.gather_objects(local) for each in part), key=lambda x: x[0])
    ]
    to_batches = partial(collate, micro_batch_tokens=config.training.tokens_per_forward)
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.training.seed, step, epoch]).permutation(len(rows))
        for part in np.array_split(order, config.minibatches):
            batches = shard_rows([rows[row] for row in part], to_batches, group.rank, group.size)
            history.append(state.policy.update(Term(batches, state.loss_fn)))
    return {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}


def distill_loss_fn(student: object, teacher: Reference, config: DistillConfig) -> LossFn:
    """Loss function of distillation: the reverse KL at each target, summed."""

    def loss_fn(batch: Ragged) -> LossSum:
        with torch.no_grad():
            wanted = teacher(batch=batch, return_logits=True).logits
        found = student(batch=batch, return_logits=True).logits  # type: ignore[operator]
        each = reverse_kl(found / config.temperature, wanted / config.temperature, likeliest=config.likeliest)
        return LossSum(each.sum(), {"reverse_kl": each.sum()})

    return loss_fn


def build_state(config: DistillConfig, data: RolloutData, run: Run) -> DistillState:
    """Load student and teacher, and make the engine that trains."""
    if not same_vocabulary(data.tokenizer, load_tokenizer(config.teacher)):
        raise UserError(
            f"teacher: {config.teacher} has another tokenizer than {config.policy}; distil from one with the same"
        )
    metrics, bases = load_metrics(config.metrics), SharedWeights(config.weights, shared=shares_weights())
    start = load_start(config, data, bases)
    policy = policy_engine(start, config, data.iterations)
    teacher = reference_of(start, config.teacher, policy, bases=bases)
    networks = [policy.backend.unwrapped, teacher.model]
    return DistillState(
        policy,
        reference=teacher,
        score=no_score,
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        start=start,
        metrics=metrics,
        roles=[Role("policy", policy.backend.unwrapped, policy), teacher.role],
        share_prompts=prompt_sharing(networks, wanted=config.training.share_prompts, note=run.note),
        servers=config.servers and ServerSampler(config.servers, policy, start),
        cuda_graphs=config.cuda_graphs,
        loss_fn=distill_loss_fn(policy.model, teacher, config),
    )


def no_score(prompts: Sequence[Example], responses: Sequence[Sequence[int]], ended: Sequence[bool]) -> Tensor:
    """0 for each response: nobody scores them."""
    return torch.zeros(len(responses))

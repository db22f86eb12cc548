"""On-policy distillation: a student learns from a teacher's distribution at every token of its own responses.

The rollout is PPO's, without scores. An iteration: the student responds, and learns to be less far from the teacher at
the prefixes that it has written itself, whereas a student of the teacher's texts never sees its own mistakes.

Left out: mixtures with the teacher's or a data set's responses (GKD's lambda below 1), divergences other than the
reverse KL.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from alignment.adapters.specs import refuse_dropout
from alignment.algorithms.policies import Role
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.loop import update_on_rollouts
from alignment.algorithms.rollouts.metrics import load_metrics, sample_metrics
from alignment.algorithms.rollouts.rollout import Rollout, collect
from alignment.algorithms.rollouts.servers import ServerSampler
from alignment.algorithms.rollouts.setup import RolloutData, load_start, policy_engine, read_rollout_data
from alignment.algorithms.rollouts.state import SamplingState
from alignment.algorithms.runs import check_rows, open_run
from alignment.data.batches import Example, collate
from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.tokenizer import check_vocabulary
from alignment.errors import UserError
from alignment.loading import Checkpoint, load_frozen_model, load_tokenizer, same_vocabulary
from alignment.models.external.models import ExternalLanguageModel
from alignment.models.language_model import LanguageModel
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import check_weights
from alignment.ragged import Ragged
from alignment.settings import PositiveInt, Rule, refusal
from alignment.training import Engine, LossFn, LossSum, Term, shard_rows
from alignment.training.distributed import shares_weights


@dataclass(frozen=True, kw_only=True)
class DistillConfig(SamplingSettings):
    """Settings of one run of on-policy distillation: the keys of `SamplingSettings`, and its own.

    `training.max_steps` or `training.epochs` count iterations over the prompts. The loss, logged as `reverse_kl` too,
    is the KL of student from teacher at a response token, in nats, of their whole distributions at the temperature of
    the samples.

    Attributes:
        policy: the student.
        teacher: checkpoint whose distributions it learns, a decoder with the same tokenizer.
        likeliest: the student's likeliest tokens that are compared one by one, all others being compared as one; None:
            all tokens are compared one by one.
    """

    teacher: str
    likeliest: PositiveInt | None = None

    RULES = (
        Rule(
            "weights",
            lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None, judges=True).removeprefix(
                "weights."
            ),
        ),
        Rule(
            "adapter.dropout",
            lambda c: refusal(refuse_dropout, c.adapter, "distillation").removeprefix("adapter.dropout "),
        ),
        Rule(
            "reference",
            lambda c: c.reference is not None,
            "has no effect: the student is compared with its teacher; leave it out",
        ),
        Rule(
            "rewards",
            lambda c: c.reward_model is not None or c.rewards or c.missing_end_penalty != 1,
            "are not learned from, nor reward_model and missing_end_penalty; leave them out",
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
    """Everything that an iteration reads and changes."""

    _: KW_ONLY
    loss_fn: LossFn


def run(config: DistillConfig) -> Path:
    """Train a student on its own responses and return its directory, `output/model`.

    Each iteration samples responses to `training.batch_size` prompts and takes `epochs` passes over them in
    `minibatches` updates each. The samples have no gradient: the loss is the KL at the prefixes as they are.

    Raises:
        UserError: bad data or checkpoints, before any training.

    Source: Agarwal et al. 2023, arXiv:2306.13649, algorithm 1 with lambda = 1 and the reverse KL; Gu et al. 2023,
        arXiv:2306.08543, for the reverse KL.
    """
    with open_run(config, "distill", [config.policy, config.teacher]) as run:
        if not run.finished:
            data = read_rollout_data(config, run)
            update_on_rollouts(run, config, data, build_distill_state(config, data), sample_and_distill)
        return run.output / "model"


def sample_and_distill(
    state: DistillState, config: DistillConfig, prompts: Sequence[Example], step: int
) -> tuple[dict[str, float], Rollout]:
    """One iteration: the student's responses, then updates that bring it nearer the teacher at each of their tokens."""
    rollout = collect(state, config, prompts, step)
    metrics = sample_metrics(rollout, state)
    for of_scores in ("score", "unscored_share", "seconds_scoring"):
        del metrics[of_scores]
    return metrics | update_student(state, config, rollout, step), rollout


def update_student(state: DistillState, config: DistillConfig, rollout: Rollout, step: int) -> dict[str, float]:
    """Epochs of minibatch updates on the responses of all ranks; the mean of each metric over the updates."""
    group = state.process_group
    history = []
    columns = zip(rollout.numbers, rollout.prompts, rollout.responses, rollout.rows, strict=True)
    local = [
        (row_number, Example.answered(prompt, [response], row.row_id, row.source))
        for row_number, prompt, response, row in columns
    ]
    everyone = (row for part in group.gather_objects(local) for row in part)
    rows = [example for _, example in sorted(everyone, key=lambda row: row[0])]
    to_batches = partial(collate, micro_batch_tokens=config.training.tokens_per_forward)
    for epoch in range(config.epochs):
        order = np.random.default_rng([config.training.seed, step, epoch]).permutation(len(rows))
        for part in np.array_split(order, config.minibatches):
            batches = shard_rows([rows[row] for row in part], to_batches, group.rank, group.size)
            history.append(state.policy.update(Term(batches, state.loss_fn)))
    return {name: float(np.mean([metrics[name] for metrics in history])) for name in history[0]}


def distill_loss_fn(engine: Engine, teacher: LanguageModel | ExternalLanguageModel, config: DistillConfig) -> LossFn:
    """Loss function of distillation: the reverse KL at each target, summed.

    Of our own models the logits of few targets are in memory at a time; transformers' classes make all of a
    micro-batch.
    """

    def loss_fn(batch: Ragged) -> LossSum:
        with torch.no_grad(), engine.backend.autocast():
            token_loss = teacher.teacher_loss(batch, config.likeliest)
        total = engine.model(batch=batch, temperature=config.temperature, token_loss=token_loss).losses.sum()
        return LossSum(total, {"reverse_kl": total})

    return loss_fn


def build_distill_state(config: DistillConfig, data: RolloutData) -> DistillState:
    """Load student and teacher, and make the engine that trains."""
    teacher_start = Checkpoint(config.teacher)
    if not same_vocabulary(data.tokenizer, load_tokenizer(teacher_start)):
        raise UserError(f"teacher: {config.teacher} has another tokenizer than {config.policy}; take one with the same")
    metrics = load_metrics(config.metrics)
    bases = SharedWeights(config.weights, shared=shares_weights())
    start = load_start(config, data, bases)
    policy = policy_engine(start, config, data.iterations)
    teacher = load_frozen_model(teacher_start, bases, policy.process_group.device)
    if not isinstance(teacher, LanguageModel | ExternalLanguageModel):
        raise UserError(f"teacher: {config.teacher} is no decoder; take one that continues prompts as the student does")
    check_vocabulary(data.tokenizer, teacher.spec.vocabulary)
    check_rows(teacher, data.prompts.rows, config.data.max_length, config.max_new_tokens)
    return DistillState(
        policy,
        score=lambda prompts, responses, ended: torch.full((len(responses),), float("nan")),  # nobody scores them
        stop_ids=sorted(stop_token_ids(data.tokenizer)),
        start=start,
        metrics=metrics,
        roles=[Role("policy", policy.backend.unwrapped, policy), Role("teacher", teacher)],
        servers=config.servers and ServerSampler(config.servers, policy, start),
        cuda_graphs=config.cuda_graphs,
        loss_fn=distill_loss_fn(policy, teacher, config),
    )

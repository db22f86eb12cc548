"""Direct preference optimization (DPO): a policy learns from pairs of responses, without a reward model."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alignment.adapters.specs import AdapterSpec, refuse_dropout
from alignment.algorithms.memory_notes import Role, note_memory
from alignment.algorithms.policies import (
    LogProbModel,
    load_policy,
    note_dropout_off,
    reference_of,
    save_policy,
    sequence_log_probs,
)
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_split
from alignment.data.batches import PairBatch, collate_pairs
from alignment.data.config import DataConfig
from alignment.loading import load_tokenizer
from alignment.losses.preference import dpo_loss, implicit_rewards, preference_metrics
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights, refuse_trained
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import LossFn, LossSum, OptimConfig, TrainingConfig, fit
from alignment.training.distributed import shares_weights


@dataclass(frozen=True)
class DPOConfig:
    """Settings of one DPO run.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        data: comparisons.
        output: the run's directory.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume.
        beta: pull towards the reference, > 0.
        label_smoothing: share of labels assumed flipped, in [0, 0.5).
        adapter: train an adapter, without dropout; the reference is then the same weights with the adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's among them.
    """

    policy: str
    data: DataConfig
    output: str
    reference: str | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None, judges=True)
        if self.beta <= 0:
            raise ValueError(f"beta must be above 0, got {self.beta}; 0.1 is usual")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), got {self.label_smoothing}")
        refuse_dropout(self.adapter, "DPO")


def run(config: DPOConfig) -> Path:
    """Train a policy on pairs and return its directory, `output/model`.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Rafailov et al. 2023, arXiv:2305.18290, eq. 7.
    """
    with open_run(config, "dpo", parents=[config.policy, config.reference]) as run:
        tokenizer = load_tokenizer(config.policy, config.chat_template)
        train, held_out = read_split(config.data, "comparisons", tokenizer, run)
        bases = SharedWeights(config.weights, shared=shares_weights())
        policy = load_policy(config.policy, config.adapter, tokenizer, config.output, bases=bases)
        check_rows(policy.model, train + held_out, config.data.max_length)
        note_dropout_off(policy, run)
        engine, stream = prepare_training(policy.model.eval(), config, train, run)
        reference = reference_of(policy, config.reference, engine, bases=bases)
        roles = [Role("policy", engine.backend.unwrapped, engine), reference.role]
        refuse_trained({role.name: role.model for role in roles if role.model is not None})
        note_memory(run, roles)
        loss_fn = dpo_loss_fn(engine.model, reference, config)
        save = partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size)
        models = [policy.model, reference.model]
        sharing = prompt_sharing(models, wanted=config.training.share_prompts, note=run.note)
        collate = partial(collate_pairs, share_prompts=sharing)
        fit(engine, stream, collate, loss_fn, training=config.training, run=run, held_out=held_out, save=save)
        return run.output / "model"


def dpo_loss_fn(policy: LogProbModel, reference: LogProbModel, config: DPOConfig) -> LossFn:
    """Loss function of DPO: `dpo_loss`, summed over the batch's pairs. `reference` computes no gradients."""

    def loss_fn(batch: PairBatch) -> LossSum:
        policy_chosen, policy_rejected = sequence_log_probs(policy, batch.ragged).chunk(2)  # [2B], chosen first
        reference_chosen, reference_rejected = sequence_log_probs(reference, batch.ragged).chunk(2)
        cost = dpo_loss(
            policy_chosen, policy_rejected, reference_chosen, reference_rejected,
            beta=config.beta, label_smoothing=config.label_smoothing,
        )  # fmt: skip
        chosen_reward = implicit_rewards(policy_chosen, reference_chosen, config.beta).detach()
        rejected_reward = implicit_rewards(policy_rejected, reference_rejected, config.beta).detach()
        metrics = preference_metrics(chosen_reward - rejected_reward) | {
            "chosen_reward": chosen_reward.sum(),
            "rejected_reward": rejected_reward.sum(),
            "chosen_log_prob": policy_chosen.detach().sum(),  # both may fall while the margin grows
            "rejected_log_prob": policy_rejected.detach().sum(),
        }
        return LossSum(cost.sum(), metrics)

    return loss_fn

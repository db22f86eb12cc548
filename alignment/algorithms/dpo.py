"""Direct preference optimization: pairs straight to a policy, no reward model. Other preference losses come later."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from alignment.adapters.specs import LoRASpec, PrefixSpec, refuse_dropout
from alignment.algorithms.policies import (
    check_rows,
    load_policy,
    mean_over,
    note_dropout_off,
    open_run,
    read_split,
    reference_model,
    save_policy,
    sequence_log_probs,
    stream_of,
)
from alignment.algorithms.reward import preference_metrics
from alignment.data.batches import PairBatch, collate_pairs
from alignment.data.rows.read import DataConfig
from alignment.loading import load_tokenizer
from alignment.losses import dpo_loss
from alignment.training import Engine, LossSum, OptimConfig, TrainingConfig, fit


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
    """

    policy: str
    data: DataConfig
    output: str
    reference: str | None = None
    beta: float = 0.1
    label_smoothing: float = 0.0
    adapter: LoRASpec | PrefixSpec | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
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
    with open_run(config, "dpo", parents=[config.policy, config.reference]) as run_directory:
        tokenizer = load_tokenizer(config.policy)
        train, held_out = read_split(config.data, "comparisons", tokenizer, run_directory)
        policy = load_policy(config.policy, config.adapter, config.output)
        check_rows(policy.model, train + held_out, config.data.max_length)
        note_dropout_off(policy, run_directory)
        stream, steps = stream_of(train, config.training)
        engine = Engine(policy.model.eval(), config.optim, config.training, total_steps=steps)
        reference = reference_model(policy, config.reference, engine)
        loss_fn = pair_loss(engine.model, reference, config)
        collate = partial(collate_pairs, micro_batch_tokens=config.training.micro_batch_tokens)
        evaluate = partial(mean_over, engine, collate(held_out), loss_fn) if held_out else None
        save = partial(save_policy, engine, policy, tokenizer, config.output)
        fit(engine, stream, collate, loss_fn, config.training, run_directory, evaluate=evaluate, save=save)
        return Path(config.output) / "model"


def pair_loss(policy: Any, reference: Callable[..., Any], config: DPOConfig) -> Callable[[PairBatch], LossSum]:
    """The loss function of `run`: batch of pairs -> sum over pairs."""

    def loss_fn(batch: PairBatch) -> LossSum:
        policy_chosen, policy_rejected = sequence_log_probs(policy, batch.ragged).chunk(2)  # [2B], chosen first
        with torch.no_grad():
            reference_chosen, reference_rejected = sequence_log_probs(reference, batch.ragged).chunk(2)
        cost = dpo_loss(
            policy_chosen, policy_rejected, reference_chosen, reference_rejected,
            beta=config.beta, label_smoothing=config.label_smoothing,
        )  # fmt: skip
        chosen = config.beta * (policy_chosen - reference_chosen).detach()
        rejected = config.beta * (policy_rejected - reference_rejected).detach()
        return LossSum(cost.sum(), _metrics(chosen, rejected, policy_chosen, policy_rejected))

    return loss_fn


def _metrics(chosen: Tensor, rejected: Tensor, policy_chosen: Tensor, policy_rejected: Tensor) -> dict[str, Tensor]:
    """Sums over pairs; the log-probabilities show displacement: both may fall while the margin grows."""
    return preference_metrics(chosen - rejected) | {
        "chosen_reward": chosen.sum(),
        "rejected_reward": rejected.sum(),
        "chosen_log_prob": policy_chosen.detach().sum(),
        "rejected_log_prob": policy_rejected.detach().sum(),
    }

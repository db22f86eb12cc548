"""Reward models, trained on pairs of responses by the Bradley-Terry loss."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from torch import Tensor

from alignment.adapters.specs import AdapterSpec
from alignment.algorithms.memory_notes import Role, note_memory
from alignment.algorithms.policies import Policy, load_value_model, save_policy
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_split
from alignment.data.batches import PairBatch, collate_pairs
from alignment.data.config import DataConfig
from alignment.data.text.chat import stop_token_ids
from alignment.loading import load_tokenizer
from alignment.losses.preference import bradley_terry_loss, center_penalty, preference_metrics
from alignment.models.protocols import ScoringModel
from alignment.models.shared_prompts import prompt_sharing
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import LossFn, LossSum, OptimConfig, TrainingConfig, fit


@dataclass(frozen=True)
class RewardConfig:
    """Settings of one reward-model run.

    Attributes:
        policy: the checkpoint whose trunk the reward model starts from, usually the SFT policy.
        data: comparisons.
        output: the run's directory.
        adapter: train an adapter and the score head only; None trains every weight.
        chat_template: as for SFT; saved with the model, whose scores depend on it.
        weights: type of the frozen weights in memory.
        center_coef: weight of (chosen + rejected)^2, which holds the scores near 0 (Eisenstein et al. 2023,
            arXiv:2312.09244); 0 leaves their level free.
    """

    policy: str
    data: DataConfig
    output: str
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    center_coef: float = 0.0
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None)
        if self.center_coef < 0:
            raise ValueError(f"center_coef must be 0 (off) or above, got {self.center_coef}; 0.01 is usual")


def run(config: RewardConfig) -> Path:
    """Train a reward model and return its directory, `output/model`.

    Each update minimizes the mean over pairs of -log sigmoid(score(chosen) - score(rejected) - margin); a score is read
    at the last token of prompt + response + end token.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Stiennon et al. 2020, arXiv:2009.01325, section 3.4; margin Touvron et al. 2023, arXiv:2307.09288, eq. 2.
    """
    with open_run(config, "reward", parents=[config.policy]) as run:
        tokenizer = load_tokenizer(config.policy, config.chat_template)
        train, held_out = read_split(config.data, "comparisons", tokenizer, run)
        reward_model = load_value_model(
            config.policy, config.adapter, tokenizer, config.output, head="normal", bases=SharedWeights(config.weights)
        )
        check_rows(reward_model.model, train + held_out, config.data.max_length)
        for line in notes(reward_model):
            run.note(line)
        engine, stream = prepare_training(reward_model.model.train(), config, train, run)
        note_memory(run, [Role("reward model", engine.backend.unwrapped, engine)])
        loss_fn = reward_loss_fn(engine.model, config.center_coef)
        save = partial(save_policy, engine, reward_model, run.output, max_shard_size=config.training.max_shard_size)
        sharing = prompt_sharing([reward_model.model], wanted=config.training.share_prompts, note=run.note)
        collate = partial(collate_pairs, share_prompts=sharing)
        fit(engine, stream, collate, loss_fn, training=config.training, run=run, held_out=held_out, save=save)
        return run.output / "model"


def notes(reward_model: Policy) -> Iterator[str]:
    """What a user should know about a reward model before it is trained."""
    yield f"score head: new, with random weights; any head that {reward_model.source} has is not used"
    pad = reward_model.model.config.get("pad_token_id")
    if reward_model.adapter is not None and pad in stop_token_ids(reward_model.tokenizer):
        yield (
            f"{reward_model.base}: its config.json has an end token ({pad}) as pad_token_id, so transformers reads this "
            "adapter's scores before the end token, where they are others; `alignment export` writes a model that it "
            "reads right, or set pad_token_id to null on the loaded base's config"
        )


def reward_loss_fn(model: ScoringModel, center_coef: float) -> LossFn:
    """Loss function of a reward model: Bradley-Terry, summed over the batch's pairs, plus `center_penalty`."""

    def loss_fn(batch: PairBatch) -> LossSum:
        chosen, rejected = pair_scores(model, batch)  # [B] each
        cost = bradley_terry_loss(chosen, rejected, batch.margins)
        if center_coef:
            cost = cost + center_coef * center_penalty(chosen, rejected)
        score = (chosen + rejected).detach().sum() / 2
        return LossSum(cost.sum(), preference_metrics(chosen - rejected) | {"score": score})

    return loss_fn


def pair_scores(model: ScoringModel, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """Scores of the chosen and the rejected responses, [B] each."""
    values = model(batch=batch.ragged).values  # [N]
    chosen, rejected = values[batch.ragged.last].chunk(2)  # the last token saw the whole text
    return chosen, rejected

"""Supervised fine-tuning (SFT): next-token loss on the response alone."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alignment.adapters.specs import AdapterSpec
from alignment.algorithms.memory_notes import Role, note_memory
from alignment.algorithms.policies import language_loss_fn, load_policy, save_policy
from alignment.algorithms.runs import check_rows, open_run, prepare_training, read_split
from alignment.data.batches import collate
from alignment.data.config import DataConfig
from alignment.loading import load_tokenizer
from alignment.models.shared_weights import SharedWeights
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.training import OptimConfig, TrainingConfig, fit


@dataclass(frozen=True)
class SFTConfig:
    """Settings of one supervised fine-tuning run.

    Attributes:
        policy: directory or hub name of the checkpoint to start from.
        data: demonstrations.
        output: the run's directory.
        adapter: train a LoRA or prefix adapter on the frozen model; None trains every weight.
        weights: type of the frozen weights in memory.
    """

    policy: str
    data: DataConfig
    output: str
    adapter: AdapterSpec | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None)


def run(config: SFTConfig) -> Path:
    """Fine-tune and return the directory of the result, `output/model`.

    Each update minimizes the mean of -log p(token) over all response tokens of the global batch, end token included.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.5.
    """
    with open_run(config, "sft", parents=[config.policy]) as run:
        tokenizer = load_tokenizer(config.policy)
        train, held_out = read_split(config.data, "demonstrations", tokenizer, run)
        policy = load_policy(
            config.policy, config.adapter, tokenizer, config.output, bases=SharedWeights(config.weights)
        )
        check_rows(policy.model, train + held_out, config.data.max_length)
        engine, stream = prepare_training(policy.model.train(), config, train, run)
        save = partial(save_policy, engine, policy, run.output, max_shard_size=config.training.max_shard_size)
        note_memory(run, [Role("policy", engine.backend.unwrapped, engine)])
        fit(
            engine, stream, collate, language_loss_fn(engine.model),
            training=config.training, run=run, held_out=held_out, save=save,
        )  # fmt: skip
        return run.output / "model"

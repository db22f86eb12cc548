"""Supervised fine-tuning: next-token loss on the response alone. Preferences come in reward.py, dpo.py and ppo.py."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from alignment.adapters.specs import LoRASpec, PrefixSpec
from alignment.algorithms.policies import check_rows, fit_language_model, load_policy, open_run, read_split, save_policy
from alignment.data.rows.read import DataConfig
from alignment.loading import load_tokenizer
from alignment.training import OptimConfig, TrainingConfig


@dataclass(frozen=True)
class SFTConfig:
    """Settings of one supervised fine-tuning run.

    Attributes:
        policy: directory or hub name of the checkpoint to start from.
        data: demonstrations.
        output: the run's directory.
        adapter: train a LoRA or prefix adapter on the frozen model; None trains every weight.
    """

    policy: str
    data: DataConfig
    output: str
    adapter: LoRASpec | PrefixSpec | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-5))
    training: TrainingConfig = field(default_factory=TrainingConfig)


def run(config: SFTConfig) -> Path:
    """Fine-tune and return the directory of the result, `output/model`.

    Each update minimizes the mean of -log p(token) over all response tokens of the global batch, end token included.

    Raises:
        UserError: bad data or checkpoint, before any training.

    Source: Ouyang et al. 2022, arXiv:2203.02155, section 3.5.
    """
    with open_run(config, "sft", parents=[config.policy]) as run_directory:
        tokenizer = load_tokenizer(config.policy)
        train, held_out = read_split(config.data, "demonstrations", tokenizer, run_directory)
        policy = load_policy(config.policy, config.adapter, config.output)
        check_rows(policy.model, train + held_out, config.data.max_length)
        save = partial(save_policy, policy=policy, tokenizer=tokenizer, output=config.output)
        fit_language_model(policy, train, held_out, config.optim, config.training, run_directory, save=save)
        return Path(config.output) / "model"

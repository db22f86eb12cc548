"""Who scores the sampled responses of a stage: its reward models, and the other entries of `rewards`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from alignment.algorithms.memory_notes import Role
from alignment.algorithms.runs import check_rows
from alignment.data.config import DataConfig
from alignment.data.examples import Example
from alignment.data.rows.records import Prompt
from alignment.data.table import column_of
from alignment.data.tokenize import encode_prompts
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.loading import find_directory
from alignment.models.classifiers import SequenceClassifier
from alignment.models.model import check_lengths
from alignment.models.shared_weights import SharedWeights
from alignment.reward_model import Combine, RewardModel, load_frozen_reward_model, member_count
from alignment.rewards.build import build_rewards, finite_scorer, prepare_rewards, response_scorer
from alignment.rewards.combine import Rewards, ScoreFunction, Scores, TextReward
from alignment.rewards.specs import RewardSpec, names_of
from alignment.training import TrainingConfig
from alignment.training.distributed import ProcessGroup


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """The settings by which responses are scored, in the names of PPO's own, for stages and prompts that have others."""

    reward_model: str | None
    rewards: list[RewardSpec]
    reward_combine: Combine = "mean"
    reward_std_coef: float = 1.0
    data: DataConfig
    max_new_tokens: int
    training: TrainingConfig


class ScoredSettings(Protocol):
    """The settings by which responses are scored: PPO's own, or a `Scoring`."""

    @property
    def reward_model(self) -> str | None: ...
    @property
    def rewards(self) -> list[RewardSpec]: ...
    @property
    def reward_combine(self) -> Combine: ...
    @property
    def reward_std_coef(self) -> float: ...
    @property
    def data(self) -> DataConfig: ...
    @property
    def max_new_tokens(self) -> int: ...
    @property
    def training(self) -> TrainingConfig: ...


def reward_model_specs(config: ScoredSettings) -> dict[str, RewardSpec]:
    """The entries that are reward models, by name; of the short form one, named reward_model."""
    if config.reward_model is not None:
        combine, std_coef = config.reward_combine, config.reward_std_coef
        return {"reward_model": RewardSpec(config.reward_model, reward_combine=combine, reward_std_coef=std_coef)}
    named = zip(names_of(config.rewards), config.rewards, strict=True)
    return {name: spec for name, spec in named if spec.reward_model is not None}


def prepare_scoring(config: ScoredSettings, prompts: Sequence[Example]) -> dict[str, TextReward]:
    """The rewards that read texts, by name, before any network is loaded.

    Raises:
        UserError: as for `prepare_rewards` and `check_combine`.
    """
    texts = prepare_rewards(config.rewards, prompts)
    for spec in reward_model_specs(config).values():
        check_combine(spec)
    return texts


def check_combine(spec: RewardSpec) -> None:
    """Refuse to combine the members of a reward model that is no ensemble.

    Raises:
        UserError: in words.
    """
    assert spec.reward_model is not None
    if spec.reward_combine != "mean" and (found := member_count(find_directory(spec.reward_model))) == 1:
        raise UserError(
            f"{spec.reward_model}: reward_combine={spec.reward_combine} combines the members of an ensemble, and this "
            f"reward model has {found}; leave it out, or train one with `ensemble`"
        )


def load_judges(
    config: ScoredSettings,
    prompts: Sequence[Example],
    tokenizer: Tokenizer,
    bases: SharedWeights,
    device: torch.device,
) -> dict[str, RewardModel]:
    """The reward models by the name of their entry; each can read all prompts.

    Raises:
        UserError: a bad checkpoint, or prompts that one of them cannot read.
    """
    judges = {}
    for name, spec in reward_model_specs(config).items():
        assert spec.reward_model is not None
        judges[name] = load_frozen_reward_model(
            spec.reward_model, bases, device, combine=spec.reward_combine, std_coef=spec.reward_std_coef
        )
        check_judged(prompts, judges[name], tokenizer, config, spec.reward_model)
    return judges


def score_function(
    config: ScoredSettings,
    tokenizer: Tokenizer,
    texts: Mapping[str, TextReward],
    judges: Mapping[str, RewardModel],
    group: ProcessGroup,
) -> ScoreFunction:
    """What scores the responses: the reward model, or all of `rewards`."""
    tokens = config.training.tokens_per_forward
    scorers = {name: response_scorer(judge, tokenizer, tokens) for name, judge in judges.items()}
    if not config.rewards:
        score = finite_scorer(config.reward_model or "", scorers["reward_model"])
        deviation = 1.0 if judges["reward_model"].calibration.fitted else None
        return lambda *responses: Scores(score(*responses), fixed_deviation=deviation)
    return build_rewards(
        config.rewards, texts, scorers,
        tokenizer=tokenizer,
        scaled=[name for name, judge in judges.items() if judge.calibration.fitted],
        reduce=group.sum,
    )  # fmt: skip


def roles_of(judges: Mapping[str, RewardModel], config: ScoredSettings) -> list[Role]:
    """The reward models as networks of a run; that of the short form has no further name."""
    return [Role(f"reward model{f' {name}' if config.rewards else ''}", judge.model) for name, judge in judges.items()]


def save_statistics(score: ScoreFunction) -> dict[str, object]:
    """What a checkpoint keeps of the rewards, for `load_statistics`; nothing of a reward model alone."""
    return {"rewards": score.state()} if isinstance(score, Rewards) else {}


def load_statistics(score: ScoreFunction, saved: dict[str, list[float]] | None) -> None:
    """Take the statistics of the rewards from the entry `rewards` of a checkpoint.

    Raises:
        UserError: they are of other rewards.
    """
    if isinstance(score, Rewards):
        score.load(saved or {})


class JudgedSettings(Protocol):
    """The settings of a run whose samples a reward model scores."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def max_new_tokens(self) -> int: ...


def check_judged(
    prompts: Sequence[Example],
    reward_model: RewardModel,
    tokenizer: Tokenizer,
    config: JudgedSettings,
    name: str | None,
) -> None:
    """Refuse prompts that the reward model cannot read, or that one with a tokenizer of its own would see otherwise.

    Args:
        prompts: all of them.
        reward_model: the judge.
        tokenizer: the policy's.
        config: of the run.
        name: directory of the reward model, for messages.

    Raises:
        UserError: prompts whose beginning was cut off, that the reward model's template refuses, or too long for it.
    """
    if reward_model.shares_token_ids(tokenizer):
        return check_rows(reward_model.model, prompts, config.data.max_length, config.max_new_tokens)
    if cut := column_of(prompts, "cut").nonzero()[0].tolist():
        names = ", ".join(prompts[row].row_id for row in cut[:3])
        raise UserError(
            f"{name}: the reward model has a tokenizer or chat template of its own and reads whole prompts, "
            f"while the policy sees {len(cut)} of {len(prompts)} without their beginning ({names}); raise "
            f"data.max_length (it is {config.data.max_length}), or leave the long prompts out"
        )
    if isinstance(reward_model.model, SequenceClassifier):
        messages = [prompt.row_id for prompt in prompts if not isinstance(prompt.prompt, str)]
        if messages:
            raise UserError(
                f"{name}: the reward model is an encoder and reads texts, and {len(messages)} of "
                f"{len(prompts)} prompts are messages ({', '.join(messages[:3])}); take a decoder as reward model, or "
                "prompts as texts"
            )
        return
    ids = encode_prompts(
        reward_model.tokenizer, [Prompt(prompt.prompt, prompt.extra, prompt.row_id) for prompt in prompts]
    )
    lengths = [(prompt.row_id, len(tokens)) for prompt, tokens in zip(prompts, ids, strict=True)]
    check_lengths(reward_model.model, lengths, "leave these prompts out, or take another reward model", new_tokens=1)

"""Settings of the judge of held-out prompts, by which a PPO run stops before it over-optimizes its reward."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from alignment.data.config import DataConfig
from alignment.reward_model import Combine
from alignment.rewards.specs import RewardSpec, check_rewards, reward_models_of
from alignment.training import TrainingConfig

HELD_OUT_METRICS = ("held_out_win_rate", "held_out_score")  # by which the best weights can be kept


@dataclass(frozen=True)
class HeldOutConfig:
    """Who scores the responses to the held-out prompts, `data.evaluation` or `data.evaluation_share`, and what the run may cost.

    Before the first iteration, after every `training.evaluate_every_steps`-th and after the last one the policy responds
    to each held-out prompt. Logged are `held_out_score`, the mean score; `held_out_win_rate`, the share of prompts to which
    the response scores higher than the starting policy's (equal scores count half); `held_out_kl`, the KL of a response
    from the reference; and `held_out_unscored_share`, the share of responses to which a reward gave no number; one
    without any score is in no mean. `training.keep_best` and `training.early_stopping` take the first two.

    Attributes:
        reward_model: directory of a second reward model, one that PPO does not maximize; an ensemble where one was trained.
        rewards: in its place several rewards with weights, as in `rewards`; their numbers are neither normalized nor
            clipped.
        reward_combine, reward_std_coef: how the scores of an ensemble in `reward_model` become one.
        kl_budget: nats; the run ends once `held_out_kl` exceeds them. Weights beyond it are not kept as the best ones.
            null: no budget.
        seed: of the responses to the held-out prompts, which are drawn alike in every evaluation.
    """

    reward_model: str | None = None
    rewards: list[RewardSpec] = field(default_factory=list)
    reward_combine: Combine = "mean"
    reward_std_coef: float = 1.0
    kl_budget: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_rewards(self.reward_model, self.rewards, self.reward_combine, self.reward_std_coef)
        if self.kl_budget is not None and not self.kl_budget > 0:
            raise ValueError(f"kl_budget must be above 0 nats, got {self.kl_budget}; null is no budget")
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")

    @property
    def reward_models(self) -> list[str]:
        """Directories of its reward models."""
        return reward_models_of(self.reward_model, self.rewards)


class EvaluatedSettings(Protocol):
    """The settings of a run with held-out prompts."""

    @property
    def data(self) -> DataConfig: ...

    @property
    def training(self) -> TrainingConfig: ...

    @property
    def held_out(self) -> HeldOutConfig | None: ...


def check_held_out(config: EvaluatedSettings) -> None:
    """Refuse held-out prompts without a judge, a judge without them, and what the evaluation cannot decide.

    Raises:
        ValueError: in words.
    """
    training = config.training
    if config.held_out is None:
        if config.data.evaluates:
            key = "evaluation" if config.data.evaluation is not None else "evaluation_share"
            raise ValueError(
                f"data.{key} is not read: nobody scores the responses to held-out prompts; name a second reward model in "
                "held_out, or leave it out and compare the results with `alignment evaluate winrate`"
            )
        for name in ("keep_best", "early_stopping"):
            if getattr(training, name) is not None:
                raise ValueError(
                    f"training.{name} has no effect in PPO without held-out prompts that are scored; set data.evaluation "
                    "and held_out.reward_model, or leave it out"
                )
        return
    if not config.data.evaluates:
        raise ValueError("held_out needs prompts: set data.evaluation, or data.evaluation_share such as 0.05")
    if config.held_out.kl_budget is not None and training.best_metric is None:
        raise ValueError(
            "held_out.kl_budget ends the run beyond the budget, and the last weights would be its result; keep the best ones "
            "within it: training.keep_best=held_out_win_rate, with training.evaluate_every_steps such as 10"
        )
    if training.best_metric not in (None, *HELD_OUT_METRICS):
        raise ValueError(
            f"training.keep_best, training.early_stopping.metric: PPO has no {training.best_metric}; it has "
            f"{' and '.join(HELD_OUT_METRICS)}"
        )


def unshaped(rewards: Sequence[RewardSpec]) -> list[RewardSpec]:
    """The rewards as they are given: neither normalized nor clipped."""
    return [replace(spec, normalize="none", clip=None) for spec in rewards]

"""Settings of online DPO, and what they must not be."""

from dataclasses import dataclass, field

from alignment.adapters.specs import refuse_dropout
from alignment.algorithms.dpo.setup import PreferenceConfig
from alignment.algorithms.ppo.config import SamplingSettings, refuse_evaluation, refuse_row_weights
from alignment.losses.preference_table import LOSSES
from alignment.models.weights_config import check_weights
from alignment.rewards.specs import RewardSpec, check_rewards, reward_models_of


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(SamplingSettings, PreferenceConfig):
    """Settings of one run of online DPO: the keys of `PreferenceConfig` and `SamplingSettings`, and its own.

    `training.max_steps` or `training.epochs` count iterations over the prompts. The loss is one of pairs, or several with
    their weights; odpo's margins are differences of scores. The loss takes log-probabilities at temperature 1, whatever the
    temperature of the samples. Networks that are adapters of one base hold its weights once, where FSDP2 or ZeRO do not
    shard each network by itself.

    Attributes:
        data: prompts. None are held out: what is learnt is compared by `alignment evaluate winrate`.
        judge: who says which response is better. reward_model (given as `reward_model`, or as `rewards`), gold (the true
            reward of the hotel data set, for its prompts only), or module:function, which is given prompts, responses
            shown first and responses shown second, and gives for each the verdict for the one shown first: 1, 0.5, 0, or
            None where it cannot say. Each two responses to a prompt are shown to it in both orders.
        reward_model: directory of the judging reward model: the short form of `rewards` with this one entry.
        rewards: what makes a response the better one, as a list of entries as in PPO: the sum of
            weight * clip(normalize(part)). Each part is logged as `score/NAME`, and the share of responses without a
            number as `unscored_share/NAME`. A single entry that does not say `normalize` is not normalized. A response
            without a score is in no pair: a judge failed on it, or no reward applies to it.
        responses_per_prompt: responses sampled to each prompt, at least 2; the best and the worst become a pair.
        tie_margin: largest difference of two scores that is a tie; a prompt whose best and worst response tie gives no
            pair. With a judge of pairs, scores are shares of comparisons won.
    """

    judge: str = "reward_model"
    reward_model: str | None = None
    rewards: list[RewardSpec] = field(default_factory=list)
    responses_per_prompt: int = 2
    tie_margin: float = 0.0

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None, judges=True)
        refuse_dropout(self.adapter, "online DPO")
        check_judge(self)
        check_loss(self)
        self.check_sampling("equal responses make no pair")
        if self.responses_per_prompt < 2:
            raise ValueError(f"responses_per_prompt must be at least 2, got {self.responses_per_prompt}")
        if self.tie_margin < 0:
            raise ValueError(f"tie_margin must be 0 (off) or above, got {self.tie_margin}")
        refuse_row_weights({"data": self.data}, "online_dpo")
        unread = ("keep_best", "early_stopping", "ema_decay")
        refuse_evaluation({"data": self.data}, unread, self.training, "online_dpo", "online DPO")

    @property
    def holds_reference(self) -> bool:
        """Whether the reference is asked during the updates, as a network or as the policy with its adapter off."""
        return self.refers

    @property
    def judging_models(self) -> list[str]:
        """Directories of the reward models, in the order of `rewards`."""
        return reward_models_of(self.reward_model, self.rewards)


def check_judge(config: OnlineDPOConfig) -> None:
    """Refuse a judge that there is not, that lacks its rewards, or that reads none.

    Raises:
        ValueError: in words.
    """
    if config.judge == "reward_model":
        if config.reward_model is None and not config.rewards:
            raise ValueError(
                "say who judges: judge=reward_model with reward_model=DIR or a list `rewards` of entries, "
                "judge=module:function, or judge=gold for prompts of the generated hotel world alone"
            )
        check_rewards(config.reward_model, config.rewards)
    elif config.judge != "gold" and ":" not in config.judge:
        raise ValueError(f"judge: there is no {config.judge!r}; there are reward_model, gold and module:function")
    elif config.reward_model is not None or config.rewards:
        key = "rewards" if config.rewards else "reward_model"
        raise ValueError(f"{key}: judge={config.judge} reads none; leave it out, or set judge=reward_model")


def check_loss(config: OnlineDPOConfig) -> None:
    """Refuse a loss that learns from other rows than pairs, and a reference or weight that none of the losses has.

    Raises:
        ValueError: in words.
    """
    names = " and ".join(loss.name for loss in config.losses)
    if (rows := config.rows) != "comparisons":
        pairs = ", ".join(name for name, spec in LOSSES.items() if spec.rows == "comparisons")
        raise ValueError(f"loss: {names} learns from {rows}, and online DPO makes pairs; take one of {pairs}")
    if not config.refers and config.reference is not None:
        raise ValueError(f"reference: {names} needs none; leave it out")
    if config.sft_weight < 0:
        raise ValueError(f"sft_coef must be 0 (off) or above, got {config.sft_coef}")

"""Settings of online DPO."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Interval

from alignment.algorithms.dpo.config import PreferenceConfig
from alignment.algorithms.ppo.config import SamplingSettings
from alignment.losses.preference_table import LOSSES
from alignment.rewards.specs import check_rewards, reward_models_of
from alignment.settings import NonNegativeFloat, Rule, refusal


@dataclass(frozen=True, kw_only=True)
class OnlineDPOConfig(SamplingSettings, PreferenceConfig):
    """Settings of one run of online DPO: the keys of `PreferenceConfig` and `SamplingSettings`, and its own.

    `training.max_steps` or `training.epochs` count iterations over the prompts. The loss is one of pairs, or several with
    their weights; odpo's margins are differences of scores. The loss takes log-probabilities at temperature 1, whatever the
    temperature of the samples.

    Attributes:
        data: prompts. None are held out: what is learnt is compared by `alignment evaluate winrate`.
        judge: the judge of which response is better. reward_model (given as `reward_model`, or as `rewards`), gold (the true
            reward of the hotel data set, for its prompts only), or module:function, which is given prompts, responses
            shown first and responses shown second, and gives for each the verdict for the one shown first: 1, 0.5, 0, or
            None where it cannot say. Each two responses to a prompt are shown to it in both orders.
        rewards: see `SamplingSettings`; a single entry that does not say `normalize` is not normalized, and a response
            without a score is in no pair.
        responses_per_prompt: responses sampled to each prompt, at least 2; the best and the worst become a pair.
        tie_margin: largest difference of two scores that is a tie; a prompt whose best and worst response tie gives no
            pair. With a judge of pairs, scores are shares of comparisons won.
    """

    judge: str = "reward_model"
    responses_per_prompt: Annotated[int, Interval(ge=2)] = 2
    tie_margin: NonNegativeFloat = 0.0

    RULES = (
        Rule(
            "judge",
            lambda c: c.judge not in ("reward_model", "gold") and ":" not in c.judge,
            "{self.judge!r} is unknown; there are reward_model, gold and module:function",
        ),
        Rule(
            "judge",
            lambda c: c.judge == "reward_model" and c.reward_model is None and not c.rewards,
            "must be said: judge=reward_model with reward_model=DIR or a list `rewards` of entries, judge=module:function, or "
            "judge=gold for prompts of the generated hotel world alone",
        ),
        Rule(
            "rewards",
            lambda c: (c.reward_model is not None or c.rewards) and refusal(check_rewards, c.reward_model, c.rewards),
        ),
        Rule(
            "judge",
            lambda c: c.judge != "reward_model" and (c.reward_model is not None or c.rewards),
            "{self.judge} reads no reward_model and no rewards; leave them out, or set judge=reward_model",
        ),
        Rule(
            "loss",
            lambda c: [loss.name for loss in c.losses if loss.spec.rows != "comparisons"],
            "{found} learns from other rows than the pairs that online DPO makes; take one of "
            + ", ".join(name for name, spec in LOSSES.items() if spec.rows == "comparisons"),
        ),
        Rule(
            "data.evaluation",
            lambda c: c.data.evaluates,
            "is not read, nor evaluation_share: online_dpo evaluates nothing while it trains; leave it out, and compare the "
            "results on held-out prompts with `alignment evaluate winrate`",
        ),
        Rule(
            "training.keep_best",
            lambda c: c.training.best_metric is not None,
            "has no effect, nor early_stopping: online DPO evaluates nothing while it runs; leave it out",
        ),
    )

    @property
    def holds_reference(self) -> bool:
        """True where the reference is asked during the updates, as a network or as the policy with its adapter off."""
        return self.refers

    @property
    def judging_models(self) -> list[str]:
        """Directories of the reward models, in the order of `rewards`."""
        return reward_models_of(self.reward_model, self.rewards)

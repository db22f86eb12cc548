"""Settings of PPO and of the methods that share its updates."""

from dataclasses import KW_ONLY, dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval

from alignment.adapters.specs import refuse_dropout
from alignment.algorithms.dpo.config import PolicyOptim
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.data.config import DataConfig
from alignment.models.weights_config import check_weights
from alignment.reward_model import Combine
from alignment.rewards.specs import RewardSpec, check_rewards, reward_models_of
from alignment.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Settings,
    Share,
    refusal,
)
from alignment.training import OptimConfig

HELD_OUT_METRICS = ("held_out_win_rate", "held_out_score")  # by which the best weights can be kept
Advantages = Literal["gae", "rloo", "grpo", "dr_grpo", "reinforce++", "remax"]
LossNormalization = Literal["token_mean", "sequence_mean", "constant"]
GROUPED = ("rloo", "grpo", "dr_grpo")  # compare the responses to one prompt with each other


@dataclass(frozen=True)
class PPOOptim(PolicyOptim):
    """The policy's optimizer and its schedule in PPO."""

    eps: PositiveFloat = 1e-5


@dataclass(frozen=True)
class ValueOptim(OptimConfig):
    """The value model's optimizer and its schedule in PPO."""

    eps: PositiveFloat = 1e-5


@dataclass(frozen=True, kw_only=True)
class UpdateSettings(Settings):
    """Settings of the updates that are taken on one iteration's samples.

    Attributes:
        advantages: how a response's rewards become advantages. gae: generalized advantage estimation with a value model
            (PPO). Without one: rloo: the reward less the mean of the other responses to the prompt. grpo: less the mean
            of all responses to the prompt, divided by their deviation. dr_grpo: without that division and, by
            `loss_normalization`, without one by lengths, both of which bias the gradient. reinforce++: reward from the
            token on, whitened over the whole iteration. remax: less the score of the greedy response to the prompt.
        kl_in: where the KL penalty `kl_coef` is applied. reward: taken off the rewards. loss: added
            to the policy's loss, with its gradient, as in GRPO.
        kl_estimator: of the penalty per token, with r = log p - log p_ref: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r.
            In the loss k2 has the gradient of the reverse KL of each token, k3 (GRPO's) that of the forward KL.
        clip_range: how far the ratio of new to old probability may fall below 1, and rise above 1 where
            `clip_range_high` is None, before the gradient stops.
        clip_range_high: how far it may rise above 1 (DAPO's clip-higher); None: as far as `clip_range`.
        dual_clip: at a negative advantage the cost stops growing where the ratio exceeds this, above 1 (3 is usual);
            None is off.
        ratio: token: of each token. sequence: the geometric mean over the response, the same for all its tokens (GSPO),
            whose ranges are far narrower: 3e-4 and 4e-4. It takes advantages of whole responses: rloo, grpo, dr_grpo.
        loss_normalization: what the loss is divided by in an update. None: sequence_mean with ratio=sequence (GSPO's
            paper, eq. 5), else constant with advantages=dr_grpo, else token_mean. token_mean: the response tokens of
            the minibatch (DAPO; loss_type=dapo in TRL, token-mean in verl). sequence_mean: each response's tokens, then
            the responses (GRPO's paper; loss_type=grpo, seq-mean-token-mean). constant: responses times
            `max_new_tokens`, so that no length is preferred (Dr. GRPO; loss_type=dr_grpo, seq-mean-token-sum-norm).
        entropy_coef: weight of the entropy, taken off the loss; 0 is off.
        target_kl: nats per token; once the mean `approx_kl` of an update exceeds it, the remaining updates of that
            iteration are left out, and a schedule of the learning rate, which counts updates, does not come to its end.
            None takes them all.
        whiten_rewards: scale the rewards of all tokens to variance 1, keeping their mean, before `gae`.
        whiten_advantages: shift and scale the advantages of all tokens to mean 0 and variance 1; None: with gae and
            reinforce++ alone.
        value_model: whose trunk the value model (critic) of `gae` starts from; None: the first reward model's, or the
            policy's where no reward is a model. Its head starts at zero where scores are normalized, else it keeps the
            reward model's. A reward model with another vocabulary cannot become it. shared: a value head, zero at the
            start, on the trunk of the policy itself: one forward and one update for both.
        value_coef: weight of the value loss beside the policy loss, with value_model=shared.
        value_warmup_steps: first iterations in which the value model learns alone.
    """

    advantages: Advantages = "gae"
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    clip_range: PositiveFloat = 0.2
    clip_range_high: PositiveFloat | None = None
    dual_clip: Annotated[float, Interval(gt=1)] | None = None
    ratio: Literal["token", "sequence"] = "token"
    loss_normalization: LossNormalization | None = None
    entropy_coef: NonNegativeFloat = 0.0
    target_kl: PositiveFloat | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool | None = None
    value_model: Literal["reward_model", "policy", "shared"] | None = None
    value_coef: PositiveFloat = 0.5
    value_warmup_steps: NonNegativeInt = 0

    RULES = (
        Rule(
            "dual_clip",
            lambda c: c.dual_clip is not None and c.dual_clip <= c.highest_ratio,
            "must be above {self.highest_ratio:g}, where the ratio is clipped anyway, got {self.dual_clip}; 3 is usual",
        ),
        Rule(
            "kl_in",
            lambda c: c.kl_in == "loss" and c.kl_estimator == "k1",
            "loss needs kl_estimator=k2 or k3: the gradient of k1, that of log p, is zero in expectation, so nothing "
            "would hold the policy back (arXiv:2506.09477)",
        ),
        Rule(
            "ratio",
            lambda c: c.ratio == "sequence" and c.advantages not in GROUPED,
            "sequence gives all tokens of a response one ratio, and advantages={self.advantages} gives each token an "
            f"advantage of its own, of which only the mean would count; take advantages={', '.join(GROUPED)}, or "
            "ratio=token",
        ),
        Rule(
            "whiten_advantages",
            lambda c: c.advantages == "dr_grpo" and c.whiten_advantages,
            "would bring back the division by the deviation, which advantages=dr_grpo leaves out; leave it out, or "
            "take advantages=grpo",
        ),
        *(
            Rule(
                name,
                lambda c, name=name, default=default: not c.has_value_model and getattr(c, name) not in (None, default),
                "goes with advantages=gae: advantages={self.advantages} has no value model; leave it out",
            )
            for name, default in (("value_model", "reward_model"), ("value_warmup_steps", 0), ("whiten_rewards", False))
        ),
        Rule(
            "value_coef",
            lambda c: c.value_model != "shared" and c.value_coef != 0.5,
            "goes with value_model=shared; a value model of its own has its own optimizer, see value_optim",
        ),
        Rule(
            "value_warmup_steps",
            lambda c: c.value_model == "shared" and c.value_warmup_steps > 0,
            "must be 0 with value_model=shared, where the value loss alone would change the policy's trunk; or take "
            "value_model=reward_model or policy",
        ),
    )

    @property
    def highest_ratio(self) -> float:
        """The ratio above which a token with a positive advantage is clipped."""
        return 1 + (self.clip_range if self.clip_range_high is None else self.clip_range_high)

    @property
    def has_value_model(self) -> bool:
        """True where advantages are estimated with a value model."""
        return self.advantages == "gae"

    @property
    def shares_trunk(self) -> bool:
        """True where the value model is a head on the policy's trunk."""
        return self.has_value_model and self.value_model == "shared"

    @property
    def whitens_advantages(self) -> bool:
        """`whiten_advantages`, with None as the method has it."""
        return self.advantages in ("gae", "reinforce++") if self.whiten_advantages is None else self.whiten_advantages

    @property
    def normalization(self) -> LossNormalization:
        """`loss_normalization`, with None as the method has it."""
        if self.loss_normalization is not None:
            return self.loss_normalization
        if self.ratio == "sequence":
            return "sequence_mean"
        return "constant" if self.advantages == "dr_grpo" else "token_mean"


@dataclass(frozen=True)
class HeldOutConfig(Settings):
    """The judge of held-out prompts, `data.evaluation` or `data.evaluation_share`, and the KL that the run may cost.

    Before the first iteration, after every `training.evaluate_every_steps`-th and after the last one the policy
    responds to each held-out prompt. Logged are `held_out_score`, the mean score; `held_out_win_rate`, the share of
    prompts to which the response scores higher than the starting policy's (equal scores count half); `held_out_kl`, the
    KL of a response from the reference; and `held_out_unscored_share`, the share of responses to which a reward gave no
    number; one without any score is in no mean. `training.keep_best` and `training.early_stopping` take the first two.

    Attributes:
        reward_model: directory of a second reward model, one that PPO does not maximize; an ensemble where one was
            trained.
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
    kl_budget: PositiveFloat | None = None
    seed: NonNegativeInt = 0

    RULES = (
        Rule(
            "rewards",
            lambda c: refusal(check_rewards, c.reward_model, c.rewards, c.reward_combine, c.reward_std_coef),
            "{found}",
        ),
    )


@dataclass(frozen=True)
class PPOConfig(SamplingSettings, UpdateSettings):
    """Settings of one PPO run: the keys of `SamplingSettings` and `UpdateSettings`, and its own.

    Log-probabilities are taken at the temperature of the samples. `training.max_steps` or `training.epochs` count
    iterations over the prompts.

    Attributes:
        data: prompts. Those of `data.evaluation` are held out for `held_out`.
        rewards: see `SamplingSettings`; `normalize_scores` shapes the scores of `reward_model` alone. The run ends
            where more than half of the responses, or than `max_failed_share` of a judge allows, have no score.
        reward_combine: how the scores of an ensemble become the reward: their mean, their least (min), or
            mean - reward_std_coef * deviation (lower). The last two hold PPO back where the members disagree (Coste et
            al. 2023, arXiv:2310.02743, section 3).
        reward_std_coef: weight of the deviation in `lower`.
        kl_coef: penalty on log p - log p_ref, per token, see `kl_in`; the starting value where `kl_target` is set.
        kl_target: steer the KL of a whole response towards this many nats; None keeps `kl_coef`.
        kl_horizon: responses over which the controller reacts.
        value_clip_range: half width of the trusted range of the value.
        gamma, gae_lambda: discount and bias-variance trade of the advantages.
        normalize_scores: shift and scale the reward model's scores to mean 0 and deviation 1 on the first samples.
            Scores of a reward model that was trained with `normalize` have their scale already, and keep it.
        pretrain: text of the pretraining mix; not read where `pretrain_coef` is 0.
        pretrain_coef: InstructGPT's gamma: weight of the text's next-token loss beside the policy loss; 0 is off.
        pretrain_batch_size: texts per update over all ranks.
        value_optim: the value model's optimizer; None: as the policy's.
        importance_cap: C of truncated importance sampling, which corrects samples of another distribution than the
            policy's own: filtered ones (top_k, top_p, min_p) and those of `rollouts_behind`. Each token's policy
            loss is multiplied by min(p / q, C), p being the policy's probability before the updates and q that of the
            sampler. null leaves the difference uncorrected.
        rollouts_behind: 1: an iteration learns from responses that the policy gave before the previous iteration's
            updates, as where sampling and training run at the same time. The ratio's denominator, reference and values
            are computed with the weights of now. 0: from its own responses.
        held_out: who scores the responses to held-out prompts during the run, by which it stops before it
            over-optimizes the reward; None: nobody.
    """

    _: KW_ONLY
    reward_combine: Combine = "mean"
    reward_std_coef: PositiveFloat = 1.0
    epochs: PositiveInt = 4
    kl_coef: NonNegativeFloat = 0.05
    kl_target: PositiveFloat | None = None
    kl_horizon: PositiveFloat = 10_000
    value_clip_range: PositiveFloat = 0.2
    gamma: Share = 1.0
    gae_lambda: Share = 0.95
    normalize_scores: bool = True
    pretrain: DataConfig | None = None
    pretrain_coef: NonNegativeFloat = 0.0
    pretrain_batch_size: PositiveInt = 32
    optim: PPOOptim = field(default_factory=PPOOptim)
    value_optim: ValueOptim | None = None
    importance_cap: PositiveFloat | None = 2.0
    rollouts_behind: Annotated[int, Interval(ge=0, le=1)] = 0
    held_out: HeldOutConfig | None = None

    RULES = (
        Rule(
            "weights",
            lambda c: refusal(check_weights, c.weights, frozen=c.adapter is not None, judges=True).removeprefix(
                "weights."
            ),
        ),
        Rule("adapter.dropout", lambda c: refusal(refuse_dropout, c.adapter, "PPO").removeprefix("adapter.dropout ")),
        Rule(
            "advantages",
            lambda c: c.advantages in GROUPED and c.responses_per_prompt < 2,
            "{self.advantages} compares the responses to one prompt: responses_per_prompt must be at least 2, got "
            "{self.responses_per_prompt}; 4 to 16 are usual",
        ),
        Rule(
            "rewards",
            lambda c: refusal(check_rewards, c.reward_model, c.rewards, c.reward_combine, c.reward_std_coef),
        ),
        Rule(
            "value_model",
            lambda c: c.has_value_model and c.value_model == "reward_model" and c.rewards and not c.reward_models,
            "reward_model: no entry of rewards is a reward model; leave it out, or set value_model=policy",
        ),
        Rule(
            "reward_std_coef",
            lambda c: c.reward_std_coef != 1 and c.reward_combine != "lower",
            "goes with reward_combine=lower, not with {self.reward_combine}",
        ),
        Rule(
            "kl_coef",
            lambda c: c.kl_target is not None and c.kl_coef == 0,
            "must be above 0 where kl_target is set: it is the controller's starting value",
        ),
        Rule(
            "pretrain_coef",
            lambda c: c.pretrain_coef > 0 and c.pretrain is None,
            "above 0 needs `pretrain`, the text; leave it out or set it to 0",
        ),
        Rule(
            "pretrain.evaluation",
            lambda c: c.pretrain is not None and c.pretrain.evaluates,
            "is not read, nor evaluation_share: the text is trained on only; leave it out",
        ),
        Rule(
            "data.evaluation",
            lambda c: c.held_out is None and c.data.evaluation is not None,
            "is not read: nobody scores the responses to held-out prompts; name a second reward model in held_out, or "
            "leave it out and compare the results with `alignment evaluate winrate`",
        ),
        Rule(
            "training.keep_best",
            lambda c: c.held_out is None and c.training.best_metric is not None,
            "has no effect, nor early_stopping, without held-out prompts that are scored; set data.evaluation and "
            "held_out.reward_model, or leave it out",
        ),
        Rule(
            "held_out",
            lambda c: c.held_out is not None and not c.data.evaluates,
            "needs prompts: set data.evaluation, or data.evaluation_share such as 0.05",
        ),
        Rule(
            "held_out.kl_budget",
            lambda c: c.held_out is not None and c.held_out.kl_budget is not None and c.training.best_metric is None,
            "ends the run beyond the budget, and the last weights would be its result; keep the best ones within it: "
            "training.keep_best=held_out_win_rate, with training.evaluate_every_steps such as 10",
        ),
        Rule(
            "training.keep_best",
            lambda c: c.held_out is not None and c.training.best_metric not in (None, *HELD_OUT_METRICS),
            "({self.training.best_metric}, or early_stopping.metric) is no metric of held-out prompts; there are "
            + " and ".join(HELD_OUT_METRICS),
        ),
    )

    def __post_init__(self) -> None:
        if self.value_model is None:  # resolved here, so that config.yaml says what the run has
            scored = bool(self.reward_models) or not self.has_value_model
            object.__setattr__(self, "value_model", "reward_model" if scored else "policy")
        super().__post_init__()

    @property
    def reward_models(self) -> list[str]:
        """Directories of the reward models, in the order of `rewards`."""
        return reward_models_of(self.reward_model, self.rewards)

    @property
    def judging_models(self) -> list[str]:
        """Directories of the reward models and of those that score held-out prompts."""
        held_out = self.held_out
        return self.reward_models + (reward_models_of(held_out.reward_model, held_out.rewards) if held_out else [])

    @property
    def samples_differ(self) -> bool:
        return self.sampler_differs or self.rollouts_behind > 0

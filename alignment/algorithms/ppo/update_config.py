"""Settings of PPO's update: which advantages, which clipped loss, where the KL penalty stands, whose value model."""

from dataclasses import dataclass
from typing import Literal

Advantages = Literal["gae", "rloo", "grpo", "dr_grpo", "reinforce++", "remax"]
LossNormalization = Literal["token_mean", "sequence_mean", "constant"]
GROUPED = ("rloo", "grpo", "dr_grpo")  # compare the responses to one prompt with each other


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """Settings of the updates that are taken on one iteration's samples.

    Attributes:
        advantages: how a response's rewards become advantages. gae: generalized advantage estimation with a value model
            (PPO). Without one: rloo: the reward less the mean of the other responses to the prompt. grpo: less the mean
            of all responses to the prompt, divided by their deviation. dr_grpo: without that division and, by
            `loss_normalization`, without one by lengths, both of which bias the gradient. reinforce++: reward from the token on,
            whitened over the whole iteration. remax: less the score of the greedy response to the prompt.
        kl_in: where the penalty `kl_coef` on leaving the reference stands. reward: taken off the rewards. loss: added to
            the policy's loss, with its gradient, as in GRPO.
        kl_estimator: of the penalty per token, with r = log p - log p_ref: k1 = r, k2 = r^2 / 2, k3 = exp(-r) - 1 + r. In
            the loss k2 has the gradient of the reverse KL of each token, k3 (GRPO's) that of the forward KL.
        clip_range: how far the ratio of new to old probability may fall below 1, and rise above 1 where
            `clip_range_high` is None, before the gradient stops.
        clip_range_high: how far it may rise above 1 (DAPO's clip-higher); None: as far as `clip_range`.
        dual_clip: at a negative advantage the cost stops growing where the ratio exceeds this, above 1 (3 is usual);
            None is off.
        ratio: token: of each token. sequence: the geometric mean over the response, the same for all its tokens (GSPO),
            whose ranges are far narrower: 3e-4 and 4e-4. It takes advantages of whole responses: rloo, grpo, dr_grpo.
        loss_normalization: what the loss is divided by in an update. None: sequence_mean with ratio=sequence (GSPO's
            paper, eq. 5), else constant with advantages=dr_grpo, else token_mean. token_mean: the response tokens of the
            minibatch (DAPO; loss_type=dapo in TRL, token-mean in verl). sequence_mean: each response's tokens, then the responses
            (GRPO's paper; loss_type=grpo, seq-mean-token-mean). constant: responses times `max_new_tokens`, so that no
            length is preferred (Dr. GRPO; loss_type=dr_grpo, seq-mean-token-sum-norm).
        entropy_coef: weight of the entropy, taken off the loss; 0 is off.
        target_kl: nats per token; once the mean `approx_kl` of an update exceeds it, the remaining updates of that
            iteration are left out, and a schedule of the learning rate, which counts updates, does not come to its end.
            None takes them all.
        whiten_rewards: scale the rewards of all tokens to variance 1, keeping their mean, before `gae`.
        whiten_advantages: shift and scale the advantages of all tokens to mean 0 and variance 1; None: with gae and
            reinforce++ alone.
        value_model: whose trunk the value model (critic) of `gae` starts from. Its head starts at zero where scores are
            normalized, else it keeps the reward model's. A reward model with another vocabulary cannot become it. shared:
            a value head, zero at the start, on the trunk of the policy itself: one forward and one update for both.
        value_coef: weight of the value loss beside the policy loss, with value_model=shared.
        value_warmup_steps: first iterations in which the value model learns alone.
    """

    advantages: Advantages = "gae"
    kl_in: Literal["reward", "loss"] = "reward"
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    clip_range: float = 0.2
    clip_range_high: float | None = None
    dual_clip: float | None = None
    ratio: Literal["token", "sequence"] = "token"
    loss_normalization: LossNormalization | None = None
    entropy_coef: float = 0.0
    target_kl: float | None = None
    whiten_rewards: bool = False
    whiten_advantages: bool | None = None
    value_model: Literal["reward_model", "policy", "shared"] = "reward_model"
    value_coef: float = 0.5
    value_warmup_steps: int = 0

    @property
    def has_value_model(self) -> bool:
        """Whether advantages are estimated with a value model."""
        return self.advantages == "gae"

    @property
    def shares_trunk(self) -> bool:
        """Whether the value model is a head on the policy's trunk."""
        return self.has_value_model and self.value_model == "shared"

    @property
    def has_own_value_model(self) -> bool:
        """Whether the value model is a network of its own."""
        return self.has_value_model and not self.shares_trunk

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


def check_update(config: UpdateSettings, responses_per_prompt: int) -> None:
    """Refuse settings of the update outside their ranges, and settings that contradict each other.

    Raises:
        ValueError: in words.
    """
    if config.clip_range <= 0:
        raise ValueError(f"clip_range must be above 0, got {config.clip_range}")
    if config.clip_range_high is not None and config.clip_range_high <= 0:
        raise ValueError(f"clip_range_high must be above 0, got {config.clip_range_high}; null is as clip_range")
    highest = 1 + (config.clip_range if config.clip_range_high is None else config.clip_range_high)
    if config.dual_clip is not None and config.dual_clip <= highest:
        raise ValueError(
            f"dual_clip must be above {highest:g}, where the ratio is clipped anyway, got {config.dual_clip}; 3 is usual"
        )
    if config.entropy_coef < 0:
        raise ValueError(
            f"entropy_coef must be 0 (off) or above, got {config.entropy_coef}: below, it sharpens the policy"
        )
    if config.target_kl is not None and config.target_kl <= 0:
        raise ValueError(f"target_kl must be above 0 nats, got {config.target_kl}; null takes every update")
    if config.kl_in == "loss" and config.kl_estimator == "k1":
        raise ValueError(
            "kl_in=loss needs kl_estimator=k2 or k3: the gradient of k1, that of log p, is zero in expectation, so "
            "nothing would hold the policy back (arXiv:2506.09477)"
        )
    if config.advantages in GROUPED and responses_per_prompt < 2:
        raise ValueError(
            f"advantages={config.advantages} compares the responses to one prompt: responses_per_prompt must be at least "
            f"2, got {responses_per_prompt}; 4 to 16 are usual"
        )
    if config.ratio == "sequence" and config.advantages not in GROUPED:
        raise ValueError(
            f"ratio=sequence gives all tokens of a response one ratio, and advantages={config.advantages} gives each token an "
            f"advantage of its own, of which only the mean would count; take advantages={', '.join(GROUPED)}, or ratio=token"
        )
    if config.advantages == "dr_grpo" and config.whiten_advantages:
        raise ValueError(
            "advantages=dr_grpo divides by no deviation, and whiten_advantages would bring the division back; leave it "
            "out, or take advantages=grpo"
        )
    _check_value_model(config)


def _check_value_model(config: UpdateSettings) -> None:
    """Refuse settings of a value model that there is not, or that it cannot have."""
    if config.value_coef <= 0:
        raise ValueError(f"value_coef must be above 0, got {config.value_coef}")
    if config.value_warmup_steps < 0:
        raise ValueError(f"value_warmup_steps must be 0 (off) or above, got {config.value_warmup_steps}")
    if not config.has_value_model:
        for name, default in (("value_model", "reward_model"), ("value_warmup_steps", 0), ("whiten_rewards", False)):
            if (value := getattr(config, name)) != default:
                raise ValueError(
                    f"{name}={value} goes with advantages=gae: advantages={config.advantages} has no value model; leave "
                    "it out"
                )
    if config.value_model != "shared" and config.value_coef != 0.5:
        raise ValueError(
            "value_coef goes with value_model=shared; a value model of its own has its own optimizer, see value_optim"
        )
    if config.value_model == "shared" and config.value_warmup_steps > 0:
        raise ValueError(
            "value_warmup_steps: with value_model=shared the value loss alone would change the policy's trunk; take "
            "value_model=reward_model or policy, or leave it out"
        )

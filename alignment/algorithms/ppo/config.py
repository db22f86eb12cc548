"""Settings of PPO, those that it shares with every stage that samples its own responses, and what they must not be."""

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

from alignment.adapters.specs import AdapterSpec, refuse_dropout
from alignment.algorithms.ppo.held_out_config import HeldOutConfig, check_held_out
from alignment.algorithms.ppo.update_config import UpdateSettings, check_update
from alignment.algorithms.ppo.vllm_config import Sampler, VLLMConfig, check_sampler
from alignment.data.config import DataConfig
from alignment.generation import SamplingConfig
from alignment.models.weights_config import WeightsConfig, check_weights
from alignment.reward_model import Combine
from alignment.rewards.specs import RewardSpec, check_rewards, reward_models_of
from alignment.training import OptimConfig, TrainingConfig

METRICS = {"hotel_gold": "alignment.hotel_world.gold:gold_score"}  # name in the config -> module:function


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """Settings of a stage that learns from its own samples.

    Attributes:
        missing_end_penalty: taken off the score of a response that did not end, in deviations of the scores: 1 is 1 where a
            reward model's scores are normalized, else the deviation of the iteration's scores over all responses. Equal
            scores have none, and nothing is taken off them.
        max_new_tokens: longest response, end token included.
        responses_per_prompt: responses sampled to each prompt; `training.batch_size` counts prompts.
        temperature: of the samples.
        top_k, top_p, min_p: filters of the samples, in this order: the k likeliest tokens (0: all), the smallest set of
            likeliest tokens whose probability reaches top_p (1: all), tokens at least min_p times as likely as the
            likeliest (0: all). What the sampler logs is the log-probability in the cut distribution; what learns from
            the samples takes that of the whole one, and the KL from the reference is summed over the whole vocabulary,
            which takes one more forward of policy and reference.
        micro_rollout_batch_size: responses that one process samples side by side. Each holds its keys and values for the
            longest prompt and `max_new_tokens`; the number changes memory and speed, and no response.
        rollout_weights: of the policy while it samples, where FSDP2 or ZeRO-3 shards it. gathered: whole on every
            device, gathered once per iteration. sharded: each block is gathered for every token, which is slower and
            takes the memory of one block. auto: gathered where it fits; the choice is printed. It changes no response.
        sampler: who draws the responses. engine: our decoding engine. vllm: vLLM (extra `vllm`) on the same GPUs, given the
            policy's weights before each iteration; it computes otherwise than training does, see `importance_cap` of PPO.
        vllm: how vLLM runs.
        epochs: passes over the samples of each iteration.
        minibatches: updates in each pass.
        metrics: functions of prompts and responses to log the mean of, which nothing learns from: a name of METRICS, or
            module:function. A mean is logged under its function's name.
    """

    missing_end_penalty: float = 1.0
    responses_per_prompt: int = 1
    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    micro_rollout_batch_size: int = 256
    rollout_weights: Literal["auto", "gathered", "sharded"] = "auto"
    sampler: Sampler = "engine"
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    epochs: int = 1
    minibatches: int = 1
    metrics: list[str] = field(default_factory=list)
    training: TrainingConfig = field(default_factory=TrainingConfig)

    @property
    def sampler_differs(self) -> bool:
        """True where filters or vLLM draw responses from another distribution than that of the policy with its present weights."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0 or self.sampler == "vllm"

    @property
    def sampling(self) -> SamplingConfig:
        """How the samples are drawn; what a checkpoint's generation config says has no effect."""
        return SamplingConfig(
            self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.training.seed, min_p=self.min_p
        )

    def check_sampling(self, why: str) -> None:
        """Refuse settings outside their ranges.

        Args:
            why: what a temperature of 0 would prevent.

        Raises:
            ValueError: in words.
        """
        if self.sampling.temperature <= 0:  # `sampling` has checked the ranges of the others
            raise ValueError(f"temperature must be above 0, got {self.temperature}: {why}")
        for name in ("micro_rollout_batch_size", "epochs", "minibatches", "responses_per_prompt"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        check_sampler(self.sampler, self.vllm, self.temperature, self.rollout_weights)
        if self.missing_end_penalty < 0:
            raise ValueError(
                f"missing_end_penalty must be 0 (off) or above, got {self.missing_end_penalty}: below, it rewards not "
                "ending"
            )
        if self.minibatches > self.training.batch_size:
            raise ValueError(
                f"minibatches ({self.minibatches}) cannot exceed training.batch_size ({self.training.batch_size})"
            )
        for name in self.metrics:
            if name not in METRICS and ":" not in name:
                raise ValueError(f"metrics: {name!r} is unknown; known: {', '.join(METRICS)}, or module:function")


@dataclass(frozen=True)
class PPOConfig(SamplingSettings, UpdateSettings):
    """Settings of one PPO run: the keys of `SamplingSettings` and `UpdateSettings`, and its own.

    Log-probabilities are taken at the temperature of the samples. `training.max_steps` or `training.epochs` count
    iterations over the prompts.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        reward_model: directory of the reward model: the short form of `rewards` with this one entry. Its scores are shaped
            by `normalize_scores`.
        rewards: what a response is rewarded for, as a list of entries of one kind each; its score is the sum of
            weight * clip(normalize(part)), and each part is logged as `score/NAME`. `normalize_scores` is not read then.
            A response has no score, and nothing is learned from it, where no reward gave a number, where a judge failed, and
            where a reward that is not normalized gave none although it gave one for another response to the prompt; a
            reward that applies to no response to a prompt, or is normalized, adds 0. Their share is `unscored_share`; above
            one half, or what `max_failed_share` of a judge allows, the run ends.
        reward_combine: how the scores of an ensemble become the reward: their mean, their least (min), or
            mean - reward_std_coef * deviation (lower). The last two hold PPO back where the members disagree (Coste et
            al. 2023, arXiv:2310.02743, section 3).
        reward_std_coef: weight of the deviation in `lower`.
        data: prompts. Those of `data.evaluation` are held out for `held_out`.
        output: the run's directory.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume.
        adapter: train adapters, without dropout, on policy and value model; the reference is then the policy with its
            adapter off.
        chat_template: a built-in one's name (chatml, llama3, ...) or a Jinja file, also saved with the model; None: the
            tokenizer's own.
        weights: type of the frozen weights in memory, the reference's and the reward model's among them. Networks that
            are adapters of one base hold its weights once, where FSDP2 or ZeRO do not shard each network by itself.
        kl_coef: penalty on log p - log p_ref, per token, see `kl_in`; the starting value where `kl_target` is set.
        kl_target: steer the KL of a whole response towards this many nats; None keeps `kl_coef`.
        kl_horizon: responses over which the controller reacts.
        value_clip_range: half width of the trusted range of the value.
        gamma, gae_lambda: discount and bias-variance trade of the advantages.
        normalize_scores: shift and scale the reward model's scores to mean 0 and deviation 1 on the first samples. Scores
            of a reward model that was trained with `normalize` have their scale already, and keep it.
        pretrain: text of the pretraining mix; not read where `pretrain_coef` is 0.
        pretrain_coef: InstructGPT's gamma: weight of the text's next-token loss beside the policy loss; 0 is off.
        pretrain_batch_size: texts per update over all ranks.
        value_optim: the value model's optimizer; None: as the policy's.
        importance_cap: C of truncated importance sampling, which corrects samples of another distribution than the
            policy's own: filtered ones (top_k, top_p, min_p), those of `rollouts_behind`, and vLLM's. Each token's policy
            loss is multiplied by min(p / q, C), p being the policy's probability before the updates and q that of the sampler.
            null leaves the difference uncorrected.
        rollouts_behind: 1: an iteration learns from responses that the policy gave before the previous iteration's
            updates, as where sampling and training run at the same time. The ratio's denominator, reference and values are
            computed with the weights of now. 0: from its own responses.
        held_out: who scores the responses to held-out prompts during the run, by which it stops before it over-optimizes
            the reward; None: nobody.
    """

    policy: str
    _: KW_ONLY
    data: DataConfig
    output: str
    reward_model: str | None = None
    rewards: list[RewardSpec] = field(default_factory=list)
    reward_combine: Combine = "mean"
    reward_std_coef: float = 1.0
    reference: str | None = None
    adapter: AdapterSpec | None = None
    chat_template: str | None = None
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    epochs: int = 4
    kl_coef: float = 0.05
    kl_target: float | None = None
    kl_horizon: float = 10_000
    value_clip_range: float = 0.2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    normalize_scores: bool = True
    pretrain: DataConfig | None = None
    pretrain_coef: float = 0.0
    pretrain_batch_size: int = 32
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6, eps=1e-5))
    value_optim: OptimConfig | None = None
    importance_cap: float | None = 2.0
    rollouts_behind: int = 0
    held_out: HeldOutConfig | None = None

    def __post_init__(self) -> None:
        check_weights(self.weights, frozen=self.adapter is not None, judges=True)
        refuse_dropout(self.adapter, "PPO")
        self.check_sampling("PPO has to sample")
        check_update(self, self.responses_per_prompt)
        check_rewards(self.reward_model, self.rewards, self.reward_combine, self.reward_std_coef)
        if self.has_value_model and self.value_model == "reward_model" and not self.reward_models:
            raise ValueError("value_model: no entry of rewards is a reward model; set value_model=policy")
        if self.pretrain_batch_size < 1:
            raise ValueError(f"pretrain_batch_size must be at least 1, got {self.pretrain_batch_size}")
        for name in ("value_clip_range", "kl_horizon", "reward_std_coef"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.reward_std_coef != 1 and self.reward_combine != "lower":
            raise ValueError(f"reward_std_coef goes with reward_combine=lower, not with {self.reward_combine}")
        if self.kl_coef < 0:
            raise ValueError(
                f"kl_coef must be 0 (off) or above, got {self.kl_coef}: below, it rewards leaving the reference"
            )
        if self.kl_target is not None and self.kl_target <= 0:
            raise ValueError(f"kl_target must be above 0 nats, got {self.kl_target}; null keeps kl_coef as it is")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_coef must be above 0 where kl_target is set: it is the controller's starting value")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be in [0, 1], got {getattr(self, name)}")
        if self.pretrain_coef < 0:
            raise ValueError(f"pretrain_coef must be 0 (off) or above, got {self.pretrain_coef}")
        if self.pretrain_coef > 0 and self.pretrain is None:
            raise ValueError("pretrain_coef above 0 needs `pretrain`, the text; leave it out or set it to 0")
        check_importance(self)
        refuse_row_weights({"data": self.data, "pretrain": self.pretrain}, "ppo")
        check_held_out(self)
        refuse_evaluation({"pretrain": self.pretrain}, ("ema_decay",), self.training, "ppo", "PPO")

    @property
    def reward_models(self) -> list[str]:
        """Directories of the reward models, in the order of `rewards`."""
        return reward_models_of(self.reward_model, self.rewards)

    @property
    def judging_models(self) -> list[str]:
        """Directories of the reward models and of those that score held-out prompts."""
        return [*self.reward_models, *(self.held_out.reward_models if self.held_out else [])]

    @property
    def samples_differ(self) -> bool:
        """Whether responses come by construction from another distribution than the policy's that learns from them."""
        return self.sampler_differs or self.rollouts_behind > 0


def check_importance(config: PPOConfig) -> None:
    """Refuse settings of the importance correction that are out of range.

    Raises:
        ValueError: in words.
    """
    if config.importance_cap is not None and not config.importance_cap > 0:
        raise ValueError(
            f"importance_cap must be above 0, got {config.importance_cap}; 2 is usual, null corrects nothing"
        )
    if config.rollouts_behind not in (0, 1):
        raise ValueError(f"rollouts_behind must be 0 or 1, got {config.rollouts_behind}")


def refuse_row_weights(data: Mapping[str, DataConfig | None], stage: str) -> None:
    """Refuse settings of row weights, which a stage that learns from its own samples does not read.

    Args:
        data: data configs by their key.
        stage: its name in messages.

    Raises:
        ValueError: in words.
    """
    for name, config in data.items():
        if config is not None and (unread := config.unread("loss_weight")):
            raise ValueError(
                f"{name}: {stage} counts all rows alike, without {unread[0]}; draw by weights: data.mixing"
            )


def refuse_evaluation(
    data: Mapping[str, DataConfig | None], keys: Sequence[str], training: TrainingConfig, stage: str, title: str
) -> None:
    """Refuse settings of evaluations that a stage that learns from its own samples does not read.

    Args:
        data: data configs by their key.
        keys: of `training`, that have no effect.
        stage, title: its name in messages.

    Raises:
        ValueError: in words.
    """
    for name, config in data.items():
        if config is not None and config.evaluates:
            key = "evaluation" if config.evaluation is not None else "evaluation_share"
            raise ValueError(
                f"{name}.{key} is not read: {stage} evaluates nothing while it trains; leave it out, and compare the "
                "results on held-out prompts with `alignment evaluate winrate`"
            )
    for name in keys:
        if getattr(training, name) is not None:
            raise ValueError(
                f"training.{name} has no effect in {title}, which evaluates nothing while it runs; leave it out"
            )

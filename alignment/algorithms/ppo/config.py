"""Settings of PPO, checked on their own. The algorithm is in ppo.py."""

from dataclasses import dataclass, field
from typing import Literal

from alignment.adapters.specs import LoRASpec, PrefixSpec, refuse_dropout
from alignment.data.rows.read import DataConfig
from alignment.generation import SamplingConfig
from alignment.training import OptimConfig, TrainingConfig


@dataclass(frozen=True)
class PPOConfig:
    """Settings of one PPO run. `training.max_steps` or `training.epochs` count iterations over the prompts.

    Attributes:
        policy: the checkpoint to start from, usually the SFT policy.
        reward_model: directory of the reward model.
        data: prompts. None are held out: what is learnt is compared by `alignment evaluate winrate`.
        output: the run's directory.
        reference: checkpoint of the reference; None: the starting checkpoint itself, also after a resume.
        critic: whose trunk the critic starts from. Its head starts at zero where scores are normalized, else it keeps
            the reward model's. A reward model with another vocabulary cannot be the critic.
        adapter: train adapters, without dropout, on policy and critic; the reference is then the policy with its
            adapter off.
        max_new_tokens: longest response, end token included.
        temperature: of the samples; log-probabilities are taken at the same one.
        micro_rollout_batch_size: responses that one process samples side by side. Each holds its keys and values for the
            longest prompt and `max_new_tokens`; the number changes memory and speed, and no response.
        epochs: passes over each rollout.
        minibatches: updates in each pass.
        kl_coef: penalty on log p - log p_ref, per token; the starting value where `kl_target` is set.
        kl_target: steer the KL of a whole response towards this many nats; None keeps `kl_coef`.
        kl_horizon: responses over which the controller reacts.
        clip_range, value_clip_range: half widths of the trusted range of ratio and value.
        gamma, gae_lambda: discount and bias-variance trade of the advantages.
        missing_end_penalty: taken off the (normalized) score of a response that did not end.
        normalize_scores: shift and scale the reward model's scores to mean 0 and deviation 1 on the first samples.
        pretrain: text of the pretraining mix; not read where `pretrain_coef` is 0.
        pretrain_coef: InstructGPT's gamma: weight of the text's next-token loss beside the policy loss; 0 is off.
        pretrain_batch_size: texts per update over all ranks.
        watch: gold: also log the embedded world's true reward, `gold_score`, which nothing learns from.
        value_optim: the critic's optimizer; None: as the policy's.
    """

    policy: str
    reward_model: str
    data: DataConfig
    output: str
    reference: str | None = None
    critic: Literal["reward_model", "policy"] = "reward_model"
    adapter: LoRASpec | PrefixSpec | None = None
    max_new_tokens: int = 64
    temperature: float = 1.0
    micro_rollout_batch_size: int = 256
    epochs: int = 4
    minibatches: int = 1
    kl_coef: float = 0.05
    kl_target: float | None = None
    kl_horizon: float = 10_000
    clip_range: float = 0.2
    value_clip_range: float = 0.2
    gamma: float = 1.0
    gae_lambda: float = 0.95
    missing_end_penalty: float = 1.0
    normalize_scores: bool = True
    pretrain: DataConfig | None = None
    pretrain_coef: float = 0.0
    pretrain_batch_size: int = 32
    watch: Literal["gold"] | None = None
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-6, eps=1e-5))
    value_optim: OptimConfig | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)

    def __post_init__(self) -> None:
        refuse_dropout(self.adapter, "PPO")
        if self.temperature <= 0:
            raise ValueError(f"temperature must be above 0, got {self.temperature}: PPO has to sample")
        SamplingConfig(self.max_new_tokens, self.temperature)  # checks their ranges
        for name in ("micro_rollout_batch_size", "epochs", "minibatches", "pretrain_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("clip_range", "value_clip_range", "kl_horizon"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if self.kl_coef < 0:
            raise ValueError(
                f"kl_coef must be 0 (off) or above, got {self.kl_coef}: below, it rewards leaving the reference"
            )
        if self.missing_end_penalty < 0:
            raise ValueError(
                f"missing_end_penalty must be 0 (off) or above, got {self.missing_end_penalty}: below, it rewards not "
                "ending"
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
        for name, data in (("data", self.data), ("pretrain", self.pretrain)):
            if data is not None and data.evaluation is not None:
                raise ValueError(
                    f"{name}.evaluation is not read: ppo evaluates nothing while it trains; leave it out, and compare the "
                    "results on held-out prompts with `alignment evaluate winrate`"
                )
        if self.minibatches > self.training.batch_size:
            raise ValueError(
                f"minibatches ({self.minibatches}) cannot exceed training.batch_size ({self.training.batch_size})"
            )

"""The state of PPO: KL controller, normalizer of scores, engines; with what of it a checkpoint keeps."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from alignment.algorithms.rollouts.alarms import Alarms
from alignment.algorithms.rollouts.config import SamplingSettings
from alignment.algorithms.rollouts.state import SamplingState, Saved
from alignment.errors import UserError
from alignment.models.classifiers import values_before_targets
from alignment.ragged import Batch, Ragged
from alignment.rewards.combine import mean_and_std, no_std_reason
from alignment.training import Engine


@dataclass
class AdaptiveKL:
    """Penalty weight that steers the measured KL towards a target, by a proportional controller.

    error = clip(kl / target - 1, -0.2, 0.2);  coef <- coef * (1 + error * n / horizon)

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (their K_beta is 1 / horizon per response).
    """

    coef: float  # penalty weight now, the whole state
    target: float  # wanted KL per response, nats
    horizon: float  # responses over which the error is worked off

    def __post_init__(self) -> None:
        if not min(self.coef, self.target, self.horizon) > 0:
            raise ValueError(f"coef, target and horizon of the adaptive KL controller must be above 0, got {self}")

    def update(self, kl: float, n: int) -> float:
        """Take in the mean KL of n responses of all ranks, nats each, and return the new coefficient."""
        if not math.isfinite(kl):
            raise ValueError(f"the measured KL is {kl}; the penalty weight cannot follow it")
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * n / self.horizon
        return self.coef


@dataclass
class FixedKL:
    """Penalty weight that stays at `coef`, with the methods of `AdaptiveKL`."""

    coef: float

    def update(self, kl: float, n: int) -> float:
        """The coefficient; the measurement changes nothing."""
        return self.coef


@dataclass
class ScoreNormalizer:
    """Gives scores mean 0 and deviation 1 on the first samples: scale * score + shift.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (there on samples of the reference, as here).
    """

    enabled: bool = True  # False leaves scores as they are
    scale: float = 1.0
    shift: float = 0.0
    fitted: bool = False  # True once scale and shift are set; the first samples set them for the whole run

    def fit(self, scores: Tensor, reduce: Callable[[Tensor], Tensor]) -> "ScoreNormalizer":
        """Set scale and shift by the first scores, [B] on each rank, without those that are missing (not a number)."""
        if self.enabled and not self.fitted:
            count, mean, deviation = mean_and_std(scores, reduce)
            if deviation == 0:
                raise UserError(
                    f"the reward model's scores cannot be normalized by {no_std_reason(count)}, or set "
                    "normalize_scores=false"
                )
            self.scale = 1 / deviation
            self.shift = -mean / deviation
            self.fitted = True
        return self


@dataclass(kw_only=True)
class PPOState(SamplingState):
    """Everything that an iteration of PPO reads and changes.

    Attributes:
        value: the engine of the value model; None with a value head on the policy's trunk, or without one.
        kl: the controller of the KL penalty, its coefficient as `.coef`.
        normalizer: gives the scores mean 0 and deviation 1.
        pretraining: update number -> micro-batches of this rank; None without a pretraining mix.
        num_updates: minibatch updates taken so far.
        shared_value: True where the policy has a value head on its trunk.
    """

    value: Engine | None
    kl: AdaptiveKL | FixedKL
    normalizer: ScoreNormalizer = field(default_factory=ScoreNormalizer)
    pretraining: Callable[[int], list[Batch]] | None = None
    num_updates: int = 0
    alarms: Alarms | None = field(default_factory=Alarms)
    shared_value: bool = False

    @property
    def engines(self) -> dict[str, Engine]:
        return {"policy": self.policy} if self.value is None else {"policy": self.policy, "value": self.value}

    def ask(self, batch: Ragged, config: SamplingSettings) -> dict[str, Tensor]:
        """Log-probabilities of policy and reference and, with a value model, the values before the tokens, [M] each."""
        assert self.reference is not None
        heads = {"values": True} if self.shared_value else {}
        output = self.policy.model(batch=batch, temperature=config.temperature, **heads)
        columns = {"log_probs": output.log_probs}
        if self.shared_value:
            columns["values"] = output.values
        elif self.value is not None:
            columns["values"] = values_before_targets(self.value.model, batch)
        reference = self.reference(batch=batch, temperature=config.temperature).log_probs
        return columns | {"reference_log_probs": reference}

    def saved(self) -> dict[str, object]:
        controllers = {"num_updates": self.num_updates, "kl_coef": self.kl.coef, "normalizer": vars(self.normalizer)}
        return super().saved() | controllers

    def restore(self, saved: Saved) -> None:
        super().restore(saved)
        self.num_updates = saved["num_updates"]
        self.kl.coef = saved["kl_coef"]
        self.normalizer = ScoreNormalizer(**saved["normalizer"])

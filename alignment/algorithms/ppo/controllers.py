"""What adapts during a PPO run: the weight of the KL penalty, and the scale of the reward model's scores."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from alignment.errors import UserError
from alignment.rewards.normalize import mean_and_deviation, no_deviation


@dataclass
class AdaptiveKL:
    """Penalty weight that steers the measured KL towards a target, by a proportional controller.

    error = clip(kl / target - 1, -0.2, 0.2);  coef <- coef * (1 + error * n / horizon)

    Attributes:
        coef: penalty weight now; the whole state, to be saved and given back on resume.
        target: wanted KL per response, nats.
        horizon: responses over which the error is worked off.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (their K_beta is 1 / horizon per response).
    """

    coef: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for name in ("coef", "target", "horizon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} of the adaptive KL controller must be above 0, got {getattr(self, name)}")

    def update(self, kl: float, n: int) -> float:
        """Take in a measurement and return the new coefficient.

        Args:
            kl: mean KL per response, nats; may be slightly negative, as k1 is.
            n: responses it was measured on, over all ranks.

        Raises:
            ValueError: kl is not finite.
        """
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

    Attributes:
        enabled: False leaves scores as they are.
        fitted: whether scale and shift were set; the first samples set them for the whole run.

    Source: Ziegler et al. 2019, arXiv:1909.08593, section 2.2 (there on samples of the reference, as here).
    """

    enabled: bool = True
    scale: float = 1.0
    shift: float = 0.0
    fitted: bool = False

    def fit(self, scores: Tensor, reduce: Callable[[Tensor], Tensor]) -> "ScoreNormalizer":
        """Set scale and shift by the first scores, [B] on each rank; later calls change nothing. Returns itself.

        A score that is not a number is left out.

        Args:
            reduce: adds a tensor over all ranks.

        Raises:
            UserError: there is one score, or all are equal.
        """
        if self.fitted or not self.enabled:
            return self
        count, mean, deviation = mean_and_deviation(scores, reduce)
        if deviation == 0:
            raise UserError(
                f"the reward model's scores cannot be normalized by {no_deviation(count)}, or set normalize_scores=false"
            )
        self.scale, self.shift, self.fitted = 1 / deviation, -mean / deviation, True
        return self

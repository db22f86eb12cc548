"""AdamW, and the learning rate as a pure function of the update number. No scheduler object, no state."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate schedule.

    Attributes:
        learning_rate: peak, reached after the warm-up.
        weight_decay: on matrices (weights and embeddings); biases, norms and other vectors are not decayed.
        warmup_steps: updates of linear rise from zero.
        warmup_ratio: length of the warm-up as a fraction of the run's updates, in [0, 1); excludes `warmup_steps`.
        min_learning_rate_ratio: end of cosine and linear, as a fraction of the peak.
        max_grad_norm: the global gradient norm is clipped to this; 0 turns clipping off.
    """

    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    min_learning_rate_ratio: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}; 1e-5 is usual for fine-tuning")
        # AdamW moves a weight by up to learning_rate * |g| / (|g| + eps): by the rate itself where eps is small.
        if self.learning_rate > max(1.0, self.eps):
            raise ValueError(
                f"learning_rate must be at most 1, got {self.learning_rate}: every weight would move by about as much in "
                "each update; 1e-5 is usual for fine-tuning, 1e-3 for small models"
            )
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}; 0.0 or 0.1 are usual")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must lie in [0, 1), got {self.betas}; (0.9, 0.999) is usual")
        if self.eps <= 0:
            raise ValueError(f"eps must be above 0, got {self.eps}; 1e-8 is usual")
        if self.schedule not in ("cosine", "linear", "constant"):
            raise ValueError(f"schedule must be cosine, linear or constant, got {self.schedule!r}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {self.warmup_steps}")
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(f"warmup_ratio must lie in [0, 1), got {self.warmup_ratio}; 0.03 to 0.1 is usual")
        if self.warmup_steps and self.warmup_ratio:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) both say how long the warm-up "
                "is: leave one out, or set it to 0"
            )
        if not 0 <= self.min_learning_rate_ratio <= 1:
            raise ValueError(f"min_learning_rate_ratio must lie in [0, 1], got {self.min_learning_rate_ratio}")
        if self.max_grad_norm < 0:
            raise ValueError(f"max_grad_norm must not be negative, got {self.max_grad_norm}; 1.0 is usual, 0 is off")


def warmup_updates(config: OptimConfig, total_steps: int) -> int:
    """Updates of the warm-up, w. A ratio is rounded up, as in transformers, and leaves at least one update at the peak."""
    if config.warmup_ratio:
        return min(math.ceil(config.warmup_ratio * total_steps), total_steps - 1)
    return config.warmup_steps


def endless_warmup(config: OptimConfig, total_steps: int) -> str:
    """A warning for a warm-up that does not end before the run; '' for any other."""
    warmup = warmup_updates(config, total_steps)
    if warmup < total_steps:
        return ""
    reached = learning_rate_at(total_steps, config, total_steps) / config.learning_rate
    return (
        f"the warm-up ({warmup} updates) is as long as the run ({total_steps}) or longer: the learning rate ends at "
        f"{reached:.0%} of its peak; lower warmup_steps, or give warmup_ratio, a fraction of the run, in its place"
    )


def learning_rate_at(update: int, config: OptimConfig, total_steps: int) -> float:
    """The learning rate of update number `update`.

    With k = update - 1 updates before it, w warm-up updates and T updates in total:
        k < w:  peak * k / w
        else:   peak * (s + (1 - s) * shape((k - w) / (T - w)))     s = min_learning_rate_ratio
    The first update of a run with a warm-up thus uses 0, and the end value belongs to update T + 1: the convention of
    transformers' schedules. Without a warm-up the first update uses the peak.

    Args:
        update: from 1.
        total_steps: updates of the whole run, over which the schedule is stretched.
    """
    done, warmup = update - 1, warmup_updates(config, total_steps)
    if done < warmup:
        return config.learning_rate * done / warmup
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (done - warmup) / max(1, total_steps - warmup))
    shape = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    ratio = config.min_learning_rate_ratio
    return config.learning_rate * (ratio + (1 - ratio) * shape)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trainable parameters in two groups, matrices with weight decay and vectors without; an empty group is left out."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, fused: one kernel per group on CUDA, one pass over memory on the CPU.

    Raises:
        ValueError: nothing is trainable, or a trainable parameter is not float32 (its updates would round away).

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
    """
    groups = parameter_groups(model, config.weight_decay)
    if not groups:
        raise ValueError("the model has no trainable parameter: nothing requires a gradient")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: train float32 weights, and set precision=bf16 to compute in "
                "bfloat16; small updates round away in lower precision"
            )
    devices = {parameter.device.type for group in groups for parameter in group["params"]}
    return torch.optim.AdamW(
        groups,
        lr=config.learning_rate,
        betas=config.betas,
        eps=config.eps,
        fused=devices <= {"cpu", "cuda"},
    )

"""Settings of the optimizer, and the learning rate as a pure function of the update number: no scheduler, no state."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, get_args

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon", "sgd"]
Schedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
# The settings that not every optimizer or schedule has, and which has them.
OPTIMIZER_SETTINGS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "adamw_8bit": ("betas", "eps"),
    "paged_adamw_8bit": ("betas", "eps"),
    "adafactor": ("beta2_decay", "clip_threshold"),
    "muon": ("momentum", "adjust_lr_fn", "betas", "eps"),
    "sgd": ("momentum",),
}
SCHEDULE_SETTINGS: dict[str, tuple[str, ...]] = {
    "wsd": ("decay_ratio", "decay_type"),
    "inverse_sqrt": ("timescale",),
}
MOMENTUM = {"muon": 0.95, "sgd": 0.9}
DEFAULT_TIMESCALE = 10_000  # of inverse_sqrt without a warm-up, as in transformers


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its learning rate schedule.

    A setting that the chosen optimizer or schedule does not have is refused where it differs from its default.

    Attributes:
        learning_rate: peak, reached after the warm-up.
        name: adamw (fused). adamw_8bit: its two moments in 8 bits each, by bitsandbytes; paged_adamw_8bit: they move
            between GPU and CPU memory as needed, CUDA only. adafactor: the second moment as one value per row and
            column, no first moment. muon: orthogonalized momentum for the matrices of the blocks, AdamW for the rest
            (embeddings, output and score heads, vectors, LoRA). sgd: with momentum.
        weight_decay: on matrices (weights and embeddings); biases, norms and other vectors are not decayed. Decoupled
            from the gradient, except with sgd, where it is added to the gradient.
        betas: decay rates of AdamW's two moments.
        eps: AdamW's addition to the denominator.
        momentum: of muon and sgd, in [0, 1); null: 0.95 for muon, 0.9 for sgd.
        adjust_lr_fn: how muon scales its rate by a matrix's shape. match_rms_adamw: 0.2 sqrt(max(rows, columns)), with
            which the rate and weight decay of AdamW can be kept; original: sqrt(max(1, rows / columns)), which is used
            with rates such as 0.02.
        beta2_decay: of adafactor; the second moment's decay rate in update t is 1 - t ** beta2_decay, in [-1, 0).
        clip_threshold: of adafactor; a tensor's update is scaled down to this root mean square, before the rate.
        learning_rates: regular expression -> factor of the learning rate for the parameters in whose names it is found;
            where several are, the first one counts. {lora_B: 16} is LoRA+.
        schedule: after the warm-up. wsd: the peak, and a decay at the end; inverse_sqrt: peak / sqrt(update).
        warmup_steps: updates of linear rise from zero.
        warmup_ratio: length of the warm-up as a fraction of the run's updates, in [0, 1); excludes `warmup_steps`.
        min_learning_rate_ratio: end of cosine, linear and wsd, as a fraction of the peak.
        decay_ratio: length of wsd's decay as a fraction of the run's updates, in (0, 1].
        decay_type: shape of wsd's decay.
        timescale: of inverse_sqrt, in updates; null: the length of the warm-up, or 10,000 without one.
        max_grad_norm: the global gradient norm is clipped to this; 0 turns clipping off.

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101 (AdamW); Dettmers et al. 2022, arXiv:2110.02861 (8 bits); Shazeer
    and Stern 2018, arXiv:1804.04235 (Adafactor); Jordan et al. 2024, kellerjordan.github.io/posts/muon, and Liu et al.
    2025, arXiv:2502.16982, section 2.2 (Muon); Hayou et al. 2024, arXiv:2402.12354 (LoRA+); Haegele et al. 2024,
    arXiv:2405.18392 (wsd with 1-sqrt); Zhai et al. 2022, arXiv:2106.04560 (inverse_sqrt).
    """

    learning_rate: float
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    schedule: Schedule = "cosine"
    warmup_steps: int = 0
    warmup_ratio: float = 0.0
    min_learning_rate_ratio: float = 0.0
    max_grad_norm: float = 1.0
    name: OptimizerName = "adamw"
    momentum: float | None = None
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    beta2_decay: float = -0.8
    clip_threshold: float = 1.0
    learning_rates: dict[str, float] = field(default_factory=dict)
    decay_ratio: float = 0.1
    decay_type: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    timescale: int | None = None

    def __post_init__(self) -> None:
        _check_optimizer(self)
        _check_learning_rate(self)
        _check_schedule(self)

    @property
    def momentum_or_default(self) -> float:
        """The momentum of muon and sgd."""
        return MOMENTUM[self.name] if self.momentum is None else self.momentum


def _check_optimizer(config: OptimConfig) -> None:
    """Refuse an unknown optimizer, settings that it does not have, and values out of range."""
    if config.name not in get_args(OptimizerName):
        raise ValueError(f"name must be one of {', '.join(get_args(OptimizerName))}, got {config.name!r}")
    _refuse_foreign(config, "name", config.name, OPTIMIZER_SETTINGS)
    if config.weight_decay < 0:
        raise ValueError(f"weight_decay must not be negative, got {config.weight_decay}; 0.0 or 0.1 are usual")
    if not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas must lie in [0, 1), got {config.betas}; (0.9, 0.999) is usual")
    if config.eps <= 0:
        raise ValueError(f"eps must be above 0, got {config.eps}; 1e-8 is usual")
    if config.momentum is not None and not 0 <= config.momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {config.momentum}; 0.9 to 0.95 is usual")
    if config.adjust_lr_fn not in ("match_rms_adamw", "original"):
        raise ValueError(f"adjust_lr_fn must be match_rms_adamw or original, got {config.adjust_lr_fn!r}")
    if not -1 <= config.beta2_decay < 0:
        raise ValueError(f"beta2_decay must lie in [-1, 0), got {config.beta2_decay}; -0.8 is usual")
    if not (math.isfinite(config.clip_threshold) and config.clip_threshold > 0):
        raise ValueError(f"clip_threshold must be above 0, got {config.clip_threshold}; 1.0 is usual")
    if config.max_grad_norm < 0:
        raise ValueError(f"max_grad_norm must not be negative, got {config.max_grad_norm}; 1.0 is usual, 0 is off")


def _check_learning_rate(config: OptimConfig) -> None:
    """Refuse learning rates that no run can have, the peak or one by a pattern."""
    if not (math.isfinite(config.learning_rate) and config.learning_rate > 0):
        raise ValueError(f"learning_rate must be above 0, got {config.learning_rate}; 1e-5 is usual for fine-tuning")
    # AdamW moves a weight by up to learning_rate * |g| / (|g| + eps): by the rate itself where eps is small. Adafactor and
    # Muon move the weights of a matrix by about the rate, too. SGD's step is proportional to the gradient: no limit.
    limit = math.inf if config.name == "sgd" else max(1.0, config.eps)
    if config.learning_rate > limit:
        raise ValueError(
            f"learning_rate must be at most 1, got {config.learning_rate}: every weight would move by about as much in "
            "each update; 1e-5 is usual for fine-tuning, 1e-3 for small models"
        )
    for pattern, factor in config.learning_rates.items():
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"learning_rates: {pattern!r} is no regular expression: {error}") from error
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"learning_rates: the factor of {pattern!r} must be above 0, got {factor}; LoRA+ uses 16")
        if config.learning_rate * factor > limit:
            raise ValueError(
                f"learning_rates: {factor} times learning_rate {config.learning_rate} must be at most 1 for {pattern!r}: "
                "every such weight would move by about as much in each update"
            )


def _check_schedule(config: OptimConfig) -> None:
    """Refuse an unknown schedule, settings that it does not have, and values out of range."""
    if config.schedule not in get_args(Schedule):
        *others, last = get_args(Schedule)
        raise ValueError(f"schedule must be {', '.join(others)} or {last}, got {config.schedule!r}")
    _refuse_foreign(config, "schedule", config.schedule, SCHEDULE_SETTINGS)
    if config.warmup_steps < 0:
        raise ValueError(f"warmup_steps must not be negative, got {config.warmup_steps}")
    if not 0 <= config.warmup_ratio < 1:
        raise ValueError(f"warmup_ratio must lie in [0, 1), got {config.warmup_ratio}; 0.03 to 0.1 is usual")
    if config.warmup_steps and config.warmup_ratio:
        raise ValueError(
            f"warmup_steps ({config.warmup_steps}) and warmup_ratio ({config.warmup_ratio}) both say how long the warm-up "
            "is: leave one out, or set it to 0"
        )
    if not 0 <= config.min_learning_rate_ratio <= 1:
        raise ValueError(f"min_learning_rate_ratio must lie in [0, 1], got {config.min_learning_rate_ratio}")
    if config.schedule == "inverse_sqrt" and config.min_learning_rate_ratio:
        raise ValueError("min_learning_rate_ratio has no effect with schedule: inverse_sqrt, leave it out")
    if not 0 < config.decay_ratio <= 1:
        raise ValueError(f"decay_ratio must lie in (0, 1], got {config.decay_ratio}; 0.1 to 0.2 is usual")
    if config.schedule == "wsd" and config.decay_ratio + config.warmup_ratio > 1:
        raise ValueError(
            f"warmup_ratio ({config.warmup_ratio}) and decay_ratio ({config.decay_ratio}) must be at most 1 together"
        )
    if config.decay_type not in ("1-sqrt", "linear", "cosine"):
        raise ValueError(f"decay_type must be 1-sqrt, linear or cosine, got {config.decay_type!r}")
    if config.timescale is not None and config.timescale < 1:
        raise ValueError(
            f"timescale must be at least 1 update, got {config.timescale}; null takes the warm-up's length"
        )


def _refuse_foreign(config: OptimConfig, key: str, chosen: str, settings: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a setting that only others than `chosen` have, unless it has its default value."""
    foreign = {name for names in settings.values() for name in names} - set(settings.get(chosen, ()))
    for each in fields(config):
        if each.name in foreign and getattr(config, each.name) != each.default:
            users = ", ".join(name for name, names in settings.items() if each.name in names)
            raise ValueError(
                f"{each.name} has no effect with {key}: {chosen}; leave it out, or choose {key} among those that have it: "
                f"{users}"
            )


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
        k < w:                   peak * k / w
        cosine, linear:          peak * (s + (1 - s) * shape((k - w) / (T - w)))     s = min_learning_rate_ratio
        wsd, d = ceil(decay_ratio * T) updates of decay at the end:
            k < T - d:           peak
            else:                peak * (s + (1 - s) * shape((k - (T - d)) / d))
        inverse_sqrt:            peak / sqrt((k - w + t) / t)                        t = timescale
    where shape(x) falls from 1 to 0: (1 + cos(pi x)) / 2, 1 - x, or 1 - sqrt(x).
    The first update of a run with a warm-up thus uses 0, and the end value belongs to update T + 1: the convention of
    transformers' schedules. Without a warm-up the first update uses the peak. A warm-up of wsd that would reach into the
    decay shortens the decay.

    Args:
        update: from 1.
        total_steps: updates of the whole run, over which the schedule is stretched.
    """
    done, warmup = update - 1, warmup_updates(config, total_steps)
    if done < warmup:
        return config.learning_rate * done / warmup
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "inverse_sqrt":
        timescale = config.timescale or warmup or DEFAULT_TIMESCALE
        return config.learning_rate / math.sqrt((done - warmup + timescale) / timescale)
    start, kind = warmup, config.schedule
    if config.schedule == "wsd":
        start, kind = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps)), config.decay_type
        if done < start:
            return config.learning_rate
    progress = min(1.0, (done - start) / max(1, total_steps - start))
    ratio = config.min_learning_rate_ratio
    return config.learning_rate * (ratio + (1 - ratio) * _falling(kind, progress))


def _falling(kind: str, progress: float) -> float:
    """The shape of a decay: 1 where `progress` is 0, 0 where it is 1."""
    if kind == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (math.sqrt(progress) if kind == "1-sqrt" else progress)

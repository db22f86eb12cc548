"""Settings of the optimizer, and the learning rate as a pure function of the update number: no scheduler, no state."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from annotated_types import Interval

from alignment.settings import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Settings,
    Share,
    compile_pattern,
    refusal,
)

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon", "sgd"]
Decay = Annotated[float, Interval(ge=0, lt=1)]
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
class OptimConfig(Settings):
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

    learning_rate: PositiveFloat
    weight_decay: NonNegativeFloat = 0.0
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: PositiveFloat = 1e-8
    schedule: Schedule = "cosine"
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: Decay = 0.0
    min_learning_rate_ratio: Share = 0.0
    max_grad_norm: NonNegativeFloat = 1.0
    name: OptimizerName = "adamw"
    momentum: Decay | None = None
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    beta2_decay: Annotated[float, Interval(ge=-1, lt=0)] = -0.8
    clip_threshold: PositiveFloat = 1.0
    learning_rates: dict[str, PositiveFloat] = field(default_factory=dict)
    decay_ratio: Annotated[float, Interval(gt=0, le=1)] = 0.1
    decay_type: Literal["1-sqrt", "linear", "cosine"] = "1-sqrt"
    timescale: PositiveInt | None = None

    RULES = (
        Rule("name", lambda c: _foreign(c, "name", OPTIMIZER_SETTINGS)),
        Rule("schedule", lambda c: _foreign(c, "schedule", SCHEDULE_SETTINGS)),
        Rule(
            "learning_rate",
            lambda c: c.learning_rate > c.highest_rate,
            "must be at most 1, got {self.learning_rate}: every weight would move by about as much in each update; 1e-5 is "
            "usual for fine-tuning, 1e-3 for small models",
        ),
        Rule(
            "learning_rates",
            lambda c: next((why for each in c.learning_rates if (why := refusal(compile_pattern, each))), ""),
        ),
        Rule(
            "learning_rates",
            lambda c: [key for key, factor in c.learning_rates.items() if factor * c.learning_rate > c.highest_rate],
            "of {found} times learning_rate {self.learning_rate} must be at most 1: such a weight would move by as much",
        ),
        Rule(
            "warmup_steps",
            lambda c: c.warmup_steps and c.warmup_ratio,
            "({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) both say how long the warm-up is: leave one out",
        ),
        Rule(
            "min_learning_rate_ratio",
            lambda c: c.schedule == "inverse_sqrt" and c.min_learning_rate_ratio,
            "has no effect with schedule: inverse_sqrt, leave it out",
        ),
        Rule(
            "decay_ratio",
            lambda c: c.schedule == "wsd" and c.decay_ratio + c.warmup_ratio > 1,
            "({self.decay_ratio}) and warmup_ratio ({self.warmup_ratio}) must be at most 1 together",
        ),
    )

    @property
    def highest_rate(self) -> float:
        """The largest sensible learning rate.

        AdamW moves a weight by up to learning_rate * |g| / (|g| + eps): by the rate itself where eps is small. Adafactor
        and Muon move the weights of a matrix by about the rate, too. SGD's step is proportional to the gradient: no limit.
        """
        return math.inf if self.name == "sgd" else max(1.0, self.eps)

    @property
    def momentum_or_default(self) -> float:
        """The momentum of muon and sgd."""
        return MOMENTUM[self.name] if self.momentum is None else self.momentum


def _foreign(config: OptimConfig, key: str, settings: Mapping[str, tuple[str, ...]]) -> str:
    """Names a setting that only others than the chosen optimizer or schedule have and that differs from its default."""
    chosen = getattr(config, key)
    foreign = {name for names in settings.values() for name in names} - set(settings.get(chosen, ()))
    for each in fields(config):
        if each.name in foreign and getattr(config, each.name) != each.default:
            users = ", ".join(name for name, names in settings.items() if each.name in names)
            return f"{chosen} has no {each.name}; leave {each.name} out, or choose among those that have it: {users}"
    return ""


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

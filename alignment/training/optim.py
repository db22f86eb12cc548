"""Optimizers by name, their settings and state, and the learning rate as a pure function of the update number."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from typing import Annotated, Any, Literal

import torch
from annotated_types import Interval
from torch import Tensor, nn

from alignment.errors import UserError, install_advice
from alignment.ragged import has_apple_gpu
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
    search_names,
    without_numbers,
)

OptimizerName = Literal["adamw", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon", "sgd"]
Decay = Annotated[float, Interval(ge=0, lt=1)]
Schedule = Literal["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
# The settings that not every optimizer or schedule has, and which has them.
OPTIMIZER_SETTINGS: dict[str, tuple[str, ...]] = {
    "adamw": ("betas", "eps"),
    "adamw_8bit": ("betas", "eps"),
    "paged_adamw_8bit": ("betas", "eps"),
    "muon": ("momentum", "betas", "eps"),
    "sgd": ("momentum",),
}
SCHEDULE_SETTINGS: dict[str, tuple[str, ...]] = {
    "wsd": ("decay_ratio", "decay_type"),
    "inverse_sqrt": ("timescale",),
}
DEFAULT_TIMESCALE = 10_000  # of inverse_sqrt without a warm-up, as in transformers


@dataclass(frozen=True)
class OptimConfig(Settings):
    """The optimizer and its learning rate schedule.

    A setting that the chosen optimizer or schedule does not have is refused where it differs from its default.

    Attributes:
        learning_rate: peak, reached after the warm-up.
        name: adamw (fused). adamw_8bit: its two moments in 8 bits each, by bitsandbytes; paged_adamw_8bit: they move
            between GPU and CPU memory as needed, CUDA only. adafactor: the second moment as one value per row and
            column, no first moment. muon: orthogonalized momentum for the matrices of the blocks, its rate scaled so
            that those of AdamW can be kept, and AdamW for the rest (embeddings, heads, vectors, LoRA). sgd: with
            momentum.
        weight_decay: on matrices (weights and embeddings); biases, norms and other vectors are not decayed. Decoupled
            from the gradient, except with sgd, where it is added to the gradient.
        betas: decay rates of AdamW's two moments.
        eps: AdamW's addition to the denominator.
        momentum: of muon and sgd, in [0, 1); null: 0.95 for muon, 0.9 for sgd.
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

    Source: Loshchilov and Hutter 2019, arXiv:1711.05101 (AdamW); Dettmers et al. 2022, arXiv:2110.02861 (8 bits);
    Shazeer and Stern 2018, arXiv:1804.04235 (Adafactor); Jordan et al. 2024, kellerjordan.github.io/posts/muon, and Liu
    et al. 2025, arXiv:2502.16982, section 2.2 (Muon); Hayou et al. 2024, arXiv:2402.12354 (LoRA+); Haegele et al. 2024,
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
            "must be at most 1, got {self.learning_rate}: every weight would move by about as much in each update; "
            "1e-5 is usual for fine-tuning, 1e-3 for small models",
        ),
        Rule(
            "learning_rates",
            lambda c: next((why for pattern in c.learning_rates if (why := refusal(compile_pattern, pattern))), ""),
        ),
        Rule(
            "learning_rates",
            lambda c: [key for key, factor in c.learning_rates.items() if factor * c.learning_rate > c.highest_rate],
            "of {found} times learning_rate {self.learning_rate} must be at most 1: such a weight would move by as "
            "much",
        ),
        Rule(
            "warmup_steps",
            lambda c: c.warmup_steps and c.warmup_ratio,
            "({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) both say how long the warm-up is: leave one "
            "out",
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

        AdamW moves a weight by up to learning_rate * |g| / (|g| + eps): by the rate itself where eps is small.
        Adafactor and Muon move the weights of a matrix by about the rate, too. SGD's step is proportional to the
        gradient: no limit.
        """
        return math.inf if self.name == "sgd" else max(1.0, self.eps)

    @property
    def momentum_or_default(self) -> float:
        """The momentum of muon and sgd."""
        return {"muon": 0.95, "sgd": 0.9}[self.name] if self.momentum is None else self.momentum


def _foreign(config: OptimConfig, key: str, settings: Mapping[str, tuple[str, ...]]) -> str:
    """Names a setting that only others than the chosen optimizer or schedule have and that differs from its default."""
    chosen = getattr(config, key)
    foreign = {name for names in settings.values() for name in names} - set(settings.get(chosen, ()))
    for setting in fields(config):
        if setting.name in foreign and getattr(config, setting.name) not in (
            setting.default,
            getattr(OptimConfig, setting.name),
        ):
            users = ", ".join(name for name, names in settings.items() if setting.name in names)
            return (
                f"{chosen} has no {setting.name}; leave {setting.name} out, or choose among those that have it: {users}"
            )
    return ""


# The schedule


def learning_rate_at(update: int, config: OptimConfig, total_steps: int) -> float:
    """The learning rate of update number `update`, from 1.

    With k = update - 1 updates before it, w warm-up updates and T = total_steps:
        k < w:                   peak * k / w
        cosine, linear:          peak * (s + (1 - s) * shape((k - w) / (T - w)))     s = min_learning_rate_ratio
        wsd, d = ceil(decay_ratio * T) updates of decay at the end:
            k < T - d:           peak
            else:                peak * (s + (1 - s) * shape((k - (T - d)) / d))
        inverse_sqrt:            peak / sqrt((k - w + t) / t)                        t = timescale
    where shape(x) falls from 1 to 0: (1 + cos(pi x)) / 2, 1 - x, or 1 - sqrt(x).
    The first update of a run with a warm-up thus uses 0, and the end value belongs to update T + 1, as in transformers.
    A warm-up of wsd that would reach into the decay shortens the decay. A ratio of warm-up is rounded up, as in
    transformers, and leaves at least one update at the peak.
    """
    done = update - 1
    warmup = config.warmup_steps
    if config.warmup_ratio:
        warmup = min(math.ceil(config.warmup_ratio * total_steps), total_steps - 1)
    if done < warmup:
        return config.learning_rate * done / warmup
    if config.schedule == "inverse_sqrt":
        timescale = config.timescale or warmup or DEFAULT_TIMESCALE
        return config.learning_rate / math.sqrt((done - warmup + timescale) / timescale)
    start = warmup
    kind = config.schedule
    if config.schedule == "wsd":
        start = max(warmup, total_steps - math.ceil(config.decay_ratio * total_steps))
        kind = config.decay_type
    if config.schedule == "constant" or done < start:
        return config.learning_rate
    progress = min(1.0, (done - start) / max(1, total_steps - start))
    shapes = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "1-sqrt": 1 - math.sqrt(progress),
        "linear": 1 - progress,
    }
    ratio = config.min_learning_rate_ratio
    return config.learning_rate * (ratio + (1 - ratio) * shapes[kind])


# The optimizers

CLASSES = {  # muon: see `_muon`
    "adamw": "alignment.training.optim:AdamW",
    "adamw_8bit": "bitsandbytes.optim.adamw:AdamW8bit",
    "paged_adamw_8bit": "bitsandbytes.optim.adamw:PagedAdamW8bit",
    "adafactor": "transformers.optimization:Adafactor",
    "sgd": "torch.optim:SGD",
}
EIGHT_BIT = ("adamw_8bit", "paged_adamw_8bit")
MIN_8BIT_SIZE = 4096  # elements; bitsandbytes keeps the moments of smaller tensors in float32
BLOCK_SIZE = 256  # elements of an 8-bit moment that share a scale
CODE_TABLES = {"qmap1": "dynamic", "qmap2": "udynamic"}  # bitsandbytes' values of the 256 codes, equal for all tensors
CODE_TABLE_BYTES = 2 * 256 * 4
# Why an optimizer cannot run on a backend. ZeRO flattens the parameters of a group into one vector, of which each rank
# updates a part: only elementwise updates keep their meaning. adamw_8bit does, with blocks that may span two
# parameters.
UNSUPPORTED = {
    ("adamw_8bit", "fsdp2"): "bitsandbytes cannot read sharded tensors (DTensor)",
    ("adafactor", "fsdp2"): "transformers' Adafactor cannot read sharded tensors (DTensor)",
    ("adafactor", "deepspeed"): "DeepSpeed flattens weights into vectors, and Adafactor needs rows and columns",
    ("muon", "deepspeed"): "DeepSpeed flattens weights into vectors, and Muon needs matrices",
}

# Names of a parameter's state: of AdamW; of Adafactor, for a vector and for a matrix; of bitsandbytes.
STATES = (
    "step exp_avg exp_avg_sq",
    "step exp_avg_sq RMS",
    "step exp_avg_sq_row exp_avg_sq_col RMS",
    "step state1 state2",
)

Group = dict[str, Any]  # a parameter group of a torch optimizer


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimizer: one list of groups, one state."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]):
        self._parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for part in self._parts:
            part.step()


class AdamW(torch.optim.AdamW):
    """torch's AdamW without wrappers for torch.compile, whose first call loads the compiler: a second of start-up."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `config.name` over the trainable parameters.

    Adafactor is transformers', without relative steps and without scaling by the parameter: an update is the rate of
    the schedule times a tensor whose root mean square is at most 1. torch's own multiplies the rate by the root
    mean square of the parameter, so that `learning_rate` would not be the rate.
    """
    trainable = trainable_parameters(model)
    if not trainable:
        raise ValueError("the model has no trainable parameter: nothing requires a gradient")
    for name, parameter in trainable.items():
        if parameter.dtype != torch.float32:
            raise ValueError(
                f"parameter {name} is {parameter.dtype}: train float32 weights, and set precision=bf16 to compute in "
                "bfloat16; small updates round away in lower precision"
            )
    groups = parameter_groups(model, config.weight_decay, config.learning_rates)
    if config.name == "muon":
        return _muon(model, groups, config)
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        options["fused"] = _fused(groups)
    elif config.name == "sgd":
        options = {"momentum": config.momentum_or_default}
    elif config.name == "adafactor":
        options = {"scale_parameter": False, "relative_step": False}
    module, _, name = CLASSES[config.name].partition(":")
    return getattr(import_module(module), name)(groups, lr=config.learning_rate, **options)


def _fused(groups: list[Group]) -> bool:
    """True where torch has AdamW in one kernel."""
    return {parameter.device.type for group in groups for parameter in group["params"]} <= {"cpu", "cuda"}


def _muon(model: nn.Module, groups: list[Group], config: OptimConfig) -> MuonWithAdamW:
    hidden = {id(parameter) for parameter in hidden_matrices(model).values()}
    if not hidden:
        raise UserError(
            "optim.name muon: no matrix of the model's blocks is trained, only adapters, embeddings, heads or vectors; "
            "choose adamw"
        )

    def part(in_muon: bool) -> list[Group]:
        parts = [
            {**param_group, "params": [x for x in param_group["params"] if (id(x) in hidden) == in_muon]}
            for param_group in groups
        ]
        return [group for group in parts if group["params"]]

    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(
            part(True), lr=config.learning_rate, momentum=config.momentum_or_default, adjust_lr_fn="match_rms_adamw"
        )
    ]
    if rest := part(False):
        adamw = AdamW(rest, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=_fused(rest))
        optimizers.append(adamw)
    return MuonWithAdamW(optimizers)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient by name, a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(
    model: nn.Module, weight_decay: float, learning_rates: Mapping[str, float] | None = None
) -> list[Group]:
    """Groups for a torch optimizer: matrices with weight decay, vectors without, each by factor of the learning rate.

    A group whose factor (`OptimConfig.learning_rates`) is not 1 has it as `lr_scale`.
    """
    trainable = trainable_parameters(model)
    scales = _learning_rate_scales(list(trainable), learning_rates or {})
    groups: dict[tuple[float, float], Group] = {}
    for name, parameter in sorted(trainable.items(), key=lambda item: item[1].ndim < 2):
        matrix = parameter.ndim >= 2
        scale = scales.get(name, 1.0)
        group: Group = {"params": [], "weight_decay": weight_decay if matrix else 0.0}
        group |= {"lr_scale": scale} if scale != 1 else {}
        groups.setdefault((matrix, scale), group)["params"].append(parameter)
    return list(groups.values())


def _learning_rate_scales(names: Sequence[str], learning_rates: Mapping[str, float]) -> dict[str, float]:
    """The factor of the learning rate of each parameter that a pattern matches; the first matching pattern counts."""
    scales: dict[str, float] = {}
    for pattern, factor in learning_rates.items():
        matches = search_names(pattern, names, f"optim.learning_rates {pattern!r}")
        if not matches:
            raise UserError(
                f"optim.learning_rates: {pattern!r} is found in the name of no trainable parameter; there are: "
                f"{', '.join(without_numbers(names))}"
            )
        if all(name in scales for name in matches):
            raise UserError(
                f"optim.learning_rates: {pattern!r} has no effect: patterns before it match all its parameters, and "
                "the first one counts; move it up, or leave it out"
            )
        scales |= {name: factor for name in matches if name not in scales}
    return scales


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of every group for the next step, times the factor of its pattern."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters that Muon takes: the 2-D weights of a model's blocks, the entries of a ModuleList.

    Embeddings are left out wherever they are (a relative position bias lies in a block), and so are LoRA's factors,
    whose product is the matrix, and experts stored as one 3-D tensor.
    """

    def inside(kind: type[nn.Module]) -> set[int]:
        return {id(x) for module in model.modules() if isinstance(module, kind) for x in module.parameters()}

    taken = inside(nn.ModuleList) - inside(nn.Embedding)
    return {
        name: parameter
        for name, parameter in trainable_parameters(model).items()
        if parameter.ndim == 2 and id(parameter) in taken and "lora_" not in name
    }


def optimizer_bytes(shapes: Mapping[str, Sequence[int]], config: OptimConfig, *, hidden: Collection[str] = ()) -> int:
    """Bytes of the optimizer's state of trainable parameters with these shapes, without sharding; `hidden`: Muon's."""
    eight_bit = config.name in EIGHT_BIT
    total = 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        if config.name == "sgd" or (config.name == "muon" and name in hidden):
            total += 4 * size if config.momentum_or_default or name in hidden else 0
        elif config.name == "adafactor":  # the second moment by row and column, and the root mean square of the weight
            total += 4 * (size // shape[-1] + size // shape[-2] if len(shape) > 1 else size) + 4
        elif eight_bit and size >= MIN_8BIT_SIZE:
            total += 2 * (size + 4 * math.ceil(size / BLOCK_SIZE))
        else:
            total += 2 * 4 * size + (0 if eight_bit else 4)  # and the number of updates
    has_codes = eight_bit and any(math.prod(shape) >= MIN_8BIT_SIZE for shape in shapes.values())
    return total + (CODE_TABLE_BYTES if has_codes else 0)


def saved_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's state of one parameter as tensors; Python numbers become int64 tensors without dimensions.

    bitsandbytes' code tables are left out: they are constants.
    """
    return {
        key: value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.int64)
        for key, value in optimizer.state.get(parameter, {}).items()
        if key not in CODE_TABLES
    }


def restore_state(optimizer: torch.optim.Optimizer, parameter: Tensor, tensors: Mapping[str, Tensor]) -> None:
    """Put back what `saved_state` returned, on the parameter's device and sharded as the parameter is."""
    state: dict[str, Any] = {
        key: int(tensor) if tensor.dtype == torch.int64 and tensor.ndim == 0 else tensor
        for key, tensor in tensors.items()
    }
    buffer = getattr(optimizer, "get_state_buffer", None)  # bitsandbytes': paged memory for the paged optimizer
    if buffer is not None:
        for key in ("state1", "state2"):
            state[key] = buffer(parameter, dtype=tensors[key].dtype).copy_(tensors[key])
    if "absmax1" in state:
        tables: dict[str, Tensor] = optimizer.name2qmap  # pyright: ignore[reportAttributeAccessIssue]
        for key, name in CODE_TABLES.items():
            state[key] = tables[name] = tables[name].to(parameter.device)
    optimizer.state[parameter] = state


def check_optimizer(config: OptimConfig, kind: str) -> None:
    """Refuse an optimizer that cannot run here in this kind of process group, before any model is loaded."""
    name = "adamw_8bit" if config.name in EIGHT_BIT else config.name
    if (name, kind) in UNSUPPORTED:
        raise UserError(
            f"optim.name {config.name} does not run under {kind}: {UNSUPPORTED[name, kind]}; choose adamw, or launch "
            "with configs/launch/ddp.yaml"
        )
    if config.name in EIGHT_BIT and has_apple_gpu():
        raise UserError(f"optim.name {config.name} does not run on Apple's GPUs; choose adamw")
    if config.name in EIGHT_BIT and find_spec("bitsandbytes") is None:
        raise UserError(f"optim.name {config.name} needs bitsandbytes: {install_advice('quantization')}")
    if config.name == "paged_adamw_8bit" and not torch.cuda.is_available():
        raise UserError(
            "optim.name paged_adamw_8bit moves its state between GPU and CPU memory, and there is no GPU: choose "
            "adamw_8bit"
        )

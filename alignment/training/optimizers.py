"""Optimizers by name: which parameters they take, the tensors and the bytes of their state, and where they can run."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError, install_advice
from alignment.settings import search_names, without_numbers
from alignment.training.optim import OptimConfig

CLASSES = {  # muon: see `_muon`
    "adamw": "alignment.training.optimizers:AdamW",
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
# updates a part: only elementwise updates keep their meaning. adamw_8bit does, with blocks that may span two parameters.
UNSUPPORTED = {
    ("adamw_8bit", "fsdp2"): "bitsandbytes cannot read sharded tensors (DTensor)",
    ("adafactor", "fsdp2"): "transformers' Adafactor cannot read sharded tensors (DTensor)",
    ("adafactor", "deepspeed"): "DeepSpeed flattens weights into vectors, and Adafactor needs rows and columns",
    ("muon", "deepspeed"): "DeepSpeed flattens weights into vectors, and Muon needs matrices",
}


Group = dict[str, Any]  # a parameter group of a torch optimizer


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some parameters and AdamW for the others, as one optimizer: one list of groups, one state."""

    def __init__(self, muon: torch.optim.Muon | None, adamw: torch.optim.AdamW | None):
        self._parts = [part for part in (muon, adamw) if part is not None]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        for part in self._parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyright: ignore[reportIncompatibleMethodOverride]
        loss = closure() if closure is not None else None
        for part in self._parts:
            part.step()
        return loss


class AdamW(torch.optim.AdamW):
    """torch's AdamW without its wrappers for torch.compile, whose first call loads the compiler: a second of start-up."""

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer of `config.name` over the trainable parameters.

    AdamW is fused: one kernel per group on CUDA, one pass over memory on the CPU. Adafactor is transformers', without
    relative steps and without scaling by the parameter: an update is the learning rate of the schedule times a tensor
    whose root mean square is at most `clip_threshold`. torch's own multiplies the rate by the root mean square of the
    parameter and limits it to 1 / sqrt(update), so that `learning_rate` would not be the rate.

    Raises:
        ValueError: nothing is trainable, or a trainable parameter is not float32 (its updates would round away).
        UserError: a pattern of `learning_rates` has no parameter, or muon no matrix.
    """
    check_trainable(model)
    groups = parameter_groups(model, config.weight_decay, config.learning_rates)
    if config.name == "muon":
        return _muon(model, groups, config)
    options: dict[str, Any] = {"betas": config.betas, "eps": config.eps}
    if config.name == "adamw":
        options["fused"] = fused(groups)
    elif config.name == "sgd":
        options = {"momentum": config.momentum_or_default}
    elif config.name == "adafactor":
        options = {"decay_rate": config.beta2_decay, "clip_threshold": config.clip_threshold}
        options |= {"scale_parameter": False, "relative_step": False}
    module, _, name = CLASSES[config.name].partition(":")
    return getattr(import_module(module), name)(groups, lr=config.learning_rate, **options)


def check_trainable(model: nn.Module) -> None:
    """Check that the model has trainable parameters and that all of them are float32.

    Raises:
        ValueError: nothing is trainable, or a trainable parameter has another type; it is named.
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


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient by name, a tied one once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_groups(
    model: nn.Module, weight_decay: float, learning_rates: Mapping[str, float] | None = None
) -> list[Group]:
    """Trainable parameters by weight decay (matrices with, vectors without) and by factor of the learning rate.

    Args:
        learning_rates: regular expression -> factor; see `OptimConfig`.

    Returns:
        Groups for a torch optimizer, none of them empty. One whose factor is not 1 has it as `lr_scale`.

    Raises:
        UserError: a pattern decides the rate of no parameter.
    """
    trainable = trainable_parameters(model)
    scales = learning_rate_scales(list(trainable), learning_rates or {})
    groups: dict[tuple[float, float], Group] = {}
    for matrices in (True, False):
        for name, parameter in trainable.items():
            if (parameter.ndim >= 2) == matrices:
                scale = scales.get(name, 1.0)
                group: Group = {"params": [], "weight_decay": weight_decay if matrices else 0.0}
                group |= {"lr_scale": scale} if scale != 1 else {}
                groups.setdefault((matrices, scale), group)["params"].append(parameter)
    return list(groups.values())


def learning_rate_scales(names: Sequence[str], learning_rates: Mapping[str, float]) -> dict[str, float]:
    """The factor of the learning rate of each parameter that a pattern matches; the first matching pattern counts.

    Raises:
        UserError: a pattern takes too long, matches nothing, or only what patterns before it match.
    """
    scales: dict[str, float] = {}
    for pattern, factor in learning_rates.items():
        found = search_names(pattern, names, f"optim.learning_rates {pattern!r}")
        if not found:
            raise UserError(
                f"optim.learning_rates: {pattern!r} is found in the name of no trainable parameter; there are: "
                f"{', '.join(without_numbers(names))}"
            )
        if all(name in scales for name in found):
            raise UserError(
                f"optim.learning_rates: {pattern!r} has no effect: patterns before it match all its parameters, and the "
                "first one counts; move it up, or leave it out"
            )
        scales |= {name: factor for name in found if name not in scales}
    return scales


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Set the rate of every group for the next step, times the factor of its pattern."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group.get("lr_scale", 1.0)


def hidden_matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters that Muon takes: the 2-D weights of a model's blocks.

    A block is an entry of a ModuleList. Embeddings are left out wherever they are (a relative position bias lies in a
    block), and so are LoRA's factors, whose product is the matrix and not they themselves. Experts that are stored as
    one 3-D tensor are left to AdamW too: torch's Muon takes matrices only.
    """
    inside = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for parameter in module.parameters()
    }
    embedded = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    return {
        name: parameter
        for name, parameter in trainable_parameters(model).items()
        if parameter.ndim == 2 and id(parameter) in inside - embedded and "lora_" not in name
    }


def optimizer_bytes(shapes: Mapping[str, Sequence[int]], config: OptimConfig, *, hidden: Collection[str] = ()) -> int:
    """Bytes of the optimizer's state after every parameter was updated, without sharding.

    Args:
        shapes: of each trainable parameter, by name.
        hidden: names of `hidden_matrices`; used for muon only.
    """
    sizes = [_state_bytes(shape, config, hidden=name in hidden) for name, shape in shapes.items()]
    eight_bit = config.name in EIGHT_BIT and any(math.prod(shape) >= MIN_8BIT_SIZE for shape in shapes.values())
    return sum(sizes) + (CODE_TABLE_BYTES if eight_bit else 0)


def _state_bytes(shape: Sequence[int], config: OptimConfig, *, hidden: bool) -> int:
    """Bytes of the state of one parameter: float32 numbers, in 8 bits with the scale of each block."""
    number = math.prod(shape)
    if config.name == "sgd" or (config.name == "muon" and hidden):
        return 4 * number if hidden or config.momentum_or_default else 0
    if config.name == "adafactor":  # the second moment by row and column, and the root mean square of the weight
        return 4 * (number // shape[-1] + number // shape[-2] if len(shape) > 1 else number) + 4
    if config.name in EIGHT_BIT and number >= MIN_8BIT_SIZE:
        return 2 * (number + 4 * math.ceil(number / BLOCK_SIZE))
    return 2 * 4 * number + (0 if config.name in EIGHT_BIT else 4)  # and the number of updates


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state with keys such as `name/exp_avg`; a parameter that was never updated has no entry."""
    return {
        f"{name}/{key}": value
        for name, parameter in trainable_parameters(model).items()
        for key, value in saved_state(optimizer, parameter).items()
    }


def saved_state(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's state of one parameter as tensors, each in its own type; empty before its first update.

    Python numbers become int64 tensors without dimensions. bitsandbytes' code tables are left out: they are constants.
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
            tables[name] = tables[name].to(parameter.device)
            state[key] = tables[name]
    optimizer.state[parameter] = state


def check_optimizer(config: OptimConfig, kind: str) -> None:
    """Check that the optimizer can run here, before any model is loaded.

    Args:
        kind: of the process group: single, ddp, fsdp2 or deepspeed.

    Raises:
        UserError: a package or a device is missing, or the backend cannot run it.
    """
    name = "adamw_8bit" if config.name in EIGHT_BIT else config.name
    if (name, kind) in UNSUPPORTED:
        raise UserError(
            f"optim.name {config.name} does not run under {kind}: {UNSUPPORTED[name, kind]}; choose adamw, or launch with "
            "configs/launch/ddp.yaml"
        )
    if config.name in EIGHT_BIT and find_spec("bitsandbytes") is None:
        raise UserError(f"optim.name {config.name} needs bitsandbytes: {install_advice('quantization')}")
    if config.name == "paged_adamw_8bit" and not torch.cuda.is_available():
        raise UserError(
            "optim.name paged_adamw_8bit moves its state between GPU and CPU memory, and there is no GPU: choose adamw_8bit"
        )


def fused(groups: list[Group]) -> bool:
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
            {**group, "params": [parameter for parameter in group["params"] if (id(parameter) in hidden) == in_muon]}
            for group in groups
        ]
        return [group for group in parts if group["params"]]

    muon = torch.optim.Muon(
        part(True),
        lr=config.learning_rate,
        momentum=config.momentum_or_default,
        adjust_lr_fn=config.adjust_lr_fn,
    )
    rest = part(False)
    adamw = (
        AdamW(rest, lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=fused(rest)) if rest else None
    )
    return MuonWithAdamW(muon, adamw)

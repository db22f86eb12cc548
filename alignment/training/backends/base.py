"""The base of the backends, which spread one optimizer step over processes; and the one that replicates the model.

Every backend sums gradients over ranks, so that a loss divided by the global weight needs no further correction.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.ragged import fill_groups
from alignment.training.backends import state_files
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import (
    STATES,
    OptimConfig,
    build_optimizer,
    restore_state,
    saved_state,
    set_learning_rate,
    trainable_parameters,
)

BUCKET_ELEMENTS = 32 * 1024 * 1024  # gradients sent at once: 128 MB in float32, past where larger messages go faster


class RowSource(Protocol):
    """The place of an unread parameter's data, its attribute `stored`; models/huggingface makes them."""

    def rows(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Rows `start` to `stop` of the parameter; to be copied from."""
        ...


class Backend:
    """One prepared model with its optimizer. Unless a subclass says otherwise, the weights are whole on every rank.

    Attributes:
        model: the module to call; every forward of training goes through it.
        unwrapped: the module that was passed in, for generation and saving; its weights are whole only inside
            `full_parameters()`.
        optimizer: over the trainable parameters of `unwrapped`.
        autocast: makes contexts in which matrix products run in the run's precision, in other models too.
        collective_forward: all ranks must run equally many forwards and backwards (they communicate in each).
    """

    model: nn.Module
    process_group: ProcessGroup
    unwrapped: nn.Module
    optimizer: torch.optim.Optimizer
    config: OptimConfig
    autocast: Callable[[], AbstractContextManager[Any]]
    collective_forward = False
    _missing: list[str] | None = None

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`; `last` marks the update's last backward on every rank."""
        raise NotImplementedError

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        """Clip and step, if the gradient norm and the losses are finite; then clear the gradients.

        Args:
            values: sums over all ranks that the caller wants as numbers; the first `num_losses` must be finite.

        Returns:
            `values` as numbers, and the global gradient norm before clipping.
        """
        if self._missing is None:
            trained = trainable_parameters(self.unwrapped)
            self._missing = [name for name, parameter in trained.items() if parameter.grad is None]
        return checked_step(self.optimizer, self.config.max_grad_norm, learning_rate, values, num_losses)

    def without_gradient(self) -> list[str]:
        """Names of trainable parameters that got no gradient in the first update; known only after it."""
        return self._missing or []

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of the state dict, one at a time, on the CPU of rank 0; every rank must run it to its end."""
        state: dict[str, Any] = self.unwrapped.state_dict()
        for name in names:
            tensor = state[name].detach()
            whole = tensor.full_tensor() if state_files.is_sharded(tensor) else tensor
            if self.process_group.is_main:
                yield name, whole.cpu()

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """While open, every rank holds whole weights, in the type that each layer computes in at the run's precision.

        Opening and closing are collective operations; in between nothing communicates, and nothing may be trained.
        """
        with self.autocast():
            yield

    def whole_bytes(self) -> int:
        """Bytes that `full_parameters` takes on each device while it is open; 0 where weights are not sharded."""
        return 0

    def sharded_decoding(self) -> AbstractContextManager[None]:
        """While open, `unwrapped` may decode with sharded weights: its blocks gather theirs one after another.

        Opening, closing and each call of `prefill` and `decode` are collective operations, where weights are sharded.
        """
        return self.full_parameters()

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, sharded where the model is, to read and write in place between updates."""
        return {name: parameter.detach() for name, parameter in trainable_parameters(self.unwrapped).items()}

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state into an existing directory; a collective operation."""
        kept = state_files.kept_tensors(self.unwrapped)
        rank = self.process_group.rank
        bad = [name for names in self.process_group.gather_objects(state_files.not_finite(kept)) for name in names]
        if bad:
            raise FloatingPointError(f"{bad[0]} holds values that are not finite; the checkpoint is not written")
        state_files.write(state_files.WEIGHTS, kept, directory, rank=rank)
        state = {
            f"{name}/{key}": value
            for name, parameter in trainable_parameters(self.unwrapped).items()
            for key, value in saved_state(self.optimizer, parameter).items()
        }
        state_files.write(state_files.OPTIMIZER, state, directory, rank=rank)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; a collective operation."""
        state_files.read_into(state_files.WEIGHTS, state_files.kept_tensors(self.unwrapped), directory)
        parameters = trainable_parameters(self.unwrapped)
        saved: dict[str, dict[str, Tensor]] = {}
        for key, stored in state_files.saved_tensors(state_files.OPTIMIZER, directory).items():
            name, entry = key.rsplit("/", 1)
            if name not in parameters:
                raise UserError(f"{directory}: {name} is not a trainable parameter of this model")
            if stored.shape == parameters[name].shape:  # sharded as the parameter
                empty = torch.empty_like(parameters[name].detach(), dtype=stored.dtype)
            else:
                empty = torch.empty(stored.shape, dtype=stored.dtype, device=parameters[name].device)
            saved.setdefault(name, {})[entry] = empty
        entries = {f"{name}/{entry}": tensor for name, state in saved.items() for entry, tensor in state.items()}
        state_files.read_into(state_files.OPTIMIZER, entries, directory)
        for name, tensors in saved.items():
            if lacking := [whole for whole in STATES if tensors.keys() < set(whole.split())]:
                raise UserError(f"{directory}: the optimizer's state of {name} lacks one of: {lacking[0]}")
            restore_state(self.optimizer, parameters[name], tensors)


def checked_step(
    optimizer: torch.optim.Optimizer, max_grad_norm: float, learning_rate: float, values: Tensor, num_losses: int
) -> tuple[list[float], float]:
    """`Backend.step` for a torch optimizer, with a single synchronization with the device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # sharded: the local norm is only a part
        norm = norm.full_tensor()
    *numbers, grad_norm = torch.cat([values, norm.reshape(1).to(values)]).tolist()
    if all(math.isfinite(value) for value in (*numbers[:num_losses], grad_norm)):
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        set_learning_rate(optimizer, learning_rate)
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return numbers, grad_norm


def autocast_context(
    device: torch.device, precision: str, *, keep_casts: bool = True
) -> Callable[[], AbstractContextManager[Any]]:
    """A function that makes contexts in which matrix products run in `precision`; weights keep their type.

    With `keep_casts` the bfloat16 copy of a trained weight is kept until the context ends, for its next use. Where
    weights are sharded, the copies of all blocks together would take what sharding saves.
    """
    if precision != "bf16":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=keep_casts)


def autocast_forward(model: nn.Module, device: torch.device, precision: str, *, keep_casts: bool = True) -> nn.Module:
    """Run every call of `model` under autocast, as `autocast_context`. The model is changed in place and returned."""
    if precision != "bf16":
        return model
    forward = model.forward
    autocast = autocast_context(device, precision, keep_casts=keep_casts)

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return forward(*args, **kwargs)

    model.forward = cast
    return model


class ReplicatedBackend(Backend):
    """The whole model on every rank: one process, or data-parallel replicas.

    Replicas sum their gradients once, after the last backward, in large buckets. torch's DistributedDataParallel
    requires that every backward uses every parameter and that all ranks run equally many; several terms and unequal
    shards do not.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group = process_group
        self.config = config
        self.model = self.unwrapped = autocast_forward(model.to(process_group.device), process_group.device, precision)
        self.autocast = autocast_context(process_group.device, precision)
        if process_group.size > 1:  # ranks may have initialized different weights and buffers
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        self.optimizer = build_optimizer(model, config)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        if self.process_group.size > 1:
            self._sum_gradients()
        return super().step(learning_rate, values, num_losses)

    def _sum_gradients(self) -> None:
        parameters = list(trainable_parameters(self.unwrapped).values())
        used = self.process_group.max(torch.tensor([float(parameter.grad is not None) for parameter in parameters]))
        # A parameter that no rank used keeps no gradient, as in one process: AdamW then leaves it alone.
        present = [parameter for parameter, flag in zip(parameters, used.tolist(), strict=True) if flag]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in present if parameter.grad is not None]
        sizes = [gradient.numel() for gradient in gradients]
        for numbers in fill_groups(range(len(sizes)), sizes, BUCKET_ELEMENTS):
            bucket = [gradients[index] for index in numbers]
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            pieces = flat.split([sizes[index] for index in numbers])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def check_finite(model: nn.Module) -> None:
    """Refuse new parameters that were computed from unread ones, which are NaN."""
    bad = [
        name
        for name, parameter in model.named_parameters()
        if not (parameter.is_meta or hasattr(parameter, "stored"))
        and parameter.is_floating_point()
        and parameter.isnan().any()
    ]
    if bad:
        raise UserError(
            f"{', '.join(bad[:5])}: not a number at the start of the training; an adapter that starts from the values "
            "of the frozen weights needs them read before it is attached, or the checkpoint is damaged"
        )


# Whole weights for sampling where they are sharded, each gathered once, in the type that its layer computes in


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The called children of every ModuleList: transformer blocks, and experts within them; outer ones first."""
    return [
        block
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for block in module
        if not isinstance(block, nn.ModuleList | nn.ModuleDict)  # those are never called
    ]


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    """The modules that lie in no other one of the list."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]


def computing_types(model: nn.Module, precision: str) -> dict[nn.Parameter, torch.dtype]:
    """The type in which whole copies of parameters give the same numbers as the parameters themselves.

    Under autocast a linear layer rounds its weight and bias to bfloat16 before it uses them, so a copy that is already
    rounded gives the same bits in half the memory. This holds for the plain linear layers inside of blocks.
    Embeddings, norms and heads compute in float32. Layers under an adapter keep their type as well: some adapters
    (DoRA) read the weights in other operations.
    """
    types = {parameter: parameter.dtype for parameter in model.parameters()}
    if precision != "bf16":
        return types
    uses: dict[nn.Parameter, list[bool]] = {}
    blocks = outermost(blocks_of(model))
    within = {id(module) for block in blocks for module in block.modules()}
    adapted = {id(child) for module in model.modules() if hasattr(module, "base_layer") for child in module.modules()}
    for module in model.modules():
        plain = type(module) is nn.Linear and id(module) in within and id(module) not in adapted
        for parameter in module._parameters.values():
            if parameter is not None:
                uses.setdefault(parameter, []).append(plain and parameter.dtype == torch.float32)
    return types | {parameter: torch.bfloat16 for parameter, plain in uses.items() if all(plain)}


def whole_bytes(types: Mapping[nn.Parameter, torch.dtype], is_sharded: Callable[[nn.Parameter], bool]) -> int:
    """Bytes that whole copies of the sharded parameters take on each device."""
    return sum(
        getattr(parameter, "ds_numel", parameter.numel()) * dtype.itemsize
        for parameter, dtype in types.items()
        if is_sharded(parameter)
    )


@contextmanager
def whole_parameters(
    model: nn.Module,
    types: Mapping[nn.Parameter, torch.dtype],
    gather: Callable[[nn.Parameter, torch.dtype], Tensor | None],
) -> Iterator[None]:
    """While open, whole copies of the sharded parameters stand in the model; opening is a collective operation.

    `gather` makes the whole tensor of a parameter in a type; None for a parameter that is whole already.
    """
    copies: dict[nn.Parameter, nn.Parameter] = {}  # a parameter that several modules share is gathered once
    locations: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                if parameter not in copies:
                    whole = gather(parameter, types[parameter])
                    copies[parameter] = parameter if whole is None else nn.Parameter(whole, requires_grad=False)
                if copies[parameter] is not parameter:
                    module._parameters[name] = copies[parameter]
                    locations.append((module, name, parameter))
        yield
    finally:
        for module, name, parameter in locations:
            module._parameters[name] = parameter

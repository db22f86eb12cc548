"""What an engine asks of a way to train: one process, replicas, FSDP2 (here and in sharded.py) or DeepSpeed (zero.py).

Every backend sums gradients over ranks, so that a loss divided by the global weight needs no further correction.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignment.training.backends import state_files
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig, build_optimizer

BUCKET_ELEMENTS = 32 * 1024 * 1024  # gradients sent at once: 128 MB in float32, past where larger messages go faster


class Backend(Protocol):
    """One prepared model with its optimizer.

    Attributes:
        model: call this one; every forward of training goes through it.
        unwrapped: the module as it was handed in, for generation and saving.
        collective_forward: all ranks must run equally many forwards and backwards (they communicate in each).
        autocast: makes contexts in which matrix products run in the run's precision.
    """

    model: nn.Module
    unwrapped: nn.Module
    collective_forward: bool
    autocast: Callable[[], AbstractContextManager[Any]]

    def backward(self, loss: Tensor, last: bool) -> None:
        """Add the gradients of `loss`; `last` marks the update's last backward on every rank."""
        ...

    def step(self, learning_rate: float, values: Tensor, guarded: int) -> tuple[list[float], float]:
        """Change the weights, if the first `guarded` of `values` and the gradient norm are finite; clear gradients.

        Returns:
            `values` as numbers, and the global gradient norm before clipping.
        """
        ...

    def without_gradient(self) -> list[str]:
        """Trainable parameters that got no gradient in the first update; to be asked after it."""
        ...

    def full_state(self) -> dict[str, Tensor]:
        """The whole state dict in float32 on the CPU of rank 0, empty on other ranks; a collective operation."""
        ...

    def full_parameters(self) -> AbstractContextManager[None]:
        """While open, every rank holds whole weights: `unwrapped` may be used in ways other than its forward.

        Opening and closing are collective operations. In between nothing communicates, neither in calls of `model`, so
        that ranks may do unequal work; nothing may be trained.
        """
        ...

    def save(self, directory: Path) -> None:
        """Write what `load` needs to go on; a collective operation."""
        ...

    def load(self, directory: Path) -> None:
        """Put back what `save` wrote.

        Raises:
            UserError: a missing file or tensor, named.
        """
        ...


class ReplicatedBackend:
    """The whole model on every rank: one process, or data-parallel replicas.

    Replicas sum their gradients once, after the last backward, in large buckets. torch's DistributedDataParallel would
    overlap this with the last backward, but wants every parameter used in every backward and equally many backwards
    on all ranks; an update made of several terms and of unequal shares keeps neither promise.
    """

    collective_forward = False

    def __init__(self, model: nn.Module, config: OptimConfig, world: ProcessGroup, precision: str):
        self.world, self.config = world, config
        self.model = self.unwrapped = autocast_forward(model.to(world.device), world.device, precision)
        self.autocast = autocast_context(world.device, precision)
        self._agree_on_weights()
        self.optimizer = build_optimizer(model, config)
        self._missing: list[str] | None = None

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float, values: Tensor, guarded: int) -> tuple[list[float], float]:
        self._sum_gradients()
        if self._missing is None:
            self._missing = names_without_gradient(self.unwrapped)
        return checked_step(self.optimizer, self.config.max_grad_norm, learning_rate, values, guarded)

    def without_gradient(self) -> list[str]:
        return self._missing or []

    def full_state(self) -> dict[str, Tensor]:
        if self.world.rank:
            return {}
        return {name: value.detach().cpu() for name, value in self.unwrapped.state_dict().items()}

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        with self.autocast():
            yield

    def save(self, directory: Path) -> None:
        if self.world.rank == 0:
            state_files.save_weights(self.unwrapped, self.full_state(), directory)
            state_files.save_optimizer(state_files.optimizer_tensors(self.unwrapped, self.optimizer), directory)

    def load(self, directory: Path) -> None:
        state_files.load_weights(self.unwrapped, directory)
        state_files.load_optimizer(self.unwrapped, self.optimizer, directory)

    def _agree_on_weights(self) -> None:
        """Rank 0's weights and buffers everywhere: ranks may have drawn different ones."""
        if self.world.size > 1:
            for tensor in [*self.unwrapped.parameters(), *self.unwrapped.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

    def _sum_gradients(self) -> None:
        if self.world.size == 1:
            return
        parameters = [parameter for parameter in self.unwrapped.parameters() if parameter.requires_grad]
        used = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=self.world.device)
        # A parameter that no rank used keeps no gradient, as in one process: AdamW then leaves it alone.
        present = [parameter for parameter, flag in zip(parameters, self.world.max(used).tolist(), strict=True) if flag]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets([parameter.grad for parameter in present if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def checked_step(
    optimizer: torch.optim.Optimizer, max_grad_norm: float, learning_rate: float, values: Tensor, guarded: int
) -> tuple[list[float], float]:
    """Norm, check, clip and step, with one wait for the device; see `Backend.step`."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm(gradients)
    if hasattr(norm, "full_tensor"):  # sharded: the local norm is only a part
        norm = norm.full_tensor()
    *numbers, grad_norm = torch.cat([values, norm.reshape(1).to(values)]).tolist()
    if all(math.isfinite(number) for number in (*numbers[:guarded], grad_norm)):
        if max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return numbers, grad_norm


def names_without_gradient(model: nn.Module) -> list[str]:
    """Names of trainable parameters whose gradient is missing after a backward."""
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]


def buckets(tensors: list[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[list[Tensor]]:
    """The tensors in order, in groups of at most `elements` elements each; a single larger tensor goes alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > elements:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def autocast_context(device: torch.device, precision: str) -> Callable[[], AbstractContextManager[Any]]:
    """Makes contexts in which matrix products run in `precision`; weights stay as they are."""
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


def autocast_forward(model: nn.Module, device: torch.device, precision: str) -> nn.Module:
    """Let every call of `model` run under autocast, whoever calls it; the model itself is changed and returned."""
    if precision == "fp32":
        return model
    forward, autocast = model.forward, autocast_context(device, precision)

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return forward(*args, **kwargs)

    model.forward = cast
    return model

"""The base of the backends, each of which spreads one optimizer step over processes.

Every backend sums gradients over ranks, so that a loss divided by the global weight needs no further correction.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.training.backends import state_files
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import optimizer_tensors, restore_state, set_learning_rate, trainable_parameters


class Backend:
    """One prepared model with its optimizer. Unless a subclass says otherwise, the weights are whole on every rank.

    Attributes:
        model: the module to call; every forward of training goes through it.
        process_group: the processes that train it.
        unwrapped: the module that was passed in, for generation and saving; its weights are whole only inside
            `full_parameters()`.
        optimizer: over the trainable parameters of `unwrapped`.
        config: its settings.
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
            values: sums over all ranks that the caller wants as numbers, the losses first.
            num_losses: number of leading `values` that must be finite.

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
        """Whole tensors of the state dict, one at a time, on the CPU of rank 0; a collective operation.

        Every rank must run the iterator to its end. On other ranks it is empty.
        """
        state: dict[str, Any] = self.unwrapped.state_dict()
        for name in names:
            tensor = state[name].detach()
            whole = tensor.full_tensor() if state_files.is_sharded(tensor) else tensor
            if self.process_group.is_main:
                yield name, whole.cpu()

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        """While open, every rank holds whole weights, in the type that each layer computes in at the run's precision.

        Opening and closing are collective operations. In between nothing communicates, calls of `model` included: ranks
        may do unequal work and use `unwrapped` in ways other than its forward. Nothing may be trained inside.
        """
        with self.autocast():
            yield

    def whole_bytes(self) -> int:
        """Bytes that `full_parameters` takes on each device while it is open; 0 where weights are not sharded."""
        return 0

    def sharded_decoding(self) -> AbstractContextManager[None]:
        """While open, `unwrapped` may decode with sharded weights: its blocks gather theirs one after another.

        Weights outside of blocks (embeddings, head, prefix) stay whole meanwhile. Opening and closing are collective
        operations, and so is each call of `prefill` and `decode`: all ranks must run equally many. Where weights are not
        sharded nothing communicates.
        """
        return self.full_parameters()

    def trained_weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, sharded where the model is, to be read and written in place between updates.

        Raises:
            UserError: the backend holds them in a form that cannot be written.
        """
        return {name: parameter.detach() for name, parameter in trainable_parameters(self.unwrapped).items()}

    def save(self, directory: Path) -> None:
        """Write weights and optimizer state into an existing directory; a collective operation.

        Raises:
            FloatingPointError: a weight is not finite.
        """
        kept, rank = state_files.kept_tensors(self.unwrapped), self.process_group.rank
        bad = [name for names in self.process_group.gather_objects(state_files.not_finite(kept)) for name in names]
        if bad:
            raise FloatingPointError(f"{bad[0]} holds values that are not finite; the checkpoint is not written")
        state_files.write(state_files.WEIGHTS, kept, directory, rank=rank)
        state_files.write(
            state_files.OPTIMIZER, optimizer_tensors(self.unwrapped, self.optimizer), directory, rank=rank
        )

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; a collective operation.

        Raises:
            UserError: a file or tensor is missing or does not fit; it is named.
        """
        state_files.read_into(state_files.WEIGHTS, state_files.kept_tensors(self.unwrapped), directory)
        parameters = trainable_parameters(self.unwrapped)
        saved: dict[str, dict[str, Tensor]] = {}
        for key, stored in state_files.saved_tensors(state_files.OPTIMIZER, directory).items():
            name, entry = key.rsplit("/", 1)
            if name not in parameters:
                raise UserError(f"{directory}: {name} is not a trainable parameter of this model")
            saved.setdefault(name, {})[entry] = empty_like(parameters[name], stored)
        entries = {f"{name}/{entry}": tensor for name, each in saved.items() for entry, tensor in each.items()}
        state_files.read_into(state_files.OPTIMIZER, entries, directory)
        for name, tensors in saved.items():
            restore_state(self.optimizer, parameters[name], tensors)


def empty_like(parameter: nn.Parameter, stored: state_files.Stored) -> Tensor:
    """A tensor for an entry of a parameter's optimizer state: sharded as the parameter where it has its shape."""
    if stored.shape == parameter.shape:
        return torch.empty_like(parameter.detach(), dtype=stored.dtype)
    return torch.empty(stored.shape, dtype=stored.dtype, device=parameter.device)


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
    if all(math.isfinite(number) for number in (*numbers[:num_losses], grad_norm)):
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

    Args:
        keep_casts: whether the bfloat16 copy of a trained weight is kept until the context ends, for its next use. Where
            weights are sharded, the copies of all blocks together would take what sharding saves.
    """
    if precision == "fp32":
        return nullcontext
    if precision != "bf16":
        raise ValueError(f"precision must be fp32 or bf16, got {precision!r}")
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=keep_casts)


def autocast_forward(model: nn.Module, device: torch.device, precision: str, *, keep_casts: bool = True) -> nn.Module:
    """Run every call of `model` under autocast, as `autocast_context`. The model is changed in place and returned."""
    if precision == "fp32":
        return model
    forward, autocast = model.forward, autocast_context(device, precision, keep_casts=keep_casts)

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with autocast():
            return forward(*args, **kwargs)

    model.forward = cast
    return model

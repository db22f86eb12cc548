"""FSDP2: torch's fully_shard, one shard group per block. Checkpoints hold whole tensors, for any number of ranks."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from alignment.training.backends import state_files
from alignment.training.backends.base import autocast_context, autocast_forward, checked_step, names_without_gradient
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer, restore_state, saved_state


class FSDP2Backend:
    """Weights, gradients and optimizer state sharded over ranks; a block's weights are gathered while it runs."""

    collective_forward = True

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group, self.config = process_group, config
        self.model = self.unwrapped = autocast_forward(model.to(process_group.device), process_group.device, precision)
        self.autocast = autocast_context(process_group.device, precision)
        self._reshard_after_forward = reshard_after_forward()
        shard_model(model, process_group, self._reshard_after_forward)
        self.optimizer = build_optimizer(model, config)
        self._missing: list[str] | None = None

    def backward(self, loss: Tensor, last: bool) -> None:
        # FSDP2 averages over ranks; every backward reduces, so that a rank never holds more than its shard of gradients.
        (loss * self.process_group.size).backward()

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        if self._missing is None:
            self._missing = names_without_gradient(self.unwrapped)
        return checked_step(self.optimizer, self.config.max_grad_norm, learning_rate, values, num_losses)

    def without_gradient(self) -> list[str]:
        return self._missing or []

    def full_state(self) -> dict[str, Tensor]:
        return self._on_rank_0(self.unwrapped.state_dict().items())

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        root: Any = self.unwrapped
        modules = [module for module in root.modules() if hasattr(module, "unshard")]
        # FSDP2 makes the first module that runs its root. It must be the whole model, even if only parts of it run.
        root._get_fsdp_state()._lazy_init()
        root.set_reshard_after_forward(False)  # otherwise a block is sharded again after its first forward
        for module in modules:
            module.unshard()
        try:
            with self.autocast():
                yield
        finally:
            root.set_reshard_after_forward(self._reshard_after_forward)
            root.set_reshard_after_forward(False, recurse=False)  # its backward follows at once and needs whole weights
            for module in modules:
                module.reshard()

    def save(self, directory: Path) -> None:
        names = set(state_files.kept_names(self.unwrapped))
        weights = self._on_rank_0((name, value) for name, value in self.unwrapped.state_dict().items() if name in names)
        state = self._on_rank_0(
            (f"{name}/{key}", value)
            for name, parameter in self.unwrapped.named_parameters()
            if parameter.requires_grad
            for key, value in saved_state(self.optimizer, parameter).items()
        )
        if self.process_group.is_main:
            state_files.save_weights(self.unwrapped, weights, directory)
            state_files.save_optimizer(state, directory)

    def load(self, directory: Path) -> None:
        tensors = dict(self.unwrapped.named_parameters()) | dict(self.unwrapped.named_buffers())
        with torch.no_grad():
            for name, tensor in state_files.read_weights(self.unwrapped, directory).items():
                tensors[name].copy_(shard_like(tensor, tensors[name]))
        state = state_files.read_optimizer(self.unwrapped, directory)
        for name, parameter in self.unwrapped.named_parameters():
            if name in state:
                restore_state(self.optimizer, parameter, state[name], partial(shard_like, like=parameter))

    def _on_rank_0(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Whole tensors on rank 0's CPU, gathered one at a time: together they might not fit on one device."""
        state: dict[str, Tensor] = {}
        for name, value in tensors:
            tensor = full_tensor(value)
            if self.process_group.is_main:
                state[name] = tensor.cpu().contiguous()
        return state


def reshard_after_forward() -> bool:
    """Whether a block's weights are sharded again after its forward (`fsdp_reshard_after_forward`, true by default)."""
    return os.environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower() == "true"


def shard_model(model: nn.Module, process_group: ProcessGroup, reshard_after_forward: bool = True) -> None:
    """Shard each block (a child of a ModuleList) by itself, then the rest; all ranks start with rank 0's weights."""
    from torch.distributed import broadcast
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(process_group.device.type, (process_group.size,))
    for module in reversed(list(model.modules())):  # from the inside out, as fully_shard requires
        if isinstance(module, nn.ModuleList):
            for block in module:
                if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # those are never called
                    fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh)


def full_tensor(value: Tensor) -> Tensor:
    """The whole tensor; a collective operation if it is sharded."""
    value = value.detach()
    return value.full_tensor() if isinstance(value, DTensor) else value


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a whole tensor, sharded like `like`."""
    if not isinstance(like, DTensor):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

"""FSDP2: torch's fully_shard, one shard group per block. Checkpoints hold whole tensors, for any number of ranks."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from alignment.training.backends import state_files
from alignment.training.backends.base import autocast_context, autocast_forward, checked_step, names_without_gradient
from alignment.training.backends.whole_weights import computing_types, whole_bytes, whole_parameters
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer, restore_state, saved_state

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FSDP2Backend:
    """Weights, gradients and optimizer state sharded over ranks; a block's weights are gathered while it runs."""

    collective_forward = True

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group, self.config = process_group, config
        self.model = self.unwrapped = autocast_forward(model.to(process_group.device), process_group.device, precision)
        self.autocast, self._precision = autocast_context(process_group.device, precision), precision
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
        modules = fsdp_modules(self.unwrapped)
        for module in modules:
            module.reshard()
        with (
            whole_parameters(self.unwrapped, self._computing_types(), self._all_gather),
            without_gathering(modules),
            self.autocast(),
        ):
            yield

    def whole_bytes(self) -> int:
        return whole_bytes(self._computing_types(), lambda parameter: isinstance(parameter, DTensor))

    @contextmanager
    def sharded_decoding(self) -> Iterator[None]:
        from torch.distributed.fsdp import register_fsdp_forward_method

        root: Any = fsdp_modules(self.unwrapped)[0]
        root.unshard()  # the root's own weights: FSDP2 would keep them after the first forward anyhow
        root.set_reshard_after_forward(True)
        root.set_reshard_after_forward(False, recurse=False)
        for name in ("prefill", "decode"):
            register_fsdp_forward_method(root, name)
        try:
            with self.autocast():
                yield
        finally:
            for name in ("prefill", "decode"):
                delattr(root, name)  # the wrapper on the instance; the method of the class is back
            root.set_reshard_after_forward(self._reshard_after_forward)
            root.set_reshard_after_forward(False, recurse=False)  # its backward follows at once and needs whole weights
            root.reshard()

    def _computing_types(self) -> dict[nn.Parameter, torch.dtype]:
        """The type of each parameter's whole copy; where FSDP2 gathers in another type than it stores, that one."""
        types = computing_types(self.unwrapped, self._precision)
        for module in fsdp_modules(self.unwrapped):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for managed in group.fsdp_params:
                    if managed.param_dtype is not None:
                        types[managed.sharded_param] = managed.param_dtype
        return types

    def _all_gather(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        if not isinstance(parameter, DTensor):
            return None
        with torch.no_grad():
            return full_tensor(parameter.to(self.process_group.device, dtype))

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


def fsdp_modules(model: nn.Module) -> "list[FSDPModule]":
    """The modules whose weights are sharded together, the whole model first. FSDP2 makes it the root of the others."""
    from torch.distributed.fsdp import FSDPModule

    root: Any = model
    # FSDP2 makes the first module that runs its root. It must be the whole model, even if only parts of it run.
    root._get_fsdp_state()._lazy_init()
    return [module for module in root.modules() if isinstance(module, FSDPModule)]


@contextmanager
def without_gathering(modules: "list[FSDPModule]") -> Iterator[None]:
    """While open, these modules' forwards gather and shard nothing; casts of their inputs and outputs go on."""
    states = [module._get_fsdp_state() for module in modules]
    groups = [state._fsdp_param_groups for state in states]
    for state in states:
        state._fsdp_param_groups = []
    try:
        yield
    finally:
        for state, own in zip(states, groups, strict=True):
            state._fsdp_param_groups = own


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

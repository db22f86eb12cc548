"""FSDP2: torch's fully_shard, one shard group per block. Checkpoints are gathered, so they load in any world."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alignment.training import state_files
from alignment.training.backend import autocast_context, autocast_forward, checked_step, names_without_gradient
from alignment.training.optim import OptimConfig, build_optimizer
from alignment.training.world import World


class Sharded:
    """Weights, gradients and optimiser state split over ranks; a block's weights come together while it runs."""

    in_step = True

    def __init__(self, model: nn.Module, config: OptimConfig, world: World, precision: str):
        self.world, self.config = world, config
        self.model = self.unwrapped = autocast_forward(model.to(world.device), world.device, precision)
        self.autocast = autocast_context(world.device, precision)
        shard(model, world)
        self.optimizer = build_optimizer(model, config)
        self._missing: list[str] | None = None

    def backward(self, loss: Tensor, last: bool) -> None:
        # FSDP2 averages over ranks; every backward reduces, so that only a shard of the gradients is ever kept.
        (loss * self.world.size).backward()

    def step(self, learning_rate: float, values: Tensor, guarded: int) -> tuple[list[float], float]:
        if self._missing is None:
            self._missing = names_without_gradient(self.unwrapped)
        return checked_step(self.optimizer, self.config.max_grad_norm, learning_rate, values, guarded)

    def without_gradient(self) -> list[str]:
        return self._missing or []

    def full_state(self) -> dict[str, Tensor]:
        return self._on_rank_0({name: whole(value) for name, value in self.unwrapped.state_dict().items()})

    @contextmanager
    def gathered(self) -> Iterator[None]:
        modules = [module for module in self.unwrapped.modules() if hasattr(module, "unshard")]
        for module in modules:
            module.unshard()  # pyright: ignore[reportCallIssue]
        try:
            with self.autocast():
                yield
        finally:
            for module in modules:
                module.reshard()  # pyright: ignore[reportCallIssue]

    def save(self, directory: Path) -> None:
        weights = self.full_state()
        state = {
            f"{name}/{key}": whole(value)
            for name, parameter in self.unwrapped.named_parameters()
            if parameter.requires_grad
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }
        state = self._on_rank_0(state)
        if self.world.rank == 0:
            state_files.save_weights(self.unwrapped, weights, directory)
            state_files.save_optimizer(state, directory)

    def load(self, directory: Path) -> None:
        here = dict(self.unwrapped.named_parameters()) | dict(self.unwrapped.named_buffers())
        with torch.no_grad():
            for name, tensor in state_files.read_weights(self.unwrapped, directory).items():
                here[name].copy_(split_like(tensor, here[name]))
        state = state_files.read_optimizer(self.unwrapped, directory)
        for name, parameter in self.unwrapped.named_parameters():
            if name in state:
                self.optimizer.state[parameter] = {
                    key: split_like(tensor, parameter) if tensor.ndim else tensor.to(self.world.device)
                    for key, tensor in state[name].items()
                }

    def _on_rank_0(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.cpu().contiguous() for name, value in state.items()} if self.world.rank == 0 else {}


def shard(model: nn.Module, world: World) -> None:
    """Shard each block (a child of a ModuleList) by itself, then the rest; all ranks start from rank 0's weights."""
    from torch.distributed import broadcast
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    for tensor in [*model.parameters(), *model.buffers()]:
        broadcast(tensor.detach(), src=0)
    mesh = init_device_mesh(world.device.type, (world.size,))
    for module in reversed(list(model.modules())):  # from the inside out, as fully_shard wants it
        if isinstance(module, nn.ModuleList):
            for block in module:
                if not isinstance(block, nn.ModuleList | nn.ModuleDict):  # those are never called
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(value: Any) -> Tensor:
    """A tensor with all its shards; a collective operation where it is sharded."""
    value = value.detach()
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def split_like(tensor: Tensor, like: Any) -> Tensor:
    """This rank's part of a whole tensor, laid out as `like` is."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(like, "device_mesh"):
        return tensor.to(like.device)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)

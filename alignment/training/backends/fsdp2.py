"""FSDP2: torch's fully_shard, one shard group per block. Each rank writes its shards, for any number of ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alignment.training.backends import state_files
from alignment.training.backends.base import autocast_context, autocast_forward, checked_step, names_without_gradient
from alignment.training.backends.sharding import full_tensor, is_first_copy, local_rows, shard_like, shard_model
from alignment.training.backends.whole_weights import computing_types, whole_bytes, whole_parameters
from alignment.training.distributed import ProcessGroup, fsdp_settings
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer, restore_state

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FSDP2Backend:
    """Weights, gradients and optimizer state sharded over ranks; a block's weights are gathered while it runs."""

    collective_forward = True

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group, self.config = process_group, config
        device = process_group.device
        self.model = self.unwrapped = autocast_forward(model, device, precision, keep_casts=False)
        self.autocast, self._precision = autocast_context(device, precision, keep_casts=False), precision
        settings = fsdp_settings()
        self._reshard_after_forward = settings.reshard_after_forward
        shard_model(model, process_group, settings, precision)
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

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        state = self.unwrapped.state_dict()
        for name in names:
            tensor = full_tensor(state[name])
            if self.process_group.is_main:
                yield name, tensor.cpu()

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

    def trained_weights(self) -> dict[str, Tensor]:
        for module in fsdp_modules(self.unwrapped):  # the root's weights may still be whole after a forward
            module.reshard()
        trained = state_files.whole_trained_weights(self.unwrapped)
        return {name: weight.to_local() if isinstance(weight, DTensor) else weight for name, weight in trained.items()}

    def save_like_weights(self, kind: str, tensors: dict[str, Tensor], directory: Path) -> None:
        rows = {
            name: state_files.Rows(tensors[name], local_rows(weight)[0], weight.shape[0] if weight.ndim else 1)
            for name, weight in self._sharded_weights(tensors).items()
            if is_first_copy(weight)
        }
        state_files.write_rows(kind, rows, self.process_group.rank, directory)

    def load_like_weights(self, kind: str, tensors: dict[str, Tensor], directory: Path) -> None:
        files, weights = state_files.StateFiles(kind, directory), self._sharded_weights(tensors)
        files.check({name: weight.shape for name, weight in weights.items()})
        for name, weight in weights.items():
            tensors[name].copy_(files.rows(name, *local_rows(weight)))

    def _sharded_weights(self, names: Iterable[str]) -> dict[str, Tensor]:
        """The parameters of these names as DTensors, where they are sharded."""
        self.trained_weights()
        parameters = dict(self.unwrapped.named_parameters())
        return {name: parameters[name].detach() for name in names}

    def save(self, directory: Path) -> None:
        state = self.unwrapped.state_dict()
        kept = {name: state[name] for name in state_files.kept_names(self.unwrapped)}
        rank, weights = self.process_group.rank, held_rows(kept)
        bad = state_files.not_finite({name: rows.values for name, rows in weights.items()})
        state_files.refuse_not_finite([name for names in self.process_group.gather_objects(bad) for name in names])
        state_files.write_rows(state_files.WEIGHTS, weights, rank, directory)
        tensors = state_files.optimizer_tensors(self.unwrapped, self.optimizer)
        state_files.write_rows(state_files.OPTIMIZER, held_rows(tensors), rank, directory)

    def load(self, directory: Path) -> None:
        weights = state_files.StateFiles(state_files.WEIGHTS, directory)
        optimizer = state_files.StateFiles(state_files.OPTIMIZER, directory)
        state, names = self.unwrapped.state_dict(), state_files.kept_names(self.unwrapped)
        weights.check({name: state[name].shape for name in names})
        entries = state_files.optimizer_names(optimizer, self.unwrapped)
        with torch.no_grad():
            for name in names:
                local = state[name].to_local() if isinstance(state[name], DTensor) else state[name]
                local.copy_(weights.rows(name, *local_rows(state[name])))
        for name, parameter in self.unwrapped.named_parameters():
            if name in entries:
                tensors = {entry: self._entry(optimizer, f"{name}/{entry}", parameter) for entry in entries[name]}
                restore_state(self.optimizer, parameter, tensors, lambda tensor: tensor)

    def _entry(self, files: state_files.StateFiles, key: str, parameter: nn.Parameter) -> Tensor:
        """An entry of the optimizer's state: sharded as its parameter where it has its shape, else whole."""
        shape = files.shapes[key]
        if shape != parameter.shape:
            return files.rows(key).to(parameter.device)
        return shard_like(files.rows(key, *local_rows(parameter)), shape, parameter)


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


def held_rows(tensors: Mapping[str, Tensor]) -> dict[str, state_files.Rows]:
    """The rows of each tensor that this rank writes: those it holds, where no rank before it holds the same."""
    return {
        name: state_files.Rows(
            tensor.to_local() if isinstance(tensor, DTensor) else tensor,
            local_rows(tensor)[0],
            tensor.shape[0] if tensor.ndim else 1,
        )
        for name, tensor in tensors.items()
        if is_first_copy(tensor)
    }

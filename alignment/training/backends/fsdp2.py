"""FSDP2: torch's fully_shard, one shard group per block."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from alignment.training.backends.base import Backend, autocast_context, autocast_forward
from alignment.training.backends.sharding import shard_model
from alignment.training.backends.whole_weights import computing_types, whole_bytes, whole_parameters
from alignment.training.distributed import ProcessGroup, fsdp_settings
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


class FSDP2Backend(Backend):
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

    def backward(self, loss: Tensor, last: bool) -> None:
        # FSDP2 averages over ranks; every backward reduces, so that a rank never holds more than its shard of gradients.
        (loss * self.process_group.size).backward()

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
            copy: Any = parameter.to(self.process_group.device, dtype)
            return copy.full_tensor()

    def trained_weights(self) -> dict[str, Tensor]:
        for module in fsdp_modules(self.unwrapped):  # the root's weights may still be whole after a forward
            module.reshard()
        return super().trained_weights()


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

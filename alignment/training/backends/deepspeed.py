"""DeepSpeed ZeRO 1 to 3, prepared by Accelerate. Checkpoints are in zero.py.

Stage and offloading come from the launch configuration. Precision, clipping and batch sizes are set here, so that a
config trains the same model on every backend.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.training.backends.base import Backend, autocast_context
from alignment.training.backends.whole_weights import (
    blocks_of,
    computing_types,
    outermost,
    whole_bytes,
    whole_parameters,
)
from alignment.training.backends.zero import ZeroState, read_partitions, read_whole
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer, set_learning_rate


class DeepSpeedBackend(Backend):
    """A DeepSpeed engine around the model and its optimizer; several may live in one process."""

    collective_forward = True

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group, self.unwrapped = process_group, model
        self.autocast, self._precision = autocast_context(process_group.device, precision), precision
        self._reached, self._hooks = set(), []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._hooks.append(parameter.register_hook(lambda _, name=name: self._reached.add(name)))
        self._trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        settings = self._configure(config, precision)
        if process_group.accelerator.deepspeed_plugin.zero_stage == 3:
            read_partitions(model, settings, process_group)
        else:
            read_whole(model)
        # Under DeepSpeed Accelerate allows one model per Accelerator; each engine's process group has its own.
        self.model: Any = process_group.accelerator.prepare(model, build_optimizer(model, config))[0]

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks. Accelerate's own `backward` is avoided, because it also steps.
        self.model.backward(loss * self.process_group.size)

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        numbers = values.tolist()
        if not all(math.isfinite(number) for number in numbers[:num_losses]):
            return numbers, math.nan
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        set_learning_rate(self.model.optimizer, learning_rate)
        self.model.step()
        # If a gradient is not finite, DeepSpeed skips the step and reports this afterwards.
        return numbers, float(self.model.get_global_grad_norm()) if self.model.was_step_applied() else math.nan

    def without_gradient(self) -> list[str]:
        return [name for name in self._trainable if name not in self._reached]

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        state = self.unwrapped.state_dict(keep_vars=True)
        for name in names:
            with self._full_tensors([state[name]]):  # one at a time: together they might not fit on one device
                tensor = state[name].detach().cpu().clone() if self.process_group.is_main else None
            if tensor is not None:
                assert tensor.numel() > 0, f"{name} came out empty: ZeRO-3 did not gather it"
                yield name, tensor

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        types = computing_types(self.unwrapped, self._precision)
        with whole_parameters(self.unwrapped, types, self._all_gather), self._without_module_hooks(), self.autocast():
            yield

    def whole_bytes(self) -> int:
        return whole_bytes(computing_types(self.unwrapped, self._precision), is_partitioned)

    @contextmanager
    def sharded_decoding(self) -> Iterator[None]:
        # ZeRO-3's own hooks follow the order of modules in a training step, from which decoding deviates.
        blocks = outermost(blocks_of(self.unwrapped))
        inside = {parameter for block in blocks for parameter in block.parameters()}
        rest = [parameter for parameter in self.unwrapped.parameters() if parameter not in inside]
        with (
            self._without_module_hooks(),
            self._full_tensors(rest),
            around_forwards(blocks, lambda block: self._full_tensors(list(block.parameters()))),
            autocast_context(self.process_group.device, self._precision, keep_casts=False)(),
        ):
            yield

    def _all_gather(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        """The whole tensor of a partitioned parameter: the ranks' equal parts of it laid end to end, and padding."""
        if not is_partitioned(parameter):
            return None
        partitioned: Any = parameter
        part = partitioned.ds_tensor.detach().to(self.process_group.device, dtype)
        flat = torch.empty(part.numel() * self.process_group.size, dtype=dtype, device=part.device)
        dist.all_gather_into_tensor(flat, part)
        return flat[: partitioned.ds_numel].view(partitioned.ds_shape)

    def trained_weights(self) -> dict[str, Tensor]:
        if any(is_partitioned(parameter) for parameter in self.unwrapped.parameters()):
            raise UserError(
                "training.ema_decay: ZeRO-3 divides the weights into parts that only its own optimizer may write; leave it "
                "out, or launch with FSDP2 or ZeRO-2 (configs/launch/fsdp2.yaml, configs/launch/zero2.yaml)"
            )
        return super().trained_weights()

    def save(self, directory: Path) -> None:
        ZeroState(self.unwrapped, self.model.optimizer, self.process_group).save(directory)

    def load(self, directory: Path) -> None:
        ZeroState(self.unwrapped, self.model.optimizer, self.process_group).load(directory)

    @contextmanager
    def _full_tensors(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """While open, these tensors are whole on every rank. Below stage 3, and if they are buffers, they always are."""
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor for tensor in tensors if hasattr(tensor, "ds_id")]):
            yield

    @contextmanager
    def _without_module_hooks(self) -> Iterator[None]:
        """While open, ZeRO-3's hooks are off: they partition weights after each forward, and compare ranks in it."""
        offload = getattr(self.model.optimizer, "parameter_offload", None)
        if offload is None:  # below stage 3
            yield
            return
        for hook in (*offload.forward_hooks, *offload.backward_hooks, offload.fwd_pre_hook):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        try:
            yield
        finally:
            offload.fwd_pre_hook = offload.module.register_forward_pre_hook(
                lambda *_: offload.get_param_coordinator().reset_step()
            )
            offload._register_deepspeed_module(offload.module)

    def _configure(self, config: OptimConfig, precision: str) -> dict[str, Any]:
        """Complete DeepSpeed's settings and return them."""
        plugin = self.process_group.accelerator.deepspeed_plugin
        if plugin.zero_stage == 0:
            raise UserError("launch configuration: zero_stage 0 is plain data parallelism; use configs/launch/ddp.yaml")
        settings = plugin.deepspeed_config
        settings["train_micro_batch_size_per_gpu"] = 1  # used for its logs only
        settings["train_batch_size"] = self.process_group.size
        settings["gradient_accumulation_steps"] = 1
        settings["gradient_clipping"] = config.max_grad_norm
        # DeepSpeed knows Adam by name and asks for consent to others; `check_optimizer` lets elementwise ones through.
        settings["zero_allow_untested_optimizer"] = config.name != "adamw"
        settings["bf16"], settings["fp16"] = {"enabled": False}, {"enabled": False}
        settings["torch_autocast"] = {
            "enabled": precision == "bf16",
            "dtype": "bfloat16",
            # With its default list ZeRO-3 leaves gathered weights rounded to bfloat16, which checkpoints would contain.
            "lower_precision_safe_modules": [],
        }
        return settings


def is_partitioned(parameter: nn.Parameter) -> bool:
    """True where ZeRO-3 has divided this parameter among the ranks."""
    return hasattr(parameter, "ds_id")


@contextmanager
def around_forwards(
    modules: list[nn.Module], context: Callable[[nn.Module], AbstractContextManager[None]]
) -> Iterator[None]:
    """While open, each forward of these modules, which do not contain each other, runs within its `context`."""
    opened: list[ExitStack] = []

    def before(module: nn.Module, _: object) -> None:
        opened.append(ExitStack())
        opened[-1].enter_context(context(module))

    def after(*_: object) -> None:
        opened.pop().close()

    hooks = [module.register_forward_pre_hook(before) for module in modules]
    hooks += [module.register_forward_hook(after, always_call=True) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

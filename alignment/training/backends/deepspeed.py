"""DeepSpeed ZeRO 1 to 3, prepared by Accelerate: its steps, how each rank reads its part of a model, and checkpoints.

Stage and offloading come from the launch configuration. Precision, clipping and batch sizes are set here, so that a
config trains the same model on every backend. Checkpoints are safetensors of each rank's flat float32 vectors, which
hold its parts of many parameters, and of their optimizer state; they go on with the same number of processes and stage
of ZeRO only.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.files import sync
from alignment.training.backends import state_files
from alignment.training.backends.base import (
    Backend,
    RowSource,
    autocast_context,
    blocks_of,
    check_finite,
    computing_types,
    outermost,
    whole_bytes,
    whole_parameters,
)
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import (
    OptimConfig,
    build_optimizer,
    restore_state,
    saved_state,
    set_learning_rate,
    trainable_parameters,
)


class DeepSpeedBackend(Backend):
    """A DeepSpeed engine around the model and its optimizer; several may live in one process."""

    collective_forward = True

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group = process_group
        self.unwrapped = model
        self.autocast = autocast_context(process_group.device, precision)
        self._precision = precision
        trainable = trainable_parameters(model)
        self._missing = list(trainable)
        self._reached: set[str] = set()
        self._hooks = [
            parameter.register_hook(lambda _, name=name: self._reached.add(name))
            for name, parameter in trainable.items()
        ]
        settings = self._configure(config, precision)
        if process_group.accelerator.deepspeed_plugin.zero_stage == 3:
            _read_partitions(model, settings, process_group)
        else:
            for parameter, stored in _unread(model):
                parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(stored.rows())
        # Under DeepSpeed Accelerate allows one model per Accelerator; each engine's process group has its own.
        self.model: Any = process_group.accelerator.prepare(model, build_optimizer(model, config))[0]

    def backward(self, loss: Tensor, last: bool) -> None:
        self.model.set_gradient_accumulation_boundary(last)
        # DeepSpeed averages over ranks. Accelerate's own `backward` is avoided, because it also steps.
        self.model.backward(loss * self.process_group.size)

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        numbers = values.tolist()
        if not all(math.isfinite(value) for value in numbers[:num_losses]):
            return numbers, math.nan
        while self._hooks:
            self._hooks.pop().remove()
        set_learning_rate(self.model.optimizer, learning_rate)
        self.model.step()
        # If a gradient is not finite, DeepSpeed skips the step and reports this afterwards.
        return numbers, float(self.model.get_global_grad_norm()) if self.model.was_step_applied() else math.nan

    def without_gradient(self) -> list[str]:
        return [name for name in self._missing or [] if name not in self._reached]

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
        return whole_bytes(computing_types(self.unwrapped, self._precision), _is_partitioned)

    @contextmanager
    def sharded_decoding(self) -> Iterator[None]:
        # ZeRO-3's own hooks follow the order of modules in a training step, from which decoding deviates.
        blocks = outermost(blocks_of(self.unwrapped))
        inside = {parameter for block in blocks for parameter in block.parameters()}
        rest = [parameter for parameter in self.unwrapped.parameters() if parameter not in inside]
        with (
            self._without_module_hooks(),
            self._full_tensors(rest),
            _around_forwards(blocks, lambda block: self._full_tensors(list(block.parameters()))),
            autocast_context(self.process_group.device, self._precision, keep_casts=False)(),
        ):
            yield

    def _all_gather(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor | None:
        """The whole tensor of a partitioned parameter: the ranks' equal parts of it laid end to end, and padding."""
        if not _is_partitioned(parameter):
            return None
        partitioned: Any = parameter
        part = partitioned.ds_tensor.detach().to(self.process_group.device, dtype)
        flat = torch.empty(part.numel() * self.process_group.size, dtype=dtype, device=part.device)
        dist.all_gather_into_tensor(flat, part)
        return flat[: partitioned.ds_numel].view(partitioned.ds_shape)

    def trained_weights(self) -> dict[str, Tensor]:
        if any(_is_partitioned(parameter) for parameter in self.unwrapped.parameters()):
            raise UserError(
                "training.ema_decay: ZeRO-3 divides the weights into parts that only its own optimizer may write; "
                "leave it out, or launch with FSDP2 or ZeRO-2 (configs/launch/fsdp2.yaml, configs/launch/zero2.yaml)"
            )
        return super().trained_weights()

    @property
    def _masters(self) -> list[Tensor]:
        """This rank's vectors of float32 weights."""
        zero = self.model.optimizer
        return zero.fp32_partitioned_groups_flat if self._stage3 else zero.single_partition_of_fp32_groups

    @property
    def _stage3(self) -> bool:
        return hasattr(self.model.optimizer, "fp32_partitioned_groups_flat")

    @property
    def _layout(self) -> dict[str, str]:
        size = self.process_group.size
        stage = "3" if self._stage3 else "1 or 2"
        return {"layout": f"{size} process{'es' if size > 1 else ''} under ZeRO-{stage}"}

    def _buffers(self) -> dict[str, Tensor]:
        """The saved buffers, which are whole on every rank."""
        saved = set(self.unwrapped.state_dict())
        return {f"buffer/{name}": buffer for name, buffer in self.unwrapped.named_buffers() if name in saved}

    def _path(self, directory: Path) -> Path:
        return directory / f"zero-rank-{self.process_group.rank:05d}.safetensors"

    def save(self, directory: Path) -> None:
        weights = {str(index): master for index, master in enumerate(self._masters)} | self._buffers()
        if any(self.process_group.gather_objects(bool(state_files.not_finite(weights)))):
            raise FloatingPointError("weights are not finite; the checkpoint is not written")
        state = {
            f"{index}/{entry}": value
            for index, master in enumerate(self._masters)
            for entry, value in saved_state(self.model.optimizer.optimizer, master).items()
        }
        state_files.write_file(weights | state, self._path(directory), self._layout)
        sync(self._path(directory))  # rank 0, which syncs all files, may run on another machine

    def load(self, directory: Path) -> None:
        path = self._path(directory)
        saved = None
        tensors: dict[str, Tensor] = {}
        if path.is_file():
            with safe_open(path, framework="pt") as file:
                saved = file.metadata()
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if saved != self._layout:
            was = saved["layout"] if saved else "another kind of launch"
            raise UserError(
                f"{path}: this checkpoint was saved by {was}, and now there are {self._layout['layout']}; resume with "
                "the launch configuration that saved it"
            )
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(tensors[name])
            for index, master in enumerate(self._masters):
                master.copy_(tensors[str(index)])
        self._refresh_weights()
        for index, master in enumerate(self._masters):
            state = {key.split("/", 1)[1]: x for key, x in tensors.items() if key.startswith(f"{index}/")}
            on_device = {key: x.to(master.device) for key, x in state.items()}
            restore_state(self.model.optimizer.optimizer, master, on_device)

    @torch.no_grad()
    def _refresh_weights(self) -> None:
        """Give the weights that the model computes with the values of the vectors."""
        zero = self.model.optimizer
        if not self._stage3:
            for flat, master in zip(zero.bit16_groups_flat, self._masters, strict=True):
                dist.all_gather_into_tensor(flat, master.detach().to(flat.device))
            return
        for sub_group_id in range(len(self._masters)):
            zero._reassign_or_swap_out_partitioned_parameters(sub_group_id)
        persistent = zero.persistent_parameters  # small parameters that are whole: they are gathered again
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    @contextmanager
    def _full_tensors(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """While open, these tensors are whole on every rank. Below stage 3, and as buffers, they always are."""
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
        offload.forward_hooks = []
        offload.backward_hooks = []
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
        settings["bf16"] = {"enabled": False}
        settings["fp16"] = {"enabled": False}
        settings["torch_autocast"] = {
            "enabled": precision == "bf16",
            "dtype": "bfloat16",
            # With its default list ZeRO-3 leaves gathered weights rounded to bfloat16, which checkpoints would contain.
            "lower_precision_safe_modules": [],
        }
        return settings


def _is_partitioned(parameter: nn.Parameter) -> bool:
    """True where ZeRO-3 has divided this parameter among the ranks."""
    return hasattr(parameter, "ds_id")


@contextmanager
def _around_forwards(
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


@torch.no_grad()
def _read_partitions(model: nn.Module, settings: dict[str, object], process_group: ProcessGroup) -> None:
    """Divide a model's unread parameters among ranks, as `deepspeed.zero.Init`, and read this rank's part of each."""
    import deepspeed

    waiting = _unread(model)
    if not waiting:
        return
    init: Any = deepspeed.zero.Init(config_dict_or_path=settings, dtype=torch.float32, mem_efficient_linear=False)
    for parameter, stored in waiting:
        # Memory that is not written to is not taken from the machine; a GPU gives it back with the next parameter.
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=process_group.device)
        init._convert_to_deepspeed_param(parameter)
        partitioned: Any = parameter
        partitioned.partition()
        part = partitioned.ds_tensor
        first = part.ds_numel * process_group.rank
        count = min(part.ds_numel, partitioned.ds_numel - first)
        if count > 0:
            part.narrow(0, 0, count).copy_(_elements(stored.rows, partitioned.ds_shape, first, first + count))
        part.narrow(0, max(count, 0), part.ds_numel - max(count, 0)).zero_()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(process_group.device)


def _unread(model: nn.Module) -> list[tuple[nn.Parameter, RowSource]]:
    """The parameters that have not been read, each once, with the place of their data, which they no longer name."""
    check_finite(model)
    unread: list[tuple[nn.Parameter, RowSource]] = []
    for parameter in model.parameters():
        stored = getattr(parameter, "stored", None)
        if stored is not None:
            del parameter.stored  # pyright: ignore[reportAttributeAccessIssue]
            unread.append((parameter, stored))
    return unread


def _elements(rows: Callable[[int, int], Tensor], shape: torch.Size, first: int, last: int) -> Tensor:
    """Elements `first` to `last` of a flattened tensor of a shape; `rows(start, stop)` reads these rows alone."""
    width = math.prod(shape[1:])  # elements of a row; a tensor without dimensions is one row
    start = first // width
    stop = -(-last // width)
    return rows(start, stop).reshape(-1)[first - start * width : last - start * width]

"""Weights under DeepSpeed's ZeRO: how each rank reads its part of a model, and the files of its checkpoints.

Unread weights are divided as by `deepspeed.zero.Init`, before they have values, and never whole on any rank. DeepSpeed
itself divides what has been read or drawn (adapters, new heads), with rank 0's values.
Checkpoints are safetensors of each rank's flat float32 vectors, which hold its parts of many parameters, and of their
optimizer state. They go on with the same number of processes and the same stage of ZeRO only.
"""

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.files import sync
from alignment.training.backends import state_files
from alignment.training.backends.sharding import RowSource, check_finite
from alignment.training.distributed import ProcessGroup
from alignment.training.optimizers import restore_state, saved_state


@torch.no_grad()
def read_whole(model: nn.Module) -> None:
    """Read the unread parameters of a model, whole on every rank, for stages 1 and 2 of ZeRO."""
    for parameter, stored in unread(model):
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(stored.rows())


@torch.no_grad()
def read_partitions(model: nn.Module, settings: dict[str, object], process_group: ProcessGroup) -> None:
    """Divide the unread parameters of a model among the ranks and read this rank's part of each, for stage 3.

    Args:
        model: changed in place; buffers are moved to the process's device, as DeepSpeed then leaves them where they are.
        settings: DeepSpeed's, with batch sizes.
        process_group: the ranks.
    """
    import deepspeed

    waiting = unread(model)
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
            part.narrow(0, 0, count).copy_(elements(stored.rows, partitioned.ds_shape, first, first + count))
        part.narrow(0, max(count, 0), part.ds_numel - max(count, 0)).zero_()
    for buffer in model.buffers():
        buffer.data = buffer.data.to(process_group.device)


def unread(model: nn.Module) -> list[tuple[nn.Parameter, RowSource]]:
    """The parameters that have not been read, each once, with the place of their data, which they no longer name.

    Raises:
        UserError: another parameter is not a number.
    """
    check_finite(model)
    found: list[tuple[nn.Parameter, RowSource]] = []
    for parameter in model.parameters():
        stored = getattr(parameter, "stored", None)
        if stored is not None:
            del parameter.stored  # pyright: ignore[reportAttributeAccessIssue]
            found.append((parameter, stored))
    return found


def elements(rows: Callable[[int, int], Tensor], shape: torch.Size, first: int, last: int) -> Tensor:
    """Elements `first` to `last` of a flattened tensor.

    Args:
        rows: (start, stop) -> these rows of the tensor, which alone are read.
        shape: of the tensor.
    """
    width = prod(shape[1:])  # elements of a row; a tensor without dimensions is one row
    start, stop = first // width, -(-last // width)
    return rows(start, stop).reshape(-1)[first - start * width : last - start * width]


class ZeroState:
    """Float32 weights and optimizer state of the trainable parameters of a DeepSpeed engine.

    Attributes:
        masters: the vectors of float32 weights of this rank.
    """

    def __init__(self, model: nn.Module, zero: object, process_group: ProcessGroup):
        """Find the vectors.

        Args:
            model: as it was given to DeepSpeed.
            zero: the engine's optimizer, of any stage of ZeRO.
            process_group: the engine's.
        """
        self.model, self.process_group = model, process_group
        self.zero: Any = zero
        self.stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        vectors = "fp32_partitioned_groups_flat" if self.stage3 else "single_partition_of_fp32_groups"
        self.masters: list[Any] = getattr(zero, vectors)
        size = process_group.size
        self._layout = {
            "layout": f"{size} process{'es' if size > 1 else ''} under ZeRO-{3 if self.stage3 else '1 or 2'}"
        }

    def save(self, directory: Path) -> None:
        """Write this rank's vectors; a collective operation.

        Raises:
            FloatingPointError: a weight is not finite.
        """
        weights = {str(number): master for number, master in enumerate(self.masters)} | self._buffers()
        bad = self.process_group.gather_objects(bool(state_files.not_finite(weights)))
        if any(bad):
            raise FloatingPointError("weights are not finite; the checkpoint is not written")
        state = {
            f"{number}/{entry}": value
            for number, master in enumerate(self.masters)
            for entry, value in saved_state(self.zero.optimizer, master).items()
        }
        state_files.write_file(weights | state, self._path(directory), self._layout)
        sync(self._path(directory))  # rank 0, which syncs all files, may run on another machine

    def load(self, directory: Path) -> None:
        """Read back what `save` wrote; a collective operation.

        Raises:
            UserError: the files are missing, or of another number of processes or stage of ZeRO.
        """
        path = self._path(directory)
        if not path.is_file():
            raise UserError(
                f"{path} is missing: this checkpoint was not saved by {self._layout['layout']}; resume with the launch "
                "configuration that saved it"
            )
        with safe_open(path, framework="pt") as file:
            layout, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if layout != self._layout:
            raise UserError(
                f"{path} was saved by {layout.get('layout')}, and now there are {self._layout['layout']}; resume with the "
                "launch configuration that saved it"
            )
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                buffer.copy_(tensors[name])
            for number, master in enumerate(self.masters):
                master.copy_(tensors[str(number)])
        self._refresh_weights()
        for number, master in enumerate(self.masters):
            state = {key.split("/", 1)[1]: x for key, x in tensors.items() if key.startswith(f"{number}/")}
            restore_state(self.zero.optimizer, master, {key: x.to(master.device) for key, x in state.items()})

    @torch.no_grad()
    def _refresh_weights(self) -> None:
        """Give the weights that the model computes with the values of the vectors."""
        if not self.stage3:
            for flat, master in zip(self.zero.bit16_groups_flat, self.masters, strict=True):
                dist.all_gather_into_tensor(flat, master.detach().to(flat.device))
            return
        for number in range(len(self.masters)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        persistent = self.zero.persistent_parameters  # small parameters that are whole: they are gathered again
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    def _buffers(self) -> dict[str, Tensor]:
        """The saved buffers, which are whole on every rank."""
        saved = set(self.model.state_dict())
        return {f"buffer/{name}": buffer for name, buffer in self.model.named_buffers() if name in saved}

    def _path(self, directory: Path) -> Path:
        return directory / f"zero-rank-{self.process_group.rank:05d}.safetensors"

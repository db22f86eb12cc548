"""Checkpoints under DeepSpeed's ZeRO: each rank's flat float32 vectors and their optimizer state, as safetensors.

ZeRO keeps vectors of many parameters, cut into equal parts by rank. They are saved as they lie, and so go on with the same
number of processes and the same stage of ZeRO only.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn

from alignment.errors import UserError
from alignment.files import sync
from alignment.training.backends import state_files
from alignment.training.distributed import ProcessGroup
from alignment.training.optimizers import restore_state, saved_state


class ZeroState:
    """Float32 weights and optimizer state of the trainable parameters of a DeepSpeed engine.

    Attributes:
        masters: the vectors of float32 weights of this rank.
    """

    def __init__(self, model: nn.Module, zero: Any, process_group: ProcessGroup):
        """Find the vectors.

        Args:
            model: as it was given to DeepSpeed.
            zero: the engine's optimizer, of any stage of ZeRO.
            process_group: the engine's.
        """
        self.model, self.zero, self.process_group = model, zero, process_group
        self.stage3 = hasattr(zero, "fp32_partitioned_groups_flat")
        self.masters: list[Any] = (
            zero.fp32_partitioned_groups_flat if self.stage3 else zero.single_partition_of_fp32_groups
        )
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
        self._spread()
        for number, master in enumerate(self.masters):
            state = {key.split("/", 1)[1]: x for key, x in tensors.items() if key.startswith(f"{number}/")}
            restore_state(self.zero.optimizer, master, {key: x.to(master.device) for key, x in state.items()})

    @torch.no_grad()
    def _spread(self) -> None:
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

"""The processes that train together, and the few things they tell each other. What they train is in backend.py."""

import atexit
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from alignment.errors import UserError
from alignment.training.backends.fsdp_settings import check_fsdp_settings

# How long a rank waits for the others in one collective operation. Rank 0 hashes and writes checkpoints while the rest
# wait: hundreds of gigabytes on a slow disk take longer than NCCL's ten minutes. A rank that fails is noticed within
# seconds by other means (ranks.py), so a long wait costs nothing.
TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class ProcessGroup:
    """This process among all. With one process nothing here communicates or waits for a device.

    Attributes:
        kind: one process, replicas (DDP), sharded by FSDP2, or sharded by DeepSpeed ZeRO.
        accelerator: Accelerate's object, which owns the launch protocol.
    """

    kind: str
    rank: int
    size: int
    device: torch.device
    accelerator: Any

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which alone writes files."""
        return self.rank == 0

    def sum(self, values: Tensor) -> Tensor:
        """Sum over ranks, elementwise."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Maximum over ranks, elementwise."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        if self.size == 1:
            return values
        values = values.detach().to(self.device, copy=True)
        dist.all_reduce(values, op=operation)
        return values

    def gather(self, values: list[float]) -> list[list[float]]:
        """The equally long lists of all ranks, in order of rank, on every rank."""
        if self.size == 1:
            return [values]
        mine = torch.tensor(values, dtype=torch.float64, device=self.device)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine)
        return torch.stack(everyone).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """One plain value of every rank, on every rank. Slow; for checkpoints and messages."""
        if self.size == 1:
            return [value]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, value)
        return everyone

    def broadcast_object(self, value: Any) -> Any:
        """Rank 0's plain value, on every rank."""
        return self.gather_objects(value if self.rank == 0 else None)[0]

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier()


def launched_rank() -> int:
    """This process's rank as its launcher set it, before any process group exists."""
    return int(os.environ.get("RANK", "0"))


def launched_size() -> int:
    """Number of processes that the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_distributed() -> ProcessGroup:
    """Join the processes started by `accelerate launch` or `torchrun`; alone where there was no such launch.

    Raises:
        UserError: a launch configuration that we do not support, or DeepSpeed asked for and not installed.
    """
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    fsdp = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if fsdp:
        check_fsdp_settings()
    on_cpu = not torch.cuda.is_available()
    handlers: list[Any] = [InitProcessGroupKwargs(backend=_backend(on_cpu, deepspeed), timeout=TIMEOUT)]
    # Precision is ours to set: computation in bfloat16, weights in float32, the same for every backend.
    accelerator = Accelerator(mixed_precision="no", cpu=on_cpu and not deepspeed, kwargs_handlers=handlers)
    atexit.register(_leave)
    kind = "deepspeed" if deepspeed else "single" if accelerator.num_processes == 1 else "fsdp2" if fsdp else "ddp"
    return ProcessGroup(kind, accelerator.process_index, accelerator.num_processes, accelerator.device, accelerator)


def _leave() -> None:
    """End the process group at exit.

    gloo's threads let go of Python objects a moment after the last operation. One that does so while the interpreter
    is already closing aborts the process and hides its exit code (pytorch/pytorch#179291), so give them that moment.
    """
    if dist.is_initialized():
        gloo = "gloo" in dist.get_backend()
        dist.destroy_process_group()
        time.sleep(0.5 if gloo else 0.0)


def _backend(on_cpu: bool, deepspeed: bool) -> str | None:
    """The transport to ask for by name; None leaves it to Accelerate."""
    from accelerate.utils import is_deepspeed_available

    if deepspeed and not is_deepspeed_available():
        raise UserError("the launch configuration asks for DeepSpeed, which is not installed: pip install deepspeed")
    # Without a device of its own Accelerate takes several DeepSpeed processes for one unless the transport is named.
    return "gloo" if on_cpu and deepspeed else None

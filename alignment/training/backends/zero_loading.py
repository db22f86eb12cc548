"""Models whose weights have not been read, under DeepSpeed: stage 3 reads each rank's part of every parameter alone.

This is `deepspeed.zero.Init` for a model that exists: its parameters are divided before they have values, and never whole
on any rank. DeepSpeed itself divides what has been read or drawn (adapters, new heads), with rank 0's values.
"""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from alignment.training.backends.sharding import RowSource, check_finite
from alignment.training.distributed import ProcessGroup


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

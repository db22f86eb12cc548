"""The whole model on every rank: one process, or data-parallel replicas that sum their gradients."""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignment.training.backends.base import Backend, autocast_context, autocast_forward
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer

BUCKET_ELEMENTS = 32 * 1024 * 1024  # gradients sent at once: 128 MB in float32, past where larger messages go faster


class ReplicatedBackend(Backend):
    """The whole model on every rank: one process, or data-parallel replicas.

    Replicas sum their gradients once, after the last backward, in large buckets. torch's DistributedDataParallel would
    overlap this with the last backward, but requires that every backward uses every parameter and that all ranks run
    equally many backwards; an update of several terms and unequal shards meets neither condition.
    """

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group, self.config = process_group, config
        self.model = self.unwrapped = autocast_forward(model.to(process_group.device), process_group.device, precision)
        self.autocast = autocast_context(process_group.device, precision)
        if process_group.size > 1:  # ranks may have initialized different weights and buffers
            for tensor in [*model.parameters(), *model.buffers()]:
                dist.broadcast(tensor.detach(), src=0)
        self.optimizer = build_optimizer(model, config)

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        self._sum_gradients()
        return super().step(learning_rate, values, num_losses)

    def _sum_gradients(self) -> None:
        if self.process_group.size == 1:
            return
        parameters = [parameter for parameter in self.unwrapped.parameters() if parameter.requires_grad]
        used = torch.tensor(
            [float(parameter.grad is not None) for parameter in parameters], device=self.process_group.device
        )
        # A parameter that no rank used keeps no gradient, as in one process: AdamW then leaves it alone.
        present = [
            parameter for parameter, flag in zip(parameters, self.process_group.max(used).tolist(), strict=True) if flag
        ]
        for parameter in present:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for bucket in buckets([parameter.grad for parameter in present if parameter.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            pieces = flat.split([gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def buckets(tensors: list[Tensor], elements: int = BUCKET_ELEMENTS) -> Iterator[list[Tensor]]:
    """The tensors in order, in groups of at most `elements` elements each; a single larger tensor goes alone."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.numel() > elements:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket

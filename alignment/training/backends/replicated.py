"""The whole model on every rank: one process, or data-parallel replicas that sum their gradients."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from alignment.training.backends import state_files
from alignment.training.backends.base import autocast_context, autocast_forward, checked_step, names_without_gradient
from alignment.training.distributed import ProcessGroup
from alignment.training.optim import OptimConfig
from alignment.training.optimizers import build_optimizer, restore_state

BUCKET_ELEMENTS = 32 * 1024 * 1024  # gradients sent at once: 128 MB in float32, past where larger messages go faster


class ReplicatedBackend:
    """The whole model on every rank: one process, or data-parallel replicas.

    Replicas sum their gradients once, after the last backward, in large buckets. torch's DistributedDataParallel would
    overlap this with the last backward, but requires that every backward uses every parameter and that all ranks run
    equally many backwards; an update of several terms and unequal shards meets neither condition.
    """

    collective_forward = False

    def __init__(self, model: nn.Module, config: OptimConfig, process_group: ProcessGroup, precision: str):
        self.process_group, self.config = process_group, config
        self.model = self.unwrapped = autocast_forward(model.to(process_group.device), process_group.device, precision)
        self.autocast = autocast_context(process_group.device, precision)
        self._broadcast_weights()
        self.optimizer = build_optimizer(model, config)
        self._missing: list[str] | None = None

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def step(self, learning_rate: float, values: Tensor, num_losses: int) -> tuple[list[float], float]:
        self._sum_gradients()
        if self._missing is None:
            self._missing = names_without_gradient(self.unwrapped)
        return checked_step(self.optimizer, self.config.max_grad_norm, learning_rate, values, num_losses)

    def without_gradient(self) -> list[str]:
        return self._missing or []

    def gather(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        if self.process_group.is_main:
            state = self.unwrapped.state_dict()
            yield from ((name, state[name].detach().cpu()) for name in names)

    @contextmanager
    def full_parameters(self) -> Iterator[None]:
        with self.autocast():
            yield

    def whole_bytes(self) -> int:
        return 0

    def sharded_decoding(self) -> AbstractContextManager[None]:
        return self.full_parameters()

    def trained_weights(self) -> dict[str, Tensor]:
        return state_files.whole_trained_weights(self.unwrapped)

    def save_like_weights(self, kind: str, tensors: dict[str, Tensor], directory: Path) -> None:
        if self.process_group.is_main:
            state_files.write_whole(kind, tensors, directory)

    def load_like_weights(self, kind: str, tensors: dict[str, Tensor], directory: Path) -> None:
        state_files.fill_whole(kind, tensors, directory)

    def save(self, directory: Path) -> None:
        if self.process_group.is_main:
            state = self.unwrapped.state_dict()
            kept = {name: state[name] for name in state_files.kept_names(self.unwrapped)}
            state_files.refuse_not_finite(state_files.not_finite(kept))
            state_files.write_whole(state_files.WEIGHTS, kept, directory)
            tensors = state_files.optimizer_tensors(self.unwrapped, self.optimizer)
            state_files.write_whole(state_files.OPTIMIZER, tensors, directory)

    def load(self, directory: Path) -> None:
        weights = state_files.StateFiles(state_files.WEIGHTS, directory)
        optimizer = state_files.StateFiles(state_files.OPTIMIZER, directory)
        state, names = self.unwrapped.state_dict(), state_files.kept_names(self.unwrapped)
        weights.check({name: state[name].shape for name in names})
        entries = state_files.optimizer_names(optimizer, self.unwrapped)
        with torch.no_grad():
            for name in names:
                state[name].copy_(weights.rows(name))
        for name, parameter in self.unwrapped.named_parameters():
            if name in entries:
                tensors = {entry: optimizer.rows(f"{name}/{entry}") for entry in entries[name]}
                restore_state(self.optimizer, parameter, tensors, lambda tensor, to=parameter.device: tensor.to(to))

    def _broadcast_weights(self) -> None:
        """Send rank 0's weights and buffers to all ranks, which may have initialized different ones."""
        if self.process_group.size > 1:
            for tensor in [*self.unwrapped.parameters(), *self.unwrapped.buffers()]:
                dist.broadcast(tensor.detach(), src=0)

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

"""An exponential moving average of the trained weights, beside the weights themselves and sharded as they are."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from alignment.training.backends.base import Backend
from alignment.training.backends.state_files import local_tensor, read_into, write


class MovingAverage:
    """The average of a model's trained weights, in float32 on their device; frozen weights have none.

    average <- decay * average + (1 - decay) * weight, after every update; it begins with the starting weights.

    Source: Polyak and Juditsky 1992; Tarvainen and Valpola 2017, arXiv:1703.01780 (their alpha is decay).
    """

    def __init__(self, backend: Backend, decay: float):
        """Copy the weights.

        Args:
            backend: of the model.
            decay: in (0, 1).

        Raises:
            UserError: the backend holds no weights that could be averaged, as ZeRO-3.
        """
        self._backend, self._decay = backend, decay
        self._average = {name: weight.clone() for name, weight in backend.trained_weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights in, once after each update."""
        for name, weight in self._backend.trained_weights().items():
            local_tensor(self._average[name]).lerp_(local_tensor(weight), 1 - self._decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """While open, the model has the averaged weights; afterwards its own again, bit for bit."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, weight in self._backend.trained_weights().items():
            kept = weight.clone()  # one tensor at a time: no second copy of the model
            weight.copy_(self._average[name])
            self._average[name].copy_(kept)

    def save(self, directory: Path) -> None:
        """Write the average beside the weights of a checkpoint; a collective operation."""
        write("average", self._average, directory, rank=self._backend.process_group.rank)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote; a collective operation.

        Raises:
            UserError: a file or tensor is missing or does not fit.
        """
        read_into("average", self._average, directory)

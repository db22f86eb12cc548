"""What torch.compile leaves out of its graphs. Importing it loads the compiler, which takes a second: only for models that
are compiled."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class OutsideGraphs:
    """A function of one batch, called outside the graphs of torch.compile."""

    function: Callable[..., Tensor]

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Tensor:
        return self.function(*args)


def leave_out(modules: Iterable[nn.Module]) -> None:
    """Leave the forward of every module whose class says `data_dependent_shapes` out of the graphs.

    The class is changed and not its instances: a graph specializes on the function, and blocks share their graphs.
    """
    for kind in {type(module) for module in modules if getattr(module, "data_dependent_shapes", False)}:
        if not getattr(kind.forward, "_torchdynamo_disable", False):
            kind.forward = torch.compiler.disable(kind.forward)

"""torch.compile for models: each block is compiled by itself, attention stays outside the compiled graphs.

Blocks of one architecture share their graphs, so a model of 36 layers compiles as long as one of 2. The number of
tokens is a symbol of the graph: batches of other sizes run without a recompilation. Attention runs in its own kernel
either way, and its arguments (rectangles, masks, caches) differ from batch to batch. Importing this module loads the
compiler, which takes a second: import it for models that are compiled only.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from alignment.errors import UserError

# Variants of one block that a run may need: with and without gradient, with its adapter on and off, in training and
# decoding, and a batch of a single row. torch's own limit is 8, after which it goes back to eager mode silently.
RECOMPILE_LIMIT = 64


@dataclass(frozen=True)
class OutsideGraphs:
    """A function of one batch, called outside the graphs of torch.compile."""

    function: Callable[..., Tensor]

    @torch.compiler.disable
    def __call__(self, *args: Any) -> Tensor:
        return self.function(*args)


def compile_blocks(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Compile each of these modules in place, at its first call.

    Layers whose class says `data_dependent_shapes` are left out of the graphs. The class is changed and not its
    instances: a graph specializes on the function, and blocks share their graphs.
    """
    check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    for block in blocks:
        for kind in {type(module) for module in block.modules() if getattr(module, "data_dependent_shapes", False)}:
            if not getattr(kind.forward, "_torchdynamo_disable", False):
                kind.forward = torch.compiler.disable(kind.forward)
        block.compile(dynamic=True)


def check_compiler(device: torch.device) -> None:
    """UserError where the code of torch.compile cannot be built: the CPU has no C++ compiler, or CUDA no Triton."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler
    from torch.utils._triton import has_triton

    if device.type == "cuda":
        if not has_triton():
            raise UserError(
                "training.compile: Triton is not installed for this GPU; pip install triton, or set it to false"
            )
        return
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise UserError(
            "training.compile: there is no C++ compiler (g++ or clang++) on this machine; install one, or set it to "
            "false"
        ) from error

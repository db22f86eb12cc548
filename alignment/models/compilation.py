"""torch.compile for models: each block is compiled by itself, attention stays outside the compiled graphs.

Blocks of one architecture share their graphs, so a model of 36 layers compiles as long as one of 2. The number of tokens is
a symbol of the graph: batches of other sizes run without a recompilation. Attention runs in its own kernel either way, and
its arguments (rectangles, masks, caches) differ from batch to batch.
"""

from collections.abc import Iterable

import torch
from torch import nn

from alignment.errors import UserError

# Variants of one block that a run may need: with and without gradient, with its adapter on and off, in training and
# decoding, and a batch of a single row. torch's own limit is 8, after which it goes back to eager mode silently.
RECOMPILE_LIMIT = 64


def compile_blocks(blocks: Iterable[nn.Module], device: torch.device) -> None:
    """Compile each of these modules in place, at its first call.

    Raises:
        UserError: the machine has no compiler for the device.
    """
    from alignment.models.layers.outside_graphs import leave_out  # loads the compiler

    check_compiler(device)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, RECOMPILE_LIMIT)
    for block in blocks:
        leave_out(block.modules())
        block.compile(dynamic=True)


def check_compiler(device: torch.device) -> None:
    """Check that the code that torch.compile generates for a device can be built.

    Raises:
        UserError: the CPU has no C++ compiler, or CUDA no Triton.
    """
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
            "training.compile: there is no C++ compiler (g++ or clang++) on this machine; install one, or set it to false"
        ) from error

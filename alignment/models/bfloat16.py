"""Whether a device computes in bfloat16 by itself, and the warning where it does not."""

import functools
import warnings

import torch


def cpu_computes_bfloat16() -> bool:
    """Whether the CPU has instructions for bfloat16 (AVX-512 BF16, AMX, Arm's BF16); True where torch cannot tell."""
    capabilities = getattr(torch.cpu, "get_capabilities", None)
    if capabilities is None:
        return True
    found = {name: value for name, value in capabilities().items() if "bf16" in name}
    return any(found.values()) if found else True


@functools.cache
def warn_of_slow_bfloat16() -> None:
    """Warn, once in a process, if the CPU has no instructions for bfloat16."""
    if not cpu_computes_bfloat16():
        warnings.warn(
            "this CPU has no bfloat16 instructions: results are right, but products take several times as long as in "
            "float32; set training.precision=fp32, or --dtype float32 where a model is only used",
            stacklevel=3,
        )

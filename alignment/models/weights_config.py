"""The setting of every stage for the type of its weights. frozen_weights.py applies it to a model."""

import functools
import warnings
from dataclasses import dataclass
from typing import Literal

import torch

from alignment.errors import UserError
from alignment.ragged import has_apple_gpu, has_bfloat16
from alignment.settings import Settings

Quantization = Literal["nf4", "int8"]


@dataclass(frozen=True)
class WeightsConfig(Settings):
    """Types of weights in memory. Computations run in `training.precision`, whatever the weights' type.

    Attributes:
        dtype: type of frozen weights (under an adapter; of the reference and the reward model). auto: the type that
            they have in the checkpoint, but float32 for a model that is only used on a CPU without instructions for
            bfloat16. Weights that train, norms, biases and score heads are float32 with every setting.
        quantize: hold the frozen matrices of the blocks in 4 bits (nf4, with double quantization) or 8 bits (int8);
            needs `adapter` and bitsandbytes (`pip install -e '.[quantization]'`).

    Source: NF4 and double quantization: Dettmers et al. 2023, arXiv:2305.14314; int8: Dettmers et al. 2022,
    arXiv:2208.07339.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantize: Quantization | None = None


DEFAULT_WEIGHTS = WeightsConfig()


def check_weights(weights: WeightsConfig, *, frozen: bool, judges: bool = False) -> None:
    """ValueError for a type below float32, or quantization, in a stage that trains all weights.

    Args:
        frozen: True where weights of the model in training are frozen, because it has an adapter.
        judges: True where frozen networks stand beside it, a reference or a reward model, which may have any type.
    """
    if not frozen and weights.quantize is not None:
        raise ValueError(
            f"weights.quantize {weights.quantize} needs `adapter`: quantized weights are frozen, and without an "
            "adapter nothing would train; set adapter.kind=lora, or leave weights.quantize out"
        )
    if not frozen and weights.dtype in ("bfloat16", "float16") and not judges:
        raise ValueError(
            f"weights.dtype {weights.dtype} needs `adapter`: all weights train here, and a weight of that type does "
            "not change by an update smaller than 1/256 of it; leave weights.dtype at auto, and set "
            "training.precision=bf16 to compute in bfloat16"
        )


def set_up_device(precision: str | None = None) -> str | None:
    """Set this process's GPU to a run's precision, or warn of a slow one on the CPU; return a remark on slow float32.

    cuDNN's attention is left out of those that torch chooses from: it builds a plan for every new shape, up to half a
    second each, and keeps them all, and batches of documents, like a cache that grows, have a new shape every time.

    Raises:
        UserError: the device of this process does not compute in this precision.
    """
    has_gpu = torch.cuda.is_available()
    if precision == "bf16" and has_apple_gpu():
        raise UserError(
            "training.precision bf16 was not tried on Apple's GPUs; set it to fp32, or ACCELERATE_USE_CPU=true in the "
            "environment"
        )
    if precision == "tf32" and (not has_gpu or torch.cuda.get_device_capability() < (8, 0)):
        raise UserError("training.precision tf32: only GPUs from Ampere on have it; set it to fp32")
    torch.backends.cuda.enable_cudnn_sdp(False)
    if precision == "bf16" and not has_gpu:
        warn_of_slow_bfloat16()
    if precision is None or not has_gpu:
        return None
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    if precision != "fp32":
        return None
    return (
        "training.precision is fp32: this GPU multiplies matrices several times as fast in bf16, and in tf32, which "
        "keeps 10 bits of each number"
    )


@functools.cache
def warn_of_slow_bfloat16() -> None:
    """Warn, once in a process, if the CPU has no instructions for bfloat16."""
    if has_bfloat16() is False:
        warnings.warn(
            "this CPU has no bfloat16 instructions: results are right, but products take up to 80 times as long as in "
            "float32; set training.precision=auto, or dtype auto where a model is only used",
            stacklevel=3,
        )

"""Frozen matrices in 4 bits (NF4) or 8 bits (int8): bitsandbytes' layers in a model's blocks, for adapters to train on.

The weights alone are quantized. Every product is computed with the dequantized matrix in the type of its input, so that
a result does not depend on the batch around it and is the same with and without gradients; bitsandbytes' own int8 layer
would also round the activations, by a threshold over the whole batch. bitsandbytes is imported when it is needed.
"""

import copy
import functools
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.errors import UserError, install_advice
from alignment.files import read_json_object, write_json
from alignment.models.layers.norms import computed_in
from alignment.models.weights_config import Quantization
from alignment.ragged import has_apple_gpu

Model = TypeVar("Model", bound=nn.Module)
RECORD = "alignment_quantization.json"  # in an adapter's directory
DECODED_ROWS = 64  # up to this many rows, as in decoding, bitsandbytes' fused kernel is faster on a GPU
ROUTERS = {"native": ("router",), "transformers": ("router", "gate")}  # last names of layers that choose experts


def require_bitsandbytes(quantize: Quantization | None) -> None:
    """UserError where bitsandbytes is needed, and is not installed or cannot run; nothing is imported."""
    if quantize is not None and has_apple_gpu():
        raise UserError(
            f"weights.quantize {quantize} does not run on Apple's GPUs; leave it out, or set ACCELERATE_USE_CPU=true "
            "in the environment"
        )
    if quantize is not None and find_spec("bitsandbytes") is None:
        raise UserError(f"weights.quantize {quantize} needs bitsandbytes: {install_advice('quantization')}")


@torch.no_grad()
def quantize_blocks(model: Model, quantize: Quantization) -> Model:
    """Quantize the linear layers of a model's blocks in place, one after another, and return the model.

    Embeddings, heads, norms, routers of experts and everything outside the blocks stay as they are. "nf4" is with
    double quantization, in blocks of 64 numbers; "int8" has one scale per row.
    """
    for name, layer in list(quantizable_layers(model)):
        stored = getattr(layer.weight, "stored", None)  # not read yet, see weight_map.py
        weight = layer.weight.data if stored is None else stored.read()
        if torch.cuda.is_available():  # quantizing takes a CPU a second for a few million numbers
            weight = weight.to(torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
        model.set_submodule(name, _quantized(layer, weight, quantize))
    return model


def quantizable_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Names and layers of the linear layers inside a model's blocks, which stand in lists of modules."""
    lists = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList))
    routers = ROUTERS[getattr(model, "source", "native")]
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.startswith(lists) and name.rpartition(".")[2] not in routers:
            yield name, module


@torch.no_grad()
def round_blocks(model: nn.Module, quantize: Quantization) -> dict[str, tuple[float, float]]:
    """Give the matrices of the blocks the values that they have when quantized, in place; the layers stay plain.

    Returns the largest and the mean absolute difference from the original, by layer.
    """
    errors = {}
    for name, layer in list(quantizable_layers(model)):
        rounded = dequantized(_quantized(layer, layer.weight.data, quantize)).to(layer.weight)
        error = (rounded.float() - layer.weight.data.float()).abs()
        errors[name] = (float(error.max()), float(error.mean()))
        layer.weight.data = rounded
    return errors


def dequantized(layer: nn.Linear) -> Tensor:
    """The matrix [out, in] that a quantized layer computes with, float32."""
    return layer.read_weight(torch.float32)  # type: ignore[operator]


def quantization_of(model: nn.Module) -> Quantization | None:
    """The quantization of a model's blocks."""
    return next((getattr(module, "kind") for module in model.modules() if is_quantized(module)), None)  # noqa: B009


def write_quantization(model: nn.Module, directory: Path) -> None:
    """Write the quantization of a model's blocks beside an adapter; nothing where there is none."""
    kind = quantization_of(model)
    if kind is not None:
        write_json(directory / RECORD, {"quantize": kind})


def read_quantization(directory: Path) -> Quantization | None:
    """The quantization of the weights that a directory's adapter was trained on; None where it names none."""
    path = Path(directory) / RECORD
    if not path.is_file():
        return None
    kind = read_json_object(path).get("quantize")
    if kind not in ("nf4", "int8"):
        raise UserError(
            f"{path}: quantize must be nf4 or int8, got {kind!r}; delete the file if the base was not quantized"
        )
    return kind


def is_quantized(layer: nn.Module) -> bool:
    """True for layers that `quantize_blocks` made."""
    return hasattr(layer, "read_weight")


class _ReadLinear(torch.autograd.Function):
    """`F.linear` with a weight that is read in the forward and again in the backward pass, and not kept in between."""

    @staticmethod
    def forward(ctx, x: Tensor, bias: Tensor | None, read: Callable[[torch.dtype], Tensor]) -> Tensor:
        ctx.read = read
        return F.linear(x, read(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Any:
        (grad,) = grad_outputs
        grad_x = grad @ ctx.read(grad.dtype) if ctx.needs_input_grad[0] else None
        grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if ctx.needs_input_grad[1] else None
        return grad_x, grad_bias, None


def _quantized(layer: nn.Linear, weight: Tensor, quantize: Quantization) -> Any:
    """A quantized layer with the bias and mode of `layer`, and `weight` quantized on its device."""
    kind: Any = _nf4_class() if quantize == "nf4" else _int8_class()
    with torch.device("meta"):
        made = kind(layer.in_features, layer.out_features)
    made.bias = layer.bias
    made.quantize(weight)
    return made.train(layer.training)


@functools.cache
def _nf4_class() -> type[nn.Linear]:
    """bitsandbytes' 4-bit layer with our forward, made at the first use."""
    bnb = import_module("bitsandbytes")

    class NF4Linear(bnb.nn.Linear4bit):
        """A linear layer with a frozen NF4 weight."""

        kind = "nf4"

        def __init__(self, inputs: int, outputs: int):
            super().__init__(inputs, outputs, bias=False, compute_dtype=torch.float32, quant_type="nf4")

        def quantize(self, weight: Tensor) -> None:
            """Quantize a matrix [out, in] on its device and hold it."""
            # bitsandbytes keeps the quantized numbers on the parameter and their scales on the layer too.
            self.weight = bnb.nn.Params4bit(weight.float(), requires_grad=False, quant_type="nf4", module=self).to(
                weight.device
            )

        def read_weight(self, dtype: torch.dtype) -> Tensor:
            """The matrix [out, in] in a type."""
            state = copy.copy(self.quant_state)
            # As one row: for the CPU, bitsandbytes starts a new block at every row, which the quantized blocks do not.
            state.dtype = dtype
            state.shape = torch.Size((1, self.in_features * self.out_features))
            return bnb.functional.dequantize_4bit(self.weight.data, state).view(self.out_features, self.in_features)

        @property
        def W_q(self) -> Tensor:
            """The quantized numbers; peft asks a layer with this name for its matrix, and does not read it itself."""
            return self.weight.data

        def dequantize(self) -> Tensor:
            """The matrix [out, in] in float32, for the norms of DoRA and the vectors of PiSSA."""
            return self.read_weight(torch.float32)

        def forward(self, x: Tensor) -> Tensor:
            x = computed_in(x)
            if x.is_cuda and not torch.is_grad_enabled() and x.numel() <= DECODED_ROWS * self.in_features:
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return bnb.matmul_4bit(x, self.weight, bias=bias, quant_state=self.quant_state)
            return _ReadLinear.apply(x, self.bias, self.read_weight)

    return NF4Linear


@functools.cache
def _int8_class() -> type[nn.Linear]:
    """bitsandbytes' 8-bit layer with our forward, made at the first use."""
    bnb = import_module("bitsandbytes")

    class Int8Linear(bnb.nn.Linear8bitLt):
        """A linear layer with a frozen int8 weight."""

        kind = "int8"

        compute_dtype = torch.float32  # of an adapter's weights, by peft's name for it

        scales: Tensor  # largest size in each row, [out]

        def __init__(self, inputs: int, outputs: int):
            super().__init__(inputs, outputs, bias=False, has_fp16_weights=False)

        def quantize(self, weight: Tensor) -> None:
            """Quantize a matrix [out, in] on its device and hold it."""
            # Not by `Int8Params.to`, which quantizes nothing that is on a GPU already.
            numbers, scales, _ = bnb.functional.int8_vectorwise_quant(weight.half())
            self.weight = bnb.nn.Int8Params(numbers, False, has_fp16_weights=False, CB=numbers, SCB=scales)
            self.register_buffer("scales", scales, persistent=False)
            self.state.SCB = scales  # where peft looks for it

        def read_weight(self, dtype: torch.dtype) -> Tensor:
            """The matrix [out, in] in a type."""
            made = torch.empty(self.weight.shape, dtype=dtype, device=self.weight.device)
            # A product in float32 that a GPU rounds as it writes: no float32 matrix stands in between.
            return torch.mul(self.weight.data, (self.scales / 127).unsqueeze(1), out=made)

        def forward(self, x: Tensor) -> Tensor:
            return _ReadLinear.apply(computed_in(x), self.bias, self.read_weight)

    return Int8Linear

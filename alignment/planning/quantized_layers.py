"""Linear layers whose memory is that of bitsandbytes' quantized ones, for tracing: they hold no values.

bitsandbytes' parameters are tensor subclasses and cannot be fake tensors, so their bytes and transient matrices are
written out here.
"""

import math

import torch
from torch import Tensor, nn

from alignment.models.quantization import quantizable_layers
from alignment.models.weights_config import Quantization

BLOCK, NESTED_BLOCK = 64, 256  # weights per scale; scales per scale of the scales
FURTHER_TENSORS = {"nf4": 5, "int8": 1}  # that a matrix has beside its packed weights: scales, their scales, tables
CODE_BYTES = 4 * 16 + 4 * 256 + 4  # the tables of 4-bit and of 8-bit values, and the mean of the scales


def quantized_bytes(rows: int, columns: int, kind: Quantization) -> int:
    """Bytes of one quantized matrix with all that belongs to it.

    nf4: half a byte per weight, one byte per 64 weights (its scale, quantized), 4 bytes per 256 scales, and tables.
    int8: one byte per weight, and a float32 scale per row.

    Source: Dettmers et al. 2023, arXiv:2305.14314, section 3; Dettmers et al. 2022, arXiv:2208.07339, eq. 5.
    """
    weights = rows * columns
    if kind == "int8":
        return weights + 4 * rows
    scales = math.ceil(weights / BLOCK)
    return math.ceil(weights / 2) + scales + 4 * math.ceil(scales / NESTED_BLOCK) + CODE_BYTES


class _Product(torch.autograd.Function):
    """x W for a quantized W: it is made whole for the product, forward and backward, and never kept."""

    @staticmethod
    def forward(ctx, x: Tensor, packed: Tensor, shape: tuple[int, int], kind: Quantization) -> Tensor:
        ctx.shape, ctx.kind, ctx.packed = shape, kind, packed
        return nn.functional.linear(x, _dequantized(packed, shape, x.dtype, kind))

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (grad,) = grad_outputs
        return grad @ _dequantized(ctx.packed, ctx.shape, grad.dtype, ctx.kind), None, None, None


def _dequantized(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype, kind: Quantization) -> Tensor:
    """The whole matrix, and beside it for a moment what it is made with: float32 scales, or a float32 copy for int8."""
    numbers = math.prod(shape) if kind == "int8" else math.ceil(math.prod(shape) / BLOCK)
    intermediate = torch.empty(numbers, dtype=torch.float32, device=packed.device)
    whole = torch.empty(shape, dtype=dtype, device=packed.device)
    del intermediate
    return whole


class QuantizedStandIn(nn.Linear):
    """A frozen linear layer that holds as many bytes as a quantized one, and computes through a whole matrix.

    Attributes:
        weight: all its bytes, uint8 [n].
    """

    def __init__(self, layer: nn.Linear, kind: Quantization):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = layer.in_features, layer.out_features, kind
        held = quantized_bytes(layer.out_features, layer.in_features, kind)
        packed = torch.empty(held, dtype=torch.uint8, device=layer.weight.device)
        self.weight = nn.Parameter(packed, requires_grad=False)
        self.bias = layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """input: [..., in_features] -> [..., out_features]."""
        if torch.is_autocast_enabled(input.device.type):
            input = input.to(torch.get_autocast_dtype(input.device.type))
        y: Tensor = _Product.apply(input, self.weight, (self.out_features, self.in_features), self.kind)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def replace_by_stand_ins(model: nn.Module, kind: Quantization) -> None:
    """Put a stand-in in the place of every linear layer that `quantize_blocks` would quantize."""
    for name, layer in list(quantizable_layers(model)):
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantizedStandIn(layer, kind))

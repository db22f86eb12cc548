"""Linear layers whose memory is that of bitsandbytes' quantized ones, for tracing: they hold no values.

bitsandbytes' parameters are tensor subclasses and cannot be fake tensors, so their bytes and transient matrices are
written out here.
"""

import math

import torch
from torch import Tensor, nn

from alignment.models.frozen_weights import FrozenLinear
from alignment.models.weights_config import Quantization

BLOCK, NESTED_BLOCK = 64, 256  # weights per scale; scales per scale of the scales
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
        ctx.shape, ctx.dtype, ctx.packed = shape, x.dtype, packed
        if kind == "int8":
            return _int8_product(x, shape)
        return nn.functional.linear(x, _dequantized(packed, shape, x.dtype))

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor):
        (grad,) = grad_outputs
        return grad @ _dequantized(ctx.packed, ctx.shape, grad.dtype), None, None, None


def _dequantized(packed: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The whole matrix, beside the float32 scales it is made with."""
    scales = torch.empty(math.ceil(math.prod(shape) / BLOCK), dtype=torch.float32, device=packed.device)
    whole = torch.empty(shape, dtype=dtype, device=packed.device)
    del scales
    return whole


def _int8_product(x: Tensor, shape: tuple[int, int]) -> Tensor:
    """The product of int8 inputs and weights: its int32 sums are as large as two outputs in half precision."""
    quantized = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    sums = torch.empty(*x.shape[:-1], shape[0], dtype=torch.int32, device=x.device)
    result = sums.to(x.dtype)
    del quantized
    return result


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
        y: Tensor = _Product.apply(input, self.weight, (self.out_features, self.in_features), self.kind)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def replace_by_stand_ins(module: nn.Module, kind: Quantization) -> None:
    """Put a stand-in in the place of every frozen linear layer below `module`, adapters' base layers among them."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear) and type(child) in (nn.Linear, FrozenLinear) and not child.weight.requires_grad:
            setattr(module, name, QuantizedStandIn(child, kind))
        elif not name.startswith("lora_"):
            replace_by_stand_ins(child, kind)

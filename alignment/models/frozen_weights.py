"""Frozen weights held in a lower type than they are computed with, without a change of any number.

A matrix in bfloat16 is cast to float32 where it is used, once in the forward and once in the backward pass, so that its
float32 copy never outlives one product. Quantized matrices are in quantization.py.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from alignment.models.quantization import quantize_blocks, require_bitsandbytes
from alignment.models.weights_config import WeightsConfig

LOW_TYPES = (torch.bfloat16, torch.float16)  # every value of theirs is a float32 value too
WHOLE_ELEMENTS = 2**27  # numbers of a matrix that is cast whole, 512 MiB in float32; a larger one is cast in parts
Frozen = TypeVar("Frozen", bound=nn.Module)


class FrozenLinear(nn.Linear):
    """A linear layer whose frozen weight has a lower type than its input: the same numbers as with a float32 weight."""

    compute_dtype = torch.float32  # of an adapter's weights on this layer, by peft's name for it

    def forward(self, input: Tensor) -> Tensor:
        return frozen_linear(input, self.weight, self.bias)


class FrozenEmbedding(nn.Embedding):
    """An embedding in a lower type; the rows that are looked up are float32."""

    compute_dtype = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).to(self.compute_dtype)


def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., out], in the type of `x` or of the surrounding autocast; a weight of another type is frozen."""
    if x.dtype == weight.dtype or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    return _CastLinear.apply(x, weight, bias)


class _CastLinear(torch.autograd.Function):
    """`F.linear` with the weight cast to the input's type; only the weight as it is stored is kept for the backward."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        bias = None if bias is None else bias.to(x.dtype)
        if weight.numel() <= WHOLE_ELEMENTS:
            return F.linear(x, weight.to(x.dtype), bias)
        biases = [None] * len(_parts(weight)) if bias is None else bias.split(_rows(weight))
        return torch.cat(
            [F.linear(x, part.to(x.dtype), b) for part, b in zip(_parts(weight), biases, strict=True)], dim=-1
        )

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        (grad,) = grad_outputs
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            for piece, part in zip(grad.split(_rows(weight), dim=-1), _parts(weight), strict=True):
                product = piece @ part.to(grad.dtype)
                grad_x = product if grad_x is None else grad_x + product
        if ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0)
        return grad_x, None, grad_bias


def _rows(weight: Tensor) -> int:
    """Rows of a matrix that are cast together."""
    return max(1, WHOLE_ELEMENTS // weight.shape[1])


def _parts(weight: Tensor) -> tuple[Tensor, ...]:
    return weight.split(_rows(weight))


FROZEN_CLASSES: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: FrozenLinear, nn.Embedding: FrozenEmbedding}
TRAINED_CLASSES = {frozen: plain for plain, frozen in FROZEN_CLASSES.items()}


def store_frozen(model: Frozen, weights: WeightsConfig) -> Frozen:
    """Freeze a model and hold its weights as `weights` says; return the model.

    The linear layers of the blocks are quantized where `weights.quantize` says so. All other linear layers, embeddings
    and language heads keep the type that they have, or get `weights.dtype`; everything else
    becomes float32: norms, biases, score heads, and layers of classes that compute with their weight in their own way.
    The model then computes in float32, or in the type of the autocast around a call, exactly as with float32 weights.

    Its layers are changed in place, before an adapter is attached. UserError for quantization without bitsandbytes.
    """
    require_bitsandbytes(weights.quantize)
    model.requires_grad_(False)
    if weights.quantize is not None:
        quantize_blocks(model, weights.quantize)
    dtype = None if weights.dtype == "auto" else getattr(torch, weights.dtype)
    low = _storable(model)
    for parameter in filter(torch.is_floating_point, model.parameters()):
        wanted = (dtype or parameter.dtype) if id(parameter) in low else torch.float32
        _set_type(parameter, wanted if wanted in LOW_TYPES else torch.float32)
    for buffer in model.buffers():
        if buffer.dtype in LOW_TYPES:
            buffer.data = buffer.data.float()
    for module in model.modules():
        if type(module) in FROZEN_CLASSES and module.weight.dtype in LOW_TYPES:
            module.__class__ = FROZEN_CLASSES[type(module)]  # as FSDP2 does: parameters stay shared, hooks stay on
    return model


def train_in_float32(model: Frozen) -> Frozen:
    """Give every parameter that trains float32, and its layer the plain class again; return the model.

    An adapter may train copies of layers that are otherwise frozen.
    """
    for module in model.modules():
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        for parameter in trained:
            _set_type(parameter, torch.float32)
        if trained and type(module) in TRAINED_CLASSES and module.weight.dtype == torch.float32:
            module.__class__ = TRAINED_CLASSES[type(module)]
    return model


def like_hidden_states(embedding: nn.Embedding) -> Tensor:
    """A tensor with the device of an embedding and the type of the rows that it gives outside autocast."""
    dtype = getattr(embedding, "compute_dtype", embedding.weight.dtype)
    return embedding.weight if embedding.weight.dtype == dtype else embedding.weight.new_empty(0, dtype=dtype)


def _set_type(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Give a parameter another type; one that has not been read (see weight_map.py) stays unread."""
    stored = getattr(parameter, "stored", None)
    if stored is None:
        parameter.data = parameter.data.to(dtype)
    else:
        one = parameter.data.as_strided((1,) * parameter.dim(), (1,) * parameter.dim())
        parameter.data = one.to(dtype).expand(parameter.shape)
        parameter.stored = stored._replace(dtype=dtype)  # type: ignore[attr-defined]


def _storable(model: nn.Module) -> set[int]:
    """Ids of parameters that can be held in a lower type: matrices of layers that cast them, and of no other layer."""
    kept = {id(parameter) for module in _float32_modules(model) for parameter in module.parameters()}
    storable: set[int] = set()
    for module in model.modules():
        casts = type(module) in FROZEN_CLASSES or getattr(module, "casts_weight", False)
        for name, parameter in module.named_parameters(recurse=False):
            (storable if casts and name == "weight" else kept).add(id(parameter))
    return storable - kept


def _float32_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that hold no matrix in a lower type: heads of few outputs, and what transformers keeps in float32."""
    inner = getattr(model, "inner", None)  # transformers' model in its wrapper
    if getattr(model, "task", "language") != "language":
        trunk = None if inner is None else inner.base_model
        heads = [model.get_submodule("head")] if inner is None else inner.children()
        yield from (head for head in heads if head is not trunk)
    yield from (module for module in model.modules() if getattr(module, "float32_only", False))
    kept = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    names = {name for key in kept for name in getattr(inner, key, None) or ()}
    yield from (module for name, module in model.named_modules() if names.intersection(name.split(".")))

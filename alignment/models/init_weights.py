"""Random initialization of fresh weights."""

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from alignment.models.heads import LanguageHead
from alignment.models.layers.attention import Attention
from alignment.models.layers.disentangled import RelativeEmbedding
from alignment.models.layers.positions import LearnedPositions, RelativeBias

RESIDUAL_LAYERS = re.compile(r"(attention|cross)\.output$|feedforward\.(experts\.\d+\.)?down$")
INITIALIZED = nn.Linear | nn.Embedding | nn.Conv1d | LearnedPositions | RelativeBias | RelativeEmbedding | LanguageHead


@dataclass(frozen=True)
class InitSpec:
    """Standard deviations of fresh weights; `residual_std` is for the layers that write into the residual stream."""

    std: float
    residual_std: float


@dataclass(frozen=True)
class FanInInitSpec:
    """T5 initialization: std = fan_in ** -0.5, embeddings 1.0, queries also scaled by head_dim ** -0.5."""

    position_bias_std: float  # of the relative position biases
    factor: float = 1.0  # multiplies all of them


def initialize(model: Any) -> Any:
    """Fresh weights in place: matrices normal, biases zero, norms as they come. Returns the model in eval mode."""
    init = model.spec.init
    drawn = set()
    for name, module in model.named_modules():
        if isinstance(module, INITIALIZED) and id(module.weight) not in drawn:
            initialize_layer(module, init, name)
            if isinstance(init, FanInInitSpec):  # a head that is the token table keeps that table's deviation
                drawn.add(id(module.weight))
    if isinstance(init, FanInInitSpec):
        for attention in model.modules():
            if isinstance(attention, Attention):  # T5 does not divide scores by sqrt(K)
                attention.query.weight.data *= attention.spec.head_dim**-0.5
    return model.eval()


def initialize_layer(module: nn.Module, init: InitSpec | FanInInitSpec, name: str = "") -> None:
    """One layer's matrix drawn, its bias and its constants zero.

    Source: the two deviations are Radford et al. 2019 (GPT-2), section 2.3: residual layers divided by
    sqrt(2 * layers); the other rule is that of Raffel et al. 2020's code for T5.
    """
    weight = module.weight
    bias = getattr(module, "bias", None)
    if isinstance(init, InitSpec):
        std = init.residual_std if RESIDUAL_LAYERS.search(name) else init.std
    elif isinstance(module, RelativeBias):
        std = init.position_bias_std
    else:
        std = init.factor * (
            1.0 if isinstance(module, nn.Embedding) else weight.shape[-1] ** -0.5  # type: ignore[operator, union-attr]
        )
    nn.init.normal_(weight, std=std)  # type: ignore[arg-type]
    for constant in (*([] if bias is None else [bias]), *module.buffers(recurse=False)):
        nn.init.zeros_(constant)

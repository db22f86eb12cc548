"""Specification -> module: the one place where a name becomes a part. Reads no files (see checkpoint.py)."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from alignment.models.attention import Attention
from alignment.models.block import Block
from alignment.models.families import family_of
from alignment.models.feedforward import ACTIVATIONS, FeedForward, GatedFeedForward
from alignment.models.heads import LanguageModel, ScalarModel
from alignment.models.norms import RMSNorm
from alignment.models.positions import LearnedPositions, RotaryPositions
from alignment.models.spec import (
    BlockSpec,
    FeedForwardSpec,
    GatedFeedForwardSpec,
    LayerNormSpec,
    LearnedPositionsSpec,
    NormSpec,
    PlainFeedForwardSpec,
    RMSNormSpec,
    RotaryPositionsSpec,
    TransformerSpec,
)
from alignment.models.transformer import Transformer

RESIDUAL_LAYERS = ("attention.output", "feedforward.down")  # they write into the residual stream


def build_language_model(config: dict[str, Any]) -> LanguageModel:
    """A language model with fresh weights, in eval mode.

    Args:
        config: a Hugging Face config, at least {"model_type": ...}. Keys left out have transformers' defaults, but
            dropout is off unless asked for.

    Raises:
        UserError: unknown family, unknown key, or a value that cannot be.
    """
    config = {**family_of(config).fresh_config, **config}
    return initialise(empty_model(LanguageModel, config))


def build_scalar_model(config: dict[str, Any]) -> ScalarModel:
    """A scalar model (reward or value) with fresh weights; `config` as for `build_language_model`."""
    config = {**family_of(config).fresh_config, **config}
    return initialise(empty_model(ScalarModel, config))


def empty_model(kind: Callable[[Transformer, dict[str, Any]], Any], config: dict[str, Any]) -> Any:
    """A model of `kind` whose weights mean nothing yet."""
    return kind(build_trunk(family_of(config).spec_from_config(config)), dict(config))


def build_trunk(spec: TransformerSpec) -> Transformer:
    """The trunk `spec` describes."""
    blocks = [build_block(block, spec.width) for block in spec.blocks]
    return Transformer(spec, _positions(spec), blocks, _norm(spec.norm, spec.width))


def build_block(spec: BlockSpec, width: int) -> Block:
    """One layer."""
    attention = Attention(spec.attention, width)
    return Block(attention, _feedforward(spec.feedforward, width), _norm(spec.norm, width), spec.dropout)


def _norm(spec: NormSpec, width: int) -> Callable[[], nn.Module]:
    match spec:
        case LayerNormSpec(eps=eps):
            return partial(nn.LayerNorm, width, eps=eps)
        case RMSNormSpec(eps=eps):
            return partial(RMSNorm, width, eps)


def _feedforward(spec: FeedForwardSpec, width: int) -> nn.Module:
    match spec:
        case PlainFeedForwardSpec():
            return FeedForward(width, spec.width, ACTIVATIONS[spec.activation], spec.bias)
        case GatedFeedForwardSpec():
            return GatedFeedForward(width, spec.width, ACTIVATIONS[spec.activation], spec.bias)


def _positions(spec: TransformerSpec) -> LearnedPositions | RotaryPositions:
    match spec.positions:
        case LearnedPositionsSpec(count=count):
            return LearnedPositions(count, spec.width)
        case RotaryPositionsSpec():
            return RotaryPositions(spec.positions, spec.blocks[0].attention.head_width)


def initialise(model: Any) -> Any:
    """Fresh weights in place: matrices normal, biases zero, norms one; layers into the residual stream may be smaller.

    Source: Radford et al. 2019 (GPT-2), section 2.3: residual layers divided by sqrt(2 * layers).
    """
    init = model.spec.init
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding | LearnedPositions):
            std = init.residual_std if name.endswith(RESIDUAL_LAYERS) else init.std
            nn.init.normal_(module.weight, std=std)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model.eval()

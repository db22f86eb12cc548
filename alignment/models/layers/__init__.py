"""The parts of a transformer, one file each: the spec of a part beside the module that it builds."""

from alignment.models.layers.attention import AttentionSpec, OwnScoresSpec
from alignment.models.layers.block import BlockSpec
from alignment.models.layers.disentangled import ConvolutionSpec, DisentangledSpec
from alignment.models.layers.feedforward import ExpertsSpec, FeedForwardSpec, GatedFeedForwardSpec, PlainFeedForwardSpec
from alignment.models.layers.norms import LayerNormSpec, NoNormSpec, NormSpec, RMSNormSpec
from alignment.models.layers.positions import AlibiSpec, LearnedPositionsSpec, RelativeBiasSpec, SinusoidalPositionsSpec
from alignment.models.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotarySpec,
    YarnScaling,
)

__all__ = [
    "AlibiSpec",
    "AttentionSpec",
    "BlockSpec",
    "ConvolutionSpec",
    "DisentangledSpec",
    "DynamicScaling",
    "ExpertsSpec",
    "FeedForwardSpec",
    "GatedFeedForwardSpec",
    "LayerNormSpec",
    "LearnedPositionsSpec",
    "LinearScaling",
    "Llama3Scaling",
    "LongScaling",
    "NoNormSpec",
    "NormSpec",
    "OwnScoresSpec",
    "PlainFeedForwardSpec",
    "RMSNormSpec",
    "RelativeBiasSpec",
    "RotarySpec",
    "SinusoidalPositionsSpec",
    "YarnScaling",
]

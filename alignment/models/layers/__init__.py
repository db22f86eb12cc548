"""The parts of a transformer, one file each: the spec of a part beside the module that it builds."""

from alignment.models.layers.attention import AttentionSpec
from alignment.models.layers.block import BlockSpec
from alignment.models.layers.disentangled import ConvolutionSpec, DisentangledSpec
from alignment.models.layers.feedforward import (
    ExpertsSpec,
    FeedForwardSpec,
    GatedFeedForwardSpec,
    PlainFeedForwardSpec,
)
from alignment.models.layers.norms import (
    Float32RMSNormSpec,
    LayerNormSpec,
    NoNormSpec,
    NormSpec,
    RMSNormSpec,
    UnitOffsetRMSNormSpec,
)
from alignment.models.layers.positions import (
    AlibiSpec,
    BFloat16AlibiSpec,
    LearnedPositionsSpec,
    PositionBiasSpec,
    PositionsSpec,
    RelativeBiasSpec,
    SinusoidalPositionsSpec,
)
from alignment.models.layers.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    RotaryScaling,
    RotarySpec,
    YarnScaling,
)

__all__ = [
    "AlibiSpec", "AttentionSpec", "BFloat16AlibiSpec", "BlockSpec", "ConvolutionSpec", "DisentangledSpec",
    "DynamicScaling", "ExpertsSpec", "FeedForwardSpec", "Float32RMSNormSpec", "GatedFeedForwardSpec", "LayerNormSpec",
    "LearnedPositionsSpec", "LinearScaling", "Llama3Scaling", "LongScaling", "NoNormSpec", "NormSpec",
    "PlainFeedForwardSpec", "PositionBiasSpec", "PositionsSpec", "RMSNormSpec", "RelativeBiasSpec", "RotaryScaling",
    "RotarySpec", "SinusoidalPositionsSpec", "UnitOffsetRMSNormSpec", "YarnScaling",
]  # fmt: skip

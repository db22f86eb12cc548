"""To look into models: attention maps of any of them and a page that shows them, operations counted from a specification.

Nothing is trained or scored here: see evaluation for that, and scripts/ablate.py for parts compared by training.
"""

from alignment.analysis.attention import EncoderDecoderMaps, attention_maps, encoder_decoder_attention_maps
from alignment.analysis.inspection import write_attention
from alignment.models.operations import forward_operations

__all__ = [
    "EncoderDecoderMaps", "attention_maps", "encoder_decoder_attention_maps", "forward_operations",
    "write_attention",
]  # fmt: skip

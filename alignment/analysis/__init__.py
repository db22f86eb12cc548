"""To look into models: attention maps of any of them and a page that shows them, operations counted from a specification.

Nothing is trained or scored here: see evaluation for that, and scripts/ablate.py for parts compared by training.
"""

from alignment.analysis.attention import PairMaps, attention_maps, pair_attention_maps
from alignment.analysis.inspection import write_attention
from alignment.analysis.operations import forward_operations

__all__ = ["PairMaps", "attention_maps", "forward_operations", "pair_attention_maps", "write_attention"]

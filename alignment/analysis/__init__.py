"""To look into models: attention maps, probes, attributions and the logit lens, each with a page; operations counted.

Nothing is trained or scored here: see evaluation for that, and scripts/ablate.py for parts compared by training.
"""

from alignment.analysis.attention import EncoderDecoderMaps, attention_maps, encoder_decoder_attention_maps
from alignment.analysis.attribution import gradient_times_input, integrated_gradients
from alignment.analysis.inspection import write_attention
from alignment.analysis.lens import layer_states, logit_lens, write_lens
from alignment.analysis.probe import write_probe
from alignment.analysis.saliency import write_saliency
from alignment.models.operations import forward_operations

__all__ = [
    "EncoderDecoderMaps",
    "attention_maps",
    "encoder_decoder_attention_maps",
    "forward_operations",
    "gradient_times_input",
    "integrated_gradients",
    "layer_states",
    "logit_lens",
    "write_attention",
    "write_lens",
    "write_probe",
    "write_saliency",
]

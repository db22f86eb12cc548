"""Text generation: sampling and beam search over unpadded prompts and one key-value cache. No continuous batching.

Read sampling.py and logits_processors.py for one step from logits to a token, prefill.py for how prompts fill the
cache, then the two loops, decode.py and beam_search.py.
"""

from alignment.generation.beam_search import BeamConfig, Hypotheses, beam_search
from alignment.generation.decode import Responses, decode_responses
from alignment.generation.generate import Generation, decoding_config, generate
from alignment.generation.sampling import SamplingConfig
from alignment.generation.text import response_text

__all__ = [
    "BeamConfig",
    "Generation",
    "Hypotheses",
    "Responses",
    "SamplingConfig",
    "beam_search",
    "decode_responses",
    "decoding_config",
    "generate",
    "response_text",
]

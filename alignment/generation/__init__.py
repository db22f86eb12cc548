"""Text generation: sampling by an engine with continuous batching, and beam search; over unpadded prompts.

Read sampling.py for one step from logits to a token, then engine.py for requests of all kinds side by side and for a
fixed set of prompts; beam_search.py is a loop of its own.
"""

from alignment.generation.beam_search import BeamConfig, beam_search
from alignment.generation.engine import DecodingEngine, Generation, decode_responses
from alignment.generation.generate import decoding_config, generate, response_text
from alignment.generation.requests import DecodingRequest, SamplingConfig, TokenEvent

__all__ = [
    "BeamConfig",
    "DecodingEngine",
    "DecodingRequest",
    "Generation",
    "SamplingConfig",
    "TokenEvent",
    "beam_search",
    "decode_responses",
    "decoding_config",
    "generate",
    "response_text",
]

"""Text generation: sampling by an engine with continuous batching, and beam search; over unpadded prompts.

Read sampling.py and logits_processors.py for one step from logits to a token, then engine.py for requests of all kinds
side by side, with decode.py for a fixed set of prompts on top; beam_search.py is a loop of its own.
"""

from alignment.generation.beam_search import BeamConfig, Hypotheses, beam_search
from alignment.generation.decode import Responses, decode_responses
from alignment.generation.engine import DecodingEngine
from alignment.generation.generate import Generation, decoding_config, generate
from alignment.generation.requests import DecodingRequest, SamplingConfig, TokenEvent
from alignment.generation.text import response_text

__all__ = [
    "BeamConfig", "DecodingEngine", "DecodingRequest", "Generation", "Hypotheses", "Responses", "SamplingConfig",
    "TokenEvent", "beam_search", "decode_responses", "decoding_config", "generate", "response_text",
]  # fmt: skip

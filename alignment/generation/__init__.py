"""Text in, text out: `generate` over the decoding engine. Beam search and continuous batching are not here yet."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignment.data.chat import prompt_ids, stop_token_ids
from alignment.data.tokenizers import check_vocabulary
from alignment.generation.engine import Responses, decode_responses
from alignment.generation.sampling import SamplingConfig

__all__ = ["Generation", "Responses", "SamplingConfig", "decode_responses", "generate"]


@dataclass(frozen=True)
class Generation:
    """One entry per prompt: the text, and the tokens it was decoded from with their log-probabilities (nats)."""

    texts: list[str]
    token_ids: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str | list[dict[str, str]]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 256,
) -> Generation:
    """Sample one response for each prompt.

    The generation config that travels with a checkpoint is not looked at: what is not set here is off.

    Args:
        model: a language model from `load_model`.
        tokenizer: the tokenizer from `load_tokenizer`.
        prompts: texts or lists of chat messages.
        max_new_tokens: longest response in tokens.
        temperature: 0 is greedy; 1 samples from the model itself.
        top_k: 0 keeps every token.
        top_p: 1 keeps every token.
        seed: the same seed and prompt place give the same response, whatever the batch size.
        batch_size: prompts decoded side by side.

    Returns:
        Responses without their stop token in `texts`, with it in `token_ids`.
    """
    check_vocabulary(tokenizer, model.spec.vocabulary)
    config = SamplingConfig(max_new_tokens, temperature, top_k, top_p, seed)
    was_training = model.training
    model.eval()
    try:
        responses = decode_responses(
            model,
            [prompt_ids(tokenizer, prompt) for prompt in prompts],
            config,
            sorted(stop_token_ids(tokenizer)),
            batch_size=batch_size,
        )
    finally:
        model.train(was_training)
    texts = [
        response_text(tokenizer, tokens, end) for tokens, end in zip(responses.token_ids, responses.ended, strict=True)
    ]
    return Generation(texts, responses.token_ids, responses.log_probs, responses.ended)


def response_text(tokenizer: Any, tokens: Sequence[int], ended: bool) -> str:
    """Text of a response, its stop token left off."""
    return tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False)

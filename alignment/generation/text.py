"""Text to and from the token ids of a decoder or an encoder-decoder. A decoder's prompts are encoded by data/text/chat.py."""

from collections.abc import Sequence
from typing import Any

from alignment.data.text.chat import prompt_ids
from alignment.data.tokenizers.tokenizer import Tokenizer, naming_panics
from alignment.errors import UserError, raise_all
from alignment.models.model import Model
from alignment.models.safetensors_files import HFConfig


def start_token_id(config: HFConfig) -> int | None:
    """The token that begins an encoder-decoder model's responses; None for a decoder.

    Args:
        config: the model's config.json.

    Raises:
        UserError: an encoder-decoder's config has none.
    """
    if not config.get("is_encoder_decoder", False):
        return None
    start = config.get("decoder_start_token_id")
    if start is None:
        raise UserError(
            f"the {config.get('model_type')} model's config.json names no decoder_start_token_id, so its decoder cannot "
            "begin; T5 takes its padding token, BART its end token"
        )
    return start


def start_token_of(model: Model) -> int | None:
    """The token that begins a model's responses: that of its spec, else that of its config; None for a decoder.

    Raises:
        UserError: an encoder-decoder's config has none.
    """
    start = getattr(model.spec, "start_token", None)
    return start_token_id(model.config) if start is None else start


def source_ids(tokenizer: Tokenizer, texts: Sequence[object]) -> list[list[int]]:
    """Ids of texts for an encoder, with the special tokens that its tokenizer adds (T5: the end token).

    Special tokens written in a text become those tokens, unlike in a decoder's prompt: T5's sentinels mark the gaps
    that it is asked to fill.

    Raises:
        UserError: messages instead of text, all of them at once; a text without any token.
    """
    raise_all(
        f"prompt {number}: an encoder-decoder model reads text, this prompt is a list of messages"
        for number, text in enumerate(texts)
        if not isinstance(text, str)
    )
    if not texts:
        return []
    with naming_panics(tokenizer):
        encoded = tokenizer(list(map(str, texts)), padding=False, truncation=False, verbose=False)["input_ids"]
    raise_all(f"prompt {number}: no token" for number, ids in enumerate(encoded) if not ids)
    return encoded


def read_prompts(tokenizer: Tokenizer, prompts: Sequence[Any], start_token: int | None) -> list[list[int]]:
    """Ids of prompts for a decoder, or for an encoder where responses begin with a start token.

    Raises:
        UserError: one prompt in place of a list of them, or an entry that is neither text nor messages.
    """
    if isinstance(prompts, str):
        raise UserError(f"prompts must be a list, got one text, {prompts[:40]!r}; write [text]")
    prompts = list(prompts)
    if any(isinstance(prompt, dict) for prompt in prompts):
        raise UserError("prompts must be a list of prompts, got the messages of one; write [messages]")
    raise_all(
        f"prompt {number}: must be text or a list of messages, got {type(prompt).__name__}"
        for number, prompt in enumerate(prompts)
        if not isinstance(prompt, (str, list, tuple))
    )
    if start_token is None:
        return [prompt_ids(tokenizer, prompt) for prompt in prompts]
    return source_ids(tokenizer, prompts)


def response_text(tokenizer: Tokenizer, tokens: Sequence[int], ended: bool) -> str:
    """Text of a decoder's response, without its stop token."""
    return tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False)


def target_text(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """Text of an encoder-decoder's response without special tokens, as transformers' pipelines show it."""
    return tokenizer.decode(list(tokens), skip_special_tokens=True)

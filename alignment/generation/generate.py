"""Text in, text out: `generate` over sampling (engine.py) and beam search (beam_search.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from alignment.data.encoder_inputs import encode_sources
from alignment.data.rows.records import Prompt
from alignment.data.text.chat import prompt_ids, stop_token_ids
from alignment.data.tokenizers.tokenizer import Tokenizer, check_vocabulary, known_tokens
from alignment.errors import UserError, raise_all
from alignment.generation.beam_search import BeamConfig, beam_search
from alignment.generation.engine import Generation, decode_responses
from alignment.generation.requests import SamplingConfig, check_stop
from alignment.models.model import Model, check_lengths, evaluation_mode, start_token_of


def generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 256,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    min_new_tokens: int = 0,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    stop: Sequence[str] = (),
    adapters: Sequence[str | None] | None = None,
) -> Generation:
    """One response for each prompt: sampled, or with several beams the best one that beam search finds.

    The checkpoint's generation_config.json is ignored: settings that are left out are off.

    Args:
        model, tokenizer: from `load_model` and `load_tokenizer`.
        prompts: a list of texts, encoded as they are, or of lists of chat messages, rendered by the chat template. An
            encoder-decoder's have the special tokens that its tokenizer puts around a text.
        max_new_tokens: longest response in tokens. `SamplingConfig` describes the sampling settings.
        seed: the same seed and position in `prompts` give the same response, whatever the batch size.
        batch_size: cache rows decoded side by side: one per response, or per beam. Equal prompts are computed once.
        num_beams: 1 samples; from 2 on beam search, where nothing is random. `BeamConfig` describes its settings.
        stop: texts that end a response, when sampling. The text is cut before the first that occurs; the token ids
            reach to the token that completed it.
        adapters: when sampling, for each prompt the name of its adapter, None for the base; see `load_adapters`.

    Returns:
        Responses without their stop token in `texts` (an encoder-decoder's without any special token), with it in
        `token_ids`; `ended` is True where a stop token or string ended them. `log_probs` belong to the distribution
        sampled from, after beam search to the model's own.

    Raises:
        ValueError: a setting out of range, or one that the others leave without effect.
        UserError: prompts that the model cannot read or that do not fit its positions; one prompt instead of a list.
    """
    sampling = SamplingConfig(
        max_new_tokens, temperature, top_k, top_p, seed, min_p, repetition_penalty, no_repeat_ngram_size, min_new_tokens
    )
    config = decoding_config(sampling, num_beams, length_penalty, early_stopping)
    check_stop(stop)
    if stop and num_beams > 1:
        raise ValueError("beam search ends at stop tokens only; leave stop out, or take num_beams=1 to sample")
    if adapters is not None and (len(adapters) != len(prompts) or (num_beams > 1 and any(adapters))):
        raise UserError(
            f"adapters must name one for each of {len(prompts)} prompts, got {len(adapters)}; beam search takes none"
        )
    return _generate(model, tokenizer, prompts, config, batch_size=batch_size, stop=stop, adapters=adapters)


def _generate(
    model: Model,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[Mapping[str, str]]],
    config: SamplingConfig | BeamConfig,
    *,
    batch_size: int,
    stop: Sequence[str],
    adapters: Sequence[str | None] | None,
) -> Generation:
    """`generate` with checked settings; the model's mode is eval inside and restored afterwards."""
    check_vocabulary(tokenizer, model.spec.vocabulary)
    start_token = start_token_of(model)
    ids = read_prompts(tokenizer, prompts, start_token)
    stop_ids = sorted(stop_token_ids(tokenizer))
    if start_token is None:
        lengths = [
            (f"prompt {index}", len(tokens) + model.adapter_tokens(adapters[index] if adapters else None))
            for index, tokens in enumerate(ids)
        ]
        check_lengths(model, lengths, "shorten them, or lower max_new_tokens", config.max_new_tokens)
    vocabulary = known_tokens(tokenizer)
    with evaluation_mode(model):
        if isinstance(config, BeamConfig):
            prompts_at_once = max(1, batch_size // config.num_beams)
            generation = beam_search(
                model, ids, config, stop_ids, batch_size=prompts_at_once, start_token=start_token, vocabulary=vocabulary
            )
        else:
            generation = decode_responses(
                model,
                ids,
                config,
                stop_ids,
                batch_size=batch_size,
                start_token=start_token,
                stop=stop,
                tokenizer=tokenizer if stop else None,
                adapters=adapters,
                vocabulary=vocabulary,
            )
    texts = generation.texts or [
        response_text(tokenizer, tokens, ended, start_token)
        for tokens, ended in zip(generation.token_ids, generation.ended, strict=True)
    ]
    return replace(generation, texts=texts)


def decoding_config(
    sampling: SamplingConfig,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> SamplingConfig | BeamConfig:
    """The config of sampling, or of beam search where there are several beams; ValueError for settings of both."""
    if num_beams == 1:
        if length_penalty != 1 or early_stopping is not False:
            raise ValueError("length_penalty and early_stopping belong to beam search; set num_beams to 2 or more")
        return sampling
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.temperature not in (0, 1) or (sampling.temperature and filtered):
        raise ValueError(
            f"beam search (num_beams={num_beams}) does not sample, so temperature, top_k, top_p and min_p have no "
            "effect; leave them out, or take num_beams=1 to sample"
        )
    both = ("max_new_tokens", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens")
    shared: dict[str, Any] = {name: getattr(sampling, name) for name in both}
    return BeamConfig(num_beams, length_penalty, early_stopping=early_stopping, **shared)


# Prompts and responses of a decoder or an encoder-decoder


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
        f"prompt {index}: must be text or a list of messages, got {type(prompt).__name__}"
        for index, prompt in enumerate(prompts)
        if not isinstance(prompt, (str, list, tuple))
    )
    if start_token is None:
        return [prompt_ids(tokenizer, prompt) for prompt in prompts]
    return encode_sources(tokenizer, [Prompt(prompt, {}, f"prompt {n}") for n, prompt in enumerate(prompts)])


def response_text(tokenizer: Tokenizer, tokens: Sequence[int], ended: bool, start_token: int | None = None) -> str:
    """Text of a decoder's response, without its stop token; of one behind a start token, without any special token."""
    if start_token is not None:
        return tokenizer.decode(list(tokens), skip_special_tokens=True)  # as transformers' pipelines show it
    return tokenizer.decode(list(tokens[:-1] if ended else tokens), skip_special_tokens=False)

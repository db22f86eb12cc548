"""Text in, text out: `generate` over drawing (engine.py) and beam search (beam.py). No continuous batching.

Read sampling.py and rules.py for what a step does to the logits, begin.py for how decoders and encoder-decoders begin,
then the two loops. All of it goes over ragged prompts and one cache; nothing is padded but the cache's rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from alignment.data.text.chat import stop_token_ids
from alignment.data.tokenizers.load import check_vocabulary
from alignment.generation.beam_search import BeamConfig, Hypotheses, beam_search
from alignment.generation.decode import Responses, decode_responses
from alignment.generation.sampling import SamplingConfig
from alignment.generation.text import read_prompts, response_text, start_token_id, target_text
from alignment.models.lengths import check_lengths

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
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    min_new_tokens: int = 0,
    beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> Generation:
    """One response for each prompt: drawn, or with several beams the best that a search finds.

    The generation config that travels with a checkpoint is not looked at: what is not set here is off.

    Args:
        model: a language model or an encoder-decoder from `load_model`.
        tokenizer: the tokenizer from `load_tokenizer`.
        prompts: a list of texts, read as they stand, or of lists of chat messages, read through the chat template; of
            an encoder-decoder texts, read with their special tokens.
        max_new_tokens: longest response in tokens.
        temperature: 0 is greedy; 1 samples from the model itself.
        top_k: 0 keeps every token.
        top_p: 1 keeps every token.
        seed: the same seed and prompt place give the same response, whatever the batch size.
        batch_size: cache rows decoded side by side: one per prompt, or per beam.
        min_p: 0 keeps every token; see `SamplingConfig` for this and the next three.
        repetition_penalty: 1 is off.
        no_repeat_ngram_size: 0 is off.
        min_new_tokens: 0 is off.
        beams: 1 draws; more search, and nothing is drawn.
        length_penalty: see `BeamConfig` for this and the next; for several beams only.
        early_stopping: when a search is over.

    Returns:
        Responses without their stop token in `texts` (an encoder-decoder's without any special token), with it in
        `token_ids`. `log_probs` are of the distribution drawn from; of a search, the model's own after the rules.

    Raises:
        ValueError: a setting out of range, or one that the others leave without effect.
        UserError: prompts that the model cannot read or that do not fit its positions; one prompt instead of a list.
    """
    config = decoding_config(
        SamplingConfig(
            max_new_tokens, temperature, top_k, top_p, seed, min_p, repetition_penalty, no_repeat_ngram_size,
            min_new_tokens,
        ),
        beams, length_penalty, early_stopping,
    )  # fmt: skip
    check_vocabulary(tokenizer, model.spec.vocabulary)
    start_token = model.spec.start_token if hasattr(model.spec, "start_token") else start_token_id(model.config)
    ids, stops = read_prompts(tokenizer, prompts, start_token), sorted(stop_token_ids(tokenizer))
    if start_token is None:
        lengths = [(f"prompt {number}", len(tokens)) for number, tokens in enumerate(ids)]
        check_lengths(model, lengths, "shorten them, or lower max_new_tokens", max_new_tokens)
    was_training = model.training
    model.eval()
    try:
        made = _decode(model, ids, config, stops, batch_size, start_token)
    finally:
        model.train(was_training)
    texts = [
        response_text(tokenizer, tokens, end) if start_token is None else target_text(tokenizer, tokens)
        for tokens, end in zip(made.token_ids, made.ended, strict=True)
    ]
    return Generation(texts, made.token_ids, made.log_probs, made.ended)


def decoding_config(
    sampling: SamplingConfig,
    beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
) -> SamplingConfig | BeamConfig:
    """The config of the one way to decode that the settings ask for.

    Raises:
        ValueError: settings of both ways, or out of range.
    """
    if beams == 1:
        if length_penalty != 1 or early_stopping is not False:
            raise ValueError("length_penalty and early_stopping belong to beam search; set beams to 2 or more")
        return sampling
    filtered = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0
    if sampling.temperature not in (0, 1) or (sampling.temperature and filtered):
        raise ValueError(
            f"{beams} beams draw nothing, so temperature, top_k, top_p and min_p have no effect; leave them out, or "
            "take beams=1 to sample"
        )
    return BeamConfig(
        beams,
        length_penalty,
        sampling.max_new_tokens,
        early_stopping,
        repetition_penalty=sampling.repetition_penalty,
        no_repeat_ngram_size=sampling.no_repeat_ngram_size,
        min_new_tokens=sampling.min_new_tokens,
    )


def _decode(
    model: Any,
    ids: list[list[int]],
    config: SamplingConfig | BeamConfig,
    stops: list[int],
    batch_size: int,
    start_token: int | None,
) -> Responses:
    """One response for each prompt, either way."""
    if isinstance(config, SamplingConfig):
        return decode_responses(model, ids, config, stops, batch_size=batch_size, start_token=start_token)
    prompts_at_once = max(1, batch_size // config.beams)
    found = beam_search(model, ids, config, stops, batch_size=prompts_at_once, start_token=start_token)
    return Responses(
        token_ids=[best[0] for best in found.token_ids],
        log_probs=[best[0] for best in found.log_probs],
        ended=[best[0] for best in found.ended],
    )

"""Sampling of one response for each prompt of a fixed set, by the decoding engine (engine.py). No text here.

Where every forward is a collective operation, as with sharded weights, all ranks run equally many of them: a rank that
has finished goes on with one row whose tokens are dropped, until no rank has a running row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError
from alignment.generation.engine import DecodingEngine
from alignment.generation.requests import DecodingRequest, SamplingConfig, check_failed
from alignment.models.model import Model


@dataclass(frozen=True)
class Generation:
    """Generated responses, one entry per prompt."""

    texts: list[str]  # cut before the stop string or token; empty where no tokenizer was given
    token_ids: list[list[int]]  # the stop token included where there is one
    log_probs: list[list[float]]  # of each token, nats, under the distribution it was sampled from
    ended: list[bool]  # the last token is a stop token or completes a stop string; False at the maximum length


@torch.no_grad()
def decode_responses(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: SamplingConfig,
    stop_ids: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    batch_size: int = 256,
    start_token: int | None = None,
    largest: Callable[[int], int] | None = None,
    stop: Sequence[str] = (),
    tokenizer: Tokenizer | None = None,
) -> Generation:
    """Sample one response for each prompt.

    Args:
        model: in eval mode for exact log-probabilities.
        prompts: token ids, none empty; for an encoder-decoder model the encoder's inputs.
        rows: global number of each prompt, which fixes its random numbers; None counts from 0.
        batch_size: responses decoded side by side; equal prompts are computed once.
        start_token: begins each response of an encoder-decoder model and is no part of it; None: a decoder.
        largest: gives the largest of all ranks' numbers, where each forward of the model is a collective operation. All
            ranks must then call this function, each with prompts of its own, and run equally many forwards. No response
            depends on it. None: this process decodes by itself.
        stop: texts that end a response, whose tokens reach to the one that completes the text.
        tokenizer: for `stop`.

    Raises:
        UserError: the device has no room for `batch_size` cache rows; logits that are not finite, with the number in `rows`.
    """
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    # Prompts of similar length side by side share the width of the cache with little waste; no response depends on it.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    try:
        engine = DecodingEngine(model, max_rows=batch_size, start_token=start_token, tokenizer=tokenizer)
        if order:
            engine.expect(prompts[order[-1]], config.max_new_tokens)
        requests = [DecodingRequest(prompts[i], config, numbers[i], stop_ids=stop_ids, stop=stop) for i in order]
        added = [engine.add(request) for request in requests]
        found = engine.run(largest, idle_room=1 + config.max_new_tokens)
    except torch.OutOfMemoryError as error:
        count, room = min(batch_size, len(prompts)), max(map(len, prompts)) + config.max_new_tokens
        raise UserError(
            f"out of memory while sampling {count} responses side by side, each with room for {room} tokens in the "
            "cache: lower micro_rollout_batch_size (in ppo) or batch_size (in generate and evaluate winrate), which "
            "changes no response"
        ) from error
    by_prompt = dict(zip(order, (found[number] for number in added), strict=True))
    check_failed({numbers[i]: len(row.tokens) + 1 for i, row in by_prompt.items() if row.finish == "error"})
    ordered = [by_prompt[i] for i in range(len(prompts))]
    return Generation(
        [row.text.text for row in ordered if row.text is not None],
        [row.tokens for row in ordered],
        [row.log_probs for row in ordered],
        [row.finish == "stop" for row in ordered],
    )

"""Batched decoding: prefill once, then one drawn token for every live row a step.

No text here, see `generate` in __init__.py; no beams, see beam.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.generation.logits_processors import TokenHistory
from alignment.generation.prefill import begin
from alignment.generation.sampling import SamplingConfig, draw, sampling_log_probs, uniforms


@dataclass(frozen=True)
class Responses:
    """What was drawn, one entry per prompt.

    Attributes:
        token_ids: drawn tokens, the stop token included where one was drawn.
        log_probs: natural-log probability of each under the distribution it was drawn from.
        ended: True where a stop token was drawn; False where the length ran out.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]


@torch.no_grad()
def decode_responses(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: SamplingConfig,
    stop_ids: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    batch_size: int = 256,
    start_token: int | None = None,
) -> Responses:
    """Draw one response for each prompt.

    Args:
        model: has `new_cache`, `prefill` and `decode` (see `models.language.LanguageModel`), in eval mode for exact
            log-probabilities.
        prompts: token ids, none empty; of an encoder-decoder model the source documents.
        config: lengths, temperature, filters, seed.
        stop_ids: tokens that end a response.
        rows: global number of each prompt, which fixes its draws; None counts from 0.
        batch_size: prompts decoded side by side.
        start_token: begins each response of an encoder-decoder model and is no part of it; None: a decoder.

    Raises:
        UserError: the device has no room for so many cache rows.
    """
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    # Neighbors of like length share a cache with little waste; the answer does not depend on the grouping.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    token_ids: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        documents, rows = [prompts[i] for i in group], [numbers[i] for i in group]
        try:
            drawn = _decode_group(model, documents, config, stop_ids, rows, start_token)
        except torch.OutOfMemoryError as error:
            room = max(map(len, documents)) + config.max_new_tokens
            raise UserError(
                f"out of memory while sampling {len(group)} responses side by side, each with room for {room} tokens in "
                "the cache: lower micro_rollout_batch_size (in ppo) or batch_size (in generate and evaluate winrate), "
                "which changes no response"
            ) from error
        for i, tokens, values, end in zip(group, *drawn, strict=True):
            token_ids[i], log_probs[i], ended[i] = tokens, values, end
    return Responses(token_ids, log_probs, ended)


def _decode_group(
    model: Any,
    prompts: list[Sequence[int]],
    config: SamplingConfig,
    stop_ids: Sequence[int],
    rows: list[int],
    start_token: int | None,
) -> tuple[list[list[int]], list[list[float]], list[bool]]:
    """`decode_responses` for prompts that share one cache."""
    device = next(model.parameters()).device
    steps, count = config.max_new_tokens, len(prompts)
    uniform = uniforms(config.seed, rows, steps).to(device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    tokens = torch.zeros(count, steps, dtype=torch.long, device=device)
    values = torch.zeros(count, steps, device=device)
    lengths = torch.full((count,), steps, device=device)
    live = torch.arange(count, device=device)  # which prompt each cache row serves
    running = torch.ones(count, dtype=torch.bool, device=device)

    cache, logits, past = begin(model, prompts, steps, stops, start_token)
    for step in range(steps):
        drawn, log_prob = _draw_step(logits, config, past, uniform[live, step])
        tokens[live, step], values[live, step] = drawn, log_prob
        stopped = torch.isin(drawn, stops)
        # Not by a boolean index, for which a GPU would have to say at each step how many rows it picks.
        lengths[live] = torch.where(stopped & running, step + 1, lengths[live])
        running &= ~stopped
        if step + 1 == steps:
            break
        # Asking how many rows still run stalls a GPU, so there it is asked now and then; the rest cost only idle rows.
        if device.type == "cpu" or step % 8 == 7:
            alive = int(running.sum())
            if alive == 0:
                break
            if alive <= 0.75 * len(running):
                keep = running.nonzero().squeeze(1)
                cache.keep(keep)
                past.reorder(keep)
                live, drawn, running = live[keep], drawn[keep], running[keep]
        past.append(drawn)
        logits = model.decode(drawn, cache)
    return _collect(tokens, values, lengths, stops)


def _draw_step(logits: Tensor, config: SamplingConfig, past: TokenHistory, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities [B]."""
    log_probs = sampling_log_probs(logits, config, past)
    drawn = log_probs.argmax(-1) if config.temperature == 0 else draw(log_probs, uniform)
    return drawn, log_probs.gather(-1, drawn.unsqueeze(-1)).squeeze(-1)


def _collect(
    tokens: Tensor, values: Tensor, lengths: Tensor, stops: Tensor
) -> tuple[list[list[int]], list[list[float]], list[bool]]:
    """Cut each row of [B, R] at its length."""
    sizes = lengths.tolist()
    ended = torch.isin(tokens.gather(1, lengths.unsqueeze(1) - 1).squeeze(1), stops).tolist()
    return (
        [row[:size] for row, size in zip(tokens.tolist(), sizes, strict=True)],
        [row[:size] for row, size in zip(values.tolist(), sizes, strict=True)],
        ended,
    )

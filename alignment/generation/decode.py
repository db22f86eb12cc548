"""Batched sampling: prefill once, then at each step one new token for every row that still runs. No text here.

Where every forward is a collective operation, as with sharded weights, all ranks run equally many of them: a rank that
has finished goes on with one row whose tokens are dropped, until no rank has a running row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from alignment.errors import UserError
from alignment.generation.logits_processors import TokenHistory
from alignment.generation.prefill import prefill
from alignment.generation.sampling import SamplingConfig, sample_token, sampling_log_probs, uniforms
from alignment.models.protocols import GenerativeModel

CHECK_STEPS = 8  # steps between two looks at the running rows, where a look waits for a GPU or for other ranks


@dataclass(frozen=True)
class Responses:
    """Generated responses, one entry per prompt.

    Attributes:
        token_ids: tokens, the stop token included where there is one.
        log_probs: natural-log probability of each under the distribution it was sampled from.
        ended: True where the last token is a stop token; False where the maximum length was reached.
    """

    token_ids: list[list[int]]
    log_probs: list[list[float]]
    ended: list[bool]


@torch.no_grad()
def decode_responses(
    model: GenerativeModel,
    prompts: Sequence[Sequence[int]],
    config: SamplingConfig,
    stop_ids: Sequence[int],
    *,
    rows: Sequence[int] | None = None,
    batch_size: int = 256,
    start_token: int | None = None,
    largest: Callable[[int], int] | None = None,
) -> Responses:
    """Sample one response for each prompt.

    Args:
        model: in eval mode for exact log-probabilities.
        prompts: token ids, none empty; for an encoder-decoder model the encoder's inputs.
        config: lengths, temperature, filters, seed.
        stop_ids: tokens that end a response.
        rows: global number of each prompt, which fixes its random numbers; None counts from 0.
        batch_size: prompts decoded side by side.
        start_token: begins each response of an encoder-decoder model and is no part of it; None: a decoder.
        largest: gives the largest of all ranks' numbers, where each forward of the model is a collective operation. All
            ranks must then call this function, each with prompts of its own, and run equally many forwards. No response
            depends on it. None: this process decodes by itself.

    Raises:
        UserError: the device has no room for so many cache rows.
    """
    numbers = list(range(len(prompts))) if rows is None else list(rows)
    # Prompts of similar length share a cache with little waste; no response depends on the grouping.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    token_ids: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    groups = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    others = 0 if largest is None else largest(len(groups)) - len(groups)  # groups that another rank has beyond these
    for group in groups:
        documents, rows = [prompts[i] for i in group], [numbers[i] for i in group]
        try:
            drawn = _decode_group(model, documents, config, stop_ids, rows, start_token=start_token, largest=largest)
        except torch.OutOfMemoryError as error:
            room = max(map(len, documents)) + config.max_new_tokens
            raise UserError(
                f"out of memory while sampling {len(group)} responses side by side, each with room for {room} tokens in "
                "the cache: lower micro_rollout_batch_size (in ppo) or batch_size (in generate and evaluate winrate), "
                "which changes no response"
            ) from error
        for i, tokens, values, end in zip(group, *drawn, strict=True):
            token_ids[i], log_probs[i], ended[i] = tokens, values, end
    for _ in range(others):
        shortest = [prompts[order[0]]]
        _decode_group(model, shortest, config, stop_ids, [0], start_token=start_token, largest=largest, idle=True)
    return Responses(token_ids, log_probs, ended)


def _decode_group(
    model: GenerativeModel,
    prompts: list[Sequence[int]],
    config: SamplingConfig,
    stop_ids: Sequence[int],
    rows: list[int],
    *,
    start_token: int | None,
    largest: Callable[[int], int] | None,
    idle: bool = False,
) -> tuple[list[list[int]], list[list[float]], list[bool]]:
    """Token ids, log-probabilities and `ended` of prompts that share one cache.

    Args:
        idle: decode only as long as other ranks need it; what is returned has no meaning.
    """
    device = next(model.parameters()).device
    steps, count = config.max_new_tokens, len(prompts)
    uniform = uniforms(config.seed, rows, steps).to(device)
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    tokens = torch.zeros(count, steps, dtype=torch.long, device=device)
    values = torch.zeros(count, steps, device=device)
    lengths = torch.full((count,), steps, device=device)
    live = torch.arange(count, device=device)  # which prompt each cache row serves
    running = torch.full((count,), not idle, device=device)

    cache, logits, history = prefill(model, prompts, steps, stops, start_token)
    for step in range(steps):
        drawn, log_prob = _sample_step(logits, config, history, uniform[live, step])
        tokens[live, step], values[live, step] = drawn, log_prob
        stopped = torch.isin(drawn, stops)
        # No boolean index here: it would synchronize with the GPU at each step, to learn how many rows it selects.
        lengths[live] = torch.where(stopped & running, step + 1, lengths[live])
        running &= ~stopped
        if step + 1 == steps:
            break
        # Counting the running rows synchronizes with a GPU, so there it is done every 8 steps; idle rows cost less.
        check = step % CHECK_STEPS == CHECK_STEPS - 1
        if device.type == "cpu" or check:
            alive = int(running.sum())
            if (alive == 0) if largest is None else (check and largest(alive) == 0):
                break
            if max(alive, 1) <= 0.75 * len(running):
                keep = running.nonzero().squeeze(1) if alive else torch.zeros_like(live[:1])
                cache.keep(keep)
                history.reorder(keep)
                live, drawn, running = live[keep], drawn[keep], running[keep]
        history.append(drawn)
        logits = model.decode(drawn, cache)
    return _collect(tokens, values, lengths, stops)


def _sample_step(
    logits: Tensor, config: SamplingConfig, history: TokenHistory, uniform: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens [B] and their log-probabilities [B]."""
    log_probs = sampling_log_probs(logits, config, history)
    drawn = log_probs.argmax(-1) if config.temperature == 0 else sample_token(log_probs, uniform)
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

"""Beam search over unpadded prompts. Nothing is random here; sampling is in engine.py.

Ties, length penalty and the end of the search follow transformers' `generate(num_beams=...)`, so that both find the
same tokens. One step: extend every beam by every token, keep the best candidates of each prompt, move those that end to
the finished hypotheses, continue with the best of the others.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Interval
from torch import Tensor

from alignment.generation.engine import Generation
from alignment.generation.requests import ROOM_FOR_LEAST, NewTokens, check_failed
from alignment.generation.sampling import TokenHistory, limit_repeats
from alignment.models.external.rectangles import ExternalCache
from alignment.models.layers.kv_cache import Cache
from alignment.models.model import Model
from alignment.ragged import Ragged, Seq2Seq
from alignment.settings import NonNegativeInt, PositiveFloat, Settings


@dataclass(frozen=True)
class BeamConfig(Settings):
    """Width, scoring and end of the search.

    Attributes:
        num_beams: running hypotheses of each prompt, K.
        length_penalty: the score of a finished hypothesis is its log-probability / tokens ** length_penalty: above 0
            favors long ones, below 0 short ones.
        max_new_tokens: longest response, end token included.
        early_stopping: end of the search for a prompt. True: as soon as K hypotheses have ended. False: as soon as
            the best running one, if it ended now, would not beat the worst of those. "never": as soon as it could not
            even at its most favorable length.
        repetition_penalty, no_repeat_ngram_size, min_new_tokens: as in `SamplingConfig`, on log-probabilities.
    """

    num_beams: Annotated[int, Interval(ge=1, le=10_000)] = 4  # each is a row of the cache
    length_penalty: float = 1.0
    max_new_tokens: NewTokens = 64
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: PositiveFloat = 1.0
    no_repeat_ngram_size: NonNegativeInt = 0
    min_new_tokens: NonNegativeInt = 0

    RULES = (ROOM_FOR_LEAST,)


@torch.no_grad()
def beam_search(
    model: Model,
    prompts: Sequence[Sequence[int]],
    config: BeamConfig,
    stop_ids: Sequence[int],
    *,
    batch_size: int = 64,
    start_token: int | None = None,
    vocabulary: int | None = None,
) -> Generation:
    """The best response to each prompt that a search with `config.num_beams` beams finds.

    Its log-probabilities are the model's after the logits processors, and it has the largest sum of them / tokens **
    length_penalty. Arguments as for `decode_responses`; `batch_size` prompts are searched side by side, each in
    `num_beams` rows of a cache.

    Raises:
        ValueError: fewer tokens than beams that can begin a response.
        UserError: logits that are not finite.

    Source: Wu et al. 2016, arXiv:1609.08144, section 7, with the plain power of the length as its penalty.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    responses: dict[int, tuple[list[int], list[float]]] = {}
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        searched = _search_group(model, [prompts[i] for i in group], config, stop_ids, start_token, known=vocabulary)
        rows = (column[:, 0].tolist() for column in searched[1:])
        for i, tokens, log_probs, length in zip(group, *rows, strict=True):
            responses[i] = tokens[:length], log_probs[:length]
        # A hypothesis with NaN is the best one: `topk` takes NaN for the largest number.
        broken = {i: list(map(math.isnan, responses[i][1])) for i in group}
        check_failed({i: flags.index(True) + 1 for i, flags in broken.items() if any(flags)})
    token_ids = [responses[i][0] for i in range(len(prompts))]
    ended = [tokens[-1] in set(stop_ids) for tokens in token_ids]
    return Generation([], token_ids, [responses[i][1] for i in range(len(prompts))], ended)


class _Beams(NamedTuple):
    """n hypotheses of each of B prompts: running, candidates or finished."""

    scores: Tensor  # sort key, -inf where there is no hypothesis, [B, n]
    tokens: Tensor  # [B, n, R]
    log_probs: Tensor  # of the tokens, [B, n, R]
    lengths: Tensor  # tokens in use, [B, n]

    @classmethod
    def none(cls, count: int, beams: int, steps: int, device: torch.device) -> "_Beams":
        """An empty set of hypotheses."""
        scores = torch.full((count, beams), -torch.inf, device=device)
        tokens = torch.zeros(count, beams, steps, dtype=torch.long, device=device)
        return cls(scores, tokens, torch.zeros(tokens.shape, device=device), torch.zeros_like(tokens[..., 0]))

    def pick(self, index: Tensor) -> "_Beams":
        """The hypotheses at `index` [B, m] of each prompt."""
        rows = torch.arange(len(index), device=index.device)[:, None]
        return _Beams(*(column[rows, index] for column in self))

    def put(self, prompts: Tensor, other: "_Beams") -> None:
        """Overwrite the hypotheses of some prompts, [b]."""
        for column, new in zip(self, other, strict=True):
            column[prompts] = new


def _require_beams(beams: int, vocabulary: int, stops: int) -> None:
    """ValueError where fewer tokens of the vocabulary than beams do not end a response."""
    if vocabulary - stops < beams:
        raise ValueError(
            f"{beams} beams begin with as many tokens that do not end a response, and of the vocabulary's {vocabulary} "
            f"tokens {stops} end one; lower num_beams"
        )


def _search_group(
    model: Model,
    prompts: list[Sequence[int]],
    config: BeamConfig,
    stop_ids: Sequence[int],
    start_token: int | None,
    *,
    known: int | None,
) -> _Beams:
    """Finished hypotheses [B, K] of prompts that share one cache, the best first."""
    device = next(model.parameters()).device
    steps = config.max_new_tokens
    count = len(prompts)
    beams = config.num_beams
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    cache, logits, history = _prefill(model, prompts, steps, start_token)
    vocabulary = min(logits.shape[-1], known or logits.shape[-1])
    _require_beams(beams, vocabulary, len(stops))
    kept = min(max(2, 1 + len(stops)), vocabulary) * beams  # so many that at least K of them do not end

    hypotheses, running = (_Beams.none(count, beams, steps, device) for _ in range(2))
    finished = hypotheses
    live = torch.arange(count, device=device)  # the prompt that each block of K cache rows serves
    running.scores[:, 0] = 0.0  # one beam is alive at first: the others would find the same
    rows = live.repeat_interleave(beams)
    cache.reorder(rows)
    history.keep(rows)
    logits = logits[rows]
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(steps):
        log_probs = _processed(logits[:, :vocabulary], history, config)
        if step < config.min_new_tokens:
            log_probs = log_probs.index_fill(-1, stops, -torch.inf)
        candidates, parents = _extend(running, log_probs.unflatten(0, (-1, beams)), kept, step)
        stopped = torch.isin(candidates.tokens[..., step], stops) | (step + 1 == steps)
        finished = _finish(finished, candidates, stopped & ~done[:, None], step + 1, config)
        if step + 1 == steps:
            break
        chosen = candidates.scores.masked_fill(stopped, -torch.inf).topk(beams).indices
        running = candidates.pick(chosen)
        rows = parents.gather(1, chosen) + beams * torch.arange(len(live), device=device)[:, None]
        done |= _settled(running, finished, step + 1, config)
        # Counting the unfinished prompts synchronizes with a GPU, so there it is done every 8 steps.
        if device.type == "cpu" or step % 8 == 7:
            if not len(going := (~done).nonzero().squeeze(1)):
                break
            if len(going) <= 0.75 * len(done):
                hypotheses.put(live, finished)
                live = live[going]
                rows = rows[going]
                done = done[going]
                running, finished = (_Beams(*(column[going] for column in beams)) for beams in (running, finished))
        rows = rows.flatten()
        cache.reorder(rows)
        history.keep(rows)
        newest = running.tokens[..., step].flatten()
        history.append(torch.arange(len(newest), device=device), newest)
        logits = model.decode(newest, cache)
    hypotheses.put(live, finished)
    return hypotheses


def _prefill(
    model: Model, prompts: list[Sequence[int]], steps: int, start_token: int | None
) -> tuple[Cache | ExternalCache, Tensor, TokenHistory]:
    """Run the prompts through the model: its cache, logits of each response's first token [B, V], the tokens so far."""
    device = next(model.parameters()).device
    continued = prompts if start_token is None else [[start_token]] * len(prompts)
    history = TokenHistory(device)
    longest = max(map(len, continued)) + steps
    history.reserve(len(prompts), longest)
    for row, document in enumerate(continued):
        history.put(row, document)
    batch = Ragged.build(prompts)
    batch = batch if start_token is None else Seq2Seq(batch, Ragged.build(continued))
    cache = model.new_cache(len(prompts), longest)
    return cache, model.prefill(batch.to(device), cache), history


def _processed(logits: Tensor, history: TokenHistory, config: BeamConfig) -> Tensor:
    """Log-probabilities of the next token after the logits processors, from logits [B, V]."""
    log_probs = logits.float().log_softmax(-1)
    if config.repetition_penalty == 1 and not config.no_repeat_ngram_size:
        return log_probs
    seen = history.seen(torch.arange(len(logits), device=logits.device))
    return limit_repeats(log_probs, seen, config.repetition_penalty, config.no_repeat_ngram_size)


def _extend(running: _Beams, log_probs: Tensor, kept: int, step: int) -> tuple[_Beams, Tensor]:
    """The `kept` best one-token extensions [B, C], best first by summed log-probabilities, and the beam each continues.

    `log_probs` are of every next token, [B, K, V].
    """
    sums = (log_probs + running.scores[..., None]).flatten(1)
    scores, index = sums.topk(kept)
    parents = index // log_probs.shape[-1]
    tokens = index % log_probs.shape[-1]
    continued = running.pick(parents)
    continued.tokens[..., step] = tokens
    continued.log_probs[..., step] = log_probs.flatten(1).gather(1, index)
    return _Beams(scores, continued.tokens, continued.log_probs, continued.lengths + 1), parents


def _finish(finished: _Beams, candidates: _Beams, stopped: Tensor, length: int, config: BeamConfig) -> _Beams:
    """The K best of the finished hypotheses and of the candidates that end now, [B, K]; only the K best may end."""
    may_end = stopped & (torch.arange(stopped.shape[1], device=stopped.device) < config.num_beams)
    scores = (candidates.scores / length**config.length_penalty).masked_fill(~may_end, -torch.inf)
    ending = candidates._replace(scores=scores)
    merged = _Beams(*(torch.cat(columns, dim=1) for columns in zip(finished, ending, strict=True)))
    return merged.pick(merged.scores.topk(config.num_beams).indices)


def _settled(running: _Beams, finished: _Beams, length: int, config: BeamConfig) -> Tensor:
    """True where no running hypothesis can enter a prompt's finished ones any more, [B]."""
    worst = finished.scores.min(1).values  # -inf as long as fewer than K have ended
    if config.early_stopping is True:
        return worst > -torch.inf
    longest_pays = config.early_stopping == "never" and config.length_penalty > 0
    best = running.scores[:, 0] / (config.max_new_tokens if longest_pays else length) ** config.length_penalty
    return best <= worst

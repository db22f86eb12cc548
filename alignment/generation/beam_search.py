"""Beam search over ragged prompts: the likeliest responses that a narrow search finds. Nothing is drawn here: engine.py.

The rules are those of transformers' `generate(num_beams=...)`, so that both find the same tokens. One step: extend every
beam by every token, keep the best few candidates of each prompt, set aside those that end, go on with the best others.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from alignment.generation.logits_processors import check_rules, process_logits
from alignment.generation.prefill import begin

MOST_BEAMS = 10_000


@dataclass(frozen=True)
class BeamConfig:
    """How the search goes.

    Attributes:
        beams: hypotheses carried along for each prompt, K.
        length_penalty: a finished hypothesis counts its log-probability / tokens ** length_penalty: above 0 favours
            long ones, below 0 short ones.
        max_new_tokens: longest response, end token included.
        early_stopping: True: a prompt is done as soon as K hypotheses have ended. False: as soon as the best one still
            running, were it to end now, would not beat the worst of those. "never": as soon as it could not even at
            its most favourable length.
        returned: hypotheses given back for each prompt, at most `beams`.
        repetition_penalty, no_repeat_ngram_size, min_new_tokens: as in `SamplingConfig`, on log-probabilities.
    """

    beams: int = 4
    length_penalty: float = 1.0
    max_new_tokens: int = 64
    early_stopping: bool | Literal["never"] = False
    returned: int = 1
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        check_rules(self)
        if self.beams < 1:
            raise ValueError(f"beams must be at least 1, got {self.beams}")
        if self.beams > MOST_BEAMS:  # each is a row of the cache
            raise ValueError(f"beams must be at most {MOST_BEAMS:,}, got {self.beams}; 4 or 5 are usual")
        if not 1 <= self.returned <= self.beams:
            raise ValueError(f"returned must lie between 1 and beams = {self.beams}, got {self.returned}")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f"early_stopping must be true, false or 'never', got {self.early_stopping!r}")


@dataclass(frozen=True)
class Hypotheses:
    """What was found: for each prompt its hypotheses, the best first.

    Attributes:
        token_ids: tokens, the stop token included where there is one.
        log_probs: what each token added to the hypothesis's sum, nats: the model's log-probability, after the rules.
        scores: sum of those / tokens ** length_penalty.
        ended: True where the last token is a stop token; False where the length ran out.
    """

    token_ids: list[list[list[int]]]
    log_probs: list[list[list[float]]]
    scores: list[list[float]]
    ended: list[list[bool]]


@torch.no_grad()
def beam_search(
    model: Any,
    prompts: Sequence[Sequence[int]],
    config: BeamConfig,
    stop_ids: Sequence[int],
    *,
    batch_size: int = 64,
    start_token: int | None = None,
) -> Hypotheses:
    """The best responses to each prompt that a search `config.beams` wide finds.

    Args:
        model: has `new_cache`, `prefill` and `decode`; its caches have `reorder` (see `models.cache.Cache`).
        prompts: token ids, none empty; of an encoder-decoder model the source documents.
        config: width, lengths, when to stop.
        stop_ids: tokens that end a response.
        batch_size: prompts searched side by side; each takes `beams` rows of a cache.
        start_token: begins each response of an encoder-decoder model and is no part of it; None: a decoder.

    Raises:
        ValueError: fewer tokens than beams to begin a response with.

    Source: Wu et al. 2016, arXiv:1609.08144, section 7, with the plain power of the length as its penalty.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, tuple[Any, ...]] = {}
    for start in range(0, len(order), batch_size):
        group = order[start : start + batch_size]
        searched = _search_group(model, [prompts[i] for i in group], config, stop_ids, start_token)
        found.update(zip(group, _collect(searched, config.returned, stop_ids), strict=True))
    token_ids, log_probs, scores, ended = ([found[i][column] for i in range(len(prompts))] for column in range(4))
    return Hypotheses(token_ids, log_probs, scores, ended)


@dataclass(frozen=True)
class _Beams:
    """n hypotheses for each of B prompts: running, candidates or finished.

    Attributes:
        scores: what they are ordered by, -inf where there is none, [B, n].
        tokens: [B, n, R].
        log_probs: of the tokens, [B, n, R].
        lengths: tokens in use, [B, n].
    """

    scores: Tensor
    tokens: Tensor
    log_probs: Tensor
    lengths: Tensor

    @classmethod
    def none(cls, count: int, beams: int, steps: int, device: torch.device) -> "_Beams":
        """No hypothesis yet."""
        scores = torch.full((count, beams), -torch.inf, device=device)
        tokens = torch.zeros(count, beams, steps, dtype=torch.long, device=device)
        return cls(scores, tokens, torch.zeros(tokens.shape, device=device), torch.zeros_like(tokens[..., 0]))

    def pick(self, index: Tensor) -> "_Beams":
        """Of each prompt the hypotheses at `index` [B, m]."""
        steps = index[..., None].expand(*index.shape, self.tokens.shape[-1])
        return _Beams(
            self.scores.gather(1, index),
            self.tokens.gather(1, steps),
            self.log_probs.gather(1, steps),
            self.lengths.gather(1, index),
        )

    def of(self, prompts: Tensor) -> "_Beams":
        """The hypotheses of some prompts, [b]."""
        return _Beams(self.scores[prompts], self.tokens[prompts], self.log_probs[prompts], self.lengths[prompts])

    def put(self, prompts: Tensor, other: "_Beams") -> None:
        """Write over those of some prompts."""
        self.scores[prompts], self.tokens[prompts] = other.scores, other.tokens
        self.log_probs[prompts], self.lengths[prompts] = other.log_probs, other.lengths


def _search_group(
    model: Any, prompts: list[Sequence[int]], config: BeamConfig, stop_ids: Sequence[int], start_token: int | None
) -> _Beams:
    """The finished hypotheses [B, K] of prompts that share one cache, the best first."""
    device = next(model.parameters()).device
    steps, count, beams = config.max_new_tokens, len(prompts), config.beams
    stops = torch.tensor(sorted(stop_ids), dtype=torch.long, device=device)
    cache, logits, past = begin(model, prompts, steps, stops, start_token)
    kept = _candidates_kept(beams, len(stops), logits.shape[-1])

    found = _Beams.none(count, beams, steps, device)
    live = torch.arange(count, device=device)  # which prompt each block of K cache rows serves
    running, finished = _Beams.none(count, beams, steps, device), found
    running.scores[:, 0] = 0.0  # all beams begin as one: the others would find the same
    rows = live.repeat_interleave(beams)
    cache.reorder(rows)
    past.reorder(rows)
    logits = logits[rows]
    done = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(steps):
        log_probs = process_logits(logits.float().log_softmax(-1), config, past)
        candidates, parents = _extend(running, log_probs.unflatten(0, (-1, beams)), kept, step)
        stopped = torch.isin(candidates.tokens[..., step], stops) | (step + 1 == steps)
        finished = _finish(finished, candidates, stopped & ~done[:, None], step + 1, config)
        if step + 1 == steps:
            break
        chosen = candidates.scores.masked_fill(stopped, -torch.inf).topk(beams).indices
        running = candidates.pick(chosen)
        rows = parents.gather(1, chosen) + beams * torch.arange(len(live), device=device)[:, None]
        done |= _settled(running, finished, step + 1, config)
        # Asking which prompts are done stalls a GPU, so there it is asked now and then; the rest cost only idle rows.
        if device.type == "cpu" or step % 8 == 7:
            going = (~done).nonzero().squeeze(1)
            if len(going) == 0:
                break
            if len(going) <= 0.75 * len(done):
                found.put(live, finished)
                live, rows, done = live[going], rows[going], done[going]
                running, finished = running.of(going), finished.of(going)
        rows = rows.flatten()
        cache.reorder(rows)
        past.reorder(rows)
        newest = running.tokens[..., step].flatten()
        past.append(newest)
        logits = model.decode(newest, cache)
    found.put(live, finished)
    return found


def _candidates_kept(beams: int, stops: int, vocabulary: int) -> int:
    """How many candidates of each prompt go on to be looked at: enough that K of them do not end."""
    if vocabulary - stops < beams:
        raise ValueError(
            f"{beams} beams begin with as many tokens that do not end a response, and of the vocabulary's {vocabulary} "
            f"tokens {stops} end one; take fewer beams"
        )
    return min(max(2, 1 + stops), vocabulary) * beams


def _extend(running: _Beams, log_probs: Tensor, kept: int, step: int) -> tuple[_Beams, Tensor]:
    """The best candidates among all one-token extensions, and the beam that each continues.

    Args:
        running: [B, K].
        log_probs: of every next token, [B, K, V].
        kept: C.
        step: place of the new token.

    Returns:
        Candidates [B, C], their score the sum of log-probabilities, best first; parents [B, C].
    """
    sums = (log_probs + running.scores[..., None]).flatten(1)
    scores, index = sums.topk(kept)
    parents, tokens = index // log_probs.shape[-1], index % log_probs.shape[-1]
    continued = running.pick(parents)
    continued.tokens[..., step] = tokens
    continued.log_probs[..., step] = log_probs.flatten(1).gather(1, index)
    return _Beams(scores, continued.tokens, continued.log_probs, continued.lengths + 1), parents


def _finish(finished: _Beams, candidates: _Beams, stopped: Tensor, length: int, config: BeamConfig) -> _Beams:
    """The K best of what was finished and what ends now, [B, K]; only the K best candidates may end."""
    may_end = stopped & (torch.arange(stopped.shape[1], device=stopped.device) < config.beams)
    scores = (candidates.scores / length**config.length_penalty).masked_fill(~may_end, -torch.inf)
    merged = _Beams(
        torch.cat([finished.scores, scores], dim=1),
        torch.cat([finished.tokens, candidates.tokens], dim=1),
        torch.cat([finished.log_probs, candidates.log_probs], dim=1),
        torch.cat([finished.lengths, candidates.lengths], dim=1),
    )
    return merged.pick(merged.scores.topk(config.beams).indices)


def _settled(running: _Beams, finished: _Beams, length: int, config: BeamConfig) -> Tensor:
    """Whether a prompt's finished hypotheses will stay as they are, [B]."""
    worst = finished.scores.min(1).values  # -inf as long as fewer than K have ended
    if config.early_stopping is True:
        return worst > -torch.inf
    longest_pays = config.early_stopping == "never" and config.length_penalty > 0
    best = running.scores[:, 0] / (config.max_new_tokens if longest_pays else length) ** config.length_penalty
    return best <= worst


def _collect(
    finished: _Beams, returned: int, stop_ids: Sequence[int]
) -> list[tuple[list[list[int]], list[list[float]], list[float], list[bool]]]:
    """Of each prompt: tokens, log-probabilities, scores and whether a stop token ends them; plain numbers."""
    stops, collected = set(stop_ids), []
    columns = (finished.tokens, finished.log_probs, finished.scores, finished.lengths)
    for tokens, log_probs, scores, lengths in zip(*(column[:, :returned].tolist() for column in columns), strict=True):
        cut = [row[:length] for row, length in zip(tokens, lengths, strict=True)]
        values = [row[:length] for row, length in zip(log_probs, lengths, strict=True)]
        collected.append((cut, values, scores, [row[-1] in stops for row in cut]))
    return collected

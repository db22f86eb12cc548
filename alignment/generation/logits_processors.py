"""What a response may not do in view of what stands there already: repeat itself, or end too soon.

The tokens so far are kept on the device and read there: no rule waits for it. Filters that look at one step's
distribution alone (top-k, top-p, min-p) are in sampling.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_NEW_TOKENS = 10_000_000
NOTHING = -1  # stands where a row has no token


class Rules(Protocol):
    """The settings that the rules read; a config of sampling or of beam search has them."""

    @property
    def repetition_penalty(self) -> float: ...
    @property
    def no_repeat_ngram_size(self) -> int: ...
    @property
    def min_new_tokens(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...


def check_rules(rules: Rules) -> None:
    """Refuse settings that cannot be meant.

    Raises:
        ValueError: one of them is out of its range.
    """
    if rules.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {rules.max_new_tokens}")
    if rules.max_new_tokens > MOST_NEW_TOKENS:  # their random numbers are drawn before the first of them
        raise ValueError(f"max_new_tokens must be at most {MOST_NEW_TOKENS:,}, got {rules.max_new_tokens}")
    if rules.repetition_penalty <= 0:
        raise ValueError(f"repetition_penalty must be above 0, got {rules.repetition_penalty}; 1 is off, 1.2 is usual")
    if rules.no_repeat_ngram_size < 0:
        raise ValueError(f"no_repeat_ngram_size must be 0 (off) or above, got {rules.no_repeat_ngram_size}")
    if not 0 <= rules.min_new_tokens <= rules.max_new_tokens:
        raise ValueError(
            f"min_new_tokens must lie between 0 and max_new_tokens = {rules.max_new_tokens}, got {rules.min_new_tokens}"
        )


def is_active(rules: Rules) -> bool:
    """Whether anything in the past matters."""
    return rules.repetition_penalty != 1 or rules.no_repeat_ngram_size > 0 or rules.min_new_tokens > 0


class TokenHistory:
    """The tokens that each row has so far, prompts and responses meeting at one column.

    Attributes:
        tokens: [B, P + steps], `NOTHING` before a shorter prompt and after the newest token.
        prompt_width: P, tokens of the longest prompt.
        width: columns in use.
        stops: tokens that end a response, [S].
    """

    def __init__(self, documents: Sequence[Sequence[int]], steps: int, stops: Tensor):
        self.prompt_width = self.width = max(len(document) for document in documents)
        rows = [[*[NOTHING] * (self.width - len(document)), *document, *[NOTHING] * steps] for document in documents]
        self.tokens = torch.tensor(rows).to(stops.device)
        self.stops = stops

    @property
    def seen(self) -> Tensor:
        """The columns in use, [B, width]."""
        return self.tokens[:, : self.width]

    @property
    def new_tokens(self) -> int:
        """Tokens of each response."""
        return self.width - self.prompt_width

    def append(self, tokens: Tensor) -> None:
        """One more token for every row, [B]."""
        self.tokens[:, self.width] = tokens
        self.width += 1

    def reorder(self, rows: Tensor) -> None:
        """Put row `rows[i]` at place i; a row may come several times, or not at all, [n]."""
        self.tokens = self.tokens[rows]


def process_logits(scores: Tensor, rules: Rules, past: TokenHistory) -> Tensor:
    """Scores after the rules: -inf where a token is forbidden.

    Args:
        scores: fp32, logits or log-probabilities of the next token, [B, V].
        rules: settings; those that are off cost nothing.
        past: what the rows hold.
    """
    if rules.repetition_penalty != 1:
        scores = penalize_seen(scores, past.seen, rules.repetition_penalty)
    if rules.no_repeat_ngram_size:
        scores = forbid_repeated_ngrams(scores, past.seen, rules.no_repeat_ngram_size)
    if past.new_tokens < rules.min_new_tokens:
        scores = scores.index_fill(-1, past.stops, -torch.inf)
    return scores


def penalize_seen(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make tokens that were there less likely: score / penalty where the score is positive, score * penalty elsewhere.

    The paper divides always, which makes a token with a negative score likelier; multiplying those is how everyone
    reads it. A token counts once, however often it was there.

    Args:
        scores: [B, V].
        seen: token ids of each row, `NOTHING` where there is none, [B, L].
        penalty: > 0; above 1 discourages repetition.

    Source: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, their theta.
    """
    padded = F.pad(scores, (1, 0))  # a column for NOTHING
    found = padded.gather(1, seen + 1)
    return padded.scatter(1, seen + 1, torch.where(found < 0, found * penalty, found / penalty))[:, 1:]


def forbid_repeated_ngrams(scores: Tensor, seen: Tensor, size: int) -> Tensor:
    """-inf where a token would complete a run of `size` tokens that its row has had before.

    Args:
        scores: [B, V].
        seen: token ids of each row, `NOTHING` before the first, [B, L].
        size: n of the n-grams, >= 1; 1 allows every token once.

    Source: Paulus et al. 2017, arXiv:1705.04304, section 2.5 (there for trigrams).
    """
    width = seen.shape[1]
    if width < size:
        return scores
    windows = seen.unfold(1, size, 1)  # [B, L - n + 1, n]
    begun = seen[:, None, width + 1 - size :]  # the n - 1 newest tokens
    # Newest tokens that reach back before a row's first stand nowhere else in it: no need to look for NOTHING.
    repeats = (windows[..., :-1] == begun).all(-1)
    forbidden = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
    forbidden.scatter_(1, torch.where(repeats, windows[..., -1] + 1, 0), True)
    return scores.masked_fill(forbidden[:, 1:], -torch.inf)

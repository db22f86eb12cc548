"""Logits processors that depend on the tokens so far: repetition penalty, no repeated n-grams, minimum length.

The tokens so far stay on the device, so that no processor waits for it. Filters of a single step's distribution (top-k,
top-p, min-p) are in sampling.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

MOST_NEW_TOKENS = 10_000_000
NO_TOKEN = -1  # at positions of a row that hold no token


class ProcessorSettings(Protocol):
    """The settings of the processors; `SamplingConfig` and `BeamConfig` have them."""

    @property
    def repetition_penalty(self) -> float: ...
    @property
    def no_repeat_ngram_size(self) -> int: ...
    @property
    def min_new_tokens(self) -> int: ...
    @property
    def max_new_tokens(self) -> int: ...


def check_processor_settings(settings: ProcessorSettings) -> None:
    """Refuse settings that are out of range.

    Raises:
        ValueError: one of them is out of its range; it is named.
    """
    if settings.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {settings.max_new_tokens}")
    if settings.max_new_tokens > MOST_NEW_TOKENS:  # random numbers for all of them are made in advance
        raise ValueError(f"max_new_tokens must be at most {MOST_NEW_TOKENS:,}, got {settings.max_new_tokens}")
    if settings.repetition_penalty <= 0:
        raise ValueError(
            f"repetition_penalty must be above 0, got {settings.repetition_penalty}; 1 is off, 1.2 is usual"
        )
    if settings.no_repeat_ngram_size < 0:
        raise ValueError(f"no_repeat_ngram_size must be 0 (off) or above, got {settings.no_repeat_ngram_size}")
    if not 0 <= settings.min_new_tokens <= settings.max_new_tokens:
        raise ValueError(
            f"min_new_tokens must lie between 0 and max_new_tokens = {settings.max_new_tokens}, got {settings.min_new_tokens}"
        )


def is_active(settings: ProcessorSettings) -> bool:
    """Whether any processor is on, so that the tokens so far are needed."""
    return settings.repetition_penalty != 1 or settings.no_repeat_ngram_size > 0 or settings.min_new_tokens > 0


class TokenHistory:
    """The tokens of each row so far; prompts are aligned on the right, so that all responses begin at one column.

    Attributes:
        tokens: [B, P + steps], `NO_TOKEN` before a shorter prompt and after the newest token.
        prompt_width: P, tokens of the longest prompt.
        width: columns in use.
        stops: tokens that end a response, [S].
    """

    def __init__(self, documents: Sequence[Sequence[int]], steps: int, stops: Tensor):
        self.prompt_width = self.width = max(len(document) for document in documents)
        rows = [[*[NO_TOKEN] * (self.width - len(document)), *document, *[NO_TOKEN] * steps] for document in documents]
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
        """Add one token to every row, [B]."""
        self.tokens[:, self.width] = tokens
        self.width += 1

    def reorder(self, rows: Tensor) -> None:
        """Put row `rows[i]` at position i; a row may come several times, or not at all, [n]."""
        self.tokens = self.tokens[rows]


class RowHistory:
    """The tokens of rows that begin and end at different times.

    Attributes:
        tokens: from column 0 on, [B, W].
        lengths: tokens of each row, [B].
    """

    def __init__(self, device: torch.device):
        self.tokens = torch.zeros(0, 1, dtype=torch.long, device=device)
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)

    def reserve(self, rows: int, width: int) -> None:
        """Hold at least so many rows of at least so many tokens; new rows are empty."""
        more, wider = max(0, rows - len(self.tokens)), max(0, width - self.tokens.shape[1])
        if more or wider:
            self.tokens = F.pad(self.tokens, (0, wider, 0, more))
            self.lengths = F.pad(self.lengths, (0, more))

    def put(self, row: int, document: Sequence[int]) -> None:
        """Let a row begin with a document."""
        self.tokens[row, : len(document)] = torch.tensor(document, device=self.tokens.device)
        self.lengths[row] = len(document)

    def append(self, rows: Tensor, tokens: Tensor) -> None:
        """Add a token to each of some rows, [n]; one that is full, which is not read any more, stays as it is."""
        columns_of_rows = self.lengths[rows].clamp(max=self.tokens.shape[1] - 1)
        self.tokens.index_put_((rows, columns_of_rows), tokens)
        self.lengths[rows] = columns_of_rows + 1

    def keep(self, rows: Tensor) -> None:
        """Hold only these rows from now on, in this order, [n]."""
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]

    def seen(self, rows: Tensor) -> Tensor:
        """The tokens of some rows [n], aligned on the right, `NO_TOKEN` before them, [n, W]."""
        width = self.tokens.shape[1]
        columns = torch.arange(width, device=rows.device) - (width - self.lengths[rows])[:, None]
        return self.tokens[rows].gather(1, columns.clamp(min=0)).masked_fill(columns < 0, NO_TOKEN)


def process_logits(scores: Tensor, settings: ProcessorSettings, history: TokenHistory) -> Tensor:
    """Scores after all processors: -inf where a token is forbidden.

    Args:
        scores: fp32, logits or log-probabilities of the next token, [B, V].
        settings: which processors are on; those that are off cost nothing.
        history: tokens of each row so far.
    """
    scores = discourage_repetition(scores, settings, history.seen)
    if history.new_tokens < settings.min_new_tokens:
        scores = scores.index_fill(-1, history.stops, -torch.inf)
    return scores


def discourage_repetition(scores: Tensor, settings: ProcessorSettings, seen: Tensor) -> Tensor:
    """Scores [B, V] after the repetition penalty and the ban of repeated n-grams; `seen` as for `penalize_repetition`."""
    if settings.repetition_penalty != 1:
        scores = penalize_repetition(scores, seen, settings.repetition_penalty)
    if settings.no_repeat_ngram_size:
        scores = forbid_repeated_ngrams(scores, seen, settings.no_repeat_ngram_size)
    return scores


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make earlier tokens less likely: score / penalty where the score is positive, score * penalty elsewhere.

    The paper divides always, which makes a token with a negative score likelier; every library multiplies there
    instead. A token is penalized once, however often it occurs.

    Args:
        scores: [B, V].
        seen: token ids of each row, `NO_TOKEN` where there is none, [B, L].
        penalty: > 0; above 1 discourages repetition.

    Source: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, their theta.
    """
    padded = F.pad(scores, (1, 0))  # a column for NO_TOKEN
    found = padded.gather(1, seen + 1)
    return padded.scatter(1, seen + 1, torch.where(found < 0, found * penalty, found / penalty))[:, 1:]


def forbid_repeated_ngrams(scores: Tensor, seen: Tensor, size: int) -> Tensor:
    """Scores with -inf where a token would complete an n-gram that its row already contains.

    Args:
        scores: [B, V].
        seen: token ids of each row, `NO_TOKEN` before the first, [B, L].
        size: n of the n-grams, >= 1; 1 allows every token once.

    Source: Paulus et al. 2017, arXiv:1705.04304, section 2.5 (there for trigrams).
    """
    width = seen.shape[1]
    if width < size:
        return scores
    windows = seen.unfold(1, size, 1)  # [B, L - n + 1, n]
    begun = seen[:, None, width + 1 - size :]  # the n - 1 newest tokens
    # Where the newest tokens include NO_TOKEN, no complete n-gram of the row begins like them: it needs no mask.
    repeats = (windows[..., :-1] == begun).all(-1)
    forbidden = torch.zeros(len(scores), scores.shape[1] + 1, dtype=torch.bool, device=scores.device)
    forbidden.scatter_(1, torch.where(repeats, windows[..., -1] + 1, 0), True)
    return scores.masked_fill(forbidden[:, 1:], -torch.inf)

"""Logits processors that look back at the tokens of a row: the repetition penalty and the ban of repeated n-grams.

The tokens so far stay on the device, so that no processor waits for it. Filters of a single step's distribution (top-k,
top-p, min-p) are in sampling.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

NO_TOKEN = -1  # at positions of a row that hold no token


class TokenHistory:
    """The tokens so far of rows that begin and end at different times.

    Attributes:
        tokens: from column 0 on, [B, W].
        lengths: tokens of each row, [B].
    """

    def __init__(self, device: torch.device):
        self.tokens = torch.zeros(0, 1, dtype=torch.long, device=device)
        self.lengths = torch.zeros(0, dtype=torch.long, device=device)

    def reserve(self, rows: int, width: int) -> None:
        """Hold at least `rows` rows of at least `width` tokens; new rows are empty."""
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
        """Put row `rows[i]` at position i; a row may come several times, or not at all, [n]."""
        self.tokens, self.lengths = self.tokens[rows], self.lengths[rows]

    def seen(self, rows: Tensor) -> Tensor:
        """The tokens of some rows [n], aligned on the right, `NO_TOKEN` before them, [n, W]."""
        width = self.tokens.shape[1]
        columns = torch.arange(width, device=rows.device) - (width - self.lengths[rows])[:, None]
        return self.tokens[rows].gather(1, columns.clamp(min=0)).masked_fill(columns < 0, NO_TOKEN)


def discourage_repetition(scores: Tensor, seen: Tensor, penalty: float, ngram_size: int) -> Tensor:
    """Scores [B, V] after the repetition penalty (1: off) and the ban of repeated n-grams (0: off), in this order.

    Args:
        scores: logits or log-probabilities of the next token, fp32.
        seen: token ids of each row, `NO_TOKEN` where there is none, [B, L].
    """
    if penalty != 1:
        scores = penalize_repetition(scores, seen, penalty)
    return forbid_repeated_ngrams(scores, seen, ngram_size) if ngram_size else scores


def penalize_repetition(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make earlier tokens less likely: score / penalty where the score is positive, score * penalty elsewhere.

    The paper divides always, which makes a token with a negative score likelier; every library multiplies there
    instead. A token is penalized once, however often it occurs.

    Args:
        scores: [B, V].
        seen: as for `discourage_repetition`.
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

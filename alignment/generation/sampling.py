"""From logits to a token: the sampling distribution of each row, and a sample from it. No model and no cache here.

The tokens that a logits processor looks back at stay on the device, so that nothing waits for it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from alignment.generation.requests import RunningRequest, SamplingConfig

NO_TOKEN = -1  # at positions of a row that hold no token
UNREAD = SamplingConfig()  # settings of rows that nobody reads
Rows = Sequence[RunningRequest | None]  # the request of each row; None: nobody reads the token that is drawn there


def sampling_log_probs(logits: Tensor, config: SamplingConfig, seen: Tensor | None = None) -> Tensor:
    """Log-probabilities of exactly the distribution that is sampled from.

    In this order: repetition penalty and ban of n-grams, temperature, top-k, top-p, min-p.

    Args:
        logits: [..., V], any float type; [B, V] where a logits processor is on.
        seen: tokens of each row so far, [B, L], where a logits processor looks back at them.

    Returns:
        float32 log-probabilities, -inf where a token cannot be sampled, [..., V].

    Source: top-k Fan et al. 2018, arXiv:1805.04833; top-p Holtzman et al. 2020, arXiv:1904.09751; min-p Nguyen et al.
        2024, arXiv:2407.01082; repetition penalty Keskar et al. 2019, arXiv:1909.05858.
    """
    logits = logits.float()
    if config.needs_history:
        if seen is None:
            raise ValueError("repetition_penalty and no_repeat_ngram_size need the tokens so far: seen")
        logits = limit_repeats(logits, seen, config.repetition_penalty, config.no_repeat_ngram_size)
    rows = logits.reshape(-1, logits.shape[-1])
    return row_log_probs(rows, RowFilters.of([config] * len(rows), rows.shape[1], rows.device)).view(logits.shape)


# Processors that look back


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
        more = max(0, rows - len(self.tokens))
        wider = max(0, width - self.tokens.shape[1])
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
        self.tokens = self.tokens[rows]
        self.lengths = self.lengths[rows]

    def seen(self, rows: Tensor) -> Tensor:
        """The tokens of some rows [n], aligned on the right, `NO_TOKEN` before them, [n, W]."""
        width = self.tokens.shape[1]
        columns = torch.arange(width, device=rows.device) - (width - self.lengths[rows])[:, None]
        return self.tokens[rows].gather(1, columns.clamp(min=0)).masked_fill(columns < 0, NO_TOKEN)


def limit_repeats(scores: Tensor, seen: Tensor, penalty: float, ngram_size: int) -> Tensor:
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
    instead. A token is penalized once, however often it occurs. Arguments as for `limit_repeats`.

    Source: Keskar et al. 2019 (CTRL), arXiv:1909.05858, section 4.1, their theta.
    """
    padded = F.pad(scores, (1, 0))  # a column for NO_TOKEN
    earlier = padded.gather(1, seen + 1)
    return padded.scatter(1, seen + 1, torch.where(earlier < 0, earlier * penalty, earlier / penalty))[:, 1:]


def forbid_repeated_ngrams(scores: Tensor, seen: Tensor, size: int) -> Tensor:
    """Scores with -inf where a token would complete an n-gram of `size` tokens that its row already contains.

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


# Temperature and filters


class RowFilters(NamedTuple):
    """The sampling settings of each row, [B, 1] each; None: the filter is off in every row."""

    temperature: Tensor | None  # 1 in greedy rows
    greedy: Tensor | None  # True where the likeliest token is taken
    top_k: Tensor | None  # 0 where it is off
    largest_k: int  # the largest `top_k`
    top_p: Tensor | None  # infinity where it is off, which no rounding of a sum reaches
    min_p: Tensor | None  # 0 where it is off

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], vocabulary: int, device: torch.device) -> "RowFilters":
        """The filters of rows with these settings."""

        def column(values: Sequence[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            wanted = any(value != off for value in values)
            return torch.tensor(values, dtype=dtype, device=device)[:, None] if wanted else None

        top_k = [config.top_k if config.top_k < vocabulary else 0 for config in configs]
        return cls(
            temperature=column([config.temperature or 1.0 for config in configs], 1.0),
            greedy=column([config.temperature == 0 for config in configs], False, torch.bool),
            top_k=column(top_k, 0, torch.long),
            largest_k=max(top_k, default=0),
            top_p=column([config.top_p if config.top_p < 1 else torch.inf for config in configs], torch.inf),
            min_p=column([config.min_p for config in configs], 0.0),
        )


def row_log_probs(logits: Tensor, filters: RowFilters) -> Tensor:
    """`sampling_log_probs` of fp32 logits [B, V] with each row's own settings, after the logits processors."""
    certain = None if filters.greedy is None else greedy_log_probs(logits)
    if filters.temperature is not None:
        logits = logits / filters.temperature
    if filters.top_k is not None:
        lowest_kept = logits.topk(filters.largest_k).values.gather(-1, (filters.top_k - 1).clamp(min=0))
        logits = logits.masked_fill((logits < lowest_kept) & (filters.top_k > 0), -torch.inf)
    if filters.top_p is not None:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        before = probability.cumsum(-1) - probability  # mass of the likelier tokens: the first always stays
        logits = logits.masked_fill((before >= filters.top_p).gather(-1, order.argsort(-1)), -torch.inf)
    if filters.min_p is not None:
        probability = logits.softmax(-1)
        logits = logits.masked_fill(probability < filters.min_p * probability.amax(-1, keepdim=True), -torch.inf)
    log_probs = logits.log_softmax(-1)
    return log_probs if certain is None or filters.greedy is None else torch.where(filters.greedy, certain, log_probs)


def greedy_log_probs(logits: Tensor) -> Tensor:
    """0 for the likeliest token, -inf for the others; NaN for it where logits are not finite, as in `log_softmax`."""
    likeliest = logits.argmax(-1, keepdim=True)
    largest = logits.gather(-1, likeliest)
    return torch.full_like(logits, -torch.inf).scatter(-1, likeliest, largest - largest)


def sample_token(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the token where cumulative probability passes `uniform`, never one of probability 0.

    Nothing is read back, which would stall a GPU. log_probs: [B, V]; uniform: in [0, 1), [B].
    """
    cumulative = log_probs.exp().cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    threshold = uniform.to(cumulative.dtype)[:, None] * total
    passed = torch.searchsorted(cumulative, threshold, right=True)
    last = torch.searchsorted(cumulative, total)  # a threshold may round up to the total, which nothing passes
    return torch.minimum(passed, last).clamp(max=log_probs.shape[-1] - 1).squeeze(-1)  # NaN has no place


# Rows of requests


class SampledTokens(NamedTuple):
    """One token and its log-probability, [B], for each of B rows."""

    rows: Rows
    tokens: Tensor
    log_probs: Tensor


class RowSampler:
    """Samples the next tokens of rows whose requests differ in their settings.

    Args:
        slots: cache row of each, for the history; None: 0, 1, ...
        steps: tokens that are drawn before the next rows of random numbers are made, which on a GPU are sent at once.
        vocabulary: ids from here on have no token, and no probability; None: all may be drawn.
    """

    def __init__(
        self,
        rows: Rows,
        device: torch.device,
        *,
        slots: Sequence[int] | None = None,
        steps: int = 1,
        vocabulary: int | None = None,
    ):
        self.rows = tuple(rows)
        self._device = device
        self._steps = steps
        self._vocabulary = vocabulary
        self._slots = torch.tensor(range(len(rows)) if slots is None else slots, device=device)
        live = [row.request for row in rows if row is not None]
        self._with_processors = [
            (row_index, row)
            for row_index, row in enumerate(rows)
            if row is not None and (row.request.sampling.needs_history or row.request.sampling.min_new_tokens)
        ]
        self._greedy = all(request.sampling.temperature == 0 for request in live)
        self._filters: RowFilters | None = None
        self._draws = torch.empty(0, len(rows), device=device)
        self._used = 0

    def draw(self, logits: Tensor, history: TokenHistory | None) -> SampledTokens:
        """Tokens from the logits of all rows, [B, V]."""
        logits = logits[:, : self._vocabulary].float()
        processed = self._process(logits, history)
        if self._greedy:
            log_probs = greedy_log_probs(processed)
            tokens = log_probs.argmax(-1)
        else:
            if self._filters is None:
                configs = [UNREAD if row is None else row.request.sampling for row in self.rows]
                self._filters = RowFilters.of(configs, logits.shape[-1], self._device)
            log_probs = row_log_probs(processed, self._filters)
            tokens = sample_token(log_probs, self._next_draws())
        for row in self.rows:
            if row is not None:
                row.drawn += 1
        return SampledTokens(self.rows, tokens, log_probs.gather(-1, tokens[:, None]).squeeze(-1))

    def _next_draws(self) -> Tensor:
        """One uniform number for each row, in the type of the log-probabilities, [B]; a greedy row's has no effect."""
        if self._used == len(self._draws):
            draws = [[0.0 if row is None else row.uniform_at(step) for row in self.rows] for step in range(self._steps)]
            self._draws = torch.tensor(draws, dtype=torch.float32).to(self._device, non_blocking=True)
            self._used = 0
        self._used += 1
        return self._draws[self._used - 1]

    def _process(self, logits: Tensor, history: TokenHistory | None) -> Tensor:
        """Logits after the processors of those rows that have any, -inf for stop tokens that would come too early."""
        groups: dict[tuple[float, int], list[int]] = {}
        forbidden: list[tuple[int, int]] = []
        for row_index, row in self._with_processors:
            sampling = row.request.sampling
            if sampling.needs_history:
                settings = (sampling.repetition_penalty, sampling.no_repeat_ngram_size)
                groups.setdefault(settings, []).append(row_index)
            if row.drawn < sampling.min_new_tokens:
                forbidden += [(row_index, stop) for stop in row.request.stop_ids]
        logits = logits.clone() if groups or forbidden else logits
        for settings, numbers in groups.items():
            assert history is not None
            index = torch.tensor(numbers, device=self._device)
            seen = history.seen(self._slots[index])
            logits.index_copy_(0, index, limit_repeats(logits[index], seen, *settings))
        if forbidden:
            rows, stops = torch.tensor(forbidden, device=self._device).unbind(1)
            logits.index_put_((rows, stops), torch.tensor(-torch.inf, device=self._device))
        return logits

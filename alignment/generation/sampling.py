"""From logits to a token: the sampling distribution, and a sample from it. No model and no cache here: see decode.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alignment.generation.logits_processors import TokenHistory, check_processor_settings, is_active, process_logits


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are sampled.

    Attributes:
        max_new_tokens: longest response, end token included.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p; 1 keeps all.
        seed: together with the number of a row it fixes that row's random numbers.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of earlier tokens; 1 is off.
        no_repeat_ngram_size: no n-gram of this size occurs twice, the prompt included; 0 is off.
        min_new_tokens: no stop token before so many others.
    """

    max_new_tokens: int = 64
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        check_processor_settings(self)
        if self.seed < 0:
            raise ValueError(f"seed must not be negative, got {self.seed}")
        if self.temperature < 0:
            raise ValueError(f"temperature must be 0 (greedy) or above, got {self.temperature}")
        if self.top_k < 0:
            raise ValueError(f"top_k must be 0 (off) or above, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}; 0 is off, 0.05 to 0.1 is usual")


def sampling_log_probs(logits: Tensor, config: SamplingConfig, history: TokenHistory | None = None) -> Tensor:
    """Log-probabilities of exactly the distribution that is sampled from.

    In this order: repetition penalty and other logits processors, temperature, top-k, top-p, min-p.

    Args:
        logits: [..., V], any float type; [B, V] where a logits processor is on.
        config: lengths and seed are not read.
        history: tokens of each row so far; needed where a logits processor is on.

    Returns:
        float32 log-probabilities, -inf where a token cannot be sampled, [..., V].

    Raises:
        ValueError: a logits processor is on and there is no history for it.

    Source: top-k Fan et al. 2018, arXiv:1805.04833; top-p Holtzman et al. 2020, arXiv:1904.09751; min-p Nguyen et al.
        2024, arXiv:2407.01082; repetition penalty Keskar et al. 2019, arXiv:1909.05858.
    """
    logits = logits.float()
    if is_active(config):
        if history is None:
            raise ValueError(
                "repetition_penalty, no_repeat_ngram_size and min_new_tokens need the tokens so far: history"
            )
        logits = process_logits(logits, config, history)
    return filtered_log_probs(logits, config)


def filtered_log_probs(logits: Tensor, config: SamplingConfig) -> Tensor:
    """`sampling_log_probs` of fp32 logits [..., V] that the logits processors have seen."""
    if config.temperature == 0:
        return _greedy_log_probs(logits)
    if config.temperature != 1:
        logits = logits / config.temperature
    if 0 < config.top_k < logits.shape[-1]:
        lowest_kept = logits.topk(config.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    if config.top_p < 1:
        logits = _keep_top_p(logits, config.top_p)
    if config.min_p > 0:
        logits = _keep_min_p(logits, config.min_p)
    return logits.log_softmax(-1)


def _greedy_log_probs(logits: Tensor) -> Tensor:
    """0 for the likeliest token and -inf for the others; NaN for it where the logits are not finite, as `log_softmax` has."""
    likeliest = logits.argmax(-1, keepdim=True)
    largest = logits.gather(-1, likeliest)
    return torch.full_like(logits, -torch.inf).scatter(-1, likeliest, largest - largest)


def _keep_top_p(logits: Tensor, top_p: float | Tensor) -> Tensor:
    ordered, order = logits.sort(descending=True)
    probability = ordered.softmax(-1)
    # Mass of the likelier tokens: 0 for the first, so it always stays.
    before = probability.cumsum(-1) - probability
    return logits.masked_fill((before >= top_p).gather(-1, order.argsort(-1)), -torch.inf)


def _keep_min_p(logits: Tensor, min_p: float | Tensor) -> Tensor:
    probability = logits.softmax(-1)
    return logits.masked_fill(probability < min_p * probability.amax(-1, keepdim=True), -torch.inf)


@dataclass(frozen=True)
class RowFilters:
    """The sampling settings of each row, [B, 1] each; None: the filter is off in every row.

    Attributes:
        temperature: 1 in greedy rows.
        greedy: whether the likeliest token is taken.
        top_k: 0 where it is off.
        largest_k: the largest `top_k`.
        top_p: infinity where it is off, which no rounding of a sum reaches.
        min_p: 0 where it is off.
    """

    temperature: Tensor
    greedy: Tensor | None
    top_k: Tensor | None
    largest_k: int
    top_p: Tensor | None
    min_p: Tensor | None

    @classmethod
    def of(cls, configs: Sequence[SamplingConfig], vocabulary: int, device: torch.device) -> "RowFilters":
        """The filters of rows with these settings."""

        def column(values: Sequence[float], off: float, dtype: torch.dtype = torch.float32) -> Tensor | None:
            wanted = any(value != off for value in values)
            return torch.tensor(values, dtype=dtype, device=device)[:, None] if wanted else None

        temperatures = [config.temperature or 1.0 for config in configs]
        top_k = [config.top_k if config.top_k < vocabulary else 0 for config in configs]
        return cls(
            temperature=torch.tensor(temperatures, device=device)[:, None],
            greedy=column([config.temperature == 0 for config in configs], False, torch.bool),
            top_k=column(top_k, 0, torch.long),
            largest_k=max(top_k),
            top_p=column([config.top_p if config.top_p < 1 else torch.inf for config in configs], torch.inf),
            min_p=column([config.min_p for config in configs], 0.0),
        )


def row_log_probs(logits: Tensor, filters: RowFilters) -> Tensor:
    """`filtered_log_probs` with settings of their own for each row: the numbers are each row's alone.

    Args:
        logits: fp32, [B, V].

    Returns:
        float32, [B, V].
    """
    certain = _greedy_log_probs(logits) if filters.greedy is not None else None
    logits = logits / filters.temperature
    if filters.top_k is not None:
        lowest_kept = logits.topk(filters.largest_k).values.gather(-1, (filters.top_k - 1).clamp(min=0))
        logits = logits.masked_fill((logits < lowest_kept) & (filters.top_k > 0), -torch.inf)
    if filters.top_p is not None:
        logits = _keep_top_p(logits, filters.top_p)
    if filters.min_p is not None:
        logits = _keep_min_p(logits, filters.min_p)
    log_probs = logits.log_softmax(-1)
    if filters.greedy is None or certain is None:
        return log_probs
    return torch.where(filters.greedy, certain, log_probs)


def uniforms(seed: int, rows: Sequence[int], steps: int) -> Tensor:
    """One number in [0, 1) per row and step, a function of (seed, row) only: no batch, order or number of ranks matters.

    Args:
        seed: the run's seed (any int >= 0).
        rows: global number of each row, [B].
        steps: most tokens of a response.

    Returns:
        float64, [B, steps].
    """
    return torch.from_numpy(np.stack([np.random.default_rng([seed, row]).random(steps) for row in rows]))


def sample_token(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """Inverse transform sampling: the token at which the cumulative probability passes `uniform`; never one of probability 0.

    Args:
        log_probs: [B, V].
        uniform: in [0, 1), [B].

    Returns:
        token ids, [B].
    """
    if log_probs.is_cuda:
        return sample_token_unasked(log_probs, uniform)
    cumulative, threshold = _cumulative_and_threshold(log_probs, uniform)
    if bool((threshold < cumulative[:, -1:]).all()):
        return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
    return sample_token_unasked(log_probs, uniform)


def sample_token_unasked(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """What `sample_token` returns, by operations that read no number back: reading would stall a GPU."""
    cumulative, threshold = _cumulative_and_threshold(log_probs, uniform)
    # A float32 threshold can round up to the total itself; the result is then the last token that has any mass.
    possible = (cumulative > threshold).int().argmax(-1)
    last = (log_probs > -torch.inf).int().flip(-1).argmax(-1)
    return torch.where(threshold.squeeze(-1) < cumulative[:, -1], possible, log_probs.shape[-1] - 1 - last)


def _cumulative_and_threshold(log_probs: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """The cumulative probabilities [B, V], and the one at which each row stops, [B, 1]."""
    cumulative = log_probs.exp().cumsum(-1)
    return cumulative, uniform.to(cumulative.dtype).unsqueeze(-1) * cumulative[:, -1:]

"""From logits to a token: the sampling distribution and a draw from it. No model and no cache here: see engine.py."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from alignment.generation.logits_processors import TokenHistory, check_rules, is_active, process_logits


@dataclass(frozen=True)
class SamplingConfig:
    """How responses are drawn.

    Attributes:
        max_new_tokens: longest response, end token included.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keep the k likeliest tokens; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches p; 1 keeps all.
        seed: together with a row's own number it fixes that row's draws.
        min_p: keep tokens at least this fraction as likely as the likeliest; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens already there; 1 is off.
        no_repeat_ngram_size: no run of so many tokens comes twice, the prompt included; 0 is off.
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
        check_rules(self)
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


def sampling_log_probs(logits: Tensor, config: SamplingConfig, past: TokenHistory | None = None) -> Tensor:
    """Log-probabilities of exactly the distribution that is sampled from.

    In this order: repetition penalty and other rules, temperature, top-k, top-p, min-p.

    Args:
        logits: [..., V], any float type; [B, V] where a rule is on.
        config: lengths and seed are not read.
        past: what each row holds already; needed where a rule is on that reads it.

    Returns:
        float32 log-probabilities, -inf where a token cannot be drawn, [..., V].

    Raises:
        ValueError: a rule is on and there is no past to apply it to.

    Source: top-k Fan et al. 2018, arXiv:1805.04833; top-p Holtzman et al. 2020, arXiv:1904.09751; min-p Nguyen et al.
        2024, arXiv:2407.01082; repetition penalty Keskar et al. 2019, arXiv:1909.05858.
    """
    logits = logits.float()
    if is_active(config):
        if past is None:
            raise ValueError("repetition_penalty, no_repeat_ngram_size and min_new_tokens need the tokens so far: past")
        logits = process_logits(logits, config, past)
    if config.temperature == 0:
        likeliest = torch.full_like(logits, -torch.inf)
        return likeliest.scatter(-1, logits.argmax(-1, keepdim=True), 0.0)
    if config.temperature != 1:
        logits = logits / config.temperature
    if 0 < config.top_k < logits.shape[-1]:
        lowest_kept = logits.topk(config.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < lowest_kept, -torch.inf)
    if config.top_p < 1:
        ordered, order = logits.sort(descending=True)
        probability = ordered.softmax(-1)
        before = (
            probability.cumsum(-1) - probability
        )  # mass of the likelier tokens: 0 for the first, so it always stays
        logits = logits.masked_fill((before >= config.top_p).gather(-1, order.argsort(-1)), -torch.inf)
    if config.min_p > 0:
        probability = logits.softmax(-1)
        logits = logits.masked_fill(probability < config.min_p * probability.amax(-1, keepdim=True), -torch.inf)
    return logits.log_softmax(-1)


def uniforms(seed: int, rows: Sequence[int], steps: int) -> Tensor:
    """One number in [0, 1) per row and step, fixed by (seed, row): the same in any batch, order or number of ranks.

    Args:
        seed: the run's seed (any int >= 0).
        rows: global number of each row, [B].
        steps: tokens to draw at most.

    Returns:
        float64, [B, steps].
    """
    return torch.from_numpy(np.stack([np.random.default_rng([seed, row]).random(steps) for row in rows]))


def draw(log_probs: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the cumulative probability passes `uniform`; never one of probability 0.

    Args:
        log_probs: [B, V].
        uniform: in [0, 1), [B].

    Returns:
        token ids, [B].
    """
    cumulative = log_probs.exp().cumsum(-1)
    threshold = uniform.to(cumulative.dtype).unsqueeze(-1) * cumulative[:, -1:]
    # A float32 threshold can round up to the total itself; the last token that has any mass is then meant.
    possible = (cumulative > threshold).int().argmax(-1)
    last = (log_probs > -torch.inf).int().flip(-1).argmax(-1)
    return torch.where(threshold.squeeze(-1) < cumulative[:, -1], possible, log_probs.shape[-1] - 1 - last)

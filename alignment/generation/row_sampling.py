"""The next token of rows whose requests differ in their settings. The formulas are in sampling.py."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.generation.logits_processors import RowHistory, discourage_repetition, is_active
from alignment.generation.requests import RunningRequest
from alignment.generation.sampling import (
    RowFilters,
    SamplingConfig,
    filtered_log_probs,
    row_log_probs,
    sample_token,
)

Rows = Sequence[RunningRequest | None]  # the request of each row; None: nobody reads what is drawn there


class DrawnTokens(NamedTuple):
    """One token for each of B rows.

    Attributes:
        rows: whose they are.
        tokens, log_probs: [B].
        alternatives: the likeliest tokens and their log-probabilities, [B, n] each; None: no request wants any.
    """

    rows: Rows
    tokens: Tensor
    log_probs: Tensor
    alternatives: tuple[Tensor, Tensor] | None


class RowSampler:
    """The settings of some rows, for drawing their next tokens.

    Args:
        slots: cache row of each, for the history; None: 0, 1, ...
        steps: tokens that are drawn before the next rows of random numbers are made, which on a GPU are sent at once.
    """

    def __init__(self, rows: Rows, device: torch.device, *, slots: Sequence[int] | None = None, steps: int = 1):
        self.rows, self._device, self._steps = tuple(rows), device, steps
        self._slots = torch.tensor(range(len(rows)) if slots is None else slots, device=device)
        live = [row.request for row in rows if row is not None]
        self._configs = {_without_lengths(request.sampling) for request in live} or {SamplingConfig()}
        self._alternatives = max((request.alternatives for request in live), default=0)
        of_model = [row is not None and row.request.log_probs == "model" for row in rows]
        self._of_model = torch.tensor(of_model, device=device) if any(of_model) else None
        self._filters: RowFilters | None = None
        self._draws = torch.empty(0, len(rows), dtype=torch.float64, device=device)
        self._used = 0

    def draw(self, logits: Tensor, history: RowHistory | None) -> DrawnTokens:
        """Tokens from the logits of all rows, [B, V]."""
        logits = logits.float()
        processed = logits if history is None else self._process(logits, history)
        log_probs = self._log_probs(processed)
        tokens = log_probs.argmax(-1) if self._greedy() else sample_token(log_probs, self._next_draws())
        shown = log_probs
        if self._of_model is not None:
            shown = torch.where(self._of_model[:, None], logits.log_softmax(-1), log_probs)
        values = shown.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        alternatives = None
        if self._alternatives:
            top = shown.topk(min(self._alternatives, shown.shape[-1]))
            alternatives = (top.indices, top.values)
        for row in self.rows:
            if row is not None:
                row.drawn += 1
        return DrawnTokens(self.rows, tokens, values, alternatives)

    def _greedy(self) -> bool:
        return all(config.temperature == 0 for config in self._configs)

    def _log_probs(self, logits: Tensor) -> Tensor:
        if len(self._configs) == 1:
            [config] = self._configs
            return filtered_log_probs(logits, config)
        if self._filters is None:
            configs = [SamplingConfig() if row is None else row.request.sampling for row in self.rows]
            self._filters = RowFilters.of(configs, logits.shape[-1], self._device)
        return row_log_probs(logits, self._filters)

    def _next_draws(self) -> Tensor:
        """One uniform number for each row, float64, [B]; a greedy row's has no effect."""
        if self._used == len(self._draws):
            draws = [
                [0.0 if row is None else row.upcoming_draw(step) for row in self.rows] for step in range(self._steps)
            ]
            self._draws, self._used = torch.tensor(draws, dtype=torch.float64).to(self._device, non_blocking=True), 0
        self._used += 1
        return self._draws[self._used - 1]

    def _process(self, logits: Tensor, history: RowHistory) -> Tensor:
        """Logits after the processors of those rows that have any."""
        groups: dict[SamplingConfig, list[int]] = {}
        forbidden: list[tuple[int, int]] = []
        for number, row in enumerate(self.rows):
            if row is not None and is_active(row.request.sampling):
                sampling = row.request.sampling
                groups.setdefault(_without_lengths(sampling), []).append(number)
                if row.drawn < sampling.min_new_tokens:
                    forbidden += [(number, stop) for stop in row.request.stop_ids]
        if not groups:
            return logits
        logits = logits.clone()
        for config, numbers in groups.items():
            index = torch.tensor(numbers, device=self._device)
            seen = history.seen(self._slots[index])
            logits.index_copy_(0, index, discourage_repetition(logits[index], config, seen))
        if forbidden:
            rows, stops = torch.tensor(forbidden, device=self._device).unbind(1)
            logits.index_put_((rows, stops), torch.tensor(-torch.inf, device=self._device))
        return logits


def _without_lengths(config: SamplingConfig) -> SamplingConfig:
    """The config with what does not bear on a step's distribution at its default, so that equal ones are found."""
    return replace(config, max_new_tokens=1, min_new_tokens=0, seed=0)

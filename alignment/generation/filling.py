"""Fills the rows of a decoding cache with prompts, equal prompts computed once. The tokens after them: engine.py."""

from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.models.external.rectangles import ExternalCache
from alignment.models.layers.kv_cache import Cache, CachedDocument
from alignment.models.model import Model
from alignment.ragged import Ragged, Seq2Seq


class PromptKey(NamedTuple):
    """The token ids of a prompt, and the name of the adapter that reads them; None: none."""

    tokens: tuple[int, ...]
    adapter: str | None


class PromptFiller:
    """One cache and the prompts in its rows.

    Attributes:
        cache: None before the first prompts.
        continuous: single rows of the cache can be filled while the others hold documents.
        forwards: number of times that prompts were run through it.
    """

    def __init__(self, model: Model, device: torch.device, start_token: int | None):
        self._model = model
        self._device = device
        self._start_token = start_token
        self._waiting: dict[
            PromptKey, tuple[CachedDocument, Tensor]
        ] = {}  # prompts that come again; with logits [1, V]
        self._lengths: list[int] = []  # of the documents in the rows, where rows are filled one by one
        self._virtual_tokens = 0
        self.cache: Cache | ExternalCache | None = None
        self.continuous = start_token is None and isinstance(model.new_cache(0, 1), Cache)
        self.forwards = 0

    def fill(
        self, prompts: Sequence[PromptKey], slots: Sequence[int], *, rows: int, room: int, waiting: Container[PromptKey]
    ) -> Tensor:
        """Put prompts into rows `slots` of a cache with `rows` rows of `room` tokens; return logits after each, [B, V].

        `waiting` prompts will come again. Where the cache is not continuous, `slots` are all its rows from 0 on.
        """
        if self.continuous:
            return self._fill_rows(prompts, slots, self._with_room(rows, room), waiting)
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(prompts))}
        self.cache = cache = self._model.new_cache(len(distinct), room)
        logits = self._prefill(list(distinct), cache)
        if len(distinct) == len(prompts):
            return logits
        index = torch.tensor([distinct[prompt] for prompt in prompts], device=self._device)
        cache.reorder(index)
        return logits[index]

    def advance(self) -> None:
        """Note that every row has one more token."""
        self._lengths = [length + 1 for length in self._lengths]

    def release(self, slots: Sequence[int]) -> None:
        """Empty rows whose documents are no longer continued, so that they do not outgrow the cache."""
        if slots and isinstance(self.cache, Cache) and self.continuous:
            for slot in slots:
                self._lengths[slot] = 0
            self.cache.lengths.index_fill_(0, torch.tensor(slots, device=self._device), 0)
            self.cache.longest = max(self._lengths)

    def keep(self, slots: Sequence[int]) -> None:
        """Hold only these rows from now on, in this order."""
        assert self.cache is not None
        self.cache.keep(torch.tensor(slots))
        if isinstance(self.cache, Cache) and self.continuous:
            self._lengths = [self._lengths[slot] for slot in slots]
            self.cache.longest = max(self._lengths)

    def idle(self, room: int) -> None:
        """Run one token through the model, where each forward is a collective operation and no prompt waits here."""
        cache = self._model.new_cache(1, room)
        self._prefill([PromptKey((0,), None)], cache)
        if self.cache is None or not self.continuous:
            self.cache = cache
            self._lengths = [1]

    def _with_room(self, rows: int, room: int) -> Cache:
        if self.cache is None:
            self.cache = self._model.new_cache(rows, room)
            assert isinstance(self.cache, Cache)
            self._virtual_tokens = self.cache.capacity - room
        assert isinstance(self.cache, Cache)
        self.cache.reserve(rows, room + self._virtual_tokens)
        self._lengths += [0] * (rows - len(self._lengths))
        return self.cache

    def _fill_rows(
        self, prompts: Sequence[PromptKey], slots: Sequence[int], cache: Cache, waiting: Container[PromptKey]
    ) -> Tensor:
        first = dict(reversed(list(zip(prompts, slots, strict=True))))  # the row that each prompt is computed in
        known = [prompt for prompt in dict.fromkeys(prompts) if prompt in self._waiting]
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._waiting]
        for prompt in known:
            cache.load(first[prompt], self._waiting[prompt][0])
        logit_parts = [self._waiting[prompt][1] for prompt in known]
        if fresh:
            logit_parts.append(self._prefill(fresh, cache, torch.tensor([first[prompt] for prompt in fresh])))
        for prompt, slot in zip(prompts, slots, strict=True):
            before = self._virtual_tokens + self._model.adapter_tokens(prompt.adapter)
            self._lengths[slot] = before + len(prompt.tokens)
        copies = [(first[prompt], slot) for prompt, slot in zip(prompts, slots, strict=True) if slot != first[prompt]]
        if copies:
            sources, targets = torch.tensor(copies, device=self._device).unbind(1)
            cache.copy(sources, targets, max(self._lengths[source] for source, _ in copies))
        cache.longest = max(self._lengths)
        logits = logit_parts[0] if len(logit_parts) == 1 else torch.cat(logit_parts)
        order = {prompt: position for position, prompt in enumerate([*known, *fresh])}
        kept = {prompt: entry for prompt, entry in self._waiting.items() if prompt in waiting}
        for prompt in fresh:
            if prompt in waiting:
                document = cache.save(first[prompt], self._lengths[first[prompt]])
                kept[prompt] = (document, logits[order[prompt]][None].clone())
        self._waiting = kept
        index = [order[prompt] for prompt in prompts]
        return logits if index == list(range(len(logits))) else logits[torch.tensor(index, device=self._device)]

    def _prefill(
        self, prompts: Sequence[PromptKey], cache: Cache | ExternalCache, rows: Tensor | None = None
    ) -> Tensor:
        read = Ragged.build([prompt.tokens for prompt in prompts])
        self.forwards += 1
        if self._start_token is not None:
            batch = Seq2Seq(read, Ragged.build([[self._start_token]] * len(prompts)))
            return self._model.prefill(batch.to(self._device), cache)
        into = () if rows is None else (rows.to(self._device),)
        with self._model.using_adapters([prompt.adapter for prompt in prompts]):
            return self._model.prefill(read.to(self._device), cache, *into)

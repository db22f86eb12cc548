"""Fills the rows of a decoding cache with prompts; equal prompts are computed once. What is drawn after them: engine.py.

Where documents are kept, a prompt whose beginning is known (from one of them, from a prompt whose row is still running,
or from one that is filled at the same time) has the keys and values of the beginning copied into its row, and only the
rest runs through the model.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.generation.kept_documents import CachedPrefix, KeptDocuments, longest_cached_prefix
from alignment.models.layers.kv_cache import Cache, CachedDocument
from alignment.models.protocols import DecodingCache, ExtendingModel, GenerativeModel
from alignment.ragged import Ragged, Seq2Seq

Prompt = tuple[int, ...]


class KeptPrompt(NamedTuple):
    """A prompt's keys and values, and the logits [1, V] after it."""

    document: CachedDocument
    logits: Tensor


class PromptFiller:
    """One cache and the prompts in its rows.

    Attributes:
        cache: None before the first prompts.
        continuous: whether single rows of the cache can be filled while the others hold documents.
        computed_tokens: tokens of all prompts that were run through the model.
        forwards: how often prompts were run through it.
    """

    def __init__(
        self,
        model: GenerativeModel,
        device: torch.device,
        start_token: int | None,
        *,
        kept_prompts: int = 0,
        kept_tokens: int = 0,
    ):
        self._model, self._device, self._start_token = model, device, start_token
        self._most_kept = kept_prompts
        self._kept: OrderedDict[Prompt, KeptPrompt] = OrderedDict()  # the one used last is the last
        self._lengths: list[int] = []  # of the documents in the rows, where rows are filled one by one
        self._prompts: list[Prompt] = []  # in the rows; empty where the document is no longer continued
        self._virtual_tokens = 0
        self.cache: DecodingCache | None = None
        self.continuous = start_token is None and isinstance(model.new_cache(0, 1), Cache)
        self.computed_tokens = self.forwards = 0
        self._documents: KeptDocuments | None = None
        if kept_tokens and self.continuous and isinstance(model, ExtendingModel):
            self._documents, self._extending = KeptDocuments(kept_tokens), model

    def room(self, prompt: Sequence[int], max_new_tokens: int) -> int:
        """Tokens of a cache row that a prompt and its response need."""
        return (1 if self._start_token is not None else len(prompt)) + max_new_tokens

    def fill(
        self, prompts: Sequence[Prompt], slots: Sequence[int], *, rows: int, room: int, waiting: Container[Prompt]
    ) -> Tensor:
        """Put prompts into rows.

        Args:
            prompts: none empty.
            slots: row of each; all rows from 0 on where the cache is not continuous.
            rows: rows of the cache from now on.
            room: tokens that each row must have room for.
            waiting: prompts that will come again.

        Returns:
            Logits after each, [B, V].
        """
        if self.continuous:
            return self._fill_rows(prompts, slots, rows, room, waiting)
        distinct = list(dict.fromkeys(prompts))
        self.cache = self._model.new_cache(len(distinct), room)
        logits = self._prefill(distinct, self.cache)
        if len(distinct) == len(prompts):
            return logits
        index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self._device)
        self.cache.reorder(index)
        return logits[index]

    def advance(self) -> None:
        """Note that every row has one more token."""
        self._lengths = [length + 1 for length in self._lengths]

    def release(self, slots: Sequence[int]) -> None:
        """Empty rows whose documents are no longer continued, so that they do not outgrow the cache."""
        if not slots or not isinstance(self.cache, Cache) or not self.continuous:
            return
        for slot in slots:
            self._lengths[slot], self._prompts[slot] = 0, ()
        self.cache.lengths.index_fill_(0, torch.tensor(slots, device=self._device), 0)
        self.cache.longest = max(self._lengths)

    def keep(self, slots: Sequence[int]) -> None:
        """Hold only these rows from now on, in this order."""
        assert self.cache is not None
        self.cache.keep(torch.tensor(slots))
        if isinstance(self.cache, Cache) and self.continuous:
            self._lengths = [self._lengths[slot] for slot in slots]
            self._prompts = [self._prompts[slot] for slot in slots]
            self.cache.longest = max(self._lengths)

    def idle(self, room: int) -> None:
        """Run one token through the model, where each forward is a collective operation and no prompt waits here."""
        cache = self._model.new_cache(1, room)
        self._prefill([(0,)], cache)
        self.computed_tokens -= 1
        if self.cache is None or not self.continuous:
            self.cache, self._lengths, self._prompts = cache, [1], [()]

    def save(self, slot: int, response: Sequence[int]) -> None:
        """Keep a row's prompt and what is known of its response for prompts that begin so, where documents are kept."""
        if self._documents is None:
            return
        assert isinstance(self.cache, Cache)
        document = (*self._prompts[slot], *response[:-1])  # the last token has been drawn, but not read
        length = len(document) + self._virtual_tokens
        if self._may_extend(length):
            self._documents.add(document, self.cache, slot, length)

    def _fill_rows(
        self, prompts: Sequence[Prompt], slots: Sequence[int], rows: int, room: int, waiting: Container[Prompt]
    ) -> Tensor:
        cache = self._with_room(rows, room)
        known = {prompt: self._kept[prompt] for prompt in prompts if prompt in self._kept}
        first = dict(reversed(list(zip(prompts, slots, strict=True))))
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
        logits = [kept.logits for kept in known.values()]
        for prompt, kept in known.items():
            cache.load(first[prompt], kept.document)
            self._lengths[first[prompt]] = kept.document.length
        if fresh:
            logits.append(self._compute(fresh, [first[prompt] for prompt in fresh], cache))
            for prompt in fresh:
                self._lengths[first[prompt]] = len(prompt) + self._virtual_tokens
        copies = [(first[prompt], slot) for prompt, slot in zip(prompts, slots, strict=True) if slot != first[prompt]]
        if copies:
            sources, targets = torch.tensor(copies, device=self._device).unbind(1)
            cache.copy(sources, targets, max(self._lengths[source] for source, _ in copies))
            for source, target in copies:
                self._lengths[target] = self._lengths[source]
        cache.longest = max(self._lengths)
        for prompt, slot in zip(prompts, slots, strict=True):
            self._prompts[slot] = prompt
        order = {prompt: number for number, prompt in enumerate([*known, *fresh])}
        found = logits[0] if len(logits) == 1 else torch.cat(logits)
        self._keep_prompts(fresh, first, found[len(known) :], waiting)
        index = [order[prompt] for prompt in prompts]
        return found if index == list(range(len(found))) else found[torch.tensor(index, device=self._device)]

    def _with_room(self, rows: int, room: int) -> Cache:
        """The cache, with as many rows and as much room as is needed."""
        if self.cache is None:
            self.cache = self._model.new_cache(rows, room)
            assert isinstance(self.cache, Cache)
            self._virtual_tokens = self.cache.capacity - room
            self._lengths, self._prompts = [0] * rows, [()] * rows
        cache = self.cache
        assert isinstance(cache, Cache)
        cache.reserve(rows, room + self._virtual_tokens)
        self._lengths += [0] * (rows - len(self._lengths))
        self._prompts += [()] * (rows - len(self._prompts))
        return cache

    def _compute(self, prompts: Sequence[Prompt], slots: Sequence[int], cache: Cache) -> Tensor:
        """Fill rows with different prompts; logits after each, [B, V]."""
        known = self._cached_prefixes(prompts, slots)
        whole = [number for number in range(len(prompts)) if number not in known]
        rest, logits = list(known), []
        if whole:
            rows = torch.tensor([slots[number] for number in whole])
            logits.append(self._prefill([prompts[number] for number in whole], cache, rows))
        if rest:
            for number, cached in known.items():
                self._load(slots[number], cached, cache)
            ends = [prompts[number][known[number].length :] for number in rest]
            logits.append(self._extend(ends, cache, torch.tensor([slots[number] for number in rest])))
        if len(logits) == 1:
            return logits[0]
        order = torch.tensor([*whole, *rest]).argsort()
        return torch.cat(logits)[order.to(self._device)]

    def _cached_prefixes(self, prompts: Sequence[Prompt], slots: Sequence[int]) -> dict[int, CachedPrefix]:
        """What need not be computed, for the numbers of the prompts that have such a beginning."""
        known: dict[int, CachedPrefix] = {}
        if self._documents is None:
            return known
        rows: list[tuple[Prompt, CachedDocument | int]] = [
            (prompt, slot) for slot, prompt in enumerate(self._prompts) if prompt and self._fits(prompt)
        ]
        for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
            if not self._fits(prompt):
                continue
            found = [self._documents.find(prompt), longest_cached_prefix(prompt, rows)]
            best = max((each for each in found if each is not None), key=lambda each: each.length, default=None)
            if best is None:
                rows.append((prompt, slot))  # it is computed before what begins with the same tokens
            else:
                known[number] = best
        return known

    def _fits(self, prompt: Prompt) -> bool:
        return self._may_extend(len(prompt) + self._virtual_tokens)

    def _may_extend(self, length: int) -> bool:
        """Whether a document of so many tokens, virtual ones included, may be put together from a beginning and a rest."""
        limit = self._extending.longest_extended
        return limit is None or length <= limit

    def _load(self, slot: int, cached: CachedPrefix, cache: Cache) -> None:
        """The keys and values of what a prompt begins with into its row, behind virtual tokens as they were."""
        length = cached.length + self._virtual_tokens
        source = cached.source
        document = source if isinstance(source, CachedDocument) else cache.save(source, length)
        cache.load(slot, document, length)

    def _extend(self, ends: Sequence[Prompt], cache: Cache, rows: Tensor) -> Tensor:
        batch = Ragged.build(ends)
        self.computed_tokens += len(batch.tokens)
        self.forwards += 1
        return self._extending.extend(batch.to(self._device), cache, rows.to(self._device))

    def _prefill(self, prompts: Sequence[Prompt], cache: DecodingCache, rows: Tensor | None = None) -> Tensor:
        read = Ragged.build(prompts)
        self.computed_tokens += len(read.tokens)
        self.forwards += 1
        if self._start_token is None:
            batch = read.to(self._device)
            return (
                self._model.prefill(batch, cache)
                if rows is None
                else self._model.prefill(batch, cache, rows.to(self._device))
            )
        batch = Seq2Seq(read, Ragged.build([[self._start_token]] * len(prompts)))
        return self._model.prefill(batch.to(self._device), cache)

    def _keep_prompts(
        self, fresh: Sequence[Prompt], first: dict[Prompt, int], logits: Tensor, waiting: Container[Prompt]
    ) -> None:
        """Save prompts that come again, and as many others as are to be kept; forget what is not needed any more."""
        cache = self.cache
        assert isinstance(cache, Cache)
        for number, prompt in enumerate(fresh):
            if self._most_kept or prompt in waiting:
                document = cache.save(first[prompt], self._lengths[first[prompt]])
                self._kept[prompt] = KeptPrompt(document, logits[number : number + 1].clone())
        for prompt in first:
            if prompt in self._kept:
                self._kept.move_to_end(prompt)
        unneeded = [prompt for prompt in self._kept if prompt not in waiting]
        for prompt in unneeded[: max(0, len(unneeded) - self._most_kept)]:
            del self._kept[prompt]

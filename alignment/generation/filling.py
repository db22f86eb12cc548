"""Fills the rows of a decoding cache with prompts; equal prompts are computed once. What is drawn after them: engine.py.

Where documents are kept after their requests, a prompt whose beginning is known (from one of them, from a prompt whose
row is still running, or from one that is filled at the same time) has the keys and values of the beginning copied into its
row, and only the rest runs through the model, as in vLLM's prefix caching.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from alignment.models.external.cache import ExternalCache
from alignment.models.layers.kv_cache import Cache, CachedDocument
from alignment.models.model import Model
from alignment.ragged import Ragged, Seq2Seq

LEAST_SHARED = 16  # tokens: loading fewer saves less than one more forward costs

Prompt = tuple[int, ...]


class CachedPrefix(NamedTuple):
    """The beginning of a prompt that need not be computed.

    Attributes:
        length: its tokens.
        source: of its keys and values: a kept document, or a row of the cache.
    """

    length: int
    source: CachedDocument | int


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of leading tokens that are equal."""
    equal, most = 0, min(len(one), len(other))
    while equal < most:  # comparing slices is much faster than comparing token by token
        middle = (equal + most + 1) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


def longest_cached_prefix(
    prompt: Prompt, documents: Sequence[tuple[Prompt, CachedDocument | int]]
) -> CachedPrefix | None:
    """The longest beginning of a prompt that one of the documents has; None where none has `LEAST_SHARED` tokens of it.

    At least the prompt's last token is left to be computed, for the logits after it.
    """
    before_last = prompt[:-1]
    found = [CachedPrefix(common_prefix_length(before_last, tokens), source) for tokens, source in documents]
    best = max(found, key=lambda known: known.length, default=None)
    return None if best is None or best.length < LEAST_SHARED else best


class KeptDocuments:
    """Copies of cache rows, up to a number of tokens; the one used least recently goes first.

    Attributes:
        tokens: of all documents kept now, virtual ones included.
    """

    def __init__(self, most_tokens: int):
        """An empty store.

        Args:
            most_tokens: of all documents together; a longer document is cut to its first `most_tokens`.
        """
        self._most_tokens, self.tokens = most_tokens, 0
        self._documents: OrderedDict[Prompt, CachedDocument] = OrderedDict()  # the one used last is the last

    def find(self, prompt: Prompt) -> CachedPrefix | None:
        """See `longest_cached_prefix`; the document found counts as used."""
        found = longest_cached_prefix(prompt, list(self._documents.items()))
        if found is not None:
            used = next(tokens for tokens, document in self._documents.items() if document is found.source)
            self._documents.move_to_end(used)
        return found

    def add(self, tokens: Prompt, cache: Cache, row: int, length: int) -> None:
        """Keep the first `length` slots of a cache row, unless a kept document begins with the same tokens.

        Documents that the new one begins with are dropped: it serves in their place.
        """
        excess = max(0, length - self._most_tokens)
        tokens, length = tokens[: max(0, len(tokens) - excess)], length - excess
        if len(tokens) < LEAST_SHARED:
            return
        for kept in list(self._documents):
            common = common_prefix_length(kept, tokens)
            if common == len(tokens):
                self._documents.move_to_end(kept)
                return
            if common == len(kept):
                self.tokens -= self._documents.pop(kept).length
        while self.tokens + length > self._most_tokens:
            self.tokens -= self._documents.popitem(last=False)[1].length
        self._documents[tokens] = cache.save(row, length)
        self.tokens += length


class KeptPrompt(NamedTuple):
    """A prompt's keys and values, and the logits [1, V] after it."""

    document: CachedDocument
    logits: Tensor


class PromptFiller:
    """One cache and the prompts in its rows.

    Attributes:
        cache: None before the first prompts.
        continuous: single rows of the cache can be filled while the others hold documents.
        computed_tokens: tokens of all prompts that were run through the model.
        forwards: number of times that prompts were run through it.
    """

    def __init__(self, model: Model, device: torch.device, start_token: int | None, kept_tokens: int = 0):
        self._model, self._device, self._start_token = model, device, start_token
        self._kept: dict[Prompt, KeptPrompt] = {}  # prompts that wait again
        self._lengths: list[int] = []  # of the documents in the rows, where rows are filled one by one
        self._prompts: list[Prompt] = []  # in the rows; empty where the document is no longer continued
        self._virtual_tokens = 0
        self.cache: Cache | ExternalCache | None = None
        self.continuous = start_token is None and isinstance(model.new_cache(0, 1), Cache)
        self.computed_tokens = self.forwards = 0
        self._documents: KeptDocuments | None = None
        if kept_tokens and self.continuous and hasattr(model, "extend"):
            self._documents, self._extending = KeptDocuments(kept_tokens), model

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
            return self._fill_rows(prompts, slots, self._with_room(rows, room), waiting)
        distinct = list(dict.fromkeys(prompts))
        self.cache = cache = self._model.new_cache(len(distinct), room)
        logits = self._prefill(distinct, cache)
        if len(distinct) == len(prompts):
            return logits
        index = torch.tensor([distinct.index(prompt) for prompt in prompts], device=self._device)
        cache.reorder(index)
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
        """Keep a row's prompt and response for prompts that begin so, where documents are kept."""
        if self._documents is None:
            return
        assert isinstance(self.cache, Cache)
        document = (*self._prompts[slot], *response[:-1])  # the last token has been drawn, but not read
        if self._may_extend(document):
            self._documents.add(document, self.cache, slot, len(document) + self._virtual_tokens)

    def _with_room(self, rows: int, room: int) -> Cache:
        """The cache, grown to this many rows and this much room."""
        if self.cache is None:
            self.cache = self._model.new_cache(rows, room)
            assert isinstance(self.cache, Cache)
            self._virtual_tokens = self.cache.capacity - room
        cache = self.cache
        assert isinstance(cache, Cache)
        cache.reserve(rows, room + self._virtual_tokens)
        self._lengths += [0] * (rows - len(self._lengths))
        self._prompts += [()] * (rows - len(self._prompts))
        return cache

    def _fill_rows(
        self, prompts: Sequence[Prompt], slots: Sequence[int], cache: Cache, waiting: Container[Prompt]
    ) -> Tensor:
        first = dict(reversed(list(zip(prompts, slots, strict=True))))  # the row that each prompt is computed in
        known = [prompt for prompt in dict.fromkeys(prompts) if prompt in self._kept]
        fresh = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._kept]
        logits = [self._kept[prompt].logits for prompt in known]
        for prompt in known:
            cache.load(first[prompt], self._kept[prompt].document)
        if fresh:
            logits.append(self._compute(fresh, [first[prompt] for prompt in fresh], cache))
        for prompt, slot in zip(prompts, slots, strict=True):
            self._lengths[slot] = len(prompt) + self._virtual_tokens
        copies = [(first[prompt], slot) for prompt, slot in zip(prompts, slots, strict=True) if slot != first[prompt]]
        if copies:
            sources, targets = torch.tensor(copies, device=self._device).unbind(1)
            cache.copy(sources, targets, max(self._lengths[source] for source, _ in copies))
        cache.longest = max(self._lengths)
        for prompt, slot in zip(prompts, slots, strict=True):
            self._prompts[slot] = prompt
        found = logits[0] if len(logits) == 1 else torch.cat(logits)
        order = {prompt: number for number, prompt in enumerate([*known, *fresh])}
        for prompt, number in order.items():
            if prompt in waiting and prompt not in self._kept:
                document = cache.save(first[prompt], self._lengths[first[prompt]])
                self._kept[prompt] = KeptPrompt(document, found[number : number + 1].clone())
        self._kept = {prompt: kept for prompt, kept in self._kept.items() if prompt in waiting}
        index = [order[prompt] for prompt in prompts]
        return found if index == list(range(len(found))) else found[torch.tensor(index, device=self._device)]

    def _compute(self, prompts: Sequence[Prompt], slots: Sequence[int], cache: Cache) -> Tensor:
        """Fill rows with different prompts; logits after each, [B, V]."""
        known = self._cached_prefixes(prompts, slots)
        whole = [number for number in range(len(prompts)) if number not in known]
        logits = []
        if whole:
            rows = torch.tensor([slots[number] for number in whole])
            logits.append(self._prefill([prompts[number] for number in whole], cache, rows))
        if known:
            for number, (shared, source) in known.items():
                length = shared + self._virtual_tokens  # they come before the prompt
                document = source if isinstance(source, CachedDocument) else cache.save(source, length)
                cache.load(slots[number], document, length)
            batch = Ragged.build([prompts[number][shared:] for number, (shared, _) in known.items()])
            rows = torch.tensor([slots[number] for number in known])
            self._count(batch)
            logits.append(self._extending.extend(batch.to(self._device), cache, rows.to(self._device)))
        if len(logits) == 1:
            return logits[0]
        order = torch.tensor([*whole, *known]).argsort()
        return torch.cat(logits)[order.to(self._device)]

    def _cached_prefixes(self, prompts: Sequence[Prompt], slots: Sequence[int]) -> dict[int, CachedPrefix]:
        """Number of a prompt -> its beginning that need not be computed, for the prompts that have one."""
        known: dict[int, CachedPrefix] = {}
        if self._documents is None:
            return known
        rows: list[tuple[Prompt, CachedDocument | int]] = [
            (prompt, slot) for slot, prompt in enumerate(self._prompts) if prompt and self._may_extend(prompt)
        ]
        for number, (prompt, slot) in enumerate(zip(prompts, slots, strict=True)):
            if not self._may_extend(prompt):
                continue
            found = [self._documents.find(prompt), longest_cached_prefix(prompt, rows)]
            best = max((each for each in found if each is not None), key=lambda each: each.length, default=None)
            if best is None:
                rows.append((prompt, slot))  # it is computed before the prompts that begin with the same tokens
            else:
                known[number] = best
        return known

    def _may_extend(self, document: Prompt) -> bool:
        """True where a document may be put together from a beginning and a rest, virtual tokens included."""
        limit = self._extending.longest_extended
        return limit is None or len(document) + self._virtual_tokens <= limit

    def _prefill(self, prompts: Sequence[Prompt], cache: Cache | ExternalCache, rows: Tensor | None = None) -> Tensor:
        read = Ragged.build(prompts)
        self._count(read)
        if self._start_token is not None:
            batch = Seq2Seq(read, Ragged.build([[self._start_token]] * len(prompts)))
            return self._model.prefill(batch.to(self._device), cache)
        into = () if rows is None else (rows.to(self._device),)
        return self._model.prefill(read.to(self._device), cache, *into)

    def _count(self, batch: Ragged) -> None:
        self.computed_tokens += len(batch.tokens)
        self.forwards += 1

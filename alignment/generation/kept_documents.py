"""Documents whose keys and values are kept after their request, for prompts to come that begin with the same tokens.

A prefix is what a prompt begins with, as in vLLM's prefix caching; the virtual tokens of a prefix adapter are none of it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from alignment.models.layers.kv_cache import Cache, CachedDocument

LEAST_SHARED = 16  # tokens: loading fewer saves less than one more forward costs

Tokens = tuple[int, ...]


class CachedPrefix(NamedTuple):
    """What a prompt begins with that need not be computed.

    Attributes:
        length: its tokens.
        source: where its keys and values are: a kept document, or a row of the cache.
    """

    length: int
    source: CachedDocument | int


def common_prefix_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many leading tokens are equal."""
    equal, most = 0, min(len(one), len(other))
    while equal < most:  # comparing slices is much faster than comparing token by token
        middle = (equal + most + 1) // 2
        if one[equal:middle] == other[equal:middle]:
            equal = middle
        else:
            most = middle - 1
    return equal


def longest_cached_prefix(
    prompt: Tokens, documents: Sequence[tuple[Tokens, CachedDocument | int]]
) -> CachedPrefix | None:
    """The longest beginning of a prompt that one of the documents has; None where none has `LEAST_SHARED` tokens of it.

    At least the prompt's last token is left to be computed, for the logits after it.
    """
    before_last = prompt[:-1]
    found = [CachedPrefix(common_prefix_length(before_last, tokens), source) for tokens, source in documents]
    best = max(found, key=lambda known: known.length, default=None)
    return None if best is None or best.length < LEAST_SHARED else best


class KeptDocuments:
    """Copies of what cache rows held, up to a number of tokens; the one used least recently goes first.

    Attributes:
        tokens: of all documents kept now, virtual ones included.
    """

    def __init__(self, most_tokens: int):
        """An empty store.

        Args:
            most_tokens: of all documents together; of a document that is longer the first so many are kept.
        """
        self._most_tokens, self.tokens = most_tokens, 0
        self._documents: OrderedDict[Tokens, CachedDocument] = OrderedDict()  # the one used last is the last

    def find(self, prompt: Tokens) -> CachedPrefix | None:
        """See `longest_cached_prefix`; the document found counts as used."""
        found = longest_cached_prefix(prompt, list(self._documents.items()))
        if found is not None:
            used = next(tokens for tokens, document in self._documents.items() if document is found.source)
            self._documents.move_to_end(used)
        return found

    def add(self, tokens: Tokens, cache: Cache, row: int, length: int) -> None:
        """Keep what the first `length` slots of a cache row hold, unless a kept document begins with the same tokens.

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
                self._drop(kept)
        while self.tokens + length > self._most_tokens:
            self._drop(next(iter(self._documents)))
        self._documents[tokens] = cache.save(row, length)
        self.tokens += length

    def _drop(self, tokens: Tokens) -> None:
        self.tokens -= self._documents.pop(tokens).length

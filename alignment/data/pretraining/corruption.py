"""Corruption of token ids by pretraining objectives: masked tokens and spans, BART's five noises, prefixes.

The functions are pure: randomness comes from a generator argument, and each row of an epoch has a generator of its own.
"""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Annotated, Generic, Literal, TypeVar

import numpy as np
from annotated_types import Interval

from alignment.data.batches import TokenizedRow
from alignment.data.stream import Stream
from alignment.data.streaming import OrderState, StreamedOrder
from alignment.settings import Rule, Settings, Share

Ids = Sequence[int]
Row = TypeVar("Row", bound=TokenizedRow)
NOT_CHOSEN = -1  # in an array of choices: this token is left alone
CORRUPTION_SALT = 0x6D61736B  # separates corruption from the order of rows: numpy pads seeds with zeros


@dataclass(frozen=True, slots=True)
class SeededRow(Generic[Row]):
    """A row and its corruption's seed, a function of (seed, epoch, index) only, not of rank, batch or neighbors."""

    row: Row
    seed: int
    epoch: int
    index: int

    def generator(self) -> np.random.Generator:
        """A fresh generator in the same state at each call."""
        return np.random.default_rng([self.seed, self.epoch, self.index, CORRUPTION_SALT])


@dataclass(frozen=True)
class EpochStream(Generic[Row]):
    """A stream whose rows carry their epoch, so that a row is corrupted differently each time it is seen."""

    stream: Stream[Row] | StreamedOrder[Row]

    def rows_at(self, step: int) -> list[SeededRow[Row]]:
        """The rows of batch `step`, in the order of `Stream.rows_at`."""
        stream = self.stream
        rows = zip(stream.rows_at(step), stream.positions_at(step), stream.epochs_at(step), strict=True)
        return [SeededRow(row, stream.seed, epoch, index) for row, index, epoch in rows]

    def state(self) -> OrderState | None:
        """The state of the stream, where it has one."""
        return self.stream.state() if isinstance(self.stream, StreamedOrder) else None

    def restore(self, state: OrderState | None) -> None:
        """Continue from a state of the stream."""
        if isinstance(self.stream, StreamedOrder) and state is not None:
            self.stream.restore(state)


def fixed_seed_rows(rows: Sequence[Row], seed: int = 0) -> list[SeededRow[Row]]:
    """All rows in order, each with one fixed corruption: held-out data is the same at every evaluation."""
    return [SeededRow(row, seed, 0, index) for index, row in enumerate(rows)]


@dataclass(frozen=True)
class Masking(Settings):
    """The share of a text that is masked, the units of masking, and the replacements.

    Attributes:
        rate: share of the text's tokens that is chosen, in (0, 1].
        units: "tokens" (BERT), "words" (whole words) or "spans" of whole words (SpanBERT).
        mask_share: share of the chosen tokens that become the mask token.
        random_share: share of the chosen tokens that become a random token; the rest stay as they are.
        span_stop: probability that a span ends after each of its words, in (0, 1).
        longest_span: most words of a span.
    """

    rate: Annotated[float, Interval(gt=0, le=1)] = 0.15
    units: Literal["tokens", "words", "spans"] = "tokens"
    mask_share: Share = 0.8
    random_share: Share = 0.1
    span_stop: Annotated[float, Interval(gt=0, lt=1)] = 0.2
    longest_span: Annotated[int, Interval(ge=1, le=10_000)] = 10  # a table holds the probability of each length

    RULES = (
        Rule(
            "mask_share",
            lambda c: c.mask_share + c.random_share > 1,
            "({self.mask_share}) and random_share ({self.random_share}) must add up to at most 1",
        ),
    )


def budget(count: int, rate: float) -> int:
    """Number of tokens chosen out of `count`: the share `rate`, rounded, and at least one."""
    return max(1, round(rate * count))


def choose(
    maskable: Sequence[bool], word_starts: Sequence[bool], masking: Masking, generator: np.random.Generator
) -> np.ndarray:
    """Choose tokens to mask: the group of each one, [N], `NOT_CHOSEN` or a number from 0; a group is replaced as one.

    `maskable` is True for the text's own tokens (at least one), `word_starts` where a word begins, both [N].
    """
    count = budget(sum(maskable), masking.rate)
    choice = np.full(len(maskable), NOT_CHOSEN)
    if masking.units == "spans":
        return _choose_spans(words_of(maskable, word_starts), choice, count, masking, generator)
    if masking.units == "words":
        chosen = _choose_words(words_of(maskable, word_starts), count, generator)
    else:  # each set of tokens equally likely; Devlin et al. 2019, arXiv:1810.04805, section 3.1
        chosen = generator.choice(np.flatnonzero(maskable), count, replace=False)
    choice[np.sort(chosen)] = np.arange(len(chosen))
    return choice


def _choose_words(words: Sequence[tuple[int, int]], most: int, generator: np.random.Generator) -> list[int]:
    """The tokens of whole words in random order; a word that would exceed the budget is skipped.

    Source: BERT's whole-word masking, google-research/bert, README of 31 May 2019.
    """
    order = generator.permutation(len(words))
    chosen = []
    for start, stop in (words[index] for index in order):
        if len(chosen) + stop - start <= most:
            chosen += range(start, stop)
    return chosen or list(range(*words[order[0]]))


def _choose_spans(
    words: Sequence[tuple[int, int]], choice: np.ndarray, most: int, masking: Masking, generator: np.random.Generator
) -> np.ndarray:
    """Spans of whole words until the budget is met, each a group; the last word may exceed it.

    Lengths in words are geometric, truncated at `longest_span` (a mean of 3.8 at 0.2 and 10); a span begins at any word
    not chosen yet, and ends early at a special token or a word chosen before.

    Source: Joshi et al. 2020, arXiv:1907.10529, section 3.1.
    """
    probabilities = span_lengths(masking.span_stop, masking.longest_span)
    spans = 0
    count = 0
    for first_word in generator.permutation(len(words)):
        if count >= most:
            break
        length = 1 + generator.choice(len(probabilities), p=probabilities)
        end = None
        for start, stop in words[first_word : first_word + length]:
            if count >= most or choice[start] != NOT_CHOSEN or end not in (None, start):
                break
            choice[start:stop] = spans
            count = count + stop - start
            end = stop
        spans += end is not None
    return choice


def span_boundaries(choice: np.ndarray) -> np.ndarray:
    """For each token of a span: the token before its span, the token after it, and its place in it from 0, [M, 3].

    Source: Joshi et al. 2020, arXiv:1907.10529, section 3.2 (x_{s-1}, x_{e+1} and i - s of a token i of span s to e).
    """
    chosen = np.flatnonzero(choice != NOT_CHOSEN)
    first = np.flatnonzero(np.diff(choice[chosen], prepend=NOT_CHOSEN))  # of each span, among the chosen tokens
    spans = np.searchsorted(first, np.arange(len(chosen)), side="right") - 1
    starts = chosen[first]
    stops = chosen[np.append(first[1:], len(chosen)) - 1] + 1
    return np.stack([starts[spans] - 1, stops[spans], chosen - starts[spans]], 1)


def span_lengths(stop: float, longest: int) -> np.ndarray:
    """Probabilities of the lengths 1 .. longest under a geometric distribution truncated there, [longest]."""
    probabilities = stop * (1 - stop) ** np.arange(longest)
    return probabilities / probabilities.sum()


def words_of(maskable: Sequence[bool], word_starts: Sequence[bool]) -> list[tuple[int, int]]:
    """(start, stop) of each word in tokens; special tokens belong to no word."""
    words: list[tuple[int, int]] = []
    for position, (inside, starts) in enumerate(zip(maskable, word_starts, strict=True)):
        if not inside:
            continue
        if starts or not words or words[-1][1] != position:
            words.append((position, position + 1))
        else:
            words[-1] = (words[-1][0], position + 1)
    return words


def replace_chosen(
    ids: Ids,
    choice: np.ndarray,
    masking: Masking,
    generator: np.random.Generator,
    *,
    mask_id: int,
    random_ids: np.ndarray,
) -> np.ndarray:
    """Ids with each chosen group masked, replaced by one of the `random_ids`, or left as it is, [N].

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 (80 %, 10 %, 10 %).
    """
    chosen = choice != NOT_CHOSEN
    uniform = generator.random(choice.max() + 1)[choice]
    random_tokens = generator.choice(random_ids, len(ids))
    masked = chosen & (uniform < masking.mask_share)
    randomized = chosen & ~masked & (uniform < masking.mask_share + masking.random_share)
    return np.where(masked, mask_id, np.where(randomized, random_tokens, ids))


def corrupt_spans(
    ids: Ids, sentinels: Ids, generator: np.random.Generator, *, density: float = 0.15, mean_span: float = 3.0
) -> tuple[list[int], list[int]]:
    """The text with each span replaced by a sentinel, and the spans, each after its sentinel and closed by a last one.

    "a b c d e" -> "a <0> d <1>" and "<0> b c <1> e <2>". The lengths of the spans and of the gaps between them are a
    uniformly random partition; a gap comes first, a span last. There is one sentinel more than spans (`span_plan`).

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2.
    """
    noise, spans = span_plan(len(ids), density, mean_span)
    gaps, lengths = (random_partition(total, spans, generator) for total in (len(ids) - noise, noise))
    pieces = list(zip(sentinels, _cut(ids, gaps, lengths), strict=False))
    source = [token for sentinel, (gap, _) in pieces for token in (*gap, sentinel)]
    target = [token for sentinel, (_, span) in pieces for token in (sentinel, *span)]
    return source, [*target, sentinels[spans]]


def _cut(ids: Ids, gaps: Iterable[int], lengths: Iterable[int]) -> list[tuple[list[int], list[int]]]:
    """Each gap with the span after it, in tokens."""
    sizes = [int(size) for pair in zip(gaps, lengths, strict=True) for size in pair]
    pieces = [list(ids[start:stop]) for start, stop in pairwise(accumulate(sizes, initial=0))]
    return list(zip(pieces[::2], pieces[1::2], strict=True))


def span_plan(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """Number of tokens in spans and number of spans; at least one of each, and at least one token outside."""
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def random_partition(total: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """`parts` whole numbers of at least 1 that add up to `total`, all partitions equally likely, [parts]."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def split_prefix(ids: Ids, generator: np.random.Generator) -> tuple[list[int], list[int]]:
    """A text of at least two tokens cut at a random position into source and target; neither is empty.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1 (prefix language model).
    """
    cut = int(generator.integers(1, len(ids)))
    return list(ids[:cut]), list(ids[cut:])


def infill(
    ids: Ids, mask_id: int, generator: np.random.Generator, *, density: float = 0.3, mean_span: float = 3.0
) -> list[int]:
    """The text with each span of Poisson length replaced by one mask token; a span of length 0 inserts one.

    The result is never longer than the text: a length of 0 that would make it longer is drawn again.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2 (text infilling; lambda = 3, 30 % of the tokens).
    """
    masked = budget(len(ids), density)
    lengths = []
    while sum(lengths) < masked:
        length = min(int(generator.poisson(mean_span)), masked - sum(lengths))
        if length or len(lengths) < sum(lengths):
            lengths.append(length)
    parts = len(lengths) + 1
    gaps = random_partition(len(ids) - masked + parts, parts, generator) - 1  # a gap may be empty
    pieces = [gap for gap, _ in _cut(ids, gaps, [*lengths, 0])]
    return [*chain(*([*gap, mask_id] for gap in pieces[:-1])), *pieces[-1]]


def mask_random_tokens(ids: Ids, mask_id: int, generator: np.random.Generator, *, density: float = 0.3) -> list[int]:
    """The text with the share `density` of its tokens replaced by the mask token, each set of them equally likely.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2 (token masking).
    """
    masked = generator.choice(len(ids), budget(len(ids), density), replace=False)
    return np.where(np.isin(np.arange(len(ids)), masked), mask_id, ids).tolist()


def delete_tokens(ids: Ids, generator: np.random.Generator, *, density: float = 0.3) -> list[int]:
    """The text without the share `density` of its tokens; nothing tells where they were. One token at least is left.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2 (token deletion).
    """
    kept = len(ids) - min(budget(len(ids), density), len(ids) - 1)
    return [ids[position] for position in np.sort(generator.choice(len(ids), kept, replace=False))]


def permute_sentences(ids: Ids, stops: Set[int], generator: np.random.Generator) -> list[int]:
    """The sentences of the text in random order; one ends after each run of the tokens in `stops`, or with the text.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2 (sentence permutation).
    """
    edges = [i for i in range(1, len(ids)) if ids[i - 1] in stops and ids[i] not in stops]
    sentences = [ids[start:stop] for start, stop in pairwise([0, *edges, len(ids)])]
    return [token for index in generator.permutation(len(sentences)) for token in sentences[index]]


def rotate_text(ids: Ids, generator: np.random.Generator) -> list[int]:
    """The text from a random token to its end, and then from its beginning to that token.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2 (document rotation).
    """
    first = int(generator.integers(len(ids)))
    return [*ids[first:], *ids[:first]]

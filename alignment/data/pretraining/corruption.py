"""What pretraining objectives do to a text's token ids: masks, spans, cuts, pairs. Pure; chance comes in as a generator.

Batches are made in objectives.py. The same generator gives the same corruption, whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

Ids = Sequence[int]
STAYS = -1  # in an array of choices: this token is left alone


@dataclass(frozen=True)
class Masking:
    """How much of a text is masked, in which units, and what stands there instead.

    Attributes:
        rate: share of the ordinary tokens chosen, in (0, 1].
        units: "tokens" (BERT), "words" (whole words) or "spans" of whole words (SpanBERT).
        mask_share: share of the chosen that become the mask token.
        random_share: share of the chosen that become some other token; the rest stay as they are.
        span_stop: chance that a span ends after each of its words, in (0, 1).
        longest_span: words of the longest span.
    """

    rate: float = 0.15
    units: Literal["tokens", "words", "spans"] = "tokens"
    mask_share: float = 0.8
    random_share: float = 0.1
    span_stop: float = 0.2
    longest_span: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise ValueError(f"masking.rate must be in (0, 1], got {self.rate}; 0.15 is usual")
        if self.units not in ("tokens", "words", "spans"):
            raise ValueError(f"masking.units must be tokens, words or spans, got {self.units!r}")
        if min(self.mask_share, self.random_share) < 0 or self.mask_share + self.random_share > 1:
            raise ValueError("masking.mask_share and random_share must be shares that add up to at most 1")
        if not 0 < self.span_stop < 1:
            raise ValueError(f"masking.span_stop must lie between 0 and 1, got {self.span_stop}; 0.2 is usual")
        if not 1 <= self.longest_span <= 10_000:  # each length up to it has a chance of its own, in a table
            raise ValueError(f"masking.longest_span must lie between 1 and 10,000 words, got {self.longest_span}")


def budget(count: int, rate: float) -> int:
    """How many of `count` tokens are chosen: their share, rounded, and at least one."""
    return max(1, round(rate * count))


def choose_tokens(maskable: Sequence[bool], rate: float, generator: np.random.Generator) -> np.ndarray:
    """Choose single tokens, each set of them equally likely.

    Args:
        maskable: True for ordinary tokens, [N]; at least one.

    Returns:
        [N]: `STAYS`, or the number of the draw that decides what becomes of the token.

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1.
    """
    places = np.flatnonzero(maskable)
    chosen = generator.choice(places, budget(len(places), rate), replace=False)
    return _numbered(len(maskable), np.sort(chosen))


def choose_words(
    maskable: Sequence[bool], word_starts: Sequence[bool], rate: float, generator: np.random.Generator
) -> np.ndarray:
    """Choose whole words in random order; one that would exceed the budget is passed over.

    Where every word is longer than the budget, the first one drawn is chosen all the same.

    Args:
        maskable: True for ordinary tokens, [N]; at least one.
        word_starts: True where a word begins, [N].

    Returns:
        As `choose_tokens`: each piece of a word has a draw of its own.

    Source: BERT's whole-word masking, google-research/bert, README of 31 May 2019.
    """
    words = words_of(maskable, word_starts)
    room = budget(sum(maskable), rate)
    order, chosen = generator.permutation(len(words)), []
    for number in order:
        start, stop = words[number]
        if len(chosen) + stop - start <= room:
            chosen += range(start, stop)
    if not chosen:
        chosen = list(range(*words[order[0]]))
    return _numbered(len(maskable), np.sort(chosen))


def choose_spans(
    maskable: Sequence[bool], word_starts: Sequence[bool], masking: Masking, generator: np.random.Generator
) -> np.ndarray:
    """Choose spans of whole words until the budget is met; the last word may exceed it.

    Lengths in words are geometric, cut at `longest_span` (a mean of 3.8 at 0.2 and 10); the first word is any word not
    yet chosen. A span ends early at a special token, at a word chosen before and where the budget is met.

    Returns:
        As `choose_tokens`: all tokens of a span share one draw.

    Source: Joshi et al. 2020, arXiv:1907.10529, section 3.1.
    """
    words = words_of(maskable, word_starts)
    room = budget(sum(maskable), masking.rate)
    chances = span_lengths(masking.span_stop, masking.longest_span)
    choice, spans, taken = np.full(len(maskable), STAYS), 0, 0
    for number in generator.permutation(len(words)):
        if taken >= room:
            break
        length = 1 + generator.choice(len(chances), p=chances)
        end = None
        for start, stop in words[number : number + length]:
            if taken >= room or choice[start] != STAYS or end not in (None, start):
                break
            choice[start:stop] = spans
            taken, end = taken + stop - start, stop
        spans += end is not None
    return choice


def span_lengths(stop: float, longest: int) -> np.ndarray:
    """Chances of the lengths 1 .. longest under a geometric distribution cut there, [longest]."""
    chances = stop * (1 - stop) ** np.arange(longest)
    return chances / chances.sum()


def words_of(maskable: Sequence[bool], word_starts: Sequence[bool]) -> list[tuple[int, int]]:
    """First token of each word, and the one after its last; special tokens belong to none."""
    words: list[tuple[int, int]] = []
    for place, (inside, starts) in enumerate(zip(maskable, word_starts, strict=True)):
        if not inside:
            continue
        if starts or not words or words[-1][1] != place:
            words.append((place, place + 1))
        else:
            words[-1] = (words[-1][0], place + 1)
    return words


def choose(
    maskable: Sequence[bool], word_starts: Sequence[bool], masking: Masking, generator: np.random.Generator
) -> np.ndarray:
    """The choice in the units that `masking` names, as `choose_tokens`."""
    if masking.units == "spans":
        return choose_spans(maskable, word_starts, masking, generator)
    if masking.units == "words":
        return choose_words(maskable, word_starts, masking.rate, generator)
    return choose_tokens(maskable, masking.rate, generator)


def replace_chosen(
    ids: Ids, choice: np.ndarray, ordinary: np.ndarray, mask_id: int, masking: Masking, generator: np.random.Generator
) -> np.ndarray:
    """Ids with the chosen tokens masked, replaced at random, or left, by one draw for each number in `choice`.

    Args:
        choice: [N], as `choose_tokens` gives it.
        ordinary: ids a random token is drawn from; no special ones.

    Returns:
        New ids, [N].

    Source: Devlin et al. 2019, arXiv:1810.04805, section 3.1 (80 %, 10 %, 10 %).
    """
    chosen = choice != STAYS
    fate = generator.random(choice.max() + 1)[choice]
    substitutes = generator.choice(ordinary, len(ids))
    masked = chosen & (fate < masking.mask_share)
    exchanged = chosen & ~masked & (fate < masking.mask_share + masking.random_share)
    return np.where(masked, mask_id, np.where(exchanged, substitutes, ids))


def corrupt_spans(
    ids: Ids, sentinels: Ids, generator: np.random.Generator, *, density: float = 0.15, mean_span: float = 3.0
) -> tuple[list[int], list[int]]:
    """Text with spans replaced by sentinels, and the spans, each behind its sentinel; a last sentinel closes them.

    "a b c d e" -> "a <0> d <1>" and "<0> b c <1> e <2>". Spans and the gaps between them are cut at random, each way
    equally likely; a gap comes first, a span last. Special tokens are added by the caller.

    Args:
        ids: at least two tokens.
        sentinels: in the order of their use, one more than there are spans (`sentinels_needed`).
        density: share of the tokens in spans.
        mean_span: tokens of a span, on average.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.1.4 and figure 2.
    """
    noise, spans = span_plan(len(ids), density, mean_span)
    gaps, holes = (segment(total, spans, generator) for total in (len(ids) - noise, noise))
    source: list[int] = []
    target: list[int] = []
    at = 0
    for sentinel, gap, hole in zip(sentinels, gaps, holes, strict=False):
        source += [*ids[at : at + gap], sentinel]
        target += [sentinel, *ids[at + gap : at + gap + hole]]
        at += gap + hole
    return source, [*target, sentinels[spans]]


def span_plan(length: int, density: float, mean_span: float) -> tuple[int, int]:
    """How many tokens of a text lie in spans, and in how many spans; at least one of each, and one token outside."""
    noise = min(max(round(length * density), 1), length - 1)
    return noise, min(max(round(noise / mean_span), 1), noise, length - noise)


def sentinels_needed(length: int, density: float = 0.15, mean_span: float = 3.0) -> int:
    """Sentinels that a text of so many tokens takes, the closing one among them."""
    return span_plan(length, density, mean_span)[1] + 1


def segment(total: int, parts: int, generator: np.random.Generator) -> np.ndarray:
    """`total` in `parts` whole numbers of at least 1, each way to cut it equally likely, [parts]."""
    cuts = np.sort(generator.choice(total - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def split_prefix(ids: Ids, generator: np.random.Generator) -> tuple[list[int], list[int]]:
    """A text of at least two tokens cut at a random place: what is read, and what is written; neither is empty.

    Source: Raffel et al. 2020, arXiv:1910.10683, section 3.2.1 (prefix language model).
    """
    cut = int(generator.integers(1, len(ids)))
    return list(ids[:cut]), list(ids[cut:])


def infill(
    ids: Ids, mask_id: int, generator: np.random.Generator, *, density: float = 0.3, mean_span: float = 3.0
) -> list[int]:
    """Text in which spans of Poisson length each become one mask token; a span of length 0 puts one in between.

    It never gets longer than it was: a length of 0 that would make it so is drawn again.

    Source: Lewis et al. 2020, arXiv:1910.13461, section 2.2 (text infilling; lambda = 3, 30 % of the tokens).
    """
    room, lengths = budget(len(ids), density), []
    while sum(lengths) < room:
        length = min(int(generator.poisson(mean_span)), room - sum(lengths))
        if length or len(lengths) < sum(lengths):
            lengths.append(length)
    parts = len(lengths) + 1
    gaps = segment(len(ids) - room + parts, parts, generator) - 1  # a gap may be empty
    corrupted: list[int] = []
    at = 0
    for gap, length in zip(gaps, lengths, strict=False):
        corrupted += [*ids[at : at + gap], mask_id]
        at += int(gap) + length
    return corrupted + list(ids[at:])


def cut_pair(first: Ids, second: Ids, room: int) -> tuple[list[int], list[int]]:
    """Two texts cut at their ends to `room` tokens together: the longer one gives way, token by token.

    Source: Devlin et al. 2019, google-research/bert, create_pretraining_data.py.
    """
    a, b = len(first), len(second)
    while a + b > room:
        a, b = (a - 1, b) if a > b else (a, b - 1)
    return list(first[:a]), list(second[:b])


def _numbered(length: int, places: np.ndarray) -> np.ndarray:
    choice = np.full(length, STAYS)
    choice[places] = np.arange(len(places))
    return choice

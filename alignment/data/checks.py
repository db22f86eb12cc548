"""The checks of the data doctor, row by row and in bounded memory: faults of rows and of the tokens made of them.

`Checks` is filled chunk by chunk, also in several processes, and joined. Bad rows and truncation are counted elsewhere, in
the tally of the preparation; `findings` puts them together.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from typing import Literal
from zlib import crc32

from alignment.data.examples import Example, TokenizedRow
from alignment.data.faults import LEAST_PROMPT, TEXT_FAULTS
from alignment.data.rows.fields import EqualResponses
from alignment.data.rows.rankings import ALL_TIED, NO_RANKED_REPLIES
from alignment.data.rows.read import prompt_key, record_key
from alignment.data.rows.records import (
    SHOWN_IDS,
    Comparison,
    Demonstration,
    Kind,
    LabeledResponse,
    Messages,
    Ranking,
    Record,
    Steps,
    Tally,
    Text,
)
from alignment.data.rows.steps import NO_STEPS
from alignment.data.text import chat
from alignment.data.tokenize import EMPTY, EQUAL, FEW_RESPONSES, NO_STEP, PROMPT_CUT, RESPONSE_CUT, STEPS_CUT
from alignment.data.tokenizers.tokenizer import Tokenizer, bos_id, control_strings

Level = Literal["error", "warning", "note"]

MOST_HASHES = 2**17  # different rows that are kept in mind; from there on a share of them stands for all
CUT_SHARE = 0.01  # above these shares a finding is a warning
EQUAL_SHARE = 0.01
TIED_SHARE = 0.05
PROMPT_SHARE = 0.01
SAME_RESPONSE_SHARE = 0.05
LENGTH_BIAS = 0.1  # |share of pairs whose chosen side is longer - 1/2|
LABEL_SHARE = 0.05  # of the rarer label
GLUED_SHARE = 0.5
LEAST_ROWS = 20  # for findings about most rows
BACKWARD = 2**32
OUTLIER = 10  # times the length that 99 of 100 rows stay below
LEAST_OUTLIER_ROWS = 100
SKIPPED = (  # reasons to leave out a row that is no bad one
    EqualResponses().reason,
    EqualResponses("two responses of one prompt").reason,
    ALL_TIED,
    NO_RANKED_REPLIES,
    NO_STEPS,
)
JUDGED: tuple[Kind, ...] = ("comparisons", "rankings", "labels")  # kinds of rows that say which response is preferred
LOST = (EMPTY, EQUAL, FEW_RESPONSES, NO_STEP)  # reasons to drop a row for its tokens


@dataclass(frozen=True)
class Finding:
    """One observation: an error would spoil training, a warning may.

    Attributes:
        level: error, warning or note.
        text: how many rows, what they have, and the first few of them.
        name: what the fault is called.
    """

    level: str
    text: str
    name: str = ""


@dataclass
class Count:
    """How many rows have a fault, and the first few of them; a row of a sample counts for several."""

    number: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, row_id: str, weight: int = 1) -> None:
        """Count a row."""
        self.number += weight
        if len(self.first) < SHOWN_IDS:
            self.first.append(row_id)

    def merge(self, other: "Count") -> None:
        """Add another count, of later rows."""
        self.number += other.number
        self.first = (self.first + other.first)[:SHOWN_IDS]


class HashSample:
    """How often each key was seen, in bounded memory: exact up to `MOST_HASHES` keys, then for every 2nd, 4th, ... key.

    A key stays in the sample or not by its hash, so what is said of the keys in the sample holds for the others.

    Source: Gibbons 2001, distinct sampling for highly-accurate answers to distinct values queries.
    """

    def __init__(self, most: int = MOST_HASHES):
        self.most, self.halvings, self.seen = most, 0, dict[int, int]()

    @property
    def weight(self) -> int:
        """How many keys each key of the sample stands for."""
        return 2**self.halvings

    def add(self, key: int, number: int = 1) -> None:
        """Count a key `number` times."""
        self.add_all([(key, number)])

    def add_all(self, counted: Iterable[tuple[int, int]]) -> None:
        """Count keys, each with how often."""
        seen, weight = self.seen, self.weight
        for key, number in counted:
            if key % weight == 0:
                seen[key] = seen.get(key, 0) + number
                if len(seen) > self.most:
                    self._halve(self.halvings + 1)
                    seen, weight = self.seen, self.weight

    def merge(self, other: "HashSample") -> None:
        """Add another sample."""
        self._halve(max(self.halvings, other.halvings))
        self.add_all(other.seen.items())

    def _halve(self, halvings: int) -> None:
        if halvings > self.halvings:
            self.halvings = halvings
            self.seen = {key: number for key, number in self.seen.items() if key % self.weight == 0}

    def copies(self) -> int:
        """How many of the keys seen had been seen before."""
        return self.weight * sum(number - 1 for number in self.seen.values())

    def most_common(self) -> int:
        """How often the most common key of the sample was seen."""
        return max(self.seen.values(), default=0)


def stable_hash(*parts: str) -> int:
    """A number of 64 bits that is the same for the same texts, in every process."""
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def _drawn(row_id: str, weight: int) -> bool:
    """Whether a row is the one of so many whose texts and tokens are checked."""
    return crc32(row_id.encode("utf-8", "surrogatepass")) % weight == 0


class LengthCounts:
    """Lengths in buckets that grow by 2^(1/4), so quantiles are right within 19 %."""

    def __init__(self) -> None:
        self.buckets: dict[int, Count] = {}

    def add(self, length: int, row_id: str, weight: int) -> None:
        """Count a length."""
        self.buckets.setdefault(int(4 * math.log2(max(1, length))), Count()).add(row_id, weight)

    def merge(self, other: "LengthCounts") -> None:
        """Add the lengths of others."""
        for bucket, count in other.buckets.items():
            self.buckets.setdefault(bucket, Count()).merge(count)

    def outliers(self, times: float) -> Count:
        """Lengths above so many times the one that 99 of 100 stay below."""
        found, below = Count(), 0
        total = sum(count.number for count in self.buckets.values())
        limit = math.inf
        for bucket in sorted(self.buckets):
            if bucket > limit:
                found.merge(self.buckets[bucket])
            below += self.buckets[bucket].number
            if limit == math.inf and below >= 0.99 * total:
                limit = bucket + 1 + 4 * math.log2(times)
        return found


@dataclass
class LabelCounts:
    """How many labels, or pairs, and how many of them are on one side."""

    number: float = 0
    yes: float = 0
    difference: float = 0  # of lengths

    def merge(self, other: "LabelCounts") -> None:
        """Add the counts of others."""
        self.number += other.number
        self.yes += other.yes
        self.difference += other.difference


@dataclass(frozen=True)
class TokenFacts:
    """What the checks of tokens have to know of a tokenizer."""

    bos: int | None
    unknown: int | None
    stops: frozenset[int]
    stop_strings: tuple[str, ...]
    control_strings: tuple[str, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenFacts":
        """The facts of one tokenizer; a token that ends responses is no fault wherever it stands."""
        stops = chat.stop_token_ids(tokenizer)
        bos, unknown = bos_id(tokenizer), tokenizer.unk_token_id
        return cls(
            None if bos in stops else bos,
            None if unknown in stops else unknown,
            frozenset(stops),
            tuple(str(token) for token in tokenizer.convert_ids_to_tokens(sorted(stops))),
            tuple(control_strings(tokenizer)),
        )


class Checks:
    """What is unusual in the rows of one source and in their tokens.

    One object per chunk or process, `add` for each batch of rows, `merge` the objects, `findings` of the whole. Objects can
    be pickled. Memory is bounded: beyond `MOST_HASHES` different rows, every 2nd, then every 4th ... row stands for all, and
    the numbers are estimates. Texts cost most of the time (about 0.2 ms for a kilobyte): `weight` makes large data cheap.

    Args:
        kind: of the rows.
        tokenizer: that makes the tokens; None: rows are checked as text alone.
        weight: power of 2; texts and tokens of one row in so many are looked at, chosen by the hash of its id.
    """

    def __init__(self, kind: Kind, tokenizer: Tokenizer | None = None, *, weight: int = 1):
        self.kind: Kind = kind
        self.weight = weight
        self.facts = None if tokenizer is None else TokenFacts.of(tokenizer)
        self.rows = 0
        self.faults: dict[str, Count] = {}  # by name
        self.strings: dict[str, Count] = {}  # control strings typed in texts
        self.copies, self.preferences, self.responses = HashSample(), HashSample(), HashSample()
        self.lengths = LengthCounts()
        self.pairs, self.labels = LabelCounts(), LabelCounts()

    def add(self, records: Sequence[Record], examples: Sequence[TokenizedRow] = ()) -> None:
        """Check some rows, and the examples that were made of them."""
        self.rows += len(records)
        self.copies.add_all((stable_hash(*record_key(record)), 1) for record in records)
        if self.kind in JUDGED:
            for record in records:
                self._add_preferences(record)
        self.weight = weight = max(self.weight, self.copies.weight)
        for record in records:
            if weight == 1 or _drawn(record.row_id, weight):
                self._add_texts(record, weight)
        if self.facts is not None:
            for example in examples:
                if weight == 1 or _drawn(example.row_id, weight):
                    self._add_tokens(example, self.facts, weight)

    def merge(self, other: "Checks") -> None:
        """Add what was found in other rows of the same source."""
        self.rows += other.rows
        self.weight = max(self.weight, other.weight)
        for ours, theirs in ((self.faults, other.faults), (self.strings, other.strings)):
            for name, count in theirs.items():
                ours.setdefault(name, Count()).merge(count)
        self.copies.merge(other.copies)
        self.preferences.merge(other.preferences)
        self.responses.merge(other.responses)
        self.lengths.merge(other.lengths)
        self.pairs.merge(other.pairs)
        self.labels.merge(other.labels)

    def _fault(self, name: str, row_id: str, weight: int) -> None:
        self.faults.setdefault(name, Count()).add(row_id, weight)

    def _add_preferences(self, record: Record) -> None:
        """Keep in mind which of two responses was preferred, however the rows put them."""
        match record:
            case Comparison():
                ordered = [(record.chosen, record.rejected)]
            case Ranking():
                ordered = [
                    (better, worse)
                    for better, first in zip(record.responses, record.ranks, strict=True)
                    for worse, second in zip(record.responses, record.ranks, strict=True)
                    if first < second
                ]
            case LabeledResponse():
                ordered = [(record.response, "")] if record.desirable else [("", record.response)]
            case _:
                return
        for better, worse in ordered:
            key = stable_hash(prompt_key(record), *sorted((better, worse)))
            self.preferences.add(key, 1 if better < worse else BACKWARD)  # two counts in one number

    def _add_texts(self, record: Record, weight: int) -> None:
        """Check one row's texts: its prompt, and each response by itself."""
        prompt, responses = record_texts(record)
        for fault in TEXT_FAULTS:
            texts = responses if fault.responses else [prompt, *responses]
            if any(fault.found(text) for text in texts):
                self._fault(fault.name, record.row_id, weight)
        for response in responses or [prompt]:
            self.lengths.add(len(response), record.row_id, weight)
        for response in set(responses):
            self.responses.add(stable_hash(response), weight)
        plain = getattr(record, "prompt", None)
        if isinstance(plain, str) and responses:
            if len(plain.strip()) >= LEAST_PROMPT and responses[0].lstrip().startswith(plain.strip()):
                self._fault("prompt in response", record.row_id, weight)
            if plain[-1].isalnum() | (plain[-1] in ".?!") and responses[0][0].isalnum():
                self._fault("no separation", record.row_id, weight)
        if isinstance(plain, list):
            self._add_dialogue(plain, record.row_id, weight)
        self._add_judgment(record, weight)
        self._add_strings(record.row_id, [prompt, *responses], weight)

    def _add_dialogue(self, messages: Messages, row_id: str, weight: int) -> None:
        roles = [message["role"] for message in messages]
        if "system" in roles[1:]:
            self._fault("system message", row_id, weight)
        if any(role == following == "user" for role, following in pairwise(roles)):
            self._fault("turns", row_id, weight)

    def _add_judgment(self, record: Record, weight: int) -> None:
        """Count labels, and check what a row says of its responses."""
        match record:
            case Comparison():
                self._add_lengths(record.chosen, record.rejected, weight)
            case Ranking() if len(record.responses) == 2 and len(set(record.ranks)) == 2:
                best = record.ranks.index(0)
                self._add_lengths(record.responses[best], record.responses[1 - best], weight)
            case LabeledResponse():
                self.labels.merge(LabelCounts(weight, weight * record.desirable))
            case Steps():
                self.labels.merge(LabelCounts(weight * len(record.labels), weight * sum(record.labels)))
            case _:
                pass
        margin = getattr(record, "margin", None)
        if margin is not None and margin < 0:
            self._fault("margin", record.row_id, weight)
        if isinstance(record, Ranking):
            if len(set(record.ranks)) == 1:
                self._fault("tied ranking", record.row_id, weight)
            if record.scores is not None and not _agree(record.scores, record.ranks):
                self._fault("scores", record.row_id, weight)

    def _add_lengths(self, chosen: str, rejected: str, weight: int) -> None:
        longer = 0.5 if len(chosen) == len(rejected) else float(len(chosen) > len(rejected))
        self.pairs.merge(LabelCounts(weight, weight * longer, weight * (len(chosen) - len(rejected))))

    def _add_strings(self, row_id: str, texts: Sequence[str], weight: int) -> None:
        if self.facts is None:
            return
        stripped = [texts[0], *(chat.without_end(text, self.facts.stop_strings) for text in texts[1:])]
        for string in self.facts.control_strings:
            if any(string in text for text in stripped):
                self.strings.setdefault(string, Count()).add(row_id, weight)

    def _add_tokens(self, example: TokenizedRow, facts: TokenFacts, weight: int) -> None:
        documents = example.documents
        if facts.bos is not None and any(ids.count(facts.bos) > 1 for ids in documents):
            self._fault("bos", example.row_id, weight)
        if facts.unknown is not None and any(facts.unknown in ids for ids in documents):
            self._fault("unknown tokens", example.row_id, weight)
        if self.kind != "text" and _is_unstopped(example, facts.stops):
            self._fault("no stop token", example.row_id, weight)

    def findings(self, counts: Tally, *, max_cut_share: float, max_length: int) -> list[Finding]:
        """All findings, errors first.

        Args:
            counts: of the preparation: rows dropped and cut.
            max_cut_share: of the rows; from there on a run refuses them.
            max_length: tokens that a row may have.
        """
        found = [
            *_dropped(counts),
            *_cut(counts, self.kind, max_cut_share, max_length),
            *self.findings_of_rows(counts),
            *_overlap(counts),
        ]
        levels: Sequence[Level] = ("error", "warning", "note")
        return sorted(found, key=lambda finding: levels.index(finding.level))  # type: ignore[arg-type]

    def findings_of_rows(self, counts: Tally) -> list[Finding]:
        """The findings about rows that are used: what the tally says of others is left out.

        Args:
            counts: of the tokenization; a response that was cut lacks its stop token for that.
        """
        return [*self._row_findings(), *self._preference_findings(), *self._token_findings(counts)]

    def _row_findings(self) -> Iterator[Finding]:
        if copies := self.copies.copies():
            level = _level(copies, self.rows, EQUAL_SHARE)
            yield Finding(level, f"{copies} rows are exact copies of an earlier one", "copies")
        for fault in TEXT_FAULTS:
            yield from self._rows_that(fault.name, fault.says, fault.share)
        yield from self._rows_that("prompt in response", "have a response that begins with the prompt", PROMPT_SHARE)
        yield from self._rows_that("system message", "have a system message after the first message", 0.0)
        yield from self._rows_that("turns", "have two messages of the user in a row", PROMPT_SHARE)
        glued = self.faults.get("no separation")
        if glued and self.rows >= LEAST_ROWS and glued.number > GLUED_SHARE * self.rows:
            says = "have nothing between prompt and response, so the two are read as one text"
            yield from self._rows_that("no separation", says, 1.0)
        often = self.responses.most_common()
        if often >= LEAST_ROWS and often > SAME_RESPONSE_SHARE * self.rows:
            yield Finding("warning", f"about {often} rows have one and the same response", "same response")
        outliers = self.lengths.outliers(OUTLIER)
        if outliers.number and self.rows >= LEAST_OUTLIER_ROWS:
            says = f"have a text more than {OUTLIER} times as long as 99 of 100 others"
            yield Finding("warning", f"{outliers.number} rows {says} ({', '.join(outliers.first)})", "length outliers")

    def _rows_that(self, name: str, says: str, share: float, level: Level = "warning") -> Iterator[Finding]:
        """The finding about rows with a fault, where there are any; a note where they are no more than `share`."""
        if count := self.faults.get(name):
            level = level if count.number > share * self.rows else "note"
            about = "" if self.weight == 1 else "about "
            yield Finding(level, f"{about}{count.number} rows {says} ({', '.join(count.first)})", name)

    def _preference_findings(self) -> Iterator[Finding]:
        counted = self.preferences.seen.values()
        both = self.preferences.weight * sum(number > BACKWARD and number % BACKWARD > 0 for number in counted)
        if both:
            says = "have the same two responses preferred both ways round"
            if self.kind == "labels":
                says = "have the same response labeled both desirable and undesirable"
            yield Finding("warning", f"{both} prompts {says}", "contradictions")
        if self.pairs.number:
            longer = self.pairs.yes / self.pairs.number
            gap = self.pairs.difference / self.pairs.number
            level = "warning" if abs(longer - 0.5) > LENGTH_BIAS else "note"
            text = f"chosen is {gap:+.1f} characters longer on average; 'the longer one wins' is right in {longer:.1%}"
            yield Finding(level, text, "length bias")
        if self.labels.number >= LEAST_ROWS:
            share = self.labels.yes / self.labels.number
            what = "steps are right" if self.kind == "steps" else "responses are desirable"
            level = "warning" if min(share, 1 - share) < LABEL_SHARE else "note"
            yield Finding(level, f"{share:.1%} of the {what}", "label balance")
        yield from self._rows_that("margin", "have a margin below 0: the rejected response is said to lead", 0.0)
        yield from self._rows_that("scores", "have scores that contradict which response is preferred", 0.0)
        yield from self._rows_that("tied ranking", "tie all responses", TIED_SHARE)

    def _token_findings(self, counts: Tally) -> Iterator[Finding]:
        yield from self._rows_that("bos", "have more than one BOS", 0.0, "error")
        yield from self._rows_that("unknown tokens", "have unknown tokens", 0.0)
        cut = sum(number for what, number in counts.cut.items() if what.startswith("response"))
        missing = self.faults.get("no stop token", Count())
        if missing.number > cut:
            number = missing.number - cut
            yield Finding("error", f"{number} rows train no stop token ({', '.join(missing.first)})", "no stop token")
        for string, count in self.strings.items():
            text = f"{count.number} rows hold {string!r} in their text; it is read as text, not as a token"
            yield Finding("warning", text, "control strings")


def _agree(scores: Sequence[float], ranks: Sequence[int]) -> bool:
    """Whether no response with a lower score stands before one with a higher."""
    both = sorted(zip(ranks, scores, strict=True), key=lambda pair: (pair[0], -pair[1]))
    return all(first[1] >= second[1] for first, second in pairwise(both))


def _dropped(counts: Tally) -> Iterator[Finding]:
    for reason, number in counts.dropped.items():
        level = _level(number, counts.rows, EQUAL_SHARE) if reason in SKIPPED + LOST else "error"
        verb = " dropped" if reason in LOST else ""
        yield Finding(level, f"{number} rows{verb}: {reason} ({', '.join(counts.first[reason])})", reason)


def _overlap(counts: Tally) -> Iterator[Finding]:
    if ids := counts.trained_on:
        text = f"{len(ids)} held-out rows have a prompt or text that is trained on too ({', '.join(ids[:SHOWN_IDS])})"
        yield Finding("warning", text, "overlap")


def _cut(counts: Tally, kind: Kind, max_cut_share: float, max_length: int) -> Iterator[Finding]:
    for what, number in counts.cut.items():
        level = "note" if kind == "text" else _level(number, counts.rows, CUT_SHARE)
        if what in (PROMPT_CUT, RESPONSE_CUT, STEPS_CUT) and number > max_cut_share * counts.kept:
            level = "error"  # a run refuses so many
        yield Finding(level, f"{number} of {counts.rows} rows at max_length {max_length}: {what}", what)


def _level(number: int, rows: int, share: float) -> Level:
    return "warning" if number > share * rows else "note"


def record_texts(record: Record) -> tuple[str, list[str]]:
    """The text of a record's prompt (or document), and of each of its responses."""
    match record:
        case Text():
            return record.text, []
        case Comparison():
            responses = [record.chosen, record.rejected]
        case Demonstration() | LabeledResponse():
            responses = [record.response]
        case Ranking():
            responses = list(record.responses)
        case Steps():
            responses = [record.separator.join(record.steps)]
        case _:
            responses = []
    prompt = record.prompt
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt), responses


def _is_unstopped(example: TokenizedRow, stops: frozenset[int]) -> bool:
    """True where a span that counts ends with a token at which generation does not stop."""
    if not isinstance(example, Example):
        return False
    for ids, flags in zip(example.documents, example.masks, strict=True):
        mask = bytes(flags)
        ends = [found.start() for found in re.finditer(b"\\x01(?!\\x01)", mask)]
        if any(ids[index] not in stops for index in ends):
            return True
    return False

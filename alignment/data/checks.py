"""The checks of the data doctor, row by row and in bounded memory: faults of rows and of the tokens made of them.

`Checks` is filled chunk by chunk, also in several processes, and joined. Bad rows and truncation are counted elsewhere, in
the tally of the preparation; `findings` puts them together.
"""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from zlib import crc32

from alignment.data.examples import TokenizedRow
from alignment.data.faults import FAULTS, TOKEN_FAULTS, CheckedRow, Level, SpecialTokens, preferred_pairs
from alignment.data.rows.fields import EqualResponses
from alignment.data.rows.rankings import ALL_TIED, NO_RANKED_REPLIES
from alignment.data.rows.read import prompt_key, record_key
from alignment.data.rows.records import SHOWN_IDS, Kind, LabeledResponse, Record, Steps, Tally
from alignment.data.rows.steps import NO_STEPS
from alignment.data.text import chat
from alignment.data.tokenize import EMPTY, EQUAL, FEW_RESPONSES, NO_STEP, PROMPT_CUT, RESPONSE_CUT, STEPS_CUT
from alignment.data.tokenizers.tokenizer import Tokenizer

MOST_HASHES = 2**17  # different rows that are kept in mind; from there on a share of them stands for all
CUT_SHARE = 0.01  # above these shares a finding is a warning
EQUAL_SHARE = 0.01
SAME_RESPONSE_SHARE = 0.05
LENGTH_BIAS = 0.1  # |share of pairs whose chosen side is longer - 1/2|
LABEL_SHARE = 0.05  # of the rarer label
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
    """Rows with a fault, and the first few of them; a row of a sample counts for several."""

    number: int = 0
    first: list[str] = field(default_factory=list)


class CountTable(dict[Any, Count]):
    """CountTable by what is counted."""

    def add(self, key: object, row_id: str, weight: int) -> None:
        """Count a row."""
        self.add_count(key, Count(weight, [row_id]))

    def add_count(self, key: object, more: Count) -> None:
        """Add a count of later rows."""
        count = self.setdefault(key, Count())
        count.number += more.number
        count.first = (count.first + more.first)[:SHOWN_IDS]

    def merge(self, other: "CountTable") -> None:
        """Add counts of later rows."""
        for key, count in other.items():
            self.add_count(key, count)


class HashSample:
    """CountTable of keys in bounded memory: exact up to `MOST_HASHES` keys, then for every 2nd, 4th, ... key.

    A key stays in the sample or not by its hash, so what is said of the keys in the sample holds for the others.

    Source: Gibbons 2001, distinct sampling for highly-accurate answers to distinct values queries.
    """

    def __init__(self, most: int = MOST_HASHES):
        self.most, self.weight, self.seen = most, 1, dict[int, int]()  # each key in it stands for `weight` keys

    def add(self, key: int, number: int = 1) -> None:
        """Count a key `number` times."""
        if key % self.weight == 0:
            self.seen[key] = self.seen.get(key, 0) + number
            if len(self.seen) > self.most:
                self._thin(2 * self.weight)

    def merge(self, other: "HashSample") -> None:
        """Add another sample."""
        self._thin(max(self.weight, other.weight))
        for key, number in other.seen.items():
            self.add(key, number)

    def _thin(self, weight: int) -> None:
        self.weight = weight
        self.seen = {key: number for key, number in self.seen.items() if key % weight == 0}

    def copies(self) -> int:
        """Number of keys seen that had been seen before."""
        return self.weight * sum(number - 1 for number in self.seen.values())


def stable_hash(*parts: str) -> int:
    """A number of 64 bits that is the same for the same texts, in every process."""
    text = "\0".join(parts).encode("utf-8", "surrogatepass")
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "big")


def length_bucket(length: int) -> int:
    """Number of a length's bucket; buckets grow by 2^(1/4), so quantiles are right within 19 %."""
    return int(4 * math.log2(max(1, length)))


def outliers(lengths: CountTable, times: float) -> Count:
    """Rows in buckets of lengths above `times` the one that 99 of 100 stay below."""
    found, below, limit = CountTable(), 0, math.inf
    total = sum(count.number for count in lengths.values())
    for bucket in sorted(lengths):
        if bucket > limit:
            found.add_count("", lengths[bucket])
        below += lengths[bucket].number
        if limit == math.inf and below >= 0.99 * total:
            limit = bucket + 1 + 4 * math.log2(times)
    return found.get("", Count())


class Checks:
    """Unusual rows of one source, and unusual tokens of theirs.

    One object per chunk or process, `add` for each batch of rows, `merge` the objects, `findings` of the whole. Objects can
    be pickled. Memory is bounded: beyond `MOST_HASHES` different rows, every 2nd, then every 4th ... row stands for all, and
    the numbers are estimates. Texts cost most of the time (about 0.2 ms for a kilobyte): `weight` makes large data cheap.

    Args:
        kind: of the rows.
        tokenizer: that makes the tokens; None: rows are checked as text alone.
        weight: power of 2; texts and tokens of one row in this many are looked at, chosen by the hash of its id.
    """

    def __init__(self, kind: Kind, tokenizer: Tokenizer | None = None, *, weight: int = 1):
        self.kind: Kind = kind
        self.weight = weight
        self.special = None if tokenizer is None else SpecialTokens.of(tokenizer)
        self.rows = 0
        self.counts = {name: CountTable() for name in ("faults", "control strings", "lengths")}
        self.samples = {name: HashSample() for name in ("copies", "preferences", "responses")}
        self.sums: Counter[str] = Counter()  # of pairs: number, longer, difference of lengths; of labels: number, yes

    def add(self, records: Sequence[Record], examples: Sequence[TokenizedRow] = ()) -> None:
        """Check some rows, and the examples that were made of them."""
        self.rows += len(records)
        for record in records:
            self.samples["copies"].add(stable_hash(*record_key(record)))
            for better, worse in preferred_pairs(record):
                key = stable_hash(prompt_key(record), *sorted((better, worse)))
                self.samples["preferences"].add(key, 1 if better < worse else BACKWARD)  # two counts in one number
        self.weight = max(self.weight, self.samples["copies"].weight)
        for record in records:
            if self._draws(record.row_id):
                self._add_texts(CheckedRow.of(record))
        for example in examples if self.special is not None else ():
            for fault in TOKEN_FAULTS if self._draws(example.row_id) else ():
                if (fault.name != "no stop token" or self.kind != "text") and fault.found(example, self.special):
                    self.counts["faults"].add(fault.name, example.row_id, self.weight)

    def merge(self, other: "Checks") -> None:
        """Add the findings of other rows of the same source."""
        self.rows += other.rows
        self.weight = max(self.weight, other.weight)
        for name, counts in other.counts.items():
            self.counts[name].merge(counts)
        for name, sample in other.samples.items():
            self.samples[name].merge(sample)
        self.sums.update(other.sums)

    def _draws(self, row_id: str) -> bool:
        """True for the one row in `weight` whose texts and tokens are checked."""
        return self.weight == 1 or crc32(row_id.encode("utf-8", "surrogatepass")) % self.weight == 0

    def _add_texts(self, row: CheckedRow) -> None:
        """Check one row's texts: its prompt, and each response by itself."""
        row_id, weight = row.record.row_id, self.weight
        for fault in FAULTS:
            if fault.found(row):
                self.counts["faults"].add(fault.name, row_id, weight)
        for text in row.responses or [row.prompt]:
            self.counts["lengths"].add(length_bucket(len(text)), row_id, weight)
        for response in set(row.responses):
            self.samples["responses"].add(stable_hash(response), weight)
        if self.special is not None:
            ended = [chat.without_end(text, self.special.stop_strings) for text in row.responses]
            for string in self.special.control_strings:
                if any(string in text for text in (row.prompt, *ended)):
                    self.counts["control strings"].add(string, row_id, weight)
        self._add_judgment(row)

    def _add_judgment(self, row: CheckedRow) -> None:
        """Count labels, and how often the preferred one of two responses is the longer one."""
        match row.record:
            case LabeledResponse():
                labels = [row.record.desirable]
            case Steps():
                labels = row.record.labels
            case _:
                labels = []
        self.sums.update({"labels": self.weight * len(labels), "yes": self.weight * sum(labels)})
        for better, worse in preferred_pairs(row.record) if len(row.responses) == 2 else ():
            gap = len(better) - len(worse)
            longer: Any = self.weight * (0.5 if gap == 0 else float(gap > 0))
            self.sums.update({"pairs": self.weight, "longer": longer, "difference": self.weight * gap})

    def findings(self, counts: Tally, *, max_cut_share: float, max_length: int) -> list[Finding]:
        """All findings, errors first.

        Args:
            counts: of the preparation: rows dropped and cut.
            max_cut_share: of the rows; from there on a run refuses them.
            max_length: tokens that a row may have.
        """
        found = [
            *_lost(counts),
            *_cut(counts, self.kind, max_cut_share, max_length),
            *self._rows_with_faults(counts),
            *self._similar_rows(),
            *self._judgments(),
        ]
        if ids := counts.trained_on:
            text = f"{len(ids)} held-out rows have a prompt or text that is trained on too"
            found.append(Finding("warning", f"{text} ({', '.join(ids[:SHOWN_IDS])})", "overlap"))
        levels: Sequence[str] = ("error", "warning", "note")
        return sorted(found, key=lambda finding: levels.index(finding.level))

    def _rows_with_faults(self, counts: Tally) -> Iterator[Finding]:
        for fault in (*FAULTS, *TOKEN_FAULTS):
            count = self.counts["faults"].get(fault.name, Count())
            number = count.number
            if fault.name == "no stop token":  # a response that was cut lacks its stop token for that
                number -= sum(cut for what, cut in counts.cut.items() if what.startswith("response"))
            untold = fault.untold and (self.rows < LEAST_ROWS or number <= fault.untold * self.rows)
            if number > 0 and not untold:
                level = fault.level if number > fault.share * self.rows else "note"
                about = "" if self.weight == 1 else "about "
                yield Finding(level, f"{about}{number} rows {fault.says} ({', '.join(count.first)})", fault.name)
        for string, count in self.counts["control strings"].items():
            text = f"{count.number} rows hold {string!r} in their text; it is read as text, not as a token"
            yield Finding("warning", text, "control strings")

    def _similar_rows(self) -> Iterator[Finding]:
        if copies := self.samples["copies"].copies():
            level = _level(copies, self.rows, EQUAL_SHARE)
            yield Finding(level, f"{copies} rows are exact copies of an earlier one", "copies")
        often = max(self.samples["responses"].seen.values(), default=0)
        if often >= LEAST_ROWS and often > SAME_RESPONSE_SHARE * self.rows:
            yield Finding("warning", f"about {often} rows have one and the same response", "same response")
        long = outliers(self.counts["lengths"], OUTLIER)
        if long.number and self.rows >= LEAST_OUTLIER_ROWS:
            says = f"have a text more than {OUTLIER} times as long as 99 of 100 others"
            yield Finding("warning", f"{long.number} rows {says} ({', '.join(long.first)})", "length outliers")

    def _judgments(self) -> Iterator[Finding]:
        seen, sums = self.samples["preferences"], self.sums
        both = seen.weight * sum(number > BACKWARD and number % BACKWARD > 0 for number in seen.seen.values())
        if both:
            says = "have the same two responses preferred both ways round"
            if self.kind == "labels":
                says = "have the same response labeled both desirable and undesirable"
            yield Finding("warning", f"{both} prompts {says}", "contradictions")
        if sums["pairs"]:
            longer, gap = sums["longer"] / sums["pairs"], sums["difference"] / sums["pairs"]
            level = "warning" if abs(longer - 0.5) > LENGTH_BIAS else "note"
            text = f"chosen is {gap:+.1f} characters longer on average; 'the longer one wins' is right in {longer:.1%}"
            yield Finding(level, text, "length bias")
        if sums["labels"] >= LEAST_ROWS:
            share = sums["yes"] / sums["labels"]
            what = "steps are right" if self.kind == "steps" else "responses are desirable"
            level = "warning" if min(share, 1 - share) < LABEL_SHARE else "note"
            yield Finding(level, f"{share:.1%} of the {what}", "label balance")


def _lost(counts: Tally) -> Iterator[Finding]:
    for reason, number in counts.dropped.items():
        level = _level(number, counts.rows, EQUAL_SHARE) if reason in SKIPPED + LOST else "error"
        verb = " dropped" if reason in LOST else ""
        yield Finding(level, f"{number} rows{verb}: {reason} ({', '.join(counts.first[reason])})", reason)


def _cut(counts: Tally, kind: Kind, max_cut_share: float, max_length: int) -> Iterator[Finding]:
    for what, number in counts.cut.items():
        level = "note" if kind == "text" else _level(number, counts.rows, CUT_SHARE)
        if what in (PROMPT_CUT, RESPONSE_CUT, STEPS_CUT) and number > max_cut_share * counts.kept:
            level = "error"  # a run refuses so many
        yield Finding(level, f"{number} of {counts.rows} rows at max_length {max_length}: {what}", what)


def _level(number: int, rows: int, share: float) -> Level:
    return "warning" if number > share * rows else "note"

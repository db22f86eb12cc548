"""The checks of the data doctor, row by row and in bounded memory: faults of rows and of the tokens made of them.

`Checks` is filled chunk by chunk, also in several processes, and joined. Bad rows and truncation are counted elsewhere,
in the tally of the preparation; `findings` puts them together.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Any, Literal, NamedTuple
from zlib import crc32

from alignment.data.batches import Example, TokenizedRow
from alignment.data.rows.rankings import NO_RANKED_REPLIES, NO_STEPS
from alignment.data.rows.read import prompt_key, record_key, text_hash
from alignment.data.rows.records import (
    ALL_TIED,
    EQUAL_PAIR,
    EQUAL_RESPONSES,
    SHOWN_IDS,
    Comparison,
    Kind,
    LabeledResponse,
    Messages,
    Ranking,
    Record,
    Steps,
    Tally,
    Text,
    ordered_pairs,
    replies_of,
)
from alignment.data.text.special_tokens import stop_strings, stop_token_ids, without_end
from alignment.data.tokenize import EMPTY, EQUAL, FEW_RESPONSES, NO_STEP, PROMPT_CUT, RESPONSE_CUT, STEPS_CUT
from alignment.data.tokenizers.tokenizer import Tokenizer, control_strings

CUT_SHARE = 0.01  # above these shares a finding is a warning
EQUAL_SHARE = 0.01
SAME_RESPONSE_SHARE = 0.05
LENGTH_BIAS = 0.1  # |share of pairs whose chosen side is longer - 1/2|
LABEL_SHARE = 0.05  # of the rarer label
LEAST_ROWS = 20  # for findings about most rows
SKIPPED = (  # reasons to leave out a row that is no bad one
    EQUAL_PAIR,
    EQUAL_RESPONSES,
    ALL_TIED,
    NO_RANKED_REPLIES,
    NO_STEPS,
)
LITERAL = "literal "  # before a control string that rows hold as text
LOST = (EMPTY, EQUAL, FEW_RESPONSES, NO_STEP)  # reasons to drop a row for its tokens


Level = Literal["error", "warning", "note"]

LEAST_LINES = 4  # of the same line, for a text that repeats itself
LEAST_WORDS = 8  # of the same word in a row
LEAST_PROMPT = 20  # characters of a prompt that a response may not begin with

SAME_WORDS = re.compile(rf"\b(\w{{2,}})(?:\W{{1,3}}\1\b){{{LEAST_WORDS - 1}}}")
MARKERS = re.compile(r"<\|(?:im_start|begin_of_text|start_header_id|user|assistant|system)\|>|\[INST\]|<start_of_turn>")
ROLE_HEADER = re.compile(r"(?:^|\n\n)(?:(?:### ?)?(?:Human|User)|### ?(?:Assistant|Instruction|Input|Response)) ?: ?")
MARKUP = re.compile(
    r"</?(?:div|p|br|span|a|body|table|tr|td|li|ul|b|i|font)(?: [^<>]{0,200})?/?>|&(?:amp|lt|gt|nbsp|quot|#39);"
)
# UTF-8 read as Latin-1 or CP1252.
MOJIBAKE = re.compile("[\u00c3\u00c2][\u0080-\u00bf]|\u00e2\u20ac|\u00e2\u0080[\u0090-\u00bf]")
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
REFUSAL = re.compile(
    r"^\W*(?:(?:I['’]m |I am |My )?(?:very |so )?(?:sorry|apolog)|I (?:cannot|can['’]t|can not) "
    r"(?:help|assist|provide|comply|fulfill)"
    r"|As an AI\b)",
    re.IGNORECASE,
)


class CheckedRow(NamedTuple):
    """A record with its texts."""

    record: Any
    prompt: str  # text of the prompt, or the document
    responses: list[str]  # the text of each
    plain_prompt: str  # the prompt where it is plain text and has responses, else ''
    messages: Messages  # the prompt where it is messages, else none


def checked_row(record: Record) -> CheckedRow:
    """A record with its texts."""
    prompt = record.text if isinstance(record, Text) else record.prompt
    responses = [record.separator.join(record.steps)] if isinstance(record, Steps) else list(replies_of(record))
    if isinstance(prompt, str):
        return CheckedRow(record, prompt, responses, prompt if responses else "", [])
    return CheckedRow(record, "\n".join(message["content"] for message in prompt), responses, "", prompt)


def preferred_pairs(record: Record) -> list[tuple[str, str]]:
    """Better and worse text of each pair that a row orders; of a label, the response and nothing."""
    match record:
        case Comparison():
            return [(record.chosen, record.rejected)]
        case Ranking():
            return [(pair.chosen, pair.rejected) for pair in ordered_pairs(record)]
        case LabeledResponse():
            return [(record.response, "") if record.desirable else ("", record.response)]
        case _:
            return []


class SpecialTokens(NamedTuple):
    """Special tokens of a tokenizer, as the checks of tokens need them."""

    bos: int | None
    unknown: int | None
    stops: frozenset[int]
    stop_strings: tuple[str, ...]
    control_strings: tuple[str, ...]
    max_length: int  # of a document that was cut, in tokens

    @classmethod
    def of(cls, tokenizer: Tokenizer, max_length: int) -> "SpecialTokens":
        """The special tokens of a tokenizer; a token that ends responses is no fault wherever it stands."""
        stops = stop_token_ids(tokenizer)
        bos, unknown = (None if token in stops else token for token in (tokenizer.bos_token_id, tokenizer.unk_token_id))
        strings = tuple(stop_strings(tokenizer)), tuple(control_strings(tokenizer))
        return cls(bos, unknown, frozenset(stops), *strings, max_length)


class Fault(NamedTuple):
    """A fault of a row.

    Attributes:
        name: of the fault.
        says: the rest of a sentence that begins with a number of rows.
        found: row -> true where it has the fault; of `TOKEN_FAULTS` example and special tokens -> true.
        share: of the rows; above it the finding has its level, else it is a note.
        level: error or warning.
        untold: share of the rows up to which nothing is said.
    """

    name: str
    says: str
    found: Callable[..., object]
    share: float = 0.01
    level: Level = "warning"
    untold: float = 0.0


def _in_text(search: Callable[[str], object]) -> Callable[[CheckedRow], bool]:
    return lambda row: any(map(search, (row.prompt, *row.responses)))


def _in_response(search: Callable[[str], object]) -> Callable[[CheckedRow], bool]:
    return lambda row: any(map(search, row.responses))


def _repeats_itself(text: str) -> bool:
    """True where most lines of a text are one and the same, or a word stands many times in a row."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if len(lines) >= LEAST_LINES:
        line, count = Counter(lines).most_common(1)[0]
        if count >= LEAST_LINES and 2 * count > len(lines) and any(map(str.isalnum, line)):
            return True
    return SAME_WORDS.search(text) is not None


def _begins_with_prompt(row: CheckedRow) -> bool:
    prompt = row.plain_prompt.strip()
    return len(prompt) >= LEAST_PROMPT and row.responses[0].lstrip().startswith(prompt)


def _is_glued(row: CheckedRow) -> bool:
    """True where nothing stands between prompt and response."""
    last = row.plain_prompt[-1:]
    return bool(last) and (last.isalnum() or last in ".?!") and row.responses[0][0].isalnum()


def _contradicts_scores(row: CheckedRow) -> bool:
    """True where a response with a lower score has a better rank than one with a higher."""
    if not isinstance(row.record, Ranking) or row.record.scores is None:
        return False
    ranked = zip(row.record.ranks, row.record.scores, strict=True)
    return any(one[1] < other[1] for one, other in pairwise(sorted(ranked, key=lambda pair: (pair[0], -pair[1]))))


def _is_unstopped(example: Example, special: SpecialTokens) -> bool:
    """True where the last token that counts is one at which generation does not stop.

    A response that was cut lacks its stop token for that, and fills its document. Earlier replies of a dialogue may
    end in another token than the last one, as gpt-oss ends them.
    """
    for ids, mask in zip(example.documents, example.masks, strict=True):
        last = bytes(mask).rfind(1)
        if last >= 0 and ids[last] not in special.stops and last != special.max_length - 1:
            return True
    return False


def _has_two_bos(example: Example, special: SpecialTokens) -> bool:
    """True where two BOS stand next to each other; a template may write one before each turn."""
    return special.bos is not None and any((special.bos, special.bos) in pairwise(ids) for ids in example.documents)


SEPARATION = "no separation"
FAULTS = (
    Fault(
        "replacement characters",
        "hold U+FFFD, the mark of bytes that were decoded wrongly",
        _in_text(lambda text: "\ufffd" in text),
    ),
    Fault("mojibake", "hold UTF-8 that was decoded as another encoding (Ã©, â€™)", _in_text(MOJIBAKE.search)),
    Fault("control characters", "hold control characters that no reader sees", _in_text(CONTROL.search)),
    Fault(
        "markup",
        "hold tags or entities of HTML",
        _in_text(lambda text: ("<" in text or "&" in text) and MARKUP.search(text)),
        0.1,
    ),
    Fault(
        "rendered markers",
        "hold the control strings of a chat template, so they may have been rendered already",
        _in_text(lambda text: ("<" in text or "[INST]" in text) and MARKERS.search(text)),
    ),
    Fault(
        "role headers",
        "have a response with the header of another turn in it ('Human:', '### Instruction:')",
        _in_response(lambda text: ":" in text and ROLE_HEADER.search(text)),
    ),
    Fault("repetition", "have a response that repeats the same line or word", _in_response(_repeats_itself)),
    Fault("refusals", "have a response that begins as a refusal", _in_response(REFUSAL.search), 0.5),
    Fault("prompt in response", "have a response that begins with the prompt", _begins_with_prompt),
    Fault(
        "system message",
        "have a system message after the first message",
        lambda row: any(message["role"] == "system" for message in row.messages[1:]),
        0.0,
    ),
    Fault(
        "turns",
        "have two messages of the user in a row",
        lambda row: any(one["role"] == other["role"] == "user" for one, other in pairwise(row.messages)),
    ),
    Fault(
        SEPARATION,
        "have nothing between prompt and response, so the two are read as one text",
        _is_glued,
        1.0,
        untold=0.5,
    ),
    Fault(
        "margin",
        "have a margin below 0: the rejected response is said to lead",
        lambda row: (getattr(row.record, "margin", None) or 0.0) < 0,
        0.0,
    ),
    Fault("scores", "have scores that contradict which response is preferred", _contradicts_scores, 0.0),
    Fault(
        "tied ranking",
        "tie all responses",
        lambda row: isinstance(row.record, Ranking) and len(set(row.record.ranks)) == 1,
        0.05,
    ),
)
TOKEN_FAULTS = (
    Fault(
        "bos",
        "have two BOS next to each other",
        _has_two_bos,
        0.0,
        "error",
    ),
    Fault(
        "unknown tokens",
        "have unknown tokens",
        lambda row, special: special.unknown is not None and any(special.unknown in ids for ids in row.documents),
        0.0,
    ),
    Fault("no stop token", "train no stop token", _is_unstopped, 0.0, "error"),
)


@dataclass(frozen=True)
class Finding:
    """One observation: an error would spoil training, a warning may."""

    level: str  # error, warning or note
    text: str  # how many rows, what they have, and the first few of them
    name: str = ""  # of the fault


class Checks:
    """Unusual rows of one source, and unusual tokens of theirs.

    One object per chunk or process, `add` for each batch of rows, `merge` the objects, `findings` of the whole. Objects
    can be pickled. Texts cost most of the time (about 0.2 ms for a kilobyte): `weight` makes large data cheap in time
    and memory, and the numbers estimates.

    Args:
        tokenizer: that makes the tokens; None: rows are checked as text alone.
        max_length: of a document in tokens; longer ones were cut to it.
        weight: texts and tokens of one row in this many are looked at, chosen by the hash of its id; copies and
            contradictions are looked for among the contents of which one hash in this many is a multiple of it.
        joined: False where a model reads prompt and response apart.
    """

    def __init__(
        self,
        kind: Kind,
        tokenizer: Tokenizer | None = None,
        max_length: int = 0,
        *,
        weight: int = 1,
        joined: bool = True,
    ):
        self.kind: Kind = kind
        self.weight = weight
        self.joined = joined
        self.special = None if tokenizer is None else SpecialTokens.of(tokenizer, max_length)
        self.rows = 0
        self.faults: dict[str, tuple[int, list[str]]] = {}  # number of rows, the first of them; `LITERAL` strings too
        self.seen: dict[str, Counter[Any]] = {name: Counter() for name in ("rows", "preferences", "responses")}
        self.sums: Counter[str] = Counter()  # of pairs: number, longer, difference of lengths; of labels: number, yes

    def add(self, records: Sequence[Record], examples: Sequence[TokenizedRow] = ()) -> None:
        """Check some rows, and the examples that were made of them."""
        self.rows += len(records)
        for record in records:
            key = text_hash("\0".join(record_key(record)))
            self.seen["rows"].update([key] if key % self.weight == 0 else ())
            for better, worse in preferred_pairs(record):
                key = text_hash("\0".join([prompt_key(record), *sorted((better, worse))]))
                self.seen["preferences"].update([(key, better < worse)] if key % self.weight == 0 else ())
            if self._draws(record.row_id):
                self._add_texts(checked_row(record))
        if self.special is not None:
            for row_id, pieces in groupby(examples, attrgetter("row_id")):  # pieces and turns apart are one row
                if self._draws(row_id):
                    self._add_tokens(row_id, list(pieces))

    def merge(self, other: "Checks") -> None:
        """Add the findings of other rows of the same source."""
        self.rows += other.rows
        for name, (count, first) in other.faults.items():
            self._add_rows(name, count, first)
        for name, seen in other.seen.items():
            self.seen[name].update(seen)
        self.sums.update(other.sums)

    def _add_rows(self, name: str, number: int, first: list[str]) -> None:
        before, names = self.faults.get(name, (0, []))
        self.faults[name] = before + number, (names + first)[:SHOWN_IDS]

    def _draws(self, row_id: str) -> bool:
        """True for the one row in `weight` whose texts and tokens are checked."""
        return self.weight == 1 or crc32(row_id.encode("utf-8", "surrogatepass")) % self.weight == 0

    def _add_tokens(self, row_id: str, examples: Sequence[TokenizedRow]) -> None:
        """Check the tokens of one row's examples."""
        for fault in TOKEN_FAULTS:
            checked = fault.name != "no stop token" or self.kind != "text"
            if checked and any(fault.found(example, self.special) for example in examples):
                self._add_rows(fault.name, self.weight, [row_id])

    def _add_texts(self, row: CheckedRow) -> None:
        """Check one row's texts: its prompt, and each response by itself."""
        weight = self.weight
        names = [row.record.row_id]
        for fault in FAULTS:
            if (self.joined or fault.name != SEPARATION) and fault.found(row):
                self._add_rows(fault.name, weight, names)
        self.seen["responses"].update({text_hash(response): weight for response in row.responses})
        if self.special is not None:
            ended = [without_end(text, self.special.stop_strings) for text in row.responses]
            for string in self.special.control_strings:
                if any(string in text for text in (row.prompt, *ended)):
                    self._add_rows(LITERAL + string, weight, names)
        label = getattr(row.record, "desirable", None)
        labels = getattr(row.record, "labels", ()) if label is None else (label,)
        self.sums.update({"labels": weight * len(labels), "yes": weight * sum(labels)})
        for better, worse in preferred_pairs(row.record) if len(row.responses) == 2 else ():
            gap = len(better) - len(worse)
            longer: Any = weight * (0.5 if gap == 0 else float(gap > 0))
            self.sums.update({"pairs": weight, "longer": longer, "difference": weight * gap})

    def findings(self, counts: Tally, *, max_cut_share: float, max_length: int) -> list[Finding]:
        """All findings, errors first; `counts` are of the rows dropped and cut, the limits from the data config."""
        findings = [
            *_lost(counts),
            *_cut(counts, self.kind, max_cut_share, max_length),
            *self._rows_with_faults(),
            *self._similar_rows(),
            *self._judgments(),
        ]
        if ids := counts.trained_on:
            text = f"{len(ids)} held-out rows have a prompt or text that is trained on too"
            findings.append(Finding("warning", f"{text} ({', '.join(ids[:SHOWN_IDS])})", "overlap"))
        levels: Sequence[str] = ("error", "warning", "note")
        return sorted(findings, key=lambda finding: levels.index(finding.level))

    def _rows_with_faults(self) -> Iterator[Finding]:
        for fault in (*FAULTS, *TOKEN_FAULTS):
            count, first = self.faults.get(fault.name, (0, []))
            untold = fault.untold and (self.rows < LEAST_ROWS or count <= fault.untold * self.rows)
            if count > 0 and not untold:
                level = fault.level if count > fault.share * self.rows else "note"
                about = "" if self.weight == 1 else "about "
                yield Finding(level, f"{about}{count} rows {fault.says} ({', '.join(first)})", fault.name)
        for name, (count, _) in self.faults.items():
            if name.startswith(LITERAL):
                text = (
                    f"{count} rows hold {name.removeprefix(LITERAL)!r} in their text; "
                    "it is read as text, not as a token"
                )
                yield Finding("warning", text, "control strings")

    def _similar_rows(self) -> Iterator[Finding]:
        rows = self.seen["rows"]
        if copies := self.weight * (rows.total() - len(rows)):
            level = _level(copies, self.rows, EQUAL_SHARE)
            yield Finding(level, f"{copies} rows are exact copies of an earlier one", "copies")
        often = max(self.seen["responses"].values(), default=0)
        if often >= LEAST_ROWS and often > SAME_RESPONSE_SHARE * self.rows:
            yield Finding("warning", f"about {often} rows have one and the same response", "same response")

    def _judgments(self) -> Iterator[Finding]:
        seen = self.seen["preferences"]
        sums = self.sums
        if both := self.weight * (len(seen) - len({key for key, _ in seen})):
            says = "have the same two responses preferred both ways round"
            if self.kind == "labels":
                says = "have the same response labeled both desirable and undesirable"
            yield Finding("warning", f"{both} prompts {says}", "contradictions")
        if sums["pairs"]:
            longer = sums["longer"] / sums["pairs"]
            gap = sums["difference"] / sums["pairs"]
            level = "warning" if abs(longer - 0.5) > LENGTH_BIAS else "note"
            text = f"chosen is {gap:+.1f} characters longer on average; 'the longer one wins' is right in {longer:.1%}"
            yield Finding(level, text, "length bias")
        if sums["labels"] >= LEAST_ROWS:
            share = sums["yes"] / sums["labels"]
            what = "steps are right" if self.kind == "steps" else "responses are desirable"
            level = "warning" if min(share, 1 - share) < LABEL_SHARE else "note"
            yield Finding(level, f"{share:.1%} of the {what}", "label balance")


def _lost(counts: Tally) -> Iterator[Finding]:
    for reason, count in counts.dropped.items():
        level = _level(count, counts.rows, EQUAL_SHARE) if reason in SKIPPED + LOST else "error"
        verb = " dropped" if reason in LOST else ""
        yield Finding(level, f"{count} rows{verb}: {reason} ({', '.join(counts.first[reason])})", reason)


def _cut(counts: Tally, kind: Kind, max_cut_share: float, max_length: int) -> Iterator[Finding]:
    for what, count in counts.cut.items():
        level = "note" if kind == "text" else _level(count, counts.rows, CUT_SHARE)
        if what in (PROMPT_CUT, RESPONSE_CUT, STEPS_CUT) and count > max_cut_share * counts.kept:
            level = "error"  # a run refuses so many
        yield Finding(level, f"{count} of {counts.rows} rows at max_length {max_length}: {what}", what)


def _level(number: int, rows: int, share: float) -> Level:
    return "warning" if number > share * rows else "note"

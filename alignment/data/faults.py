"""Faults of single rows that a reader of the file would notice: how each is called and found. Counted in checks.py.

Each is looked for in one row, or in the tokens made of it. What needs several rows (copies, contradictions, lengths) is in
checks.py.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from alignment.data.examples import Example
from alignment.data.rows.rankings import ordered_pairs
from alignment.data.rows.records import (
    Comparison,
    Demonstration,
    LabeledResponse,
    Messages,
    Ranking,
    Record,
    Steps,
    Text,
)
from alignment.data.text import chat
from alignment.data.tokenizers.tokenizer import Tokenizer, bos_id, control_strings

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
MOJIBAKE = re.compile(
    "[\u00c3\u00c2][\u0080-\u00bf]|\u00e2\u20ac|\u00e2\u0080[\u0090-\u00bf]"
)  # UTF-8 read as Latin-1 or CP1252
CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u202a-\u202e\u2066-\u2069]")
REFUSAL = re.compile(
    r"^\W*(?:(?:I['’]m |I am |My )?(?:very |so )?(?:sorry|apolog)|I (?:cannot|can['’]t|can not) (?:help|assist|provide|comply|fulfill)"
    r"|As an AI\b)",
    re.IGNORECASE,
)


class CheckedRow(NamedTuple):
    """A record with the text of its prompt (or document), and of each of its responses."""

    record: Any
    prompt: str
    responses: list[str]

    @classmethod
    def of(cls, record: Record) -> "CheckedRow":
        """The texts of a record."""
        match record:
            case Text():
                return cls(record, record.text, [])
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
        text = prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)
        return cls(record, text, responses)

    @property
    def plain_prompt(self) -> str:
        """The prompt where it is plain text and has responses, else ''."""
        prompt = getattr(self.record, "prompt", None)
        return prompt if isinstance(prompt, str) and self.responses else ""

    @property
    def messages(self) -> Messages:
        """The prompt where it is messages, else none."""
        prompt = getattr(self.record, "prompt", None)
        return prompt if isinstance(prompt, list) else []


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

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "SpecialTokens":
        """The special tokens of a tokenizer; a token that ends responses is no fault wherever it stands."""
        stops = chat.stop_token_ids(tokenizer)
        bos, unknown = (None if token in stops else token for token in (bos_id(tokenizer), tokenizer.unk_token_id))
        names = tuple(str(token) for token in tokenizer.convert_ids_to_tokens(sorted(stops)))
        return cls(bos, unknown, frozenset(stops), names, tuple(control_strings(tokenizer)))


@dataclass(frozen=True)
class Fault:
    """A fault of a row.

    Attributes:
        name: what the fault is called.
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
    return lambda row: any(search(text) for text in (row.prompt, *row.responses))


def _in_response(search: Callable[[str], object]) -> Callable[[CheckedRow], bool]:
    return lambda row: any(map(search, row.responses))


def _repeats_itself(text: str) -> bool:
    """True where most lines of a text are one and the same, or a word stands many times in a row."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if len(lines) >= LEAST_LINES:
        line, number = Counter(lines).most_common(1)[0]
        if number >= LEAST_LINES and 2 * number > len(lines) and any(map(str.isalnum, line)):
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
    """True where a span that counts ends with a token at which generation does not stop."""
    return any(
        ids[found.start()] not in special.stops
        for ids, mask in zip(example.documents, example.masks, strict=True)
        for found in re.finditer(b"\x01(?!\x01)", bytes(mask))
    )


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
        "no separation",
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
        "have more than one BOS",
        lambda row, special: special.bos is not None and any(ids.count(special.bos) > 1 for ids in row.documents),
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

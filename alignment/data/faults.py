"""Faults of single texts that a reader of the file would notice: what each is called, and how it is found.

Each is a search in one text. What needs several rows (copies, contradictions, lengths) is in checks.py.
"""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

LEAST_LINES = 4  # of the same line, for a text that repeats itself
LEAST_WORDS = 8  # of the same word in a row
LEAST_PROMPT = 20  # characters of a prompt that a response may not begin with


@dataclass(frozen=True)
class TextFault:
    """A fault of a text.

    Attributes:
        name: what the fault is called.
        says: the rest of a sentence that begins with a number of rows.
        found: whether a text has it.
        share: of the rows; above it the finding is a warning, else a note.
        responses: looked for in responses alone, not in prompts.
    """

    name: str
    says: str
    found: Callable[[str], object]
    share: float = 0.01
    responses: bool = False


def repeats_itself(text: str) -> bool:
    """Whether most lines of a text are one and the same, or a word stands many times in a row."""
    lines = [line for line in map(str.strip, text.split("\n")) if line]
    if len(lines) >= LEAST_LINES:
        line, number = Counter(lines).most_common(1)[0]
        if number >= LEAST_LINES and 2 * number > len(lines) and any(map(str.isalnum, line)):
            return True
    return SAME_WORDS.search(text) is not None


def has_markers(text: str) -> bool:
    """Whether a chat template's control strings stand in a text: it was rendered already."""
    return ("<" in text or "[INST]" in text) and MARKERS.search(text) is not None


def has_role_header(text: str) -> bool:
    """Whether a line of a text opens someone else's turn."""
    return ":" in text and ROLE_HEADER.search(text) is not None


def has_markup(text: str) -> bool:
    """Whether tags or entities of HTML stand in a text."""
    return ("<" in text or "&" in text) and MARKUP.search(text) is not None


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

TEXT_FAULTS = (
    TextFault(
        "replacement characters",
        "hold U+FFFD, the mark of bytes that were decoded wrongly",
        lambda text: "\ufffd" in text,
    ),
    TextFault("mojibake", "hold UTF-8 that was decoded as another encoding (Ã©, â€™)", MOJIBAKE.search),
    TextFault("control characters", "hold control characters that no reader sees", CONTROL.search),
    TextFault("markup", "hold tags or entities of HTML", has_markup, 0.1),
    TextFault(
        "rendered markers",
        "hold the control strings of a chat template, so they may have been rendered already",
        has_markers,
    ),
    TextFault(
        "role headers",
        "have a response with the header of another turn in it ('Human:', '### Instruction:')",
        has_role_header,
        responses=True,
    ),
    TextFault("repetition", "have a response that repeats the same line or word", repeats_itself, responses=True),
    TextFault("refusals", "have a response that begins as a refusal", REFUSAL.search, 0.5, responses=True),
)

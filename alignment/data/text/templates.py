"""Chat templates rendered so that only what the template itself wrote can become a control token.

A template is rendered by transformers' sandbox to text (in rendering.py, under limits and at a fixed date), and the text
is tokenized as a whole, so ordinary messages get exactly the ids of `apply_chat_template(tokenize=True)` (and a BOS
where the template lacks the tokenizer's). Control strings inside messages ("<|im_end|>" typed by a user) are replaced by
private-use characters before rendering; afterwards the text is split there and the strings are tokenized as plain text.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

from alignment.data.rows.records import Messages
from alignment.data.text.rendering import RenderError, render_template
from alignment.data.tokenizers.tokenizer import Tokenizer, control_strings, encode
from alignment.errors import UserError

MAX_TEMPLATE_CHARACTERS = 200_000
PROBE = "alignmentprobe"  # a word no template contains


@dataclass(frozen=True)
class EscapedControlTokens:
    """Control strings of some messages, each replaced by "<opening><number><closing>" for template and tokenizer."""

    opening: str
    closing: str
    strings: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches one escaped string; its number is the group."""
        return re.compile(f"{self.opening}([0-9]+){self.closing}")

    def escape(self, text: str) -> str:
        """The text with every control string escaped, longest first."""
        if not self.strings:
            return text
        numbers = {string: number for number, string in enumerate(self.strings)}
        strings = "|".join(map(re.escape, self.strings))
        return re.sub(strings, lambda match: f"{self.opening}{numbers[match[0]]}{self.closing}", text)


def escape(tokenizer: Tokenizer, messages: Messages) -> tuple[Messages, EscapedControlTokens]:
    """The messages with their control strings escaped, and what was escaped."""
    present = "".join(message["content"] for message in messages)
    unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in present)
    escaped = EscapedControlTokens(
        next(unused), next(unused), tuple(text for text in control_strings(tokenizer) if text in present)
    )
    return [{**message, "content": escaped.escape(message["content"])} for message in messages], escaped


def name_of(tokenizer: Tokenizer) -> str:
    """The template's name in messages."""
    return f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"


def render(tokenizer: Tokenizer, messages: Messages, *, open_turn: bool) -> str:
    """The template's text for the messages.

    Args:
        open_turn: end with the header of the assistant's turn (`add_generation_prompt`).

    Raises:
        UserError: there is no template, it is a collection of named ones, it is too long, or it refuses the messages.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not template:
        raise UserError(
            f"{tokenizer.name_or_path or 'this tokenizer'}: messages need a chat template and there is "
            f"{'more than one' if template else 'none'}; save one as chat_template.jinja beside tokenizer.json, "
            "or write the prompts as plain text"
        )
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise UserError(f"{name_of(tokenizer)} has {len(template)} characters; {MAX_TEMPLATE_CHARACTERS} are allowed")
    try:
        return render_template(
            template, messages, add_generation_prompt=open_turn, **cast("dict[str, Any]", tokenizer.special_tokens_map)
        )
    except RenderError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise UserError(f"{name_of(tokenizer)} refuses messages of roles {roles}: {error}") from error


def require_contents(tokenizer: Tokenizer, messages: Messages, text: str) -> None:
    """Refuse a template that leaves out or rewrites what others than the assistant said (trimming blanks is fine)."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and message["content"].strip() not in text:
            raise UserError(f"{name_of(tokenizer)} leaves out or rewrites message {index} (role {message['role']})")


def encode_rendered(tokenizer: Tokenizer, text: str, escaped: EscapedControlTokens, *, follows: bool) -> list[int]:
    """Ids of rendered text: the template's control tokens as such, escaped strings as plain text."""
    ids: list[int] = []
    for number, piece in enumerate(escaped.pattern.split(text)):  # text, number, text, number, ..., text
        typed = number % 2 == 1
        if not typed and (escaped.opening in piece or escaped.closing in piece):
            raise UserError(f"{name_of(tokenizer)} cuts message texts apart, which could let control tokens through")
        if piece:
            string = escaped.strings[int(piece)] if typed else piece
            [more] = encode(tokenizer, [string], control_tokens=not typed, follows=follows or number > 0)
            ids += more
    return ids


def unescape(text: str, escaped: EscapedControlTokens) -> str:
    """The text with the escaped strings restored."""
    return escaped.pattern.sub(lambda match: escaped.strings[int(match[1])], text)


def end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The control token that the template writes right after the assistant's words, or None where it writes none."""
    text = render(
        tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}], open_turn=False
    )
    after = text.partition(PROBE)[2].lstrip()
    return next((string for string in control_strings(tokenizer) if after.startswith(string)), None)

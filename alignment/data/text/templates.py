"""Chat templates rendered so that only what the template itself wrote can become a control token.

A template is rendered by transformers' sandbox to text (in rendering.py, under limits and at a fixed date), and the text
is tokenized as a whole, so ordinary messages get exactly the ids of `apply_chat_template(tokenize=True)` (and a BOS,
should the template lack the tokenizer's). Control strings inside messages ("<|im_end|>" typed by a user) are swapped for
private-use characters before rendering; afterwards the text is cut there and the strings are tokenized as plain text.
"""

import re
from dataclasses import dataclass
from typing import Any, cast

from alignment.data.rows.records import Messages
from alignment.data.text.encoding import control_strings, encode
from alignment.data.text.rendering import RenderError, render_template
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError

MAX_TEMPLATE_CHARACTERS = 200_000
PROBE = "alignmentprobe"  # a word no template contains


@dataclass(frozen=True)
class EscapedControlTokens:
    """How control strings in messages are hidden from template and tokenizer: "<open><number><close>"."""

    opening: str
    closing: str
    strings: tuple[str, ...]

    @property
    def mark(self) -> re.Pattern[str]:
        """Matches one hidden string; its number is the group."""
        return re.compile(f"{self.opening}([0-9]+){self.closing}")

    def hide(self, text: str) -> str:
        """The text with every control string hidden, longest first."""
        if not self.strings:
            return text
        numbers = {string: number for number, string in enumerate(self.strings)}
        pattern = "|".join(map(re.escape, self.strings))
        return re.sub(pattern, lambda match: f"{self.opening}{numbers[match[0]]}{self.closing}", text)


def disguise(tokenizer: Tokenizer, messages: Messages) -> tuple[Messages, EscapedControlTokens]:
    """The messages with their control strings hidden, and how to find them again."""
    present = "".join(message["content"] for message in messages)
    unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in present)
    how = EscapedControlTokens(
        next(unused), next(unused), tuple(text for text in control_strings(tokenizer) if text in present)
    )
    return [{**message, "content": how.hide(message["content"])} for message in messages], how


def name_of(tokenizer: Tokenizer) -> str:
    """What to call the template in a message."""
    return f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"


def render(tokenizer: Tokenizer, messages: Messages, *, open_turn: bool) -> str:
    """The template's text for the messages.

    Args:
        open_turn: end with the header of the assistant's turn (`add_generation_prompt`).

    Raises:
        UserError: there is no template, it is a book of named ones, it is too long, or it refuses the messages.
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


def encode_rendered(tokenizer: Tokenizer, text: str, how: EscapedControlTokens, *, follows: bool) -> list[int]:
    """Ids of rendered text: the template's control tokens as such, hidden strings as plain text."""
    ids: list[int] = []
    for number, piece in enumerate(how.mark.split(text)):  # text, number, text, number, ..., text
        hidden = number % 2 == 1
        if not hidden and (how.opening in piece or how.closing in piece):
            raise UserError(f"{name_of(tokenizer)} cuts message texts apart, which could let control tokens through")
        if piece:
            string = how.strings[int(piece)] if hidden else piece
            [more] = encode(tokenizer, [string], control_tokens=not hidden, follows=follows or number > 0)
            ids += more
    return ids


def plain(text: str, how: EscapedControlTokens) -> str:
    """The text with hidden strings back in place."""
    return how.mark.sub(lambda match: how.strings[int(match[1])], text)


def end_of_turn(tokenizer: Tokenizer) -> str | None:
    """The control token that the template writes right after the assistant's words, or None where it writes none."""
    text = render(
        tokenizer, [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": PROBE}], open_turn=False
    )
    after = text.partition(PROBE)[2].lstrip()
    return next((string for string in control_strings(tokenizer) if after.startswith(string)), None)

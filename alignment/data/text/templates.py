"""Chat templates rendered so that only what the template itself wrote can become a control token.

A template is rendered by transformers' sandbox to text (in rendering.py, under limits and at a fixed date), and the text
is tokenized as a whole, so ordinary messages get exactly the ids of `apply_chat_template(tokenize=True)` (and a BOS
where the template lacks the tokenizer's). Control strings inside messages ("<|im_end|>" typed by a user, in a tool's
answer, in reasoning, in the arguments of a call) are replaced by private-use characters before rendering; afterwards the
text is split there and the strings are tokenized as plain text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar, cast

from alignment.data.rows.records import Message, Messages, Tools
from alignment.data.text.rendering import RenderError, RenderTask, TemplateEnded, render_tasks
from alignment.data.text.training_templates import training_template
from alignment.data.tokenizers.tokenizer import Tokenizer, control_strings, encode
from alignment.errors import UserError

MAX_TEMPLATE_CHARACTERS = 200_000
PROBE = "alignmentprobe"  # a word no template contains
HELLO: Message = {"role": "user", "content": "Hello"}
REPLY: Message = {"role": "assistant", "content": PROBE}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": PROBE, "arguments": {"a": PROBE}}}],
}

Value = TypeVar("Value")
Rendered = list[str] | UserError


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

    def escape(self, value: Value) -> Value:
        """The text with every control string escaped, longest first; of lists and objects all texts, keys included."""
        if not self.strings:
            return value
        if isinstance(value, str):
            numbers = {string: number for number, string in enumerate(self.strings)}
            strings = "|".join(map(re.escape, self.strings))
            return cast(
                "Value", re.sub(strings, lambda match: f"{self.opening}{numbers[match[0]]}{self.closing}", value)
            )
        if isinstance(value, dict):
            return cast("Value", {self.escape(key): self.escape(inner) for key, inner in value.items()})
        return cast("Value", [self.escape(inner) for inner in value]) if isinstance(value, list) else value


def escape(
    controls: Sequence[str], messages: Messages, tools: Tools | None = None
) -> tuple[Messages, Tools | None, EscapedControlTokens]:
    """The messages and tools with the control strings in any of their texts escaped, and what was escaped."""
    present = "\n".join([*_texts(messages), *_texts(tools)])
    unused = (chr(code) for code in range(0xE000, 0xF8FF) if chr(code) not in present)
    found = tuple(text for text in controls if text in present)
    escaped = EscapedControlTokens(next(unused), next(unused), found)
    return (escaped.escape(messages), escaped.escape(tools), escaped) if found else (messages, tools, escaped)


def _texts(value: object) -> list[str]:
    """All texts in a value of lists and objects."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        return [text for pair in value.items() for inner in pair for text in _texts(inner)]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else []


@dataclass(frozen=True)
class ChatFormat:
    """What a template does, found by rendering a few short dialogues.

    Attributes:
        template: its text.
        as_parts: a message's content goes to it as a list of parts, since it cannot read a plain text.
        arguments_as_text: the arguments of a tool call go to it as JSON text, since it cannot read an object.
        end: the control token right after the assistant's words; None: it writes none.
        call_end: the same after a tool call; None where it writes none, or renders no tool calls.
        header: what it adds to open the assistant's turn.
        writes_around: whether it writes anything between that header, the assistant's words and `end`.
        training: template to render whole dialogues with: itself, or a published variant that keeps earlier turns.
        training_name: that variant's name; None: the template itself.
        controls: texts of the control tokens, longest first.
    """

    template: str
    as_parts: bool = False
    arguments_as_text: bool = False
    end: str | None = None
    call_end: str | None = None
    header: str = ""
    writes_around: bool = False
    training: str = ""
    training_name: str | None = None
    controls: tuple[str, ...] = ()

    def messages(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages in the form that the template reads."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        made: dict[str, Any] = dict(message)
        if self.as_parts:
            made["content"] = [{"type": "text", "text": message["content"]}]
        if reasoning := message.get("reasoning_content"):
            made |= {"reasoning": reasoning, "thinking": reasoning}  # templates differ in the name
        if self.arguments_as_text and "tool_calls" in message:
            made["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return made


def _with_text_arguments(call: Mapping[str, object]) -> dict[str, object]:
    function = dict(cast("Mapping[str, object]", call.get("function", call)))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": function} if "function" in call else function


def chat_format(tokenizer: Tokenizer) -> ChatFormat:
    """What the tokenizer's template does.

    Raises:
        UserError: there is no template, it is a collection of named ones, or it is too long.
    """
    template = tokenizer.chat_template
    if not isinstance(template, str) or not template:
        raise UserError(
            f"{tokenizer.name_or_path or 'this tokenizer'}: messages need a chat template and there is "
            f"{'more than one' if template else 'none'}; set chat_template to a name (chatml, llama3, ...) or a file, save "
            "one as chat_template.jinja beside tokenizer.json, or write the prompts as plain text"
        )
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise UserError(f"{name_of(tokenizer)} has {len(template)} characters; {MAX_TEMPLATE_CHARACTERS} are allowed")
    special = json.dumps(dict(tokenizer.special_tokens_map), default=str)
    try:
        return _probe(template, special, tuple(control_strings(tokenizer)))
    except TemplateEnded as error:
        raise UserError(f"{name_of(tokenizer)} refuses messages of roles user, assistant: {error}") from error


@lru_cache(maxsize=32)
def _probe(template: str, variables: str, controls: tuple[str, ...]) -> ChatFormat:
    chat = ChatFormat(template, controls=controls, training=template)
    render_probe = partial(_probe_texts, json.loads(variables))
    cuts = ((1, False), (1, True), (2, False))
    found = render_probe(chat, [HELLO, REPLY], cuts)
    if not found or PROBE not in found[2]:
        in_parts = render_probe(replace(chat, as_parts=True), [HELLO, REPLY], cuts)
        if in_parts and PROBE in in_parts[2]:
            chat, found = replace(chat, as_parts=True), in_parts
    if not found:
        return chat
    base, opened, closed = found
    chat = replace(chat, end=_end_after_probe(closed, controls), header=opened[shared_length(opened, base) :])
    chat = _with_training_template(chat, render_probe)
    if closed.startswith(opened):
        body = closed[len(opened) :].partition(chat.end)[0] if chat.end else closed[len(opened) :]
        chat = replace(chat, writes_around=chat.end is not None and body != PROBE)
    whole = replace(chat, template=chat.training)
    call = render_probe(whole, [HELLO, CALL], ((2, False),))
    if not call:
        call = render_probe(replace(whole, arguments_as_text=True), [HELLO, CALL], ((2, False),))
        chat = replace(chat, arguments_as_text=bool(call))
    written = call[0].rstrip() if call and PROBE in call[0] else ""
    return replace(chat, call_end=next((string for string in controls if written.endswith(string)), None))


def _probe_texts(
    special: Mapping[str, object], chat: ChatFormat, messages: Messages, cuts: tuple[tuple[int, bool], ...]
) -> list[str]:
    """The texts of a short dialogue; none where the template fails on it.

    Raises:
        TemplateEnded: the template was ended for what it used, which no other probe will change.
    """
    [answer] = render_tasks(chat.template, [RenderTask(chat.messages(messages), cuts)], special)
    if isinstance(answer, TemplateEnded):
        raise answer
    return [] if isinstance(answer, RenderError) else answer


def _with_training_template(chat: ChatFormat, render_probe: Callable[..., list[str]]) -> ChatFormat:
    """The format with the published training variant of its template, where that writes whole dialogues otherwise."""
    published = training_template(chat.template)
    if published is None:
        return chat
    name, text = published
    dialogue, cuts = [HELLO, REPLY] * 2, ((2, False), (3, True), (4, False))
    written = render_probe(replace(chat, template=text), dialogue, cuts)
    if not written or written == render_probe(chat, dialogue, cuts):
        return chat
    end = chat.end or _end_after_probe(written[0], chat.controls)
    return replace(chat, training=text, training_name=name, end=end)


def _end_after_probe(text: str, controls: Sequence[str]) -> str | None:
    """The control token right after the assistant's words."""
    after = text.partition(PROBE)[2].lstrip()
    return next((string for string in controls if after.startswith(string)), None)


def shared_length(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def name_of(tokenizer: Tokenizer) -> str:
    """The template's name in messages."""
    return f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"


@dataclass(frozen=True)
class Dialogue:
    """Messages and tools as a template gets them, their control strings escaped, and the texts wanted of them.

    Attributes:
        cuts: for each text, how many of the messages it holds, and whether the assistant's turn is opened after them.
    """

    messages: Messages
    tools: Tools | None
    escaped: EscapedControlTokens
    cuts: tuple[tuple[int, bool], ...]


def render_dialogues(tokenizer: Tokenizer, dialogues: Sequence[Dialogue], *, training: bool = False) -> list[Rendered]:
    """The texts of each dialogue, or what is wrong with it.

    Args:
        training: render by `ChatFormat.training`.

    Raises:
        UserError: there is no usable template.
    """
    chat = chat_format(tokenizer)
    tasks = [RenderTask(chat.messages(each.messages), each.cuts, each.tools or None) for each in dialogues]
    variables = cast("dict[str, object]", tokenizer.special_tokens_map)
    answers = render_tasks(chat.training if training else chat.template, tasks, variables)
    return [
        _refusal(tokenizer, each, answer) if isinstance(answer, RenderError) else answer
        for each, answer in zip(dialogues, answers, strict=True)
    ]


def _refusal(tokenizer: Tokenizer, dialogue: Dialogue, error: RenderError) -> UserError:
    roles = ", ".join(message["role"] for message in dialogue.messages)
    return UserError(f"{name_of(tokenizer)} refuses messages of roles {roles}: {error}")


def render(tokenizer: Tokenizer, messages: Messages, *, open_turn: bool, tools: Tools | None = None) -> str:
    """The template's text for the messages.

    Args:
        open_turn: end with the header of the assistant's turn (`add_generation_prompt`).
        tools: definitions of the tools that the dialogue may use.

    Raises:
        UserError: there is no template, it is a collection of named ones, it is too long, or it refuses the messages.
    """
    unescaped = EscapedControlTokens("", "", ())
    [answer] = render_dialogues(tokenizer, [Dialogue(messages, tools, unescaped, ((len(messages), open_turn),))])
    if isinstance(answer, UserError):
        raise answer
    return answer[0]


def is_written(words: str, text: str) -> bool:
    """Whether some words stand in a rendered text, as they are or inside a JSON string."""
    return words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text


def lost_contents(tokenizer: Tokenizer, messages: Messages, tools: Tools | None, text: str) -> UserError | None:
    """What a template leaves out or rewrites of what others than the assistant said, or of the tool definitions.

    Trimmed blanks are fine, and so is a tool's answer written as a JSON string.
    """
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and not is_written(message["content"].strip(), text):
            return UserError(f"{name_of(tokenizer)} leaves out or rewrites message {index} (role {message['role']})")
    for tool in tools or []:
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and not is_written(name, text):
            return UserError(
                f"{name_of(tokenizer)} leaves out the definition of tool {name!r}; take a chat_template that renders "
                "tools, or leave the column out of the rows"
            )
    return None


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text to encode by itself.

    Attributes:
        control: read "</s>" and the like as the control token.
        follows: it continues other text.
    """

    text: str
    control: bool
    follows: bool


def pieces_of(tokenizer: Tokenizer, text: str, escaped: EscapedControlTokens, *, follows: bool) -> list[Piece]:
    """The pieces of a rendered text: the template's control tokens as such, escaped strings as plain text.

    Raises:
        UserError: the template cut an escaped string apart.
    """
    pieces = []
    for number, part in enumerate(escaped.pattern.split(text)):  # text, number, text, number, ..., text
        typed = number % 2 == 1
        if not typed and (escaped.opening in part or escaped.closing in part):
            raise UserError(f"{name_of(tokenizer)} cuts message texts apart, which could let control tokens through")
        if part:
            string = escaped.strings[int(part)] if typed else part
            pieces.append(Piece(string, not typed, follows or number > 0))
    return pieces


def encode_pieces(tokenizer: Tokenizer, pieces: Sequence[Piece]) -> list[list[int]]:
    """Ids of each piece; the tokenizer is called once for all pieces of one sort."""
    sorts: dict[tuple[bool, bool], dict[str, list[int]]] = {}
    for piece in pieces:
        sorts.setdefault((piece.control, piece.follows), {})[piece.text] = []
    for (control, follows), ids in sorts.items():
        ids.update(zip(ids, encode(tokenizer, list(ids), control_tokens=control, follows=follows), strict=True))
    return [sorts[piece.control, piece.follows][piece.text] for piece in pieces]


def unescape(text: str, escaped: EscapedControlTokens) -> str:
    """The text with the escaped strings restored."""
    return escaped.pattern.sub(lambda match: escaped.strings[int(match[1])], text) if escaped.strings else text

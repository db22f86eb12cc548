"""Chat templates rendered so that only what the template itself wrote can become a control token.

A template is rendered by transformers' sandbox to text (in rendering.py, under limits and at a fixed date), and the
text is tokenized as a whole, so ordinary messages get exactly the ids of `apply_chat_template(tokenize=True)` (and a
BOS where the template lacks the tokenizer's). Control strings inside messages ("<|im_end|>" typed by a user, in a
tool's answer, in reasoning, in the arguments of a call) are replaced by private-use characters before rendering;
afterwards the text is split there and the strings are tokenized as plain text.

Templates by name, in the formats that the field uses, are our own writing."""

import copy
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from alignment.data.rows.records import Message, Messages, Tools
from alignment.data.text.rendering import Cut, RenderError, RenderTask, TemplateEnded, render_tasks
from alignment.data.tokenizers.tokenizer import ANCHOR, Tokenizer, control_strings, encode
from alignment.errors import UserError, suggest

MAX_TEMPLATE_CHARACTERS = 200_000
# The conditions by which Qwen3's template and its many kin leave out the reasoning of earlier turns, or an empty block
# of it
DROPS = re.compile(r"loop\.index0 > ns\.\w+|loop\.(?:last|index0 == ns\.\w+) or [^%]*reasoning_content\)?")
HEADER = re.compile(r"(?=\{%-?\s*if add_generation_prompt(?!.*if add_generation_prompt))", re.DOTALL)
# GLM's templates end a reply by the token of the next role, so the last one by none
END_BY_ROLE = (
    "{%- if messages[-1].role == 'assistant' -%}"
    "{{ '<|observation|>' if messages[-1].tool_calls else '<|user|>' }}{%- endif -%}"
)
OPENING = re.compile(r"""(?<=[\s>])[<{\[("`]""")  # of a tag, an object or a fence in a header: "assistant\n<think>"
OPEN_TAG = re.compile(r"<([\w:]+|\|START_THINKING\|)>\s*$")  # a block that a header leaves open: "<think>\n"
PROBE = "alignmentprobe"  # a word no template contains
HELLO: Message = {"role": "user", "content": "Hello"}
REPLY: Message = {"role": "assistant", "content": PROBE}
CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00001", "function": {"name": PROBE, "arguments": {"a": PROBE}}}],
}

TOOL = {
    "type": "function",
    "function": {"name": "tool", "description": "tool", "parameters": {"type": "object", "properties": {}}},
}

Value = TypeVar("Value")


@dataclass(frozen=True)
class ChatFormat:
    """A chat template and its conventions, found by rendering a few short dialogues."""

    template: str
    needs_tools: bool = False  # it renders no dialogue without tools
    as_parts: bool = False  # a message's content goes to it as a list of parts, since it cannot read a plain text
    arguments_as_text: bool = False  # the arguments of a tool call go to it as JSON text, since it reads no object
    end: str | None = None  # the control token right after the assistant's words and `tail`; None: it writes none
    tail: str = ""  # what ends the assistant's words before EOS, in Cohere's templates "<|END_RESPONSE|>"
    call_end: str | None = None  # the same after a tool call; None where it writes none, or renders no tool calls
    header: str = ""  # opens the assistant's turn
    after: str = ANCHOR  # what a reply follows at generation, as `ending` says it
    prefilled: str = ""  # end of the header at generation that the template leaves out of the replies it writes
    closing: str = ""  # "</think>", where generation leaves such a block open, which no reply that is written closes
    prefills: tuple[str, ...] = ()  # ends of the header that a reply's text may repeat, longest first
    writes_around: bool = False  # it writes something between the header, the assistant's words and `end`
    training: str = ""  # renders whole dialogues: the template, or a variant that keeps earlier turns
    controls: tuple[str, ...] = ()  # texts of the control tokens, longest first

    def as_read(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages in the form that the template reads."""
        made = []
        for message in messages:
            changed: dict[str, Any] = dict(message)
            if self.as_parts:
                changed["content"] = [{"type": "text", "text": message["content"]}]
            if reasoning := message.get("reasoning_content"):
                changed |= {"reasoning": reasoning, "thinking": reasoning}  # templates differ in the name
            if self.arguments_as_text and "tool_calls" in message:
                changed["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
            made.append(changed)
        return made


def _with_text_arguments(call: Mapping[str, object]) -> dict[str, object]:
    function = dict(cast("Mapping[str, object]", call.get("function", call)))
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments", {}), ensure_ascii=False)
    return {**call, "function": function} if "function" in call else function


def template_of(tokenizer: Tokenizer, tools: object = None) -> str | None:
    """The text of the tokenizer's template; of several by name `tool_use` where there are tools, else `default`."""
    templates = tokenizer.chat_template
    if not isinstance(templates, dict):
        return templates
    return templates.get("tool_use" if tools and "tool_use" in templates else "default")


def with_one_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    """A copy of the tokenizer with no other template than this text."""
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def chat_format(tokenizer: Tokenizer, tools: object = None) -> ChatFormat:
    """The tokenizer's template and its conventions; of several by name that for rows with tools, or without."""
    template = template_of(tokenizer, tools)
    if not template:
        raise UserError(
            f"{tokenizer.name_or_path or 'this tokenizer'}: messages need a chat template and there is none, or none "
            "named default; set chat_template to a name (chatml, llama3, ...) or a file, save one as "
            "chat_template.jinja beside tokenizer.json, or write the prompts as plain text"
        )
    if len(template) > MAX_TEMPLATE_CHARACTERS:
        raise UserError(f"{name_of(tokenizer)} has {len(template)} characters; {MAX_TEMPLATE_CHARACTERS} are allowed")
    special = json.dumps(dict(tokenizer.special_tokens_map), default=str)
    try:
        return _probe(template, special, tuple(control_strings(tokenizer)))
    except TemplateEnded as error:
        raise UserError(f"{name_of(tokenizer)} refuses messages of roles user, assistant: {error}") from error


@lru_cache(maxsize=32)
def _probe(template: str, special: str, controls: tuple[str, ...]) -> ChatFormat:
    variables = json.loads(special)
    plain = ChatFormat(template, training=template, controls=controls)
    for chat in (plain, replace(plain, as_parts=True), replace(plain, needs_tools=True)):
        base, opened, closed = _probe_texts(chat, [HELLO, REPLY], ((1, False), (1, True), (2, False)), variables)
        if PROBE in closed:
            break
    else:
        return plain
    whole, trained, longer = _training_variant(chat, variables)
    trained = trained or closed  # a template may take one turn only
    after = trained.partition(PROBE)[2].lstrip()
    end = next((string for string in controls if after.startswith(string)), None)
    eos = variables.get("eos_token") or PROBE
    tail = longer.partition(PROBE)[2].lstrip().partition(eos)[0]
    if tail in controls:
        end = eos
    else:
        tail = ""
    body = closed.removeprefix(opened).partition(end)[0] if end else PROBE
    rest = trained.rpartition(end or PROBE)[2]
    header = opened[shared_length(opened, base) :] or (rest if opened.endswith(rest) else "")
    before = closed.partition(PROBE)[0]
    prefilled = opened[tag_boundary(controls, opened, shared_length(opened, before)) :]
    opening = OPEN_TAG.search(header)
    closing = ""
    if opening and header[: opening.start()].strip() and (prefilled or before == opened):
        closing = "<|END_THINKING|>" if opening[1][0] == "|" else f"</{opening[1]}>"
    ends = [prefilled, *(header[mark.start() :] for mark in OPENING.finditer(header))]
    chat = replace(
        chat,
        training=whole.template,
        end=end,
        tail=tail,
        header=header,
        after=ending(controls, opened),
        prefilled=prefilled,
        closing=closing,
        prefills=tuple(sorted({text for text in ends if text.strip()}, key=len, reverse=True)),
        writes_around=(body != PROBE or closed.endswith(PROBE)) and closed.startswith(opened),
    )
    [called] = _probe_texts(whole, [HELLO, CALL], ((2, False),), variables)
    if not called:
        [called] = _probe_texts(replace(whole, arguments_as_text=True), [HELLO, CALL], ((2, False),), variables)
        chat = replace(chat, arguments_as_text=bool(called))
    written = called.removesuffix(rest).rstrip() if PROBE in called else ""
    return replace(chat, call_end=next((string for string in controls if written.endswith(string)), None))


def _probe_texts(
    chat: ChatFormat, messages: Messages, cuts: tuple[Cut, ...], special: Mapping[str, object]
) -> list[str]:
    """The texts of a short dialogue; empty ones where the template fails on it."""
    task = RenderTask(chat.as_read(messages), cuts, [TOOL] if chat.needs_tools else None)
    [answer] = render_tasks(chat.template, [task], special)
    if isinstance(answer, TemplateEnded):
        raise answer
    return [""] * len(cuts) if isinstance(answer, RenderError) else answer


def _training_variant(chat: ChatFormat, special: Mapping[str, object]) -> tuple[ChatFormat, str, str]:
    """The variant of a template under which a reply stays as it is, its end included, when the dialogue goes on.

    The template itself, where it does so, or where no variant does that writes the last reply in the same way; and the
    texts of a dialogue that ends with a reply, and of one that goes on.
    """
    cuts = ((2, False), (3, False))
    reply, longer = _probe_texts(chat, [HELLO, REPLY, HELLO], cuts, special)
    if longer.startswith(reply):
        endless = reply.rstrip().endswith(PROBE) and "<|observation|>" in chat.controls
        variant = HEADER.sub(END_BY_ROLE, chat.template) if endless else chat.template
    else:
        variant = DROPS.sub("true", chat.template)
    changed = replace(chat, template=variant)
    kept, on = _probe_texts(changed, [HELLO, REPLY, HELLO], cuts, special)
    if kept.startswith(reply) and on.startswith(kept):
        return changed, kept, on
    return chat, reply, longer


def shared_length(one: Sequence[object], other: Sequence[object]) -> int:
    """Number of characters that two texts, or of tokens that two lists, have in common at their beginning."""
    differs = (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differs, min(len(one), len(other)))


def tag_boundary(controls: Sequence[str], text: str, index: int) -> int:
    """The index, or the first character of the control token or the tag ("<think>") that it lies within."""
    for string in controls:
        first = text.find(string, max(0, index - len(string) + 1), index + len(string) - 1)
        if 0 <= first < index < first + len(string):
            return first
    tag = re.search(r"<[^<>\s]*$", text[:index])
    return tag.start() if tag else index


def name_of(tokenizer: Tokenizer) -> str:
    """The template's name in messages."""
    return f"the chat template of {tokenizer.name_or_path or 'this tokenizer'}"


@dataclass(frozen=True)
class EscapedControlTokens:
    """Control strings of some messages, each replaced by "<opening><number><closing>" for template and tokenizer."""

    opening: str = ""
    closing: str = ""
    strings: tuple[str, ...] = ()

    @property
    def pattern(self) -> re.Pattern[str]:
        """Matches one escaped string; its number is the group."""
        return re.compile(f"{self.opening}([0-9]+){self.closing}")

    def escape(self, value: Value) -> Value:
        """The text with every control string escaped, longest first; of lists and objects all texts, keys included."""
        if not self.strings:
            return value
        if isinstance(value, str):
            numbers = {string: f"{self.opening}{index}{self.closing}" for index, string in enumerate(self.strings)}
            return cast("Value", re.sub("|".join(map(re.escape, numbers)), lambda match: numbers[match[0]], value))
        if isinstance(value, dict):
            return cast("Value", {self.escape(key): self.escape(inner) for key, inner in value.items()})
        return cast("Value", [self.escape(inner) for inner in value]) if isinstance(value, list) else value

    def unescape(self, text: str) -> str:
        """The text with the escaped strings restored."""
        return self.pattern.sub(lambda match: self.strings[int(match[1])], text) if self.strings else text


@dataclass(frozen=True)
class Dialogue:
    """Messages and tools as a template gets them, their control strings escaped, and the texts wanted of them."""

    messages: Messages
    tools: Tools | None
    escaped: EscapedControlTokens
    cuts: tuple[Cut, ...] = ()


def escape(
    controls: Sequence[str], messages: Messages, tools: Tools | None = None, cuts: tuple[Cut, ...] = ()
) -> Dialogue:
    """A dialogue whose messages and tools have the control strings in any of their texts escaped."""
    texts = json.dumps([messages, tools], ensure_ascii=False, default=str)
    unused = (character for character in map(chr, range(0xE000, 0xF8FF)) if character not in texts)
    present = tuple(text for text in controls if json.dumps(text, ensure_ascii=False)[1:-1] in texts)
    escaped = EscapedControlTokens(next(unused), next(unused), present)
    return Dialogue(escaped.escape(messages), escaped.escape(tools), escaped, cuts)


def render_dialogues(
    tokenizer: Tokenizer, dialogues: Sequence[Dialogue], *, training: bool = False
) -> list[list[str] | UserError]:
    """The texts of each dialogue, or the reason why the template refuses it; `training`: by `ChatFormat.training`."""
    chat = chat_format(tokenizer)
    tasks = [
        RenderTask(chat.as_read(dialogue.messages), dialogue.cuts, dialogue.tools or None) for dialogue in dialogues
    ]
    variables = cast("dict[str, object]", tokenizer.special_tokens_map)
    answers = render_tasks(chat.training if training else chat.template, tasks, variables)
    roles = [", ".join(message["role"] for message in dialogue.messages) for dialogue in dialogues]
    return [
        UserError(f"{name_of(tokenizer)} refuses messages of roles {of_each}: {answer}")
        if isinstance(answer, RenderError)
        else answer
        for of_each, answer in zip(roles, answers, strict=True)
    ]


def is_written(words: str, text: str) -> bool:
    """True where a rendered text holds some words, as they are or inside a JSON string."""
    return words in text or json.dumps(words, ensure_ascii=False)[1:-1] in text


def require_contents(tokenizer: Tokenizer, dialogue: Dialogue, text: str) -> None:
    """Refuse a template that omits or rewrites what others than the assistant said, but for blanks, or the tools."""
    for index, message in enumerate(dialogue.messages):
        if message["role"] != "assistant" and not is_written(message["content"].strip(), text):
            raise UserError(f"{name_of(tokenizer)} leaves out or rewrites message {index} (role {message['role']})")
    for tool in dialogue.tools or []:
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and not is_written(name, text):
            raise UserError(
                f"{name_of(tokenizer)} leaves out the definition of tool {name!r}; take a chat_template that renders "
                "tools, or leave the column out of the rows"
            )


class Piece(NamedTuple):
    """Text to encode by itself; `control`: "</s>" and the like are control tokens; `after`: as in `encode`."""

    text: str
    control: bool = False
    after: str = ""


def ending(controls: Sequence[str], text: str) -> str:
    """The control token that a text ends with, and the blanks after it, or ANCHOR for ordinary text."""
    bare = text.rstrip()
    return next((string + text[len(bare) :] for string in controls if bare.endswith(string)), ANCHOR)


def pieces_of(tokenizer: Tokenizer, text: str, escaped: EscapedControlTokens, *, after: str) -> list[Piece]:
    """The pieces of a rendered text: the template's control tokens as such, escaped strings as plain text."""
    pieces = []
    controls = control_strings(tokenizer) if escaped.strings else []
    for index, part in enumerate(escaped.pattern.split(text)):  # text, number, text, number, ..., text
        typed = index % 2 == 1
        if not typed and (escaped.opening in part or escaped.closing in part):
            raise UserError(f"{name_of(tokenizer)} cuts message texts apart, which could let control tokens through")
        if part:
            pieces.append(Piece(escaped.strings[int(part)] if typed else part, not typed, after))
            after = ANCHOR if typed else ending(controls, part)
    return pieces


def encode_pieces(tokenizer: Tokenizer, pieces: Iterable[Piece]) -> dict[Piece, list[int]]:
    """Ids of each piece; the tokenizer is called once for all pieces of one sort."""
    sorts = dict[tuple[bool, str], list[Piece]]()
    ids = dict[Piece, list[int]]()
    for piece in dict.fromkeys(pieces):
        sorts.setdefault((piece.control, piece.after), []).append(piece)
    for (control, after), same in sorts.items():
        encoded = encode(tokenizer, [piece.text for piece in same], control_tokens=control, after=after)
        ids.update(zip(same, encoded, strict=True))
    return ids


FOLDER = Path(__file__).parent / "chat_templates"
# The tokens that a template needs in the vocabulary, beside the tokenizer's own BOS and EOS.
NAMED: dict[str, tuple[str, ...]] = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "qwen": ("<|im_start|>", "<|im_end|>"),
    "llama3": ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "gemma": ("<start_of_turn>", "<end_of_turn>"),
    "phi3": ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
    "llama2": (),
    "mistral": (),
    "zephyr": (),
    "alpaca": (),
    "vicuna": (),
    "plain": (),
}


def read_chat_template(chosen: str) -> str:
    """The text of a chat template: of a built-in name (`NAMED`), of a file, or the Jinja text itself."""
    if chosen in NAMED:
        return (FOLDER / f"{chosen}.jinja").read_text(encoding="utf-8")
    if "{{" in chosen or "{%" in chosen:
        return chosen
    path = Path(os.path.expanduser(chosen))
    if not path.is_file():
        raise UserError(
            f"chat_template {chosen}: no such file, and no built-in template of that name; {suggest(chosen, NAMED)}; "
            f"built in: {', '.join(NAMED)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"chat_template {chosen}: cannot be read as text: {error}") from error


def with_chat_template(tokenizer: Tokenizer, chosen: str | None) -> Tokenizer:
    """A copy of the tokenizer with another chat template, which is saved with it; None: the tokenizer as it is."""
    if chosen is None:
        return tokenizer
    template = read_chat_template(chosen)
    name = str(tokenizer.name_or_path or "the tokenizer")
    if missing := _missing_tokens(tokenizer, chosen):
        free = ", ".join(built_in for built_in, needed in NAMED.items() if not needed)
        raise UserError(
            f"chat_template {chosen}: {name} has no special token {', '.join(missing)}. `alignment export --model "
            f"{name} --chat-template {chosen} --output DIR` writes the model with these tokens added, to start from; "
            f"or take a template that needs none of its own: {free}"
        )
    changed = with_one_template(tokenizer, template)
    if chat_format(changed).end is None:
        raise UserError(
            f"chat_template {chosen if len(chosen) < 100 else chosen[:100] + '...'}: with {name} it ends the "
            "assistant's turn with no control token of the vocabulary, so nothing could learn to stop; write {{ "
            "eos_token }} or another special token there"
        )
    return changed


def with_template_tokens(tokenizer: Tokenizer, chosen: str) -> Tokenizer:
    """The tokenizer, itself changed, with another chat template and the special tokens that it needs."""
    tokenizer.add_tokens(_missing_tokens(tokenizer, chosen), special_tokens=True)
    return with_chat_template(tokenizer, chosen)


def _missing_tokens(tokenizer: Tokenizer, chosen: str) -> list[str]:
    """Special tokens that a built-in template needs and the tokenizer lacks."""
    return [token for token in NAMED.get(chosen, ()) if token not in control_strings(tokenizer)]

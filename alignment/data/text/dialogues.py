"""Whole dialogues to token ids, with a mask that is True on what the assistant wrote; many dialogues at once.

A dialogue is rendered once as a whole, and for each of the assistant's turns up to its header and up to its end. These
texts must begin the whole one: so the mask does not depend on markers in the template, and a template that rewrites
earlier turns is noticed.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alignment.data.rows.records import Message, Messages, Tools
from alignment.data.text.ends import stop_strings, token_id, with_one_bos, without_end
from alignment.data.text.templates import (
    ChatFormat,
    Dialogue,
    EscapedControlTokens,
    Piece,
    chat_format,
    encode_pieces,
    escape,
    is_written,
    lost_contents,
    name_of,
    pieces_of,
    render_dialogues,
    shared_length,
    unescape,
)
from alignment.data.tokenizers.tokenizer import Tokenizer
from alignment.errors import UserError

# What is noted about rows that are used.
VARIANT = "dialogue rendered by trl's training template {}, which keeps earlier turns; generation keeps the model's own"
OTHER_PROMPT = (
    "what stands before the last reply has other tokens than in generation; data.turns=each trains on generation's"
)
PREFILLED = "generation opens a reply with {!r}, which the template leaves out of the replies it writes"
UNENDED = "an earlier reply ends in {!r}, at which generation does not stop, so that token does not count"
UNRENDERED_REASONING = "the chat template writes no reasoning into a reply that counts, so it is not learned"

# What is wrong with a template.
REWRITES = (
    "rewrites earlier turns when the dialogue goes on (at message {}), so it cannot be trained on whole dialogues; set "
    "data.turns=each (each reply an example of its own, after what generation renders) or data.turns=last, or set "
    "chat_template to one that keeps the history"
)
UNLIKE = "does not render the reply of message {} as it stands, then its end token"

THOUGHTS = re.compile("</?think>")


@dataclass(frozen=True, slots=True)
class DialogueRow:
    """A dialogue to train on.

    Attributes:
        messages: oldest first.
        trained: for each assistant reply whether it counts; None: all do.
        tools: definitions of the tools that it may use.
    """

    messages: Messages
    trained: Sequence[bool] | None = None
    tools: Tools | None = None


@dataclass(frozen=True, slots=True)
class EncodedDialogue:
    """Ids and mask of a dialogue, of equal length, both ending with the last reply; and what is worth knowing of it."""

    ids: list[int]
    mask: list[bool]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Turn:
    """Where an assistant's turn lies in the rendered dialogue.

    Attributes:
        start: first character that the assistant writes.
        stop: the one after its last, end token not included.
        end: the control token that ends it; None: none that counts.
        resume: where the text goes on after it.
    """

    start: int
    stop: int
    end: str | None
    resume: int


def encode_dialogues(tokenizer: Tokenizer, rows: Sequence[DialogueRow]) -> list[EncodedDialogue | UserError]:
    """Each dialogue's ids and mask, or why it cannot be used: every counting reply is True with its end token.

    What the template writes between the assistant's header and the reply (Mistral's blank, an empty block of reasoning)
    counts with the reply: a prompt ends before it.

    Raises:
        UserError: there is no usable template, or it ends the assistant's turn with no control token.
    """
    if not rows:
        return []
    chat = chat_format(tokenizer)
    if chat.end is None:
        raise UserError(f"{name_of(tokenizer)} ends the assistant's turn with no control token to stop at")
    stops = stop_strings(tokenizer)
    dialogues = [_prepared(chat.controls, row, stops) for row in rows]
    written = render_dialogues(tokenizer, dialogues, training=True)
    planned: list[_Plan | UserError] = []
    for row, dialogue, texts in zip(rows, dialogues, written, strict=True):
        try:
            if isinstance(texts, UserError):
                raise texts
            planned.append(_plan(tokenizer, chat, row, dialogue, texts))
        except UserError as error:
            planned.append(error)
    pieces = [piece for plan in planned if not isinstance(plan, UserError) for piece in plan.pieces]
    ids = iter(encode_pieces(tokenizer, pieces))
    encoded: list[EncodedDialogue | UserError] = []
    for plan in planned:
        if isinstance(plan, UserError):
            encoded.append(plan)
            continue
        parts = [([next(ids) for _ in part], counts, end) for part, counts, end in plan.parts]
        prompt = [token for _ in plan.last_prompt for token in next(ids)]
        encoded.append(_joined(tokenizer, parts, prompt, plan.notes))
    return _with_prompt_notes(tokenizer, chat, dialogues, written, encoded)


@dataclass(frozen=True, slots=True)
class _Plan:
    """A rendered dialogue cut up.

    Attributes:
        parts: pieces to encode, whether they count, the end token after them.
        last_prompt: pieces of all that stands before the last of several replies, as generation encodes it in one go.
        notes: what is worth knowing of it.
    """

    parts: list[tuple[list[Piece], bool, str | None]]
    last_prompt: list[Piece]
    notes: tuple[str, ...]

    @property
    def pieces(self) -> list[Piece]:
        """All pieces, in the order of the attributes."""
        return [piece for part, *_ in self.parts for piece in part] + self.last_prompt


def _prepared(controls: Sequence[str], row: DialogueRow, stops: Sequence[str]) -> Dialogue:
    """The dialogue up to its last reply, its control strings escaped, and the texts to render of it."""
    messages = row.messages[: 1 + max((index for index, each in enumerate(row.messages) if _replies(each)), default=-1)]
    safe, tools, escaped = escape(controls, replies_without_end(messages, stops), row.tools)
    cuts = [(len(safe), False)]
    for index, message in enumerate(safe):
        if _replies(message):
            cuts += [(index, True)] if index else []
            cuts += [(index + 1, False)] if index + 1 < len(safe) else []
    return Dialogue(safe, tools, escaped, tuple(cuts))


def replies_without_end(messages: Messages, stops: Sequence[str]) -> Messages:
    """The messages, the assistant's without the end tokens written at their ends: the template writes its own."""
    return [{**each, "content": without_end(each["content"], stops)} if _replies(each) else each for each in messages]


def _replies(message: Message) -> bool:
    return message["role"] == "assistant"


def _plan(tokenizer: Tokenizer, chat: ChatFormat, row: DialogueRow, dialogue: Dialogue, texts: Sequence[str]) -> _Plan:
    """The pieces of the dialogue, and what is to be noted."""
    if not any(row.trained or [True]) or len(dialogue.messages) < 2:
        raise UserError("a dialogue needs an assistant message with something before it")
    by_cut = dict(zip(dialogue.cuts, texts, strict=True))
    whole, messages, notes = texts[0], dialogue.messages, []
    replies = [index for index, message in enumerate(messages) if _replies(message)]
    parts: list[tuple[list[Piece], bool, str | None]] = []
    position = start = 0
    for index, counts in zip(replies, [True] * len(replies) if row.trained is None else row.trained, strict=True):
        opened, closed = by_cut.get((index, True), ""), by_cut.get((index + 1, False), whole)
        turn = _find_turn(chat, messages[index], whole, opened=opened, closed=closed)
        if isinstance(turn, str):
            raise UserError(f"{name_of(tokenizer)} {turn.format(index)}")
        if turn.start < position:
            raise UserError(f"{name_of(tokenizer)} {REWRITES.format(index)}")
        if opened and turn.start < len(opened):
            notes.append(PREFILLED.format(opened[turn.start :]))
        if turn.end is None and counts:
            notes.append(UNENDED.format(_control_at(chat, whole, turn.stop)))
        if counts and lost_reasoning(messages[index], whole[turn.start : turn.stop]):
            notes.append(UNRENDERED_REASONING)
        start = turn.start
        before, reply = whole[position:start], whole[start : turn.stop]
        parts.append((pieces_of(tokenizer, before, dialogue.escaped, follows=bool(parts)), False, None))
        parts.append((reply_pieces(tokenizer, chat, reply, dialogue.escaped), counts, turn.end))
        position = turn.resume
    if lost := lost_contents(tokenizer, messages, dialogue.tools, whole):
        raise lost
    last_prompt = pieces_of(tokenizer, whole[:start], dialogue.escaped, follows=False) if len(replies) > 1 else []
    return _Plan(parts, last_prompt, tuple(dict.fromkeys(notes)))


def reply_pieces(tokenizer: Tokenizer, chat: ChatFormat, reply: str, escaped: EscapedControlTokens) -> list[Piece]:
    """The pieces of a rendered reply: one text, unless the template wrote control tokens into it."""
    if any(string in reply for string in chat.controls):
        return pieces_of(tokenizer, reply, escaped, follows=True)
    text = unescape(reply, escaped)
    return [Piece(text, control=False, follows=True)] if text else []


def _find_turn(chat: ChatFormat, message: Message, whole: str, *, opened: str, closed: str) -> _Turn | str:
    """Where the turn of an assistant's message lies, or what is wrong with the template.

    Args:
        whole: the rendered dialogue.
        opened: the messages before it with the assistant's header; "" for the first message.
        closed: the messages up to it.
    """
    start = header_start(chat, opened, whole)
    if start is None:
        return REWRITES
    stop, goes_on = len(closed), not whole.startswith(closed)
    if (
        goes_on
    ):  # gpt-oss ends a turn in another token once the dialogue goes on, and Phi-3 a dialogue in one of its own
        stop = _control_boundary(chat, whole, shared_length(whole, closed))
        if closed[stop:].strip() not in chat.controls:
            return REWRITES
    turn, end = split_end(chat, whole[start:stop], message)
    lead = start_of_reply(turn, message)
    if lead is None or (end is None and not goes_on):
        return UNLIKE
    after = start + len(turn)
    # without a question before it, the assistant's own header is what its first words follow
    return _Turn(start if opened else lead, after, end, after + len(end or ""))


def header_start(chat: ChatFormat, opened: str, whole: str) -> int | None:
    """Where a reply begins in a rendered dialogue: after its header, or where the text leaves the header.

    Args:
        opened: what generation renders up to the reply; its header may hold more ("<think>") than a written reply does.

    Returns:
        None: the texts differ before the header.
    """
    if whole.startswith(opened):
        return len(opened)
    start = _control_boundary(chat, whole, shared_length(whole, opened))
    return start if opened.endswith(chat.header) and start >= len(opened) - len(chat.header) else None


def split_end(chat: ChatFormat, turn: str, message: Message) -> tuple[str, str | None]:
    """The turn up to its end token, and that token."""
    ends = [chat.end, chat.call_end] if message.get("tool_calls") else [chat.end]
    found = [(turn.rfind(end), end) for end in ends if end is not None and end in turn]
    if not found:
        return turn, None
    index, end = max(found)
    return turn[:index], end


def start_of_reply(turn: str, message: Message) -> int | None:
    """Index of the reply in what the template wrote for it, its blanks trimmed or not; None: it is not there."""
    content = message["content"]
    calls = [call.get("function", call).get("name", "") for call in message.get("tool_calls", [])]
    if calls:
        start = turn.find(content.strip())
        return start if start >= 0 and all(is_written(str(name), turn) for name in calls) else None
    for text in (content, content.strip()):
        start = turn.rfind(text)
        if start >= 0 and not turn[start + len(text) :].strip():
            return start
    thoughts = [part.strip() for part in THOUGHTS.split(content)]
    if len(thoughts) > 1 and turn.rstrip().endswith(thoughts[-1]) and all(part in turn for part in thoughts):
        return turn.find(next(part for part in thoughts if part) if any(thoughts) else turn)
    return None


def lost_reasoning(message: Message, turn: str) -> bool:
    """Whether a template left a message's reasoning out of the turn that it wrote."""
    return (message.get("reasoning_content") or "").strip() not in turn


def _control_at(chat: ChatFormat, text: str, index: int) -> str | None:
    return next((string for string in chat.controls if text.startswith(string, index)), None)


def _control_boundary(chat: ChatFormat, text: str, index: int) -> int:
    """The index, or the first character of the control token that it lies within."""
    for string in chat.controls:
        first = text.find(string, max(0, index - len(string) + 1), index + len(string) - 1)
        if 0 <= first < index < first + len(string):
            return first
    return index


def _joined(
    tokenizer: Tokenizer,
    parts: Sequence[tuple[list[list[int]], bool, str | None]],
    last_prompt: list[int],
    notes: tuple[str, ...],
) -> EncodedDialogue | UserError:
    """The parts in one sequence; noted where what stands before the last reply has other tokens in generation."""
    ids: list[int] = []
    mask: list[bool] = []
    for pieces, counts, end in parts:
        more = [token for piece in pieces for token in piece]
        try:
            ids += more if ids or counts else with_one_bos(tokenizer, more)
        except UserError as error:
            return error
        ids += [] if end is None else [token_id(tokenizer, end)]
        mask += [counts] * (len(ids) - len(mask))
    if not any(mask) or all(mask):
        return UserError("a dialogue needs an assistant message with something before it")
    if last_prompt and ids[: len(prompt := with_one_bos(tokenizer, last_prompt))] != prompt:
        notes = (*notes, OTHER_PROMPT)
    return EncodedDialogue(ids, mask, notes)


def _with_prompt_notes(
    tokenizer: Tokenizer,
    chat: ChatFormat,
    dialogues: Sequence[Dialogue],
    written: Sequence[list[str] | UserError],
    encoded: Sequence[EncodedDialogue | UserError],
) -> list[EncodedDialogue | UserError]:
    """The dialogues, noted where a training variant rendered them, and where generation would render another prompt."""
    if chat.training_name is None:
        return list(encoded)
    last = [Dialogue(each.messages, each.tools, each.escaped, ((len(each.messages) - 1, True),)) for each in dialogues]
    noted: list[EncodedDialogue | UserError] = []
    for dialogue, texts, result, prompt in zip(
        dialogues, written, encoded, render_dialogues(tokenizer, last), strict=True
    ):
        if isinstance(result, UserError) or isinstance(texts, UserError):
            noted.append(result)
            continue
        notes = [*result.notes, VARIANT.format(chat.training_name)]
        trained = texts[dialogue.cuts.index((len(dialogue.messages) - 1, True))]
        if isinstance(prompt, UserError) or prompt[0] != trained:
            notes.append(OTHER_PROMPT)
        noted.append(EncodedDialogue(result.ids, result.mask, tuple(dict.fromkeys(notes))))
    return noted

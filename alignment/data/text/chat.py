"""Texts and dialogues to token ids, for every stage, sampling and evaluation alike. Truncation is in truncation.py.

The rules: a sequence has exactly one BOS where the tokenizer or its template has one, and a response exactly one end
token; prompt and response are tokenized apart and joined by ids, as sampling does; a control string typed inside a text
("</s>") stays text. Messages become text through the chat template (templates.py); plain text never enters a template.
Dialogues of several turns are in dialogues.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from alignment.data.rows.records import Message, Messages, Tools
from alignment.data.text.dialogues import (
    UNRENDERED_REASONING,
    DialogueRow,
    encode_dialogues,
    header_start,
    lost_reasoning,
    replies_without_end,
    reply_pieces,
    split_end,
    start_of_reply,
)
from alignment.data.text.ends import document_end_id as document_end_id
from alignment.data.text.ends import end_token_id as end_token_id
from alignment.data.text.ends import stop_strings, token_id, with_one_bos
from alignment.data.text.ends import stop_token_ids as stop_token_ids
from alignment.data.text.ends import without_end as without_end
from alignment.data.text.templates import (
    ChatFormat,
    Dialogue,
    Piece,
    chat_format,
    encode_pieces,
    escape,
    lost_contents,
    name_of,
    pieces_of,
    render_dialogues,
)
from alignment.data.tokenizers.tokenizer import Tokenizer, adds_bos, bos_id, control_strings, encode
from alignment.errors import UserError

Result = TypeVar("Result")


def prompt_ids(tokenizer: Tokenizer, prompt: str | Messages, tools: Tools | None = None) -> list[int]:
    """Ids of a prompt: one BOS where there is one, the text; for messages up to the assistant's header.

    Args:
        tools: definitions of the tools that the dialogue may use.

    Raises:
        UserError: messages without a template, or that the template refuses, or that end with the assistant.
    """
    return _sure(encode_each_prompt(tokenizer, [prompt], [tools])[0])


def prompts_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """`prompt_ids` of many plain texts at once."""
    bos = bos_id(tokenizer) if adds_bos(tokenizer) else None
    return [ids if bos is None else [bos, *ids] for ids in encode(tokenizer, prompts)]


def encode_each_prompt(
    tokenizer: Tokenizer, prompts: Sequence[str | Messages], tools: Sequence[Tools | None] | None = None
) -> list[list[int] | UserError]:
    """`prompt_ids` of many prompts at once, texts and messages; for a prompt that is refused, why."""
    plain = iter(prompts_ids(tokenizer, [prompt for prompt in prompts if isinstance(prompt, str)]))
    every = [None] * len(prompts) if tools is None else tools
    dialogues = [(prompt, tool) for prompt, tool in zip(prompts, every, strict=True) if not isinstance(prompt, str)]
    rendered = iter(_encode_open_dialogues(tokenizer, dialogues))
    return [next(plain) if isinstance(prompt, str) else next(rendered) for prompt in prompts]


def _encode_open_dialogues(
    tokenizer: Tokenizer, prompts: Sequence[tuple[Messages, Tools | None]]
) -> list[list[int] | UserError]:
    if not prompts:
        return []
    dialogues, controls, stops = [], control_strings(tokenizer), stop_strings(tokenizer)
    for messages, tools in prompts:
        safe, definitions, escaped = escape(controls, replies_without_end(messages, stops), tools)
        dialogues.append(Dialogue(safe, definitions, escaped, ((len(safe), True),)))
    try:
        rendered = render_dialogues(tokenizer, dialogues)
    except UserError as error:
        return [error for _ in prompts]
    planned: list[list[Piece] | UserError] = []
    for dialogue, texts in zip(dialogues, rendered, strict=True):
        try:
            planned.append(_prompt_pieces(tokenizer, dialogue, texts))
        except UserError as error:
            planned.append(error)
    flat = [piece for pieces in planned if not isinstance(pieces, UserError) for piece in pieces]
    ids = iter(encode_pieces(tokenizer, flat))
    encoded: list[list[int] | UserError] = []
    for pieces in planned:
        try:
            encoded.append(
                pieces
                if isinstance(pieces, UserError)
                else with_one_bos(tokenizer, [token for _ in pieces for token in next(ids)])
            )
        except UserError as error:
            encoded.append(error)
    return encoded


def _prompt_pieces(tokenizer: Tokenizer, dialogue: Dialogue, texts: list[str] | UserError) -> list[Piece]:
    if not dialogue.messages or dialogue.messages[-1]["role"] == "assistant":
        raise UserError("a prompt of messages must end with a message of someone else than the assistant")
    [text] = _sure(texts)
    if lost := lost_contents(tokenizer, dialogue.messages, dialogue.tools, text):
        raise lost
    return pieces_of(tokenizer, text, dialogue.escaped, follows=False)


def response_ids(
    tokenizer: Tokenizer, response: str | Message, prompt: str | Messages = "", *, ended: bool = True
) -> list[int]:
    """Ids of a response and exactly one end token, also where the text already ends in it; as `responses_ids`."""
    return responses_ids(tokenizer, [response], [prompt], ended=[ended])[0]


def responses_ids(
    tokenizer: Tokenizer,
    responses: Sequence[str | Message],
    prompts: Sequence[str | Messages] | None = None,
    *,
    ended: Sequence[bool] | None = None,
    tools: Sequence[Tools | None] | None = None,
) -> list[list[int]]:
    """`response_ids` of many texts at once.

    Args:
        responses: texts; or assistant messages, whose tool calls and reasoning the template writes.
        prompts: what each responds to. After messages, the blanks that the template writes around a reply (Mistral's,
            Llama 2's) are part of the response, since `prompt_ids` ends before them. None: plain texts.
        ended: False where a response was cut off: no end token follows its text. None: all of them ended.
        tools: definitions of the tools that each dialogue may use.

    Raises:
        UserError: the template refuses a dialogue, or an assistant message has tool calls that it does not render.
    """
    return [_sure(each).ids for each in encode_each_response(tokenizer, responses, prompts, ended=ended, tools=tools)]


@dataclass(frozen=True, slots=True)
class EncodedResponse:
    """Ids of a response, and what is worth knowing of it."""

    ids: list[int]
    notes: tuple[str, ...] = ()


def encode_each_response(
    tokenizer: Tokenizer,
    responses: Sequence[str | Message],
    prompts: Sequence[str | Messages] | None = None,
    *,
    ended: Sequence[bool] | None = None,
    tools: Sequence[Tools | None] | None = None,
) -> list[EncodedResponse | UserError]:
    """As `responses_ids`; for a response that cannot be used, why.

    Raises:
        UserError: there is no usable template, or no end token.
    """
    end, stops = end_token_id(tokenizer), stop_strings(tokenizer)
    whole = [True] * len(responses) if ended is None else ended
    asked = [""] * len(responses) if prompts is None else prompts
    every = [None] * len(responses) if tools is None else tools
    replies = [_as_message(reply, stops if done else ()) for reply, done in zip(responses, whole, strict=True)]
    turns: list[_Reply | UserError] = [_Reply(_plain(reply["content"]), end) for reply in replies]
    chat = chat_format(tokenizer) if any(isinstance(prompt, list) for prompt in asked) else None
    if chat is not None and chat.end is not None:
        chosen = {
            number: _Turn(prompt, replies[number], every[number], whole[number])
            for number, prompt in enumerate(asked)
            if isinstance(prompt, list) and (chat.writes_around or _is_rich(replies[number]))
        }
        for number, reply in zip(chosen, _last_turns(tokenizer, chat, list(chosen.values())), strict=True):
            turns[number] = reply
    pieces = [piece for turn in turns if not isinstance(turn, UserError) for piece in turn.pieces]
    ids = iter(encode_pieces(tokenizer, pieces))
    encoded: list[EncodedResponse | UserError] = []
    for turn, done in zip(turns, whole, strict=True):
        if isinstance(turn, UserError):
            encoded.append(turn)
            continue
        parts = [next(ids) for _ in turn.pieces]
        tokens = parts[0] if len(parts) == 1 else [token for part in parts for token in part]
        encoded.append(EncodedResponse([*tokens, turn.end] if done else tokens, turn.notes))
    return encoded


@dataclass(frozen=True, slots=True)
class _Turn:
    """A reply to messages, whole or cut off."""

    prompt: Messages
    reply: Message
    tools: Tools | None
    ended: bool


@dataclass(frozen=True, slots=True)
class _Reply:
    """A reply as pieces to encode, the id of its end token, and what is worth knowing of it."""

    pieces: list[Piece]
    end: int
    notes: tuple[str, ...] = ()


def _plain(text: str) -> list[Piece]:
    return [Piece(text, control=False, follows=True)]


def _as_message(reply: str | Message, stops: Sequence[str]) -> Message:
    """The reply as a message, without the end tokens written at its end."""
    message: Message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    return {**message, "content": without_end(message["content"], stops)}


def _is_rich(reply: Message) -> bool:
    return bool(reply.get("tool_calls") or reply.get("reasoning_content"))


def _last_turns(tokenizer: Tokenizer, chat: ChatFormat, turns: Sequence[_Turn]) -> list[_Reply | UserError]:
    """Each reply as the template writes it after its prompt."""
    dialogues = []
    for turn in turns:
        safe, tools, escaped = escape(chat.controls, [*turn.prompt, turn.reply], turn.tools)
        dialogues.append(Dialogue(safe, tools, escaped, ((len(safe) - 1, True), (len(safe), False))))
    replies: list[_Reply | UserError] = []
    for turn, dialogue, texts in zip(turns, dialogues, render_dialogues(tokenizer, dialogues), strict=True):
        try:
            replies.append(_last_turn(tokenizer, chat, turn, dialogue, texts))
        except UserError as error:
            replies.append(error)
    return replies


def _last_turn(
    tokenizer: Tokenizer, chat: ChatFormat, turn: _Turn, dialogue: Dialogue, texts: list[str] | UserError
) -> _Reply:
    """A reply with what the template writes around it.

    A text that already begins with what the template writes before it does not get it twice; one that the template
    rewrites is left as it is.
    """
    response = turn.reply["content"]
    plain = _Reply(_plain(response), end_token_id(tokenizer))
    if not response.strip() and not _is_rich(turn.reply):
        return plain
    opened, closed = _sure(texts)
    start = header_start(chat, opened, closed)
    body, end = split_end(chat, closed[start:], turn.reply) if start is not None else ("", None)
    known = end is not None or chat.training_name is not None
    lead = start_of_reply(body, dialogue.messages[-1]) if known else None
    rich = _is_rich(turn.reply)
    if lead is None or (not rich and start != len(opened)):
        if turn.reply.get("tool_calls"):
            raise UserError(f"{name_of(tokenizer)} leaves out the tool calls of a reply, or rewrites them")
        return replace(plain, notes=(UNRENDERED_REASONING,)) if rich else plain
    if not rich and lead and response.startswith(body[:lead]):
        return plain
    if not turn.ended and not rich:
        body = body[:lead] + dialogue.escaped.escape(response)
    notes = (UNRENDERED_REASONING,) if lost_reasoning(dialogue.messages[-1], body) else ()
    pieces = reply_pieces(tokenizer, chat, body, dialogue.escaped)
    return _Reply(pieces, plain.end if end is None else token_id(tokenizer, end), notes)


def chat_ids(
    tokenizer: Tokenizer, messages: Messages, trained: Sequence[bool] | None = None, tools: Tools | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of a dialogue, and which of them count: every assistant reply with its end token, and nothing else.

    Args:
        trained: for each assistant reply whether it counts; None: all do.
        tools: definitions of the tools that the dialogue may use.

    Returns:
        ids and mask of equal length, both ending with the last reply.

    Raises:
        UserError: no assistant message; the template rewrites earlier turns, or ends a turn with no control token.
    """
    encoded = _sure(encode_dialogues(tokenizer, [DialogueRow(messages, trained, tools)])[0])
    return encoded.ids, encoded.mask


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a document to pretrain on: one BOS where there is one, the text, EOS."""
    return texts_ids(tokenizer, [text])[0]


def texts_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`text_ids` of many texts at once."""
    end = document_end_id(tokenizer)
    return [[*ids, end] for ids in prompts_ids(tokenizer, texts)]


def _sure(result: Result | UserError) -> Result:
    """The result, where it is one."""
    if isinstance(result, UserError):
        raise result
    return cast("Result", result)

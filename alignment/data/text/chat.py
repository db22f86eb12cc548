"""Texts and dialogues to token ids, for every stage, sampling and evaluation alike. Truncation is in truncation.py.

The rules: a sequence has exactly one BOS where the tokenizer or its template has one, and a response exactly one end
token; prompt and response are tokenized apart and joined by ids, as sampling does; a control string typed inside a text
("</s>") stays text. Messages become text through the chat template (templates.py); plain text never enters a template.
Dialogues of several turns are in dialogues.py.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar, cast

from alignment.data.rows.records import Message, Messages, Tools
from alignment.data.text.dialogues import (
    UNRENDERED_REASONING,
    DialogueRow,
    EncodedChat,
    Segment,
    TextPlan,
    attempt,
    encode_dialogues,
    encode_plans,
    find_turn,
    loses_reasoning,
    replies_without_end,
    reply_pieces,
)
from alignment.data.text.special_tokens import bos_adder, stop_strings, without_end
from alignment.data.text.special_tokens import document_end_id as document_end_id
from alignment.data.text.special_tokens import end_token_id as end_token_id
from alignment.data.text.special_tokens import stop_token_ids as stop_token_ids
from alignment.data.text.templates import (
    ChatFormat,
    Dialogue,
    Piece,
    chat_format,
    escape,
    name_of,
    pieces_of,
    render_dialogues,
    require_contents,
)
from alignment.data.tokenizers.tokenizer import Tokenizer, control_strings, encode
from alignment.errors import UserError

Result = TypeVar("Result")
NOT_OPEN = "a prompt of messages must end with a message of someone else than the assistant"


def prompt_ids(tokenizer: Tokenizer, prompt: str | Messages, tools: Tools | None = None) -> list[int]:
    """Ids of a prompt: one BOS where there is one, the text; for messages up to the assistant's header."""
    return _accepted(encode_each_prompt(tokenizer, [prompt], [tools])[0])


def encode_each_prompt(
    tokenizer: Tokenizer, prompts: Sequence[str | Messages], tools: Sequence[Tools | None] | None = None
) -> list[list[int] | UserError]:
    """`prompt_ids` of many prompts at once, texts and messages; the reason for each one that is refused."""
    every = [None] * len(prompts) if tools is None else tools
    asked = {number: prompt for number, prompt in enumerate(prompts) if not isinstance(prompt, str)}
    plans: list[TextPlan | UserError] = [TextPlan([Segment([Piece(str(prompt))], False)]) for prompt in prompts]
    if asked:
        controls, stops = control_strings(tokenizer), stop_strings(tokenizer)
        dialogues = [
            escape(controls, replies_without_end(prompt, stops), every[number], ((len(prompt), True),))
            for number, prompt in asked.items()
        ]
        rendered = attempt(render_dialogues, tokenizer, dialogues)
        texts = [rendered] * len(asked) if isinstance(rendered, UserError) else rendered
        for (number, prompt), dialogue, written in zip(asked.items(), dialogues, texts, strict=True):
            refused = None if prompt and prompt[-1]["role"] != "assistant" else UserError(NOT_OPEN)
            plans[number] = refused or attempt(_prompt_plan, tokenizer, dialogue, written)
    return [each if isinstance(each, UserError) else each.ids for each in encode_plans(tokenizer, plans)]


def _prompt_plan(tokenizer: Tokenizer, dialogue: Dialogue, texts: Sequence[str]) -> TextPlan:
    require_contents(tokenizer, dialogue, texts[0])
    return TextPlan([Segment(pieces_of(tokenizer, texts[0], dialogue.escaped, follows=False), False)])


def response_ids(
    tokenizer: Tokenizer, response: str | Message, prompt: str | Messages = "", *, ended: bool = True
) -> list[int]:
    """Ids of a response and exactly one end token, also where the text already ends in it; as `encode_each_response`."""
    return _accepted(encode_each_response(tokenizer, [response], [prompt], ended=[ended])[0]).ids


class _Turn(NamedTuple):
    """A reply to a prompt, and the token that ends it; None: it was cut off."""

    prompt: str | Messages
    reply: Message
    tools: Tools | None
    end: str | None

    @property
    def is_rich(self) -> bool:
        """True where the reply is more than a text."""
        return bool(self.reply.get("tool_calls") or self.reply.get("reasoning_content"))


def encode_each_response(
    tokenizer: Tokenizer,
    responses: Sequence[str | Message],
    prompts: Sequence[str | Messages] | None = None,
    *,
    ended: Sequence[bool] | None = None,
    tools: Sequence[Tools | None] | None = None,
) -> list[EncodedChat | UserError]:
    """Ids of each response and its end token, or the reason why it cannot be used.

    Args:
        responses: texts; or assistant messages, whose tool calls and reasoning the template writes.
        prompts: of each response; None: plain texts. After messages, the blanks that the template writes around a reply
            (Mistral's, Llama 2's) are part of the response, since `prompt_ids` ends before them.
        ended: False where a response was cut off: no end token follows its text. None: all of them ended.
    """
    end, stops = str(tokenizer.convert_ids_to_tokens(end_token_id(tokenizer))), stop_strings(tokenizer)
    ends = [end] * len(responses) if ended is None else [end if whole else None for whole in ended]
    replies = [_as_message(reply, stops if each else ()) for reply, each in zip(responses, ends, strict=True)]
    nothing = [None] * len(responses)
    turns = [*map(_Turn, prompts or [""] * len(responses), replies, tools or nothing, ends)]
    plans: list[TextPlan | UserError] = [_plain_plan(turn) for turn in turns]
    chat = chat_format(tokenizer) if any(isinstance(turn.prompt, list) for turn in turns) else ChatFormat("")
    if chat.end is not None:
        chosen = {}
        for number, turn in enumerate(turns):
            if isinstance(turn.prompt, list) and (chat.writes_around or turn.is_rich):
                cuts = (len(turn.prompt), True), (len(turn.prompt) + 1, False)
                chosen[number] = escape(chat.controls, [*turn.prompt, turn.reply], turn.tools, cuts)
        written = render_dialogues(tokenizer, list(chosen.values()))
        for (number, dialogue), texts in zip(chosen.items(), written, strict=True):
            if turns[number].is_rich or turns[number].reply["content"].strip():
                plans[number] = attempt(_turn_plan, tokenizer, chat, turns[number], dialogue, texts)
    return encode_plans(tokenizer, plans)


def _as_message(reply: str | Message, stops: Sequence[str]) -> Message:
    message: Message = {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
    return {**message, "content": without_end(message["content"], stops)}


def _plain_plan(turn: _Turn, notes: tuple[str, ...] = ()) -> TextPlan:
    return TextPlan([Segment([Piece(turn.reply["content"], follows=True)], True, turn.end)], notes)


def _turn_plan(
    tokenizer: Tokenizer, chat: ChatFormat, turn: _Turn, dialogue: Dialogue, texts: Sequence[str]
) -> TextPlan:
    """A reply with what the template writes around it."""
    opened, closed = texts
    response, message = turn.reply["content"], dialogue.messages[-1]
    found = find_turn(chat, message, closed, opened=opened, closed=closed)
    if isinstance(found, str) or (not turn.is_rich and found.start != len(opened)):
        if turn.reply.get("tool_calls"):
            raise UserError(f"{name_of(tokenizer)} leaves out the tool calls of a reply, or rewrites them")
        return _plain_plan(turn, (UNRENDERED_REASONING,) if turn.is_rich else ())
    body, lead = closed[found.start : found.stop], closed[found.start : found.words]
    if not turn.is_rich and lead and response.startswith(lead):
        return _plain_plan(turn)
    if turn.end is None and not turn.is_rich:
        body = lead + dialogue.escaped.escape(response)
    pieces = reply_pieces(tokenizer, chat, body, dialogue.escaped)
    end = None if turn.end is None else found.end or turn.end
    notes = (UNRENDERED_REASONING,) if loses_reasoning(message, body) else ()
    return TextPlan([Segment(pieces, True, end)], notes)


def chat_ids(
    tokenizer: Tokenizer, messages: Messages, trained: Sequence[bool] | None = None, tools: Tools | None = None
) -> tuple[list[int], list[bool]]:
    """Ids and mask of one dialogue, as `encode_dialogues`."""
    encoded = _accepted(encode_dialogues(tokenizer, [DialogueRow(messages, trained, tools)])[0])
    return encoded.ids, encoded.mask


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a document to pretrain on: one BOS where there is one, the text, EOS."""
    return texts_ids(tokenizer, [text])[0]


def texts_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`text_ids` of many texts at once."""
    end, with_one_bos = document_end_id(tokenizer), bos_adder(tokenizer)
    return [[*with_one_bos(ids), end] for ids in encode(tokenizer, texts)]


def _accepted(result: Result | UserError) -> Result:
    if isinstance(result, UserError):
        raise result
    return cast("Result", result)

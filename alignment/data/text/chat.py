"""Texts and dialogues to token ids, for every stage, sampling and evaluation alike. Truncation is in data/tokenize.py.

The rules: a sequence has exactly one BOS where the tokenizer or its template has one, and a response exactly one end
token; prompt and response are tokenized apart and joined by ids, as sampling does; a control string typed inside a text
("</s>") stays text. Messages become text through the chat template (templates.py); plain text never enters a template.

A dialogue is rendered once as a whole, and for each of the assistant's turns up to its header and up to its end. These
texts must begin the whole one: so the mask does not depend on markers in the template, and a template that rewrites
earlier turns is noticed.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple, TypeVar, cast

from alignment.data.rows.records import Demonstration, Message, Messages, Tools, is_plain
from alignment.data.text.special_tokens import bos_adder, document_end_id, end_token_id, stop_strings, without_end
from alignment.data.text.special_tokens import stop_token_ids as stop_token_ids
from alignment.data.text.templates import (
    ChatFormat,
    Dialogue,
    EscapedControlTokens,
    Piece,
    chat_format,
    encode_pieces,
    ending,
    escape,
    is_written,
    name_of,
    pieces_of,
    render_dialogues,
    require_contents,
    shared_length,
    tag_boundary,
    template_of,
    with_one_template,
)
from alignment.data.tokenizers.tokenizer import ANCHOR, Tokenizer, control_strings, encode
from alignment.errors import UserError

# Notes about rows that are used.
VARIANT = (
    "dialogue rendered by a variant of the template, which keeps earlier turns and ends replies; generation's differs"
)
OTHER_PROMPT = "tokens before the last reply differ from generation's; data.turns=each trains on generation's"
PREFILLED = (
    "generation opens a reply with {!r}, which the template leaves out of the replies it writes: so does training"
)
REPEATED = "a reply begins with {!r}, which the generation prompt has written before it: left out of the reply"
CLOSED = "the template leaves a block open before a reply without reasoning: {} is trained before the reply"
INSIDE = "generation opens a reply with {!r}, after which a reply that does not go on from it is trained as it stands"
NO_END = "the chat template ends a reply with no control token; {} is trained at its end"
UNRENDERED_REASONING = "the chat template writes no reasoning into a reply that counts, so it is not learned"

# Faults of a template.
REWRITES = (
    "rewrites earlier turns when the dialogue goes on (at message {}), so it cannot be trained on whole dialogues; set "
    "data.turns=each (each reply an example of its own, after what generation renders) or data.turns=last, or set "
    "chat_template to one that keeps the history"
)
UNLIKE = "does not render the reply of message {} as it stands, then its end token"
NO_CALLS = "leaves out the tool calls of message {}, or rewrites them; take a chat_template that renders tool calls"
ENDLESS = (
    "ends the assistant's turn with no control token to stop at; set data.turns=each (each reply an example of its "
    "own, which EOS ends), or set chat_template to one that ends a turn"
)
NOT_OPEN = "a prompt of messages must end with a message of someone else than the assistant"
NO_REPLY = "a dialogue needs an assistant message with something before it"

THOUGHTS = re.compile("</?think>")

Result = TypeVar("Result")


class Segment(NamedTuple):
    """A part of a sequence: the pieces to encode, True where they count, and the control token after them."""

    pieces: list[Piece]
    counts: bool
    end: str | None = None


class TextPlan(NamedTuple):
    """Parts of a rendered text, in order, and notes for the user; the last prompt as generation encodes it, or []."""

    parts: list[Segment]
    notes: tuple[str, ...] = ()
    last_prompt: Sequence[Piece] = ()


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """Ids and mask of a sequence, of equal length, and notes for the user.

    `prompt`, of a response: the ids that it follows in place of `prompt_ids`; empty: it follows those.
    """

    ids: list[int]
    mask: list[bool]
    notes: tuple[str, ...] = ()
    prompt: Sequence[int] = ()


def attempt(function: Callable[..., Result], *arguments: Any) -> Result | UserError:
    """The result of a function, or the UserError that it raised; the error itself where an argument is one."""
    refused = [argument for argument in arguments if isinstance(argument, UserError)]
    try:
        return refused[0] if refused else function(*arguments)
    except UserError as error:
        return error


def encode_plans(tokenizer: Tokenizer, plans: Sequence[TextPlan | UserError]) -> list[EncodedChat | UserError]:
    """The sequence of each plan, with one BOS before its context where the tokenizer has one."""
    parts = [part for plan in plans if isinstance(plan, TextPlan) for part in plan.parts]
    prompts = [piece for plan in plans if isinstance(plan, TextPlan) for piece in plan.last_prompt]
    ids = encode_pieces(tokenizer, [piece for part in parts for piece in part.pieces] + prompts)
    with_one_bos = bos_adder(tokenizer)

    def joined(plan: TextPlan) -> EncodedChat:
        sequence = list[int]()
        mask = list[bool]()
        for part in plan.parts:
            more = [token for piece in part.pieces for token in ids[piece]]
            more = more if sequence or part.counts else with_one_bos(more)
            sequence += more if part.end is None else [*more, tokenizer.convert_tokens_to_ids(part.end)]
            mask += [part.counts] * (len(sequence) - len(mask))
        prompt = with_one_bos([token for piece in plan.last_prompt for token in ids[piece]]) if plan.last_prompt else []
        notes = plan.notes if sequence[: len(prompt)] == prompt else (*plan.notes, OTHER_PROMPT)
        return EncodedChat(sequence, mask, tuple(dict.fromkeys(notes)))

    return [attempt(joined, plan) for plan in plans]


def _by_template(
    tokenizer: Tokenizer,
    encode_rows: Callable[..., list[Result]],
    tools_of_rows: Sequence[Tools | None],
    **columns: Sequence[Any],
) -> list[Result]:
    """The results of rows, given as columns, where the tools of a row choose one of several named templates."""
    templates = [template_of(tokenizer, tools) for tools in tools_of_rows]
    results = dict[int, Result]()
    for template in dict.fromkeys(templates):
        rows = [row for row, chosen in enumerate(templates) if chosen == template]
        of_rows = {name: list(map(column.__getitem__, rows)) for name, column in columns.items()}
        results.update(zip(rows, encode_rows(with_one_template(tokenizer, template), **of_rows), strict=True))
    return [results[row] for row in range(len(templates))]


def _accepted(result: Result | UserError) -> Result:
    if isinstance(result, UserError):
        raise result
    return cast("Result", result)


# Prompts, responses, documents


def prompt_ids(tokenizer: Tokenizer, prompt: str | Messages, tools: Tools | None = None) -> list[int]:
    """Ids of a prompt: one BOS where there is one, the text; for messages up to the assistant's header."""
    return _accepted(encode_each_prompt(tokenizer, [prompt], [tools])[0])


def encode_each_prompt(
    tokenizer: Tokenizer, prompts: Sequence[str | Messages], tools: Sequence[Tools | None] | None = None
) -> list[list[int] | UserError]:
    """`prompt_ids` of many prompts at once, texts and messages; the reason for each one that is refused."""
    every = [None] * len(prompts) if tools is None else tools
    if isinstance(tokenizer.chat_template, dict):
        return _by_template(tokenizer, encode_each_prompt, every, prompts=prompts, tools=every)
    asked = {index: prompt for index, prompt in enumerate(prompts) if not isinstance(prompt, str)}
    plans: list[TextPlan | UserError] = [TextPlan([Segment([Piece(str(prompt))], False)]) for prompt in prompts]
    if asked:
        controls = control_strings(tokenizer)
        stops = stop_strings(tokenizer)
        dialogues = [
            escape(controls, replies_without_end(prompt, stops), every[index], ((len(prompt), True),))
            for index, prompt in asked.items()
        ]
        rendered = attempt(render_dialogues, tokenizer, dialogues)
        texts = [rendered] * len(asked) if isinstance(rendered, UserError) else rendered
        for (index, prompt), dialogue, written in zip(asked.items(), dialogues, texts, strict=True):
            refused = None if prompt and prompt[-1]["role"] != "assistant" else UserError(NOT_OPEN)
            plans[index] = refused or attempt(_prompt_plan, tokenizer, dialogue, written)
    return [encoded if isinstance(encoded, UserError) else encoded.ids for encoded in encode_plans(tokenizer, plans)]


def _prompt_plan(tokenizer: Tokenizer, dialogue: Dialogue, texts: Sequence[str]) -> TextPlan:
    require_contents(tokenizer, dialogue, texts[0])
    return TextPlan([Segment(pieces_of(tokenizer, texts[0], dialogue.escaped, after=""), False)])


def response_ids(
    tokenizer: Tokenizer, response: str | Message, prompt: str | Messages = "", *, ended: bool = True
) -> list[int]:
    """Ids of a response and exactly one end token, even if the text already ends in it; as `encode_each_response`."""
    return encode_response(tokenizer, response, prompt, ended=ended).ids


def encode_response(
    tokenizer: Tokenizer, response: str | Message, prompt: str | Messages = "", *, ended: bool = True
) -> EncodedChat:
    """`encode_each_response` of one response."""
    return _accepted(encode_each_response(tokenizer, [response], [prompt], ended=[ended])[0])


class _Turn(NamedTuple):
    """A reply to a prompt, the token that ends it (None: it was cut off), and notes for the user."""

    prompt: str | Messages
    reply: Message
    tools: Tools | None
    end: str | None
    notes: tuple[str, ...] = ()


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
            (Mistral's, Llama 2's) are part of the response, since `prompt_ids` ends before them. A reply without
            reasoning does not follow a "<think>" that generation opens, but the prompt that the template writes.
        ended: False where a response was cut off: no end token follows its text. None: all of them ended.
    """
    whole = [True] * len(responses) if ended is None else ended
    every = [None] * len(responses) if tools is None else tools
    asked = prompts or [""] * len(responses)
    if isinstance(tokenizer.chat_template, dict):
        return _by_template(
            tokenizer, encode_each_response, every, responses=responses, prompts=asked, ended=whole, tools=every
        )
    end = str(tokenizer.convert_ids_to_tokens(end_token_id(tokenizer)))
    stops = stop_strings(tokenizer)
    ends = [end if is_whole else None for is_whole in whole]
    messages = [Message(role="assistant", content=reply) if isinstance(reply, str) else reply for reply in responses]
    replies = [
        replies_without_end([message], stops if end_token else ())[0]
        for message, end_token in zip(messages, ends, strict=True)
    ]
    turns = [*map(_Turn, asked, replies, every, ends)]
    chat = chat_format(tokenizer) if any(isinstance(turn.prompt, list) for turn in turns) else ChatFormat("")
    if chat.closing and not chat.prefilled:
        turns = [_closed(chat, turn) for turn in turns]
    plans: list[TextPlan | UserError] = [_plain_plan(chat, turn) for turn in turns]
    writes = chat.writes_around or chat.end is None
    chosen = {}
    for index, turn in enumerate(turns):
        if isinstance(turn.prompt, list) and (writes or not _continues(chat, turn)):
            cuts = (len(turn.prompt), True), (len(turn.prompt) + 1, False)
            chosen[index] = escape(chat.controls, [*turn.prompt, turn.reply], turn.tools, cuts)
    written = render_dialogues(tokenizer, list(chosen.values())) if chosen else []
    for (index, dialogue), texts in zip(chosen.items(), written, strict=True):
        if not is_plain(turns[index].reply) or turns[index].reply["content"].strip():
            plans[index] = attempt(_turn_plan, tokenizer, chat, turns[index], dialogue, texts)
    return [attempt(_prompt_apart, encoded) for encoded in encode_plans(tokenizer, plans)]


def _prompt_apart(encoded: EncodedChat) -> EncodedChat:
    start = encoded.mask.index(True) if True in encoded.mask else 0
    return replace(encoded, ids=encoded.ids[start:], mask=encoded.mask[start:], prompt=encoded.ids[:start])


def goes_on(chat: ChatFormat, reply: str) -> bool:
    """True where a reply goes on from the block that the generation prompt leaves open: it repeats or closes that."""
    return not chat.closing or chat.closing in reply or bool(without_prefill(chat, reply)[1])


def _continues(chat: ChatFormat, turn: _Turn) -> bool:
    """True for a text that follows the generation prompt itself; a text that was cut off was sampled there."""
    return is_plain(turn.reply) and (turn.end is None or (not chat.tail and goes_on(chat, turn.reply["content"])))


def _closed(chat: ChatFormat, turn: _Turn) -> _Turn:
    """A reply without reasoning after the end of the block that the template leaves open before it."""
    if not isinstance(turn.prompt, list) or _continues(chat, turn):
        return turn
    content = f"{chat.closing}\n\n{turn.reply['content']}"
    return turn._replace(reply={**turn.reply, "content": content}, notes=(CLOSED.format(chat.closing),))


def _notes(turn: _Turn, end: str | None) -> tuple[str, ...]:
    """The notes of a reply: also that the template writes no `end` after it."""
    endless = end is None and turn.end is not None
    return (*turn.notes, NO_END.format(turn.end)) if endless else turn.notes


def without_prefill(chat: ChatFormat, reply: str) -> tuple[str, tuple[str, ...]]:
    """A reply without what the generation prompt has opened before it ("<think>", "{"), and the note of that."""
    for prefill in chat.prefills:
        letters = [re.escape(letter) for letter in "".join(prefill.split())]
        if repeated := re.match(r"\s*" + r"\s*".join(letters), reply):
            rest = reply[repeated.end() :]
            blanks = prefill[len(prefill.rstrip()) :]
            rest = rest.removeprefix(blanks) if rest.startswith(blanks) else rest.lstrip()
            return rest, (REPEATED.format(prefill),)
    return reply, ()


def _plain_plan(chat: ChatFormat, turn: _Turn, notes: tuple[str, ...] = ()) -> TextPlan:
    content = turn.reply["content"]
    after = ANCHOR
    if isinstance(turn.prompt, list):
        after = chat.after
        notes += _notes(turn, chat.end)
        again = [prefill for prefill in chat.prefills if content.lstrip().startswith(prefill.split()[0])]
        inside = again[0] if again else chat.prefilled
        content, repeated = without_prefill(chat, content)
        closes = bool(chat.closing) and chat.closing in content
        notes += repeated or ((INSIDE.format(inside),) if inside and not closes else ())
    return TextPlan([Segment([Piece(content, after=after)], True, turn.end)], notes)


def _turn_plan(
    tokenizer: Tokenizer, chat: ChatFormat, turn: _Turn, dialogue: Dialogue, texts: Sequence[str]
) -> TextPlan:
    """A reply with what the template writes around it."""
    opened, closed = texts
    response = turn.reply["content"]
    message = dialogue.messages[-1]
    plain = is_plain(turn.reply)
    span = find_turn(chat, message, closed, opened=opened, closed=closed)
    follows = _continues(chat, turn)
    unlike = plain and (chat.end is None or chat.writes_around or not follows)
    if isinstance(span, str) and (unlike or turn.reply.get("tool_calls")):
        why = UNLIKE if plain else NO_CALLS
        raise UserError(f"{name_of(tokenizer)} {why.format(len(turn.prompt))}")
    if isinstance(span, str) or (span.start != len(opened) and follows):
        return _plain_plan(chat, turn, () if plain else (UNRENDERED_REASONING,))
    body = closed[span.start : span.stop]
    lead = closed[span.start : span.words]
    _, repeated = without_prefill(chat, dialogue.escaped.unescape(body[len(lead) :]))
    if plain and (repeated or (lead and response.startswith(lead))):
        return _plain_plan(chat, turn)
    if turn.end is None and plain:
        body = lead + dialogue.escaped.escape(response)
    pieces = reply_pieces(tokenizer, chat, body, dialogue.escaped, ending(chat.controls, closed[: span.start]))
    end = None if turn.end is None else span.end or turn.end
    notes = _notes(turn, span.end)
    notes += (UNRENDERED_REASONING,) if loses_reasoning(message, body) else ()
    reply = Segment(pieces, True, end)
    if span.start == len(opened):
        return TextPlan([reply], notes)
    prompt = Segment(pieces_of(tokenizer, closed[: span.start], dialogue.escaped, after=""), False)
    return TextPlan([prompt, reply], (*notes, PREFILLED.format(opened[span.start :])))


def texts_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each document to pretrain on: one BOS where there is one, the text, EOS."""
    end = document_end_id(tokenizer)
    with_one_bos = bos_adder(tokenizer)
    return [[*with_one_bos(ids), end] for ids in encode(tokenizer, texts)]


# Dialogues


def encode_dialogues(tokenizer: Tokenizer, rows: Sequence[Demonstration]) -> list[EncodedChat | UserError]:
    """Ids and mask of each row's `messages`, or why it cannot be used: every counting reply is True with its end token.

    Ids and mask end with the last reply. What the template writes between the assistant's header and the reply
    (Mistral's blank, an empty block of reasoning) counts with the reply: a prompt ends before it.
    """
    if not rows:
        return []
    if isinstance(tokenizer.chat_template, dict):
        return _by_template(tokenizer, encode_dialogues, [row.tools for row in rows], rows=rows)
    chat = chat_format(tokenizer)
    if chat.end is None:
        raise UserError(f"{name_of(tokenizer)} {ENDLESS}")
    stops = stop_strings(tokenizer)
    dialogues = [_prepared(chat.controls, row, stops) for row in rows]
    texts = render_dialogues(tokenizer, dialogues, training=True)
    generated = texts
    if chat.training != chat.template:
        generated = render_dialogues(tokenizer, [replace(dialogue, cuts=dialogue.cuts[-1:]) for dialogue in dialogues])
    plan = partial(_plan, tokenizer=tokenizer, chat=chat)
    plans = [attempt(plan, *arguments) for arguments in zip(rows, dialogues, texts, generated, strict=True)]
    return [attempt(_require_reply, encoded) for encoded in encode_plans(tokenizer, plans)]


def _require_reply(encoded: EncodedChat) -> EncodedChat:
    if not any(encoded.mask) or all(encoded.mask):
        raise UserError(NO_REPLY)
    return encoded


def _prepared(controls: Sequence[str], row: Demonstration, stops: Sequence[str]) -> Dialogue:
    """The dialogue up to its last reply, its control strings escaped, and the texts to render of it."""
    messages = row.messages or []
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    messages = messages[: replies[-1] + 1] if replies else []
    cuts = [(len(messages), False)]
    for index in replies:
        cuts += [(index, True)] if index else []
        cuts += [(index + 1, False)] if index + 1 < len(messages) else []
    return escape(controls, replies_without_end(messages, stops), row.tools, tuple(cuts))


def replies_without_end(messages: Messages, stops: Sequence[str]) -> Messages:
    """The messages, the assistant's without the end tokens written at their ends: the template writes its own."""
    return [
        {**message, "content": without_end(message["content"], stops)} if message["role"] == "assistant" else message
        for message in messages
    ]


def _plan(
    row: Demonstration,
    dialogue: Dialogue,
    texts: Sequence[str],
    generated: Sequence[str],
    *,
    tokenizer: Tokenizer,
    chat: ChatFormat,
) -> TextPlan:
    """The parts of a dialogue; the last of the `generated` texts is the prompt of the last of several replies."""
    if not any(row.trained or [True]) or len(dialogue.messages) < 2:
        raise UserError(NO_REPLY)
    by_cut = dict(zip(dialogue.cuts, texts, strict=True))
    whole = texts[0]
    messages = dialogue.messages
    notes = [VARIANT] if chat.training != chat.template else []
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    parts = list[Segment]()
    position = 0
    start = 0
    after = ""
    for index, counts in zip(replies, repeat(True) if row.trained is None else row.trained, strict=False):
        opened = by_cut.get((index, True), "")
        closed = by_cut.get((index + 1, False), whole)
        turn = find_turn(chat, messages[index], whole, opened=opened, closed=closed)
        if isinstance(turn, TurnSpan) and turn.start < position:
            turn = REWRITES
        if isinstance(turn, str):
            raise UserError(f"{name_of(tokenizer)} {turn.format(index)}")
        if opened and turn.start < len(opened):
            notes.append(PREFILLED.format(opened[turn.start :]))
        if counts and loses_reasoning(messages[index], whole[turn.start : turn.stop]):
            notes.append(UNRENDERED_REASONING)
        start = turn.start
        before = whole[position:start]
        reply = whole[start : turn.stop]
        if opened and start == len(opened):
            reply, repeated = without_prefill(chat, reply)
            notes.extend(repeated)
        parts.append(Segment(pieces_of(tokenizer, before, dialogue.escaped, after=after), False))
        pieces = reply_pieces(tokenizer, chat, reply, dialogue.escaped, ending(chat.controls, whole[:start]))
        parts.append(Segment(pieces, counts, turn.end))
        after = turn.end or ANCHOR
        position = turn.resume
    require_contents(tokenizer, dialogue, whole)
    prompt = whole[:start] if generated[-1].startswith(whole[:start]) else generated[-1]
    last_prompt = pieces_of(tokenizer, prompt, dialogue.escaped, after="") if len(replies) > 1 else ()
    return TextPlan(parts, tuple(notes), last_prompt)


def reply_pieces(
    tokenizer: Tokenizer, chat: ChatFormat, reply: str, escaped: EscapedControlTokens, after: str
) -> list[Piece]:
    """The pieces of a rendered reply: one text, unless the template wrote control tokens into it."""
    if any(string in reply for string in chat.controls):
        return pieces_of(tokenizer, reply, escaped, after=after)
    return [Piece(escaped.unescape(reply), after=after)] if reply else []


class TurnSpan(NamedTuple):
    """The place of an assistant's turn in a rendered dialogue, in characters."""

    start: int  # of all that the assistant writes
    words: int  # of the message
    stop: int  # after its last, end token not included
    end: str | None  # the control token that ends it; None: none that counts
    resume: int  # the text goes on there


def find_turn(chat: ChatFormat, message: Message, whole: str, *, opened: str, closed: str) -> TurnSpan | str:
    """The place of an assistant's message in `whole`, or the fault of the template.

    Args:
        opened: the messages before it with the assistant's header; "" for the first message.
        closed: the messages up to it.
    """
    start = len(opened)
    if not whole.startswith(opened):  # a header at generation may hold more ("<think>") than that of a written reply
        start = tag_boundary(chat.controls, whole, shared_length(whole, opened))
        if not opened.endswith(chat.header) or start < len(opened) - len(chat.header):
            return REWRITES
    stop = len(closed)
    goes_on = not whole.startswith(closed)
    if goes_on:  # gpt-oss ends a turn in another token once the dialogue goes on, Phi-3 a dialogue in one of its own
        stop = tag_boundary(chat.controls, whole, shared_length(whole, closed))
    turn = whole[start:stop]
    ends = [chat.end, chat.call_end] if message.get("tool_calls") else [chat.end]
    length, end = max(((turn.rfind(end), end) for end in ends if end and end in turn), default=(len(turn), None))
    if end is None and closed[stop:].strip() not in ("", *chat.controls):
        return REWRITES
    words = message["content"].strip()
    if chat.end is None and not message.get("tool_calls") and words in turn:
        length = turn.rfind(words) + len(words)
    lead = _start_of_words(turn[:length].removesuffix(chat.tail), message)
    if lead is None and message.get("tool_calls"):
        return NO_CALLS
    if lead is None or (chat.end is not None and end is None and not goes_on and chat.training == chat.template):
        return UNLIKE
    # without a question before it, the assistant's own header is what its first words follow
    words = start + lead
    after = start + length
    return TurnSpan(start if opened else words, words, after, end, after + len(end or ""))


def _start_of_words(turn: str, message: Message) -> int | None:
    """Index of the message in what the template wrote for it, its blanks trimmed or not; None: it is not there."""
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
        return turn.find(next((part for part in thoughts if part), turn))
    return None


def loses_reasoning(message: Message, turn: str) -> bool:
    """True where a template left a message's reasoning out of the turn that it wrote."""
    return (message.get("reasoning_content") or "").strip() not in turn

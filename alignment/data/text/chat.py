"""Texts and dialogues to token ids, for every stage, sampling and evaluation alike. Truncation is in truncation.py.

The rules: a sequence has exactly one BOS where the tokenizer or its template has one, and a response exactly one end
token; prompt and response are tokenized apart and joined by ids, as sampling does; a control string typed inside a text
("</s>") stays text. Messages become text through the chat template (templates.py); plain text never enters a template.
"""

from collections.abc import Sequence

from alignment.data.rows.records import Messages
from alignment.data.text.templates import (
    PROBE,
    encode_rendered,
    end_of_turn,
    escape,
    name_of,
    render,
    require_contents,
    unescape,
)
from alignment.data.tokenizers.tokenizer import Tokenizer, adds_bos, bos_id, control_strings, encode
from alignment.errors import UserError


def end_token_id(tokenizer: Tokenizer) -> int:
    """The token that ends a response: the template's end of turn where there is one, else the tokenizer's EOS.

    Raises:
        UserError: the tokenizer has neither.
    """
    if tokenizer.chat_template and (turn := end_of_turn(tokenizer)) is not None:
        return _token_id(tokenizer, turn)
    return document_end_id(tokenizer)


def document_end_id(tokenizer: Tokenizer) -> int:
    """The token that ends a document of plain text: EOS.

    Raises:
        UserError: the tokenizer has none.
    """
    end = tokenizer.eos_token_id
    if end is None:
        raise UserError(
            f"{tokenizer.name_or_path or 'the tokenizer'} names no end token, so nothing could learn to stop; "
            'set "eos_token" in its tokenizer_config.json'
        )
    return end


def stop_token_ids(tokenizer: Tokenizer) -> set[int]:
    """All tokens at which generation stops: the end of turn and EOS."""
    eos = tokenizer.eos_token_id
    return {end_token_id(tokenizer)} | ({eos} if eos is not None else set())


def prompt_ids(tokenizer: Tokenizer, prompt: str | Messages) -> list[int]:
    """Ids of a prompt: one BOS where there is one, the text; for messages up to the assistant's header.

    Raises:
        UserError: messages without a template, or that the template refuses, or that end with the assistant.
    """
    if isinstance(prompt, str):
        return prompts_ids(tokenizer, [prompt])[0]
    if not prompt or prompt[-1]["role"] == "assistant":
        raise UserError("a prompt of messages must end with a message of someone else than the assistant")
    messages, escaped = escape(tokenizer, prompt)
    text = render(tokenizer, messages, open_turn=True)
    require_contents(tokenizer, messages, text)
    return _with_one_bos(tokenizer, encode_rendered(tokenizer, text, escaped, follows=False))


def prompts_ids(tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """`prompt_ids` of many plain texts at once."""
    bos = bos_id(tokenizer) if adds_bos(tokenizer) else None
    return [ids if bos is None else [bos, *ids] for ids in encode(tokenizer, prompts)]


def response_ids(tokenizer: Tokenizer, response: str, prompt: str | Messages = "", *, ended: bool = True) -> list[int]:
    """Ids of a response and exactly one end token, also where the text already ends in it; as `responses_ids`."""
    return responses_ids(tokenizer, [response], [prompt], ended=[ended])[0]


def responses_ids(
    tokenizer: Tokenizer,
    responses: Sequence[str],
    prompts: Sequence[str | Messages] | None = None,
    *,
    ended: Sequence[bool] | None = None,
) -> list[list[int]]:
    """`response_ids` of many texts at once.

    Args:
        prompts: what each responds to. After messages, the blanks that the template writes around a reply (Mistral's,
            Llama 2's) are part of the response, since `prompt_ids` ends before them. None: plain texts.
        ended: False where a response was cut off: no end token follows its text. None: all of them ended.
    """
    end, stops = end_token_id(tokenizer), _stop_strings(tokenizer)
    whole = [True] * len(responses) if ended is None else ended
    texts = [without_end(text, stops) if done else text for text, done in zip(responses, whole, strict=True)]
    turns = [("", text) for text in texts]
    if prompts is not None and any(isinstance(prompt, list) for prompt in prompts):
        turn = end_of_turn(tokenizer)
        if turn is not None and _writes_around(tokenizer, turn):
            turns = [
                ("", text) if isinstance(prompt, str) else _last_turn(tokenizer, prompt, text, done, turn)
                for prompt, text, done in zip(prompts, texts, whole, strict=True)
            ]
    ids = _turns_ids(tokenizer, turns)
    return [[*tokens, end] if done else tokens for tokens, done in zip(ids, whole, strict=True)]


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a document to pretrain on: one BOS where there is one, the text, EOS."""
    return texts_ids(tokenizer, [text])[0]


def texts_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """`text_ids` of many texts at once."""
    end = document_end_id(tokenizer)
    return [[*ids, end] for ids in prompts_ids(tokenizer, texts)]


def chat_ids(
    tokenizer: Tokenizer, messages: Messages, trained: Sequence[bool] | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of a dialogue, and which of them count: every assistant reply with its end token, and nothing else.

    The template is rendered up to each reply and again with it; each text must begin with the one before. So the mask
    does not depend on markers in the template, and a template that rewrites earlier turns is noticed. What it writes
    between the assistant's header and the reply (Mistral's blank) counts with the reply: a prompt ends before it.

    Args:
        trained: for each assistant reply whether it counts; None: all do.

    Returns:
        ids and mask of equal length, both ending with the last reply's end token.

    Raises:
        UserError: no assistant message; the template rewrites earlier turns, or ends a turn with no control token.
    """
    stops = _stop_strings(tokenizer)
    messages = [
        {**message, "content": without_end(message["content"], stops)} if message["role"] == "assistant" else message
        for message in messages
    ]
    safe, escaped = escape(tokenizer, messages)
    end = end_of_turn(tokenizer)
    if end is None:
        raise UserError(f"{name_of(tokenizer)} ends the assistant's turn with no control token to stop at")
    ids: list[int] = []
    mask: list[bool] = []
    done = ""
    replies = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    for index, counts in zip(replies, [True] * len(replies) if trained is None else trained, strict=True):
        before, lead, reply, done_next = _one_turn(tokenizer, safe, index, done, end)
        context = encode_rendered(tokenizer, before, escaped, follows=bool(ids))
        ids += context if ids else _with_one_bos(tokenizer, context)
        mask += [False] * (len(ids) - len(mask))
        ids += _turns_ids(tokenizer, [(lead, unescape(reply, escaped))])[0]
        ids.append(_token_id(tokenizer, end))
        mask += [counts] * (len(ids) - len(mask))
        done = done_next
    if not any(mask) or all(mask):
        raise UserError("a dialogue needs an assistant message with something before it")
    text = render(tokenizer, safe[: 1 + _last_assistant(safe)], open_turn=False)
    require_contents(tokenizer, safe[: _last_assistant(safe)], text)
    return ids, mask


def _one_turn(tokenizer: Tokenizer, messages: Messages, index: int, done: str, end: str) -> tuple[str, str, str, str]:
    """Texts of one assistant turn: the new text up to its header, what the template writes between header and reply, the
    reply, and everything up to its end token, which is included."""
    opened = render(tokenizer, messages[:index], open_turn=True) if index else ""
    closed = render(tokenizer, messages[: index + 1], open_turn=False)
    if not (closed.startswith(opened) and opened.startswith(done)):
        raise UserError(
            f"{name_of(tokenizer)} rewrites earlier turns when the dialogue goes on (at message {index}), so it cannot "
            "be trained on whole dialogues; use a training template that keeps the history, or split the rows"
        )
    turn = _split_turn(closed[len(opened) :], messages[index]["content"], end)
    if turn is None:
        raise UserError(f"{name_of(tokenizer)} does not render the reply of message {index} as it stands, then {end!r}")
    lead, reply = turn
    if not index:  # nobody asked: the assistant's own header is what its first words follow
        opened, lead = lead, ""
    return opened[len(done) :], lead, reply, opened + lead + reply + end


def _split_turn(turn: str, content: str, end: str) -> tuple[str, str] | None:
    """What the template wrote before an assistant's reply, and the reply up to its end token; None: it rewrote the reply."""
    body, found, _ = turn.partition(end)
    start = _start_of_reply(body, content)
    return (body[:start], body[start:]) if found and start is not None else None


def _writes_around(tokenizer: Tokenizer, end: str) -> bool:
    """Whether the template writes anything between the assistant's header, its reply and the end token."""
    return _last_turn(tokenizer, [{"role": "user", "content": "Hello"}], PROBE, True, end) != ("", PROBE)


def _last_turn(tokenizer: Tokenizer, prompt: Messages, response: str, ended: bool, end: str) -> tuple[str, str]:
    """What the template writes before a response to messages, and the response as it writes it.

    A response that already begins with it does not get it twice; one that the template rewrites is left as it is.
    """
    if not response.strip():
        return "", response
    messages, escaped = escape(tokenizer, [*prompt, {"role": "assistant", "content": response}])
    opened = render(tokenizer, messages[:-1], open_turn=True)
    closed = render(tokenizer, messages, open_turn=False)
    turn = _split_turn(closed[len(opened) :], messages[-1]["content"], end) if closed.startswith(opened) else None
    if turn is None or (turn[0] and response.startswith(turn[0])):
        return "", response
    return turn[0], unescape(turn[1], escaped) if ended else response


def _turns_ids(tokenizer: Tokenizer, turns: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Ids of (lead, reply) pairs: encoded as one text, except where the lead holds control tokens (a whole header)."""
    apart = [any(string in lead for string in control_strings(tokenizer)) for lead, _ in turns]
    texts = [text if header else lead + text for header, (lead, text) in zip(apart, turns, strict=True)]
    leads = [lead if header else "" for header, (lead, _) in zip(apart, turns, strict=True)]
    heads = encode(tokenizer, leads, control_tokens=True, follows=True) if any(apart) else [[] for _ in turns]
    return [head + ids for head, ids in zip(heads, encode(tokenizer, texts, follows=True), strict=True)]


def _start_of_reply(body: str, content: str) -> int | None:
    """Index of the reply in what the template wrote for it, its blanks trimmed or not; None: it is not there."""
    for text in (content, content.strip()):
        start = body.rfind(text)
        if start >= 0 and not body[start + len(text) :].strip():
            return start
    return None


def _last_assistant(messages: Messages) -> int:
    return max(index for index, message in enumerate(messages) if message["role"] == "assistant")


def without_end(text: str, stops: Sequence[str]) -> str:
    """The text without the end tokens written at its end."""
    while stop := next((stop for stop in stops if text.rstrip().endswith(stop)), None):
        text = text.rstrip().removesuffix(stop)
    return text


def _stop_strings(tokenizer: Tokenizer) -> list[str]:
    return [str(token) for token in tokenizer.convert_ids_to_tokens(sorted(stop_token_ids(tokenizer)))]


def _token_id(tokenizer: Tokenizer, token: str) -> int:
    return tokenizer.convert_tokens_to_ids(token)


def _with_one_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    bos = bos_id(tokenizer)
    if bos is None:
        return ids
    if ids[:2] == [bos, bos]:
        raise UserError(f"{name_of(tokenizer)} writes the BOS twice; one is right")
    return ids if ids[:1] == [bos] or not adds_bos(tokenizer) else [bos, *ids]

"""Messages of a dialogue, tool calls and tool definitions as data files have them, in one form; faults raise `BadRow`.

Understood: OpenAI's messages, also with content as a list of text parts and with the older `function_call`; ShareGPT's
`from` and `value` with the roles `function_call` and `observation`; reasoning under any of its three names.
"""

import json
from collections.abc import Sequence
from typing import Any, cast

from alignment.data.rows.fields import BadRow, text_field, type_name
from alignment.data.rows.records import Columns, Message, Messages, Tools

ROLES = {  # name of a role in data files -> chat templates' name
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "ipython": "tool",
}
CALL_ROLE = "function_call"  # ShareGPT: the text of the message is the call
REASONING = ("reasoning_content", "reasoning", "thinking")


def messages_field(row: Columns, key: str) -> Messages:
    """The messages under `key`.

    Raises:
        BadRow: not a list of messages, an unknown role, content that is not text, a malformed tool call.
    """
    value = row.get(key)
    if not isinstance(value, list):
        raise BadRow(key, f"must be a list of messages, is {type_name(value)}")
    if not value:
        raise BadRow(key, "is an empty list")
    return [_message(message, key, f"{key}[{index}]") for index, message in enumerate(as_chatml(value))]


def as_chatml(messages: Sequence[object]) -> Sequence[Any]:
    """`from`/`value` messages as `role`/`content`, others as they are; the argument is not changed."""
    names = {"from": "role", "value": "content"}
    return [
        {names.get(name, name): value for name, value in message.items()}
        if isinstance(message, dict) and "from" in message
        else message
        for message in messages
    ]


def _message(message: object, key: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRow(key, "a message must be an object with role and content", f"{where} is {type_name(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(key, "unknown role", f"{where} has {role!r}; known: {', '.join(ROLES)}")
    calls = _tool_calls(message, role, key, where)
    if calls and ROLES[role] != "assistant":
        raise BadRow(key, "only the assistant can call tools", f"{where} is the {role}'s")
    content = {"content": None} if role == CALL_ROLE else _joined(message)
    if calls and content.get("content") is None:
        content = {"content": ""}
    try:
        text = text_field(content, "content", may_be_empty=bool(calls) or ROLES[role] == "tool")
    except BadRow as bad:
        raise BadRow(key, f"content of a message {bad.reason.removeprefix('content: ')}", where) from bad
    clean = Message(role=ROLES[role], content=text)
    if calls:
        clean["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if isinstance(value := message.get(name), str) and value:
            clean[name] = value
    thoughts = [message[name] for name in REASONING if message.get(name)]
    if thoughts and ROLES[role] == "assistant":
        if not isinstance(thoughts[0], str):
            raise BadRow(key, f"reasoning must be text, is {type_name(thoughts[0])}", where)
        clean["reasoning_content"] = thoughts[0]
    return clean


def _tool_calls(message: Columns, role: str, key: str, where: str) -> list[dict[str, Any]]:
    """The tool calls of a message in OpenAI's form, arguments as an object."""
    calls = message.get("tool_calls") or []
    if role == CALL_ROLE:
        calls = _decoded(message.get("content"), key, where)
    elif message.get("function_call"):
        calls = message["function_call"]
    return [_call(call, key, where) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: object, key: str, where: str) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise BadRow(key, "a tool call must be an object that names its function", f"{where}: {call!r:.60}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _decoded(arguments or "{}", key, where)
    if not isinstance(arguments, dict | None):
        raise BadRow(key, "the arguments of a tool call must be an object", f"{where}: {arguments!r:.60}")
    clean: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    if isinstance(call, dict) and isinstance(call.get("id"), str):
        clean["id"] = call["id"]
    return clean


def _decoded(text: object, key: str, where: str) -> Any:
    """A tool call, or its arguments, from JSON."""
    try:
        return json.loads(cast("str", text))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(key, "a tool call must be JSON", f"{where}: {text!r:.60}") from error


def _joined(message: Columns) -> Columns:
    """A message whose content is a list of text parts, as OpenAI's may be, with one text; any other as it is."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(texts)}


def tools_field(row: Columns, key: str = "tools") -> Tools | None:
    """The tool definitions under `key`, a list or JSON text, in OpenAI's form; None where there are none.

    Raises:
        BadRow: no list of objects that each name a function.
    """
    value = row.get(key)
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise BadRow(key, "must be a list of tool definitions, or that list as JSON", repr(value)[:60]) from error
    if not value:
        return None
    tools = []
    for tool in value if isinstance(value, list) else [value]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise BadRow(key, "a tool definition must be an object that names its function", repr(tool)[:60])
        tools.append({"type": "function", "function": function})
    return tools


def turn_weights(row: Columns, key: str) -> list[bool | None]:
    """True for each message under `key` that counts, by its own `weight` (0 or 1) or `train`; None where it does not say.

    Raises:
        BadRow: another weight, or a message of someone else than the assistant that is to count.
    """
    weights: list[bool | None] = []
    for message in as_chatml(cast("list[object]", row[key])):
        value = next((message[name] for name in ("weight", "train") if message.get(name) is not None), None)
        if value is not None and value not in (0, 1):
            raise BadRow(key, "the weight of a message must be 0 or 1", repr(value)[:40])
        if value and ROLES[message["role"]] != "assistant":
            raise BadRow(key, "only the assistant's messages can count, another has weight 1", message["role"])
        weights.append(None if value is None else bool(value))
    return weights


def prompt_field(row: Columns, key: str) -> str | Messages:
    """A prompt: text, or messages that do not end with the assistant."""
    if not isinstance(row.get(key), list):
        return text_field(row, key)
    messages = messages_field(row, key)
    if messages[-1]["role"] == "assistant":
        raise BadRow(key, "ends with an assistant message, so nothing is left to answer")
    return messages


def reply_message(row: Columns, key: str) -> Message:
    """A response as an assistant message: text, or a list of exactly one assistant message, or that message itself."""
    value = row.get(key)
    if not isinstance(value, list | dict):
        return Message(role="assistant", content=text_field(row, key))
    messages = messages_field({key: [value] if isinstance(value, dict) else value}, key)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise BadRow(key, "must be one assistant message", f"roles: {', '.join(m['role'] for m in messages)}")
    return messages[0]


def is_plain(message: Message) -> bool:
    """True where a message is its text alone, without tool calls or reasoning."""
    return not (message.get("tool_calls") or message.get("reasoning_content"))


def reply_field(row: Columns, key: str) -> str:
    """The text of a response, as `reply_message`, where it is nothing but text.

    Raises:
        BadRow: the response holds tool calls or reasoning.
    """
    message = reply_message(row, key)
    if not is_plain(message):
        raise BadRow(
            key, "holds tool calls or reasoning, which demonstrations and comparisons can have, these rows not"
        )
    return message["content"]

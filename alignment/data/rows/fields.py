"""Checks of a row's fields: text, numbers, lists, messages, tools. Each returns the clean value or raises `BadRow`.

Messages are understood as OpenAI writes them, also with content as a list of text parts and with the older
`function_call`; and as ShareGPT's `from` and `value` with the roles `function_call` and `observation`; reasoning under
any of its three names.
"""

import json
import math
import re
from collections.abc import Sequence
from itertools import chain
from typing import Any, SupportsFloat, cast

from alignment.data.rows.records import Columns, Message, Messages, Tools, is_plain

# As files write them, in CSV and spreadsheets too
FLAGS = {"true": True, "1": True, "1.0": True, "yes": True, "false": False, "0": False, "0.0": False, "no": False}
HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON can write one; no encoder takes it
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
SPEAKERS = ("user", "assistant")
CALL_ROLE = "function_call"  # ShareGPT: the text of the message is the call
TEXT_ONLY = "holds tool calls or reasoning, which demonstrations and comparisons can have, these rows not"
UNANSWERABLE = "ends with an assistant message, so nothing is left to answer"
REASONING = ("reasoning_content", "reasoning", "thinking")

# Keys of messages. What a key in none of these tables holds is counted as unread.
WEIGHTS = {"weight", "train", "loss", "training", "trainable", "loss_mask", "loss_weight"}  # true where a turn counts
READ_KEYS = {
    "role",
    "content",
    "from",
    "value",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    *REASONING,
    *WEIGHTS,
}
HARMLESS_KEYS = {"id", "index", "timestamp", "language", "model", "annotations", "refusal"}
MEDIA = {"image", "images", "video", "videos", "audio", "audios"}
NO_MEDIA = "pictures, sounds and videos are not taken, and the text alone would be another row"
PLACEHOLDERS = ("<image>", "<video>", "<audio>")  # stand in a text for what a column holds
OTHER_WEIGHTS = "is not understood; `weight` (0 or 1) says which messages count"
REFUSED_KEYS = {  # they change what a message means
    **dict.fromkeys(MEDIA, NO_MEDIA),
    **dict.fromkeys(("mask", "train_detail", "training_detail"), OTHER_WEIGHTS),
    "tools": "the tools of a dialogue belong into the row's column `tools`",
}


class BadRow(Exception):
    """A row that cannot be used.

    Args:
        key: the field at fault.
        why: in the same words for every row that has the fault.
        seen: what the field holds.
    """

    def __init__(self, key: str, why: str, seen: str = ""):
        self.reason = f"{key}: {why}"
        super().__init__(self.reason + (f" ({seen})" if seen else ""))


def type_name(value: object) -> str:
    """The type of a JSON value, in words for a message."""
    names = {type(None): "null", bool: "true/false", int: "a number", float: "a number", str: "text"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def is_given(value: object) -> bool:
    """False for null, empty text, an empty list or object, and one that holds nothing but these."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    return any(part not in (None, "", [], {}) for part in parts)


def _present(row: Columns, key: str) -> Any:
    if key not in row:
        raise BadRow(key, "missing", f"the row has {', '.join(map(str, row))}")
    return row[key]


def text_field(row: Columns, key: str, *, may_be_empty: bool = False) -> str:
    """The text under `key`; null and white space are none, unless it `may_be_empty`."""
    value = _present(row, key)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise BadRow(key, f"must be text, is {type_name(value)}")
    if not value.strip() and not may_be_empty:
        raise BadRow(key, "is empty" if not value else "is only white space")
    if not value.isascii() and HALF_PAIR.search(value):
        raise BadRow(key, "holds half a surrogate pair, which is no text")
    return value


def number_field(row: Columns, key: str) -> float | None:
    """The finite number under `key`, also written as text (CSV); None where it is missing or null."""
    value = row.get(key)
    if value is None or value == "":
        return None
    try:
        parsed = math.nan if isinstance(value, bool) else float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    if not math.isfinite(parsed):
        raise BadRow(key, "must be a finite number", repr(value)[:40])
    return parsed


def required_number(value: object, key: str) -> float:
    """The finite number that a value in the column `key` is."""
    if (parsed := number_field({key: value}, key)) is None:
        raise BadRow(key, "holds no number for a response")
    return parsed


def flag_field(row: Columns, key: str) -> bool:
    """True or false under `key`, also written as 0 or 1, or as text (CSV)."""
    value = _present(row, key)
    if (flag := as_flag(value)) is None:
        raise BadRow(key, "must be true or false (or 1 or 0)", repr(value)[:40])
    return flag


def as_flag(value: object) -> bool | None:
    """The flag that a value is, in any of the spellings of `FLAGS`; None where it is none."""
    return FLAGS.get(str(value).strip().lower()) if isinstance(value, str | bool | int | float) else None


def list_field(row: Columns, key: str, *, may_be_empty: bool = False) -> list[Any]:
    """The list under `key`."""
    value = _present(row, key)
    if not isinstance(value, list):
        raise BadRow(key, f"must be a list, is {type_name(value)}")
    if not value and not may_be_empty:
        raise BadRow(key, "is an empty list")
    return value


def object_field(row: Columns, key: str) -> Columns:
    """The object under `key`."""
    value = row.get(key)
    if not isinstance(value, dict):
        raise BadRow(key, f"must be an object, is {type_name(value)}" if key in row else "missing")
    return value


def objects_field(row: Columns, key: str) -> list[Columns]:
    """The list of objects under `key`; empty where it is missing or null."""
    value = row.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(key, "must be a list of objects", repr(value)[:40])
    return value


# Messages


def messages_field(row: Columns, key: str) -> Messages:
    """The messages under `key`."""
    messages = as_chatml(list_field(row, key))
    return [_message(message, key, f"{key}[{index}]") for index, message in enumerate(messages)]


def as_chatml(messages: Sequence[object]) -> Sequence[Any]:
    """The messages with `role` and `content`, of whatever form; the argument is not changed.

    ShareGPT's have `from` and `value`, Capybara's turns `input` and `output`; LIMA's and UltraChat's are texts, the
    user's first.
    """
    names = {"from": "role", "value": "content"}
    texts = list(messages)
    if texts and all(isinstance(turn, dict) and turn.keys() == {"input", "output"} for turn in texts):
        texts = [*chain.from_iterable((turn["input"], turn["output"]) for turn in cast("list[Columns]", texts))]
    if texts and all(isinstance(text, str) for text in texts):
        return [{"role": SPEAKERS[index % 2], "content": text} for index, text in enumerate(texts)]
    renamed = []
    for message in messages:
        if isinstance(message, dict) and "from" in message:
            renamed.append({names.get(name, name): value for name, value in message.items()})
        else:
            renamed.append(message)
    return renamed


def _message(message: object, key: str, where: str) -> Message:
    if not isinstance(message, dict):
        raise BadRow(key, "a message must be an object with role and content", f"{where} is {type_name(message)}")
    for name in message.keys() & REFUSED_KEYS.keys():
        if is_given(message[name]):
            raise BadRow(key, f"{name} of a message: {REFUSED_KEYS[name]}", where)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(key, "unknown role", f"{where} has {role!r}; known: {', '.join(ROLES)}")
    calls = _tool_calls(message, role, key, where)
    if calls and ROLES[role] != "assistant":
        raise BadRow(key, "only the assistant can call tools", f"{where} is the {role}'s")
    content = None if role == CALL_ROLE else _joined(message.get("content"))
    present = {"content": content} if "content" in message or calls else {}
    try:
        text = text_field(present, "content", may_be_empty=bool(calls) or ROLES[role] == "tool")
    except BadRow as bad:
        seen = f"{where}; {NO_MEDIA}" if isinstance(content, list) else where
        raise BadRow(key, f"content of a message {bad.reason.removeprefix('content: ')}", seen) from bad
    clean = Message(role=ROLES[role], content=text)
    if calls:
        clean["tool_calls"] = calls
    for name in ("name", "tool_call_id"):
        if isinstance(value := message.get(name), str) and value:
            clean[name] = value
    thoughts = next((message[name] for name in REASONING if message.get(name)), None)
    if thoughts is not None and ROLES[role] == "assistant":
        if not isinstance(thoughts, str):
            raise BadRow(key, f"reasoning must be text, is {type_name(thoughts)}", where)
        clean["reasoning_content"] = thoughts
    return clean


def _tool_calls(message: Columns, role: str, key: str, where: str) -> list[dict[str, Any]]:
    """The tool calls of a message in OpenAI's form, arguments as an object."""
    calls = message.get("function_call") or message.get("tool_calls") or []
    if role == CALL_ROLE:
        calls = decoded(message.get("content"), key, where)
    return [_call(call, key, where) for call in (calls if isinstance(calls, list) else [calls])]


def _call(call: object, key: str, where: str) -> dict[str, Any]:
    function = _function(call)
    if function is None or not function["name"]:
        raise BadRow(key, "a tool call must be an object that names its function", f"{where}: {call!r:.60}")
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = decoded(arguments or "{}", key, where)
    if not isinstance(arguments, dict | None):
        raise BadRow(key, "the arguments of a tool call must be an object", f"{where}: {arguments!r:.60}")
    clean: dict[str, Any] = {"type": "function", "function": {"name": function["name"], "arguments": arguments or {}}}
    given = cast("Columns", call)
    if isinstance(given.get("id"), str):
        clean["id"] = given["id"]
    return {name: clean[name] for name in (*given, *clean) if name in clean}  # a template may print the whole call


def _function(item: object) -> dict[str, Any] | None:
    """The object that names a function, which may be in another under `function`."""
    function = item.get("function", item) if isinstance(item, dict) else None
    return function if isinstance(function, dict) and isinstance(function.get("name"), str) else None


def decoded(text: object, key: str, where: str, why: str = "a tool call must be JSON") -> Any:
    """A tool call, its arguments, or the definitions of tools, from JSON."""
    try:
        return json.loads(cast("str", text))
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(key, why, f"{where}: {text!r:.60}") from error


def _joined(content: object) -> object:
    """One text of content that is a list of text parts, as OpenAI's and LLaMA-Factory's may be; any other as it is."""
    parts = content if isinstance(content, list) and content else [None]
    texts = [
        part.get("text", part.get("value")) if isinstance(part, dict) and part.get("type") == "text" else None
        for part in parts
    ]
    return "".join(cast("list[str]", texts)) if all(isinstance(text, str) for text in texts) else content


def tools_field(row: Columns, key: str = "tools") -> Tools | None:
    """The tool definitions under `key`, a list or JSON text, in OpenAI's form; None where there are none."""
    value = row.get(key)
    if isinstance(value, str):
        why = "must be a list of tool definitions, or that list as JSON"
        value = decoded(value, key, key, why) if value.strip() else None
    given = value if isinstance(value, list) else [value] if value else []
    functions = [_function(tool) for tool in given]
    if None in functions:
        wrong = repr(given[functions.index(None)])[:60]
        raise BadRow(key, "a tool definition must be an object that names its function", wrong)
    return [{"type": "function", "function": function} for function in functions] or None


def turn_weights(row: Columns, key: str) -> list[bool | None]:
    """True for each message under `key` that counts, by one of its `WEIGHTS`; None where it does not say."""
    weights: list[bool | None] = []
    for message in as_chatml(cast("list[object]", row[key])):
        given = {name: message[name] for name in sorted(message.keys() & WEIGHTS) if message[name] is not None}
        flags = {as_flag(value) for value in given.values()}
        if None in flags:
            raise BadRow(key, "the weight of a message must be 0 or 1", ", ".join(map(repr, given.values()))[:40])
        if len(flags) > 1:
            raise BadRow(key, "two weights of a message contradict each other", ", ".join(given))
        if True in flags and ROLES[message["role"]] != "assistant":
            raise BadRow(key, "only the assistant's messages can count, another has weight 1", message["role"])
        weights.append(flags.pop() if flags else None)
    return weights


def require_weight(row: Columns, key: str) -> None:
    """Refuse messages under `key` of which the last, the one that is trained on, has weight 0."""
    if turn_weights(row, key)[-1] is False:
        raise BadRow(key, "has weight 0, so nothing in the row counts")


def unread_keys(value: object) -> list[str]:
    """Keys of the messages in a list that nothing reads."""
    messages = value if isinstance(value, list) else []
    return [
        str(key)
        for message in messages
        if isinstance(message, dict) and not message.keys().isdisjoint(("role", "from"))
        for key in message.keys() - READ_KEYS - HARMLESS_KEYS
        if is_given(message[key])
    ]


def prompt_field(row: Columns, key: str) -> str | Messages:
    """A prompt: text, or messages that do not end with the assistant."""
    if not isinstance(row.get(key), list):
        return text_field(row, key)
    messages = messages_field(row, key)
    if messages[-1]["role"] == "assistant":
        raise BadRow(key, UNANSWERABLE)
    return messages


def reply_message(row: Columns, key: str) -> Message:
    """A response as an assistant message: text, or a list of exactly one assistant message, or that message itself."""
    value = row.get(key)
    if not isinstance(value, list | dict):
        return Message(role="assistant", content=text_field(row, key))
    row = {key: [value] if isinstance(value, dict) else value}
    messages = messages_field(row, key)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise BadRow(key, "must be one assistant message", f"roles: {', '.join(m['role'] for m in messages)}")
    require_weight(row, key)
    return messages[0]


def reply_field(row: Columns, key: str) -> str:
    """The text of a response, as `reply_message`, which may hold nothing else."""
    message = reply_message(row, key)
    if not is_plain(message):
        raise BadRow(key, TEXT_ONLY)
    return message["content"]

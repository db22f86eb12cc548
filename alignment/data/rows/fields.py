"""Checks of single fields of a row: text, messages, numbers. Each returns the clean value or raises `BadRow`."""

import math
import re
from collections.abc import Sequence
from typing import Any, SupportsFloat, cast

from alignment.data.rows.records import Columns, Message, Messages

ROLES = {  # name of a role in data files -> chat templates' name
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}

FLAGS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}  # how files write them
HALF_PAIR = re.compile("[\ud800-\udfff]")  # JSON can write one; no encoder takes it


class BadRow(Exception):
    """A row that cannot be used.

    Args:
        key: the field at fault; empty where the row as a whole is.
        why: the fault, in the same words for every row that has it.
        seen: what the field holds.
        advice: the way out, where it is not plain from the fault.
    """

    def __init__(self, key: str, why: str, seen: str = "", *, advice: str = ""):
        self.reason = f"{key}: {why}" if key else why
        super().__init__(self.reason + (f" ({seen})" if seen else "") + (f"; {advice}" if advice else ""))
        self.key = key

    def at(self, location: str) -> str:
        """The message for the row at FILE:LINE."""
        return f"{location}:{self}" if self.key else f"{location}: {self}"


class EqualResponses(BadRow):
    """A row whose responses do not differ, so that it prefers nothing."""

    def __init__(self, responses: str = "chosen and rejected"):
        super().__init__("", f"{responses} are identical", advice="drop the row or set data.skip_ties=true")


def type_name(value: object) -> str:
    """The type of a JSON value, in words for a message."""
    names = {type(None): "null", bool: "true/false", int: "a number", float: "a number", str: "text"}
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def text_field(row: Columns, key: str, *, may_be_empty: bool = False) -> str:
    """The text under `key`.

    Raises:
        BadRow: missing, null, not text, or nothing but white space.
    """
    if key not in row:
        raise BadRow(key, "missing", f"the row has {', '.join(map(str, row))}")
    value = row[key]
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise BadRow(key, f"must be text, is {type_name(value)}")
    if not value.strip() and not may_be_empty:
        raise BadRow(key, "is empty" if not value else "is only white space")
    if HALF_PAIR.search(value):
        raise BadRow(key, "holds half a surrogate pair, which is no text")
    return value


def number_field(row: Columns, key: str) -> float | None:
    """The finite number under `key`, also written as text (CSV); None where it is missing or null."""
    value = row.get(key)
    if value is None or value == "":
        return None
    try:
        number = math.nan if isinstance(value, bool) else float(cast("SupportsFloat", value))
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise BadRow(key, "must be a finite number", repr(value)[:40])
    return number


def flag_field(row: Columns, key: str) -> bool:
    """True or false under `key`, also written as 0 or 1, or as text (CSV).

    Raises:
        BadRow: missing, or anything else.
    """
    if key not in row:
        raise BadRow(key, "missing", f"the row has {', '.join(map(str, row))}")
    value = row[key]
    word = str(value).strip().lower() if isinstance(value, str | bool | int | float) else ""
    if word not in FLAGS:
        raise BadRow(key, "must be true or false (or 1 or 0)", repr(value)[:40])
    return FLAGS[word]


def list_field(row: Columns, key: str) -> list[Any]:
    """The list under `key`.

    Raises:
        BadRow: missing, not a list, or empty.
    """
    if key not in row:
        raise BadRow(key, "missing", f"the row has {', '.join(map(str, row))}")
    value = row[key]
    if not isinstance(value, list):
        raise BadRow(key, f"must be a list, is {type_name(value)}")
    if not value:
        raise BadRow(key, "is an empty list")
    return value


def messages_field(row: Columns, key: str) -> Messages:
    """The messages under `key`, as role and content; ShareGPT's `from` and `value` are understood.

    Raises:
        BadRow: not a list of messages, an unknown role, content that is not text, tool calls.
    """
    value = row.get(key)
    if not isinstance(value, list):
        raise BadRow(key, f"must be a list of messages, is {type_name(value)}")
    if not value:
        raise BadRow(key, "is an empty list")
    return [_message(message, f"{key}[{index}]") for index, message in enumerate(as_chatml(value))]


def as_chatml(messages: Sequence[object]) -> Sequence[Any]:
    """`from`/`value` messages as `role`/`content`, others as they are; the argument is not changed."""
    if not any(isinstance(message, dict) and "from" in message for message in messages):
        return messages
    from trl.data_utils import maybe_convert_to_chatml

    copies = [dict(message) if isinstance(message, dict) else message for message in messages]
    return maybe_convert_to_chatml({"messages": copies})["messages"]


def _message(message: object, key: str) -> Message:
    if not isinstance(message, dict):
        raise BadRow(
            _list_name(key), "a message must be an object with role and content", f"{key} is {type_name(message)}"
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(_list_name(key), "unknown role", f"{key} has {role!r}; known: {', '.join(ROLES)}")
    if message.get("tool_calls"):
        raise BadRow(_list_name(key), "tool calls are not supported", key)
    try:
        return {"role": ROLES[role], "content": text_field(_joined(message), "content")}
    except BadRow as bad:
        raise BadRow(_list_name(key), f"content of a message {bad.reason.removeprefix('content: ')}", key) from bad


def _joined(message: Columns) -> Columns:
    """A message whose content is a list of text parts, as OpenAI's may be, with one text; any other as it is."""
    parts = message.get("content")
    if not isinstance(parts, list) or not parts:
        return message
    texts = [part["text"] for part in parts if isinstance(part, dict) and part.get("type") == "text" and "text" in part]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        return message
    return {**message, "content": "".join(texts)}


def turn_weights(row: Columns, key: str) -> list[bool | None]:
    """Whether each message under `key` counts, by its own `weight` (0 or 1) or `train`; None where it does not say.

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


def _list_name(key: str) -> str:
    """`messages[3]` -> `messages`: faults are counted per column, not per message."""
    return key.partition("[")[0]


def prompt_field(row: Columns, key: str) -> str | Messages:
    """A prompt: text, or messages that do not end with the assistant."""
    if not isinstance(row.get(key), list):
        return text_field(row, key)
    messages = messages_field(row, key)
    if messages[-1]["role"] == "assistant":
        raise BadRow(key, "ends with an assistant message, so nothing is left to answer")
    return messages


def reply_field(row: Columns, key: str) -> str:
    """A response: text, or a list of exactly one assistant message, or that message itself."""
    value = row.get(key)
    if not isinstance(value, list | dict):
        return text_field(row, key)
    messages = messages_field({key: [value] if isinstance(value, dict) else value}, key)
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        raise BadRow(key, "must be one assistant message", f"roles: {', '.join(m['role'] for m in messages)}")
    return messages[0]["content"]

"""Checks of single fields of a row: text, numbers, lists. Each returns the clean value or raises `BadRow`. Messages: messages.py."""

import math
import re
from typing import Any, SupportsFloat, cast

from alignment.data.rows.records import Columns

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


def _present(row: Columns, key: str) -> Any:
    if key not in row:
        raise BadRow(key, "missing", f"the row has {', '.join(map(str, row))}")
    return row[key]


def text_field(row: Columns, key: str, *, may_be_empty: bool = False) -> str:
    """The text under `key`.

    Raises:
        BadRow: missing, null, not text, or nothing but white space.
    """
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
    value = _present(row, key)
    word = str(value).strip().lower() if isinstance(value, str | bool | int | float) else ""
    if word not in FLAGS:
        raise BadRow(key, "must be true or false (or 1 or 0)", repr(value)[:40])
    return FLAGS[word]


def list_field(row: Columns, key: str) -> list[Any]:
    """The list under `key`.

    Raises:
        BadRow: missing, not a list, or empty.
    """
    value = _present(row, key)
    if not isinstance(value, list):
        raise BadRow(key, f"must be a list, is {type_name(value)}")
    if not value:
        raise BadRow(key, "is an empty list")
    return value


def object_field(row: Columns, key: str) -> Columns:
    """The object under `key`.

    Raises:
        BadRow: missing, or anything else.
    """
    value = row.get(key)
    if not isinstance(value, dict):
        raise BadRow(key, f"must be an object, is {type_name(value)}" if key in row else "missing")
    return value


def objects_field(row: Columns, key: str) -> list[Columns]:
    """The list of objects under `key`; empty where it is missing or null.

    Raises:
        BadRow: anything else.
    """
    value = row.get(key) or []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(key, "must be a list of objects", repr(value)[:40])
    return value

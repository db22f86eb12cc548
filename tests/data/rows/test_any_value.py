"""Whatever JSON stands where a field should be, a row is read or refused in words: no parser fails on it otherwise."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from alignment.data.rows.fields import BadRow
from alignment.data.rows.read import ROW_FORMATS, RecordParser
from alignment.data.rows.records import SkippedRow, choose_turns

USER, REPLY, OTHER = (
    {"role": role, "content": text} for role, text in [("user", "u"), ("assistant", "a"), ("assistant", "b")]
)
CALL = {
    "role": "assistant",
    "content": "c",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": "{}"}}],
}
DIALOGUE = [{"role": "system", "content": "s"}, USER, CALL, {"role": "tool", "content": "t"}, {**REPLY, "weight": 1}]
TREE = {
    "role": "prompter",
    "text": "q",
    "replies": [{"role": "assistant", "text": text, "rank": rank} for rank, text in enumerate("ab")],
}
STEPS = [
    {"completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}], "chosen_completion": 0},
    {"completions": [{"text": "c", "rating": -1}], "chosen_completion": None, "human_completion": {"text": "h"}},
]
ROWS: list[tuple[str, dict[str, Any]]] = [
    ("demonstrations", {"messages": DIALOGUE, "tools": [{"type": "function", "function": {"name": "f"}}], "system": "s"}),
    ("demonstrations", {"conversations": [{"from": "human", "value": "u"}, {"from": "gpt", "value": "v"}]}),
    ("demonstrations", {"prompt": [USER], "response": [REPLY]}),
    ("demonstrations", {"instruction": "i", "input": "x", "output": "o", "system": "s"}),
    ("comparisons", {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1}),
    ("comparisons", {"chosen": [USER, REPLY], "rejected": [USER, OTHER]}),
    ("labels", {"messages": [USER, REPLY], "label": 1}),
    ("labels", {"instruction": "i", "output": "o", "kto_tag": "false"}),
    ("rankings", {"prompt": "p", "responses": ["a", "b", "c"], "ranking": [1, [0, "c"]]}),
    ("rankings", {"prompt": "p", "generations": ["a", "b"], "ratings": [1, 2]}),
    ("rankings", {"prompt": "p", "completions": [{"response": "a", "score": 1}, {"response": "b", "overall_score": 2}]}),
    ("rankings", {"message_tree_id": "x", "prompt": TREE}),
    ("steps", {"prompt": "p", "completions": ["a", "b"], "labels": [True, 0]}),
    ("steps", {"question": {"problem": "x"}, "label": {"steps": STEPS}}),
    ("steps", {"input": "Q? Step 1: a ки", "label": "Q? Step 1: a +"}),
]  # fmt: skip
VALUES = [
    None, 0, 1, -1, 2.5, float("nan"), 10**400, True, "", " ", "x", "\ud800", [], [[]], [1], ["x"], [None], [{}], {}, {"a": 1},
    {"role": "user"}, [USER], [{"role": "assistant", "content": None}],
]  # fmt: skip
MISSING = object()


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The way to each value inside a row."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (key,)
        yield from ((key, *rest) for rest in places(part))


def changed(row: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """The row with another value at a place, or without it."""
    row = copy.deepcopy(row)
    holder: Any = row
    for key in place[:-1]:
        holder = holder[key]
    if value is MISSING:
        del holder[place[-1]]
    else:
        holder[place[-1]] = copy.deepcopy(value)
    return row


@pytest.mark.parametrize(("kind", "row"), ROWS, ids=[f"{kind} {'+'.join(row)}" for kind, row in ROWS])
def test_every_value_is_read_or_refused_in_words(kind, row):
    [row_format, *_] = (each for each in ROW_FORMATS[kind] if set(each.columns) <= set(row))
    assert RecordParser(row_format)(row, "file:1")
    refused = 0
    for place in places(row):
        for value in (MISSING, *VALUES):
            try:
                choose_turns(RecordParser(row_format)(changed(row, place, value), "file:1"), "last")
            except (BadRow, SkippedRow):
                refused += 1
    assert refused > 20

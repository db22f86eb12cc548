"""Dialogues as data files have them: OpenAI's tool calls, ShareGPT's roles, reasoning."""

import datasets
import pytest

from alignment.data.rows.read import read_rows
from alignment.data.tokenize import TOKENIZE
from alignment.errors import UserError

HI = {"role": "user", "content": "hi"}
HEY = {"role": "assistant", "content": "hey"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ANSWER = {"role": "tool", "content": "3"}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def read_one(path, kind="demonstrations"):
    [record], _ = read_rows(path, kind)
    return record


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}]},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {"a": 1, "b": 2}}]},
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": '{"a": 1, "b": 2}'}},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
        {"from": "function_call", "value": '[{"name": "add", "parameters": {"a": 1, "b": 2}}]'},
    ],
)
def test_every_way_to_write_a_tool_call_is_one_call(jsonl, turn):
    row = {"messages": [HI, turn, {"role": "function", "name": "add", "content": "3"}, HEY], "tools": [TOOL]}
    record = read_one(jsonl(row))
    assert record.messages == [HI, CALLING, {**ANSWER, "name": "add"}, HEY]
    assert record.tools == [TOOL] and record.trained is None


def test_ids_of_calls_and_of_what_they_answer_are_kept(jsonl):
    turns = [HI, {**CALLING, "tool_calls": [{**CALL, "id": "c1"}]}, {**ANSWER, "tool_call_id": "c1"}, HEY]
    assert read_one(jsonl({"messages": turns})).messages == turns


@pytest.mark.parametrize("keys", [["id", "type", "function"], ["function", "id", "type"], ["id", "function"]])
def test_the_keys_of_a_call_keep_their_order(jsonl, keys):
    """A template may print the whole call; a type that is missing stands last."""
    call = {**CALL, "id": "c1"}
    row = {"messages": [HI, {**CALLING, "tool_calls": [{key: call[key] for key in keys}]}]}
    [written] = read_one(jsonl(row)).messages[1]["tool_calls"]
    assert written == call and [*written] == [*keys, *("type",)[: 3 - len(keys)]]


def test_nulls_of_arrow_are_no_keys_and_those_of_json_are(tmp_path, jsonl):
    """[C5] A column of Arrow has one struct for all rows, so each call has the arguments of every other, as null."""
    rows = []
    for argument in ("city", "zone"):
        call = {"type": "function", "function": {"name": f"get_{argument}", "arguments": {argument: "x"}}}
        properties = {argument: {"type": "string"}}
        tool = {"name": f"get_{argument}", "parameters": {"type": "object", "properties": properties}}
        turns = [HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
        rows.append({"messages": turns, "tools": [tool], f"only_{argument}": 1})
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    read = [read_rows(path, "demonstrations")[0] for path in (jsonl(*rows), tmp_path / "rows.parquet")]
    assert [[(each.messages, each.tools) for each in records] for records in read] == [
        [
            ([HI, {**row["messages"][1], "content": ""}], [{"type": "function", "function": row["tools"][0]}])
            for row in rows
        ]
    ] * 2
    null = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
    record = read_one(jsonl({"messages": [HI, {**CALLING, "tool_calls": [null]}], "tools": [TOOL]}))
    assert record.messages[1]["tool_calls"] == [null]


def test_nulls_of_other_columns_of_arrow_are_kept(tmp_path):
    """A reward function is given what its column holds."""
    rows = [{"prompt": "a", "extra_info": {"x": 1, "y": None}}, {"prompt": "b", "extra_info": {"x": None, "y": 2}}]
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "rows.parquet"))
    records, _ = read_rows(tmp_path / "rows.parquet", "prompts")
    assert [record.extra["extra_info"] for record in records] == [row["extra_info"] for row in rows]


@pytest.mark.parametrize(
    ("kind", "row"),
    [
        ("demonstrations", {"prompt": [HI], "completion": [HEY]}),
        ("demonstrations", {"messages": [HI, HEY, HI, HEY], "system": "Be kind."}),
        ("demonstrations", {"messages": [HI, {**HEY, "weight": 0}, HI, HEY]}),
        ("comparisons", {"prompt": [HI], "chosen": "a", "rejected": "b"}),
        ("prompts", {"prompt": [HI], "answer": "x"}),
        ("labels", {"messages": [HI, HEY], "label": True}),
        ("rankings", {"prompt": [HI], "responses": ["a", "b"], "ranks": [1, 2]}),
    ],
)
def test_template_variables_of_a_row_reach_the_template(jsonl, chatml, kind, row):
    """[C9] trl's column; a null is as good as none, since Arrow gives all rows the keys of every row."""
    chatml.chat_template = "{% if mood is defined %}mood {{ mood }}{% endif %}" + chatml.chat_template
    for variables, written in [({"mood": "calm"}, True), ({"mood": None}, False), ({"other": 1}, False), ({}, False)]:
        records, counts = read_rows(jsonl({**row, "chat_template_kwargs": variables}), kind)
        examples, _ = TOKENIZE[kind](records, chatml, 512)
        text = chatml.decode(examples[0].documents[0])
        assert ("mood calm" in text) is written and not counts.unread
    with pytest.raises(UserError, match="chat_template_kwargs: must be an object"):
        read_rows(jsonl({**row, "chat_template_kwargs": "mood"}), kind)
    records, _ = read_rows(jsonl({**row, "chat_template_kwargs": {"messages": []}}), kind)
    with pytest.raises(UserError, match="multiple values for keyword argument 'messages'"):
        TOKENIZE[kind](records, chatml, 512)


def test_sharegpt_with_system_tools_and_observations(jsonl):
    turns = [
        {"from": "human", "value": "hi"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1, "b": 2}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "hey"},
    ]
    row = {"conversations": turns, "system": "Be kind.", "tools": '[{"name": "add", "parameters": {"type": "object"}}]'}
    record = read_one(jsonl(row))
    assert record.messages == [{"role": "system", "content": "Be kind."}, HI, CALLING, ANSWER, HEY]
    assert record.tools == [TOOL]


def test_a_last_turn_that_calls_or_thinks_is_kept_as_a_message(jsonl):
    record = read_one(jsonl({"messages": [HI, CALLING], "tools": [TOOL]}))
    assert (record.prompt, record.response, record.messages, record.trained) == ([HI], "", [HI, CALLING], None)
    thinking = {**HEY, "thinking": "hm"}
    clean = {**HEY, "reasoning_content": "hm"}
    record = read_one(jsonl({"prompt": [HI, HEY, HI], "completion": [thinking]}))
    assert (record.messages, record.trained) == ([HI, HEY, HI, clean], (False, True))
    pair = read_one(jsonl({"prompt": [HI], "chosen": thinking, "rejected": HEY}), "comparisons")
    assert (pair.chosen, pair.rejected, pair.messages) == ("hey", "hey", (clean, HEY))
    assert read_one(jsonl({"prompt": [HI], "chosen": [thinking], "rejected": [HEY]})).messages == [HI, clean]


HH = "\n\nHuman: hello\n\nAssistant: hi\n\nHuman: more"
USER = [{"role": "user", "content": "more words"}]


@pytest.mark.parametrize(
    ("kind", "row", "prompt", "responses"),
    [
        ("demonstrations", {"prompt": "more words\n", "completion": " yes"}, USER, ["yes"]),
        (
            "demonstrations",
            {"instruction": "more", "input": "words", "output": "yes"},
            [{"role": "user", "content": "more\nwords"}],
            ["yes"],
        ),
        ("prompts", {"prompt": "more words", "answer": "4"}, USER, []),
        ("labels", {"prompt": "more words", "completion": "yes", "label": True}, USER, ["yes"]),
        ("rankings", {"prompt": "more words", "responses": [" a", " b"], "ranking": [1, 0]}, USER, ["a", "b"]),
        (
            "comparisons",
            {"chosen": f"{HH}\n\nAssistant: yes", "rejected": f"{HH}\n\nAssistant: no"},
            [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "hi"},
                {"role": "user", "content": "more"},
            ],
            ["yes", "no"],
        ),
    ],
)
def test_text_prompts_become_messages_where_that_is_asked(jsonl, kind, row, prompt, responses):
    [record], _ = read_rows(jsonl(row), kind, as_messages=True)
    assert record.prompt == prompt
    names = ("response", "chosen", "rejected")
    found = [getattr(record, name) for name in names if hasattr(record, name)] or list(getattr(record, "responses", []))
    assert found == responses
    assert getattr(record, "extra", {}) == ({"answer": "4"} if kind == "prompts" else {})

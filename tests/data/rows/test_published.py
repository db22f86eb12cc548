"""Rows of preferences, dialogues and tool calls in the columns that they are published in."""

import json

import pytest

from alignment.data.rows.published import PARTED
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import ALL_TIED
from alignment.errors import UserError

ASKED = [{"role": "user", "content": "Is it open?"}]
NAY = {"role": "assistant", "content": "nay"}
YEA = {"role": "assistant", "content": "yea"}
POST = {"subreddit": "x", "title": "T", "post": "Is it open?", "article": None}
TLDR = "SUBREDDIT: r/x\n\nTITLE: T\n\nPOST: Is it open?\n\nTL;DR:"
SIDES = [{"text": "nay", "policy": "a"}, {"text": "yea", "policy": "b"}]
ARENA = {"conversation_a": [*ASKED, NAY], "conversation_b": [*ASKED, YEA]}
BATTLE = {"prompt": '["Is it open?"]', "response_a": '["nay"]', "response_b": '["yea"]'}
PKU = {"prompt": "p", "response_0": "nay", "response_1": "yea", "safer_response_id": 0}
HELP2 = {"prompt": "p", "response_1": "nay", "response_2": "yea"}
HELP3 = {"context": ASKED, "response1": "nay", "response2": "yea"}
SHP = {"history": "p", "human_ref_A": "nay", "human_ref_B": "yea", "score_A": 2, "score_B": 9}
WEBGPT = {"question": {"full_text": "p", "id": "i"}, "answer_0": "nay", "answer_1": "yea"}
V1 = [{"type": "text", "value": "Is it open?"}]


def v1(text):
    asked = {"role": "user", "content": V1, "loss_weight": 0.0}
    return [asked, {"role": "assistant", "content": [{"type": "text", "value": text}], "loss_weight": 1.0}]


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "margin"),
    [
        ({**PKU, "better_response_id": 1}, "p", "yea", None),
        ({**PKU, "better_response_id": "0"}, "p", "nay", None),
        ({**HELP2, "preference_strength": 2}, "p", "yea", 2.0),
        ({**HELP2, "preference_strength": -3}, "p", "nay", 3.0),
        ({**HELP3, "overall_preference": 1}, ASKED, "yea", 1.0),
        ({**HELP3, "overall_preference": -1}, ASKED, "nay", 1.0),
        ({**SHP, "labels": 0}, "p", "yea", None),
        ({**SHP, "labels": 1}, "p", "nay", None),
        ({**WEBGPT, "score_0": -0.5, "score_1": 0.5}, "p", "yea", None),
        ({**WEBGPT, "question": "p", "score_0": 1, "score_1": -1}, "p", "nay", None),
        ({"info": POST, "summaries": SIDES, "choice": 1, "worker": "w"}, TLDR, "yea", None),
        ({"info": {"article": "News."}, "summaries": SIDES, "choice": 0}, "News.\n\nTL;DR:", "nay", None),
        ({**ARENA, "winner": "model_b"}, ASKED, "yea", None),
        ({**ARENA, "winner": "model_a"}, ASKED, "nay", None),
        ({**BATTLE, "winner_model_a": 0, "winner_model_b": 1, "winner_tie": 0}, ASKED, "yea", None),
        ({**BATTLE, "winner_model_a": "1", "winner_model_b": "0", "winner_tie": "0"}, ASKED, "nay", None),
        ({"trajectory": ASKED, "chosen": "yea", "rejected": "nay", "id": "i"}, ASKED, "yea", None),
        ({"chosen_messages": v1("yea"), "rejected_messages": v1("nay")}, ASKED, "yea", None),
    ],
)
def test_published_pairs(jsonl, row, prompt, chosen, margin):
    """The prompt, the preferred side and by how much; the same row is a demonstration, a ranking, and two labels."""
    path = jsonl(row)
    [pair], counts = read_rows(path, "comparisons")
    assert (pair.prompt, pair.chosen, pair.margin) == (prompt, chosen, margin)
    assert {pair.chosen, pair.rejected} == {"nay", "yea"}
    assert (counts.rows, counts.kept) == (1, 1)
    assert read_rows(path, "demonstrations")[0][0].response == chosen
    assert read_rows(path, "rankings")[0][0].responses[0] == chosen
    assert [label.desirable for label in read_rows(path, "labels")[0]] == [True, False]


@pytest.mark.parametrize(
    ("row", "tie"),
    [
        ({**HELP2, "preference_strength": 1}, {"preference_strength": 0}),
        ({**WEBGPT, "score_0": -1, "score_1": 1}, {"score_0": 0, "score_1": 0}),
        ({**ARENA, "winner": "model_b"}, {"winner": "tie (bothbad)"}),
        ({**ARENA, "winner": "model_b"}, {"winner": "tie"}),
        ({**BATTLE, "winner_model_a": 0, "winner_model_b": 1}, {"winner_model_b": 0}),
    ],
)
def test_published_ties_are_counted(jsonl, row, tie):
    path = jsonl({**row, **tie}, row)
    for kind in ("comparisons", "demonstrations", "labels"):
        rows, counts = read_rows(path, kind)
        assert rows[0].row_id.startswith(f"{path}:2")
        assert counts.dropped == {ALL_TIED: 1}
    assert [ranking.ranks for ranking in read_rows(path, "rankings")[0]] == [(0, 0), (0, 1)]


def test_dialogues_that_part_early_are_counted(jsonl):
    later = {model: [*messages, *ASKED, YEA] for model, messages in ARENA.items()}
    one = {**BATTLE, "winner_model_a": 1, "winner_model_b": 0}
    two = {**one, **dict.fromkeys(BATTLE, '["a", "b"]')}
    for first, second in [({**ARENA, "winner": "model_a"}, {**later, "winner": "model_a"}), (one, two)]:
        rows, counts = read_rows(jsonl(second, first), "comparisons")
        assert (len(rows), counts.dropped) == (1, {PARTED: 1})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**PKU, "better_response_id": 2}, "better_response_id: must be one of 0, 1"),
        ({**PKU, "better_response_id": None}, "better_response_id: holds no number"),
        ({**HELP3, "overall_preference": -100}, "overall_preference: must be one of"),
        ({**ARENA, "winner": "both"}, "winner: must be one of"),
        (
            {**BATTLE, "response_a": "nay", "winner_model_a": 0, "winner_model_b": 1},
            "response_a: must be a list as JSON",
        ),
        ({"info": POST, "summaries": SIDES[:1], "choice": 1}, "no comparisons here"),
        ({"info": {"post": None}, "summaries": SIDES, "choice": 1}, "article: missing"),
    ],
)
def test_bad_published_pairs(jsonl, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(row), "comparisons")


def test_another_verdict_is_named_in_columns(jsonl):
    path = jsonl({**PKU, "better_response_id": 1})
    [pair], _ = read_rows(path, "comparisons", columns={"better_response_id": "safer_response_id"})
    assert pair.chosen == "nay"


def test_several_right_and_wrong_responses(jsonl):
    path = jsonl({"prompt": "p", "chosen": ["a", "b"], "rejected": ["c"], "num_correct": 2})
    assert read_rows(path, "rankings")[0][0].ranks == (0, 0, 1)
    pairs = [(pair.chosen, pair.rejected) for pair in read_rows(path, "comparisons")[0]]
    assert pairs == [("a", "c"), ("b", "c")]


@pytest.mark.parametrize(
    "row",
    [
        {"conversations": ["Is it open?", "yea"]},  # LIMA
        {"id": "0", "data": ["Is it open?", "yea"]},  # UltraChat
        {"conversation": [{"input": "Is it open?", "output": "yea"}]},  # Capybara
        {"conversation": [*ASKED, YEA]},  # LMSYS-Chat, WildChat
        {"messages": v1("yea")},  # LLaMA-Factory
    ],
)
def test_published_dialogues(jsonl, row):
    [dialogue], _ = read_rows(jsonl(row), "demonstrations")
    assert (dialogue.prompt, dialogue.response) == (ASKED, "yea")


def test_turns_of_a_published_dialogue(jsonl):
    turns = {"conversation": [{"input": "a", "output": "b"}, {"input": "c", "output": "d"}]}
    for row in (turns, {"data": ["a", "b", "c", "d"]}):
        [dialogue], _ = read_rows(jsonl(row), "demonstrations")
        assert [message["content"] for message in dialogue.messages] == ["a", "b", "c", "d"]
        assert [message["role"] for message in dialogue.prompt] == ["user", "assistant", "user"]


def test_calls_in_a_column_become_tool_calls(jsonl):
    calls = [{"name": "look", "arguments": {"city": "Paris"}}]
    tools = [{"name": "look", "description": "d", "parameters": {}}]
    row = {"query": "Is it open?", "answers": json.dumps(calls), "tools": json.dumps(tools)}
    [reply], _ = read_rows(jsonl(row), "demonstrations")
    assert (reply.prompt, reply.response) == (ASKED, "")
    assert reply.messages[-1]["tool_calls"] == [{"type": "function", "function": calls[0]}]
    assert reply.tools == [{"type": "function", "function": tools[0]}]


def test_the_first_of_several_questions_is_the_prompt(jsonl):
    [prompt], _ = read_rows(jsonl({"question_id": 81, "turns": ["p", "And then?"]}), "prompts")
    assert (prompt.prompt, prompt.extra["turns"]) == ("p", ["p", "And then?"])


def test_what_follows_the_last_reply_is_left_out_and_counted(jsonl):
    path = jsonl(
        {"messages": [*ASKED, YEA, *ASKED]},
        {"messages": [*ASKED, YEA]},
        {"messages": [*ASKED, NAY, *ASKED, YEA, *ASKED]},
    )
    rows, counts = read_rows(path, "demonstrations")
    assert [(row.prompt, row.response) for row in rows[:2]] == [(ASKED, "yea")] * 2
    assert rows[2].messages == [*ASKED, NAY, *ASKED, YEA]
    assert counts.unread == {"messages after the last reply": 2}
    with pytest.raises(UserError, match="no message of the assistant"):
        read_rows(jsonl({"messages": ASKED}), "demonstrations")
    with pytest.raises(UserError, match="the last message is not the assistant's"):
        read_rows(jsonl({"messages": [*ASKED, YEA, *ASKED], "label": True}), "labels")


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        ({"output": "yea"}, "demonstrations"),
        ({"chosen": "yea", "rejected": "nay"}, "comparisons"),
        ({"output": "yea", "kto_tag": True}, "labels"),
        ({"responses": ["yea", "nay"], "ranks": [0, 1]}, "rankings"),
        ({}, "prompts"),
    ],
)
def test_history_is_the_beginning_of_the_prompt(jsonl, row, kind):
    """LLaMA-Factory's pairs of what the user said and the reply, also with a system message."""
    row = {"instruction": "Is it", "input": "open?", "system": "Be kind.", "history": [["hi", "hey"]], **row}
    expected = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "hey"},
        {"role": "user", "content": "Is it\nopen?"},
    ]
    assert read_rows(jsonl(row), kind)[0][0].prompt == expected
    assert read_rows(jsonl({**row, "system": None}), kind)[0][0].prompt == expected[1:]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"instruction": "a", "output": "b", "history": ["hi"]}, "history: must be a list of pairs"),
        ({"instruction": "a", "output": "b", "history": [["hi", ""]]}, "history: content of a message is empty"),
        ({"messages": [*ASKED, YEA], "instruction": "a", "history": [["a", "b"]]}, "history: earlier turns"),
        ({"prompt": ASKED, "completion": "b", "history": [["a", "b"]]}, "history: earlier turns"),
    ],
)
def test_bad_history(jsonl, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(row), "demonstrations")


def marked(*marks):
    texts = ["Q? Step 1: a", "Step 2: b"]
    turns = [
        ({"role": "user", "content": text}, {"role": "assistant", "content": mark})
        for text, mark in zip(texts, marks, strict=True)
    ]
    return {"conversations": [message for turn in turns for message in turn]}


@pytest.mark.parametrize(
    ("row", "steps", "labels"),
    [
        (marked("+", "-"), ("Step 1: a", "Step 2: b"), (True, False)),
        ({"problem": "Q? ", "steps": ["a", "b", "c"], "label": 1}, ("a", "b"), (True, False)),
        ({"problem": "Q? ", "steps": ["a", "b"], "label": -1}, ("a", "b"), (True, True)),
    ],
)
def test_published_steps(jsonl, row, steps, labels):
    [record], _ = read_rows(jsonl(row), "steps")
    assert (record.prompt, record.steps, record.labels) == ("Q? ", steps, labels)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (marked("+", "maybe"), "conversations: each step must be answered"),
        (
            {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "+"}]},
            "has no question",
        ),
        ({"problem": "p", "steps": ["a"], "label": 1}, "label: must be the number of a step"),
    ],
)
def test_bad_published_steps(jsonl, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(row), "steps")


@pytest.mark.parametrize("thoughts", ["Hm.", ["Hm."]])
def test_a_column_of_thoughts_is_named(jsonl, thoughts):
    """A text, or s1K's list of one; without the setting the column stays unread."""
    path = jsonl({"question": "Is it open?", "answer": "yea", "trace": thoughts})
    columns = {"prompt": "question", "completion": "answer"}
    thinking = {**columns, "reasoning": "trace"}
    [reply], counts = read_rows(path, "demonstrations", columns=thinking, as_messages=True)
    assert reply.messages == [*ASKED, {**YEA, "reasoning_content": "Hm."}]
    assert (reply.response, counts.unread) == ("yea", {})
    assert read_rows(path, "demonstrations", columns=columns)[1].unread == {"trace": 1}
    with pytest.raises(UserError, match="as_messages"):
        read_rows(path, "demonstrations", columns=thinking)
    with pytest.raises(UserError, match="reasoning: comparisons have no such column"):
        read_rows(path, "comparisons", columns={"reasoning": "trace"})


def test_thoughts_beside_a_dialogue(jsonl):
    row = {"messages": [*ASKED, NAY, *ASKED, YEA], "why": "Hm."}
    [reply], _ = read_rows(jsonl(row), "demonstrations", columns={"reasoning": "why"})
    assert reply.messages == [*ASKED, NAY, *ASKED, {**YEA, "reasoning_content": "Hm."}]
    row = {"messages": [*ASKED, {**YEA, "thinking": "So."}], "why": "Hm."}
    with pytest.raises(UserError, match="reasoning: stands in the reply too"):
        read_rows(jsonl(row), "demonstrations", columns={"reasoning": "why"})


@pytest.mark.parametrize(
    ("row", "kind", "way"),
    [
        (
            {"question": "p", "answer": "a"},
            "demonstrations",
            "data.columns.prompt=question data.columns.completion=answer",
        ),
        ({"prompt": "p", "label": "a"}, "demonstrations", "data.columns.completion=label"),
        ({"prompt": "p", "response": "a", "is_safe": True}, "labels", "data.columns.label=is_safe"),
        ({"completion": [*ASKED, YEA], "label": True}, "labels", "data.columns.messages=completion"),
        ({"context_messages": ASKED, "label": "5"}, "prompts", "data.columns.prompt=context_messages"),
        ({"question": "p", "chosen": "a", "rejected": "b"}, "comparisons", "data.columns.prompt=question"),
        ({"messages": ASKED, "chosen": YEA, "rejected": NAY}, "comparisons", "data.columns.prompt=messages"),
        (
            {"messages": ASKED, "answer": "a"},
            "demonstrations",
            "data.columns.prompt=messages data.columns.completion=answer",
        ),
        ({"prompt": "p", "one": "a", "two": "b", "best": 1}, "comparisons", "write chosen and rejected"),
    ],
)
def test_a_refusal_names_the_columns(jsonl, row, kind, way):
    """The settings that it names make the rows readable."""
    path = jsonl(row)
    with pytest.raises(UserError, match=way):
        read_rows(path, kind)
    if "=" in way:
        columns = dict(setting.removeprefix("data.columns.").split("=") for setting in way.split())
        assert len(read_rows(path, kind, columns=columns)[0]) == 1

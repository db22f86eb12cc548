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

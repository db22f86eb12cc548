"""Rows of labels, rankings and steps: every format people have, and every fault in words."""

from dataclasses import replace

import pytest

from alignment.data.rows.formats import alpaca_prompt
from alignment.data.rows.rankings import NO_RANKED_REPLIES
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import ALL_TIED, EQUAL_PAIR, EXPANDED, Comparison, Ranking, Steps
from alignment.data.rows.records import LabeledResponse as Label
from alignment.errors import UserError

HI = {"role": "user", "content": "hi"}
HEY = {"role": "assistant", "content": "hey"}
YO = {"role": "assistant", "content": "yo"}
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hey"}]
THREE = {"prompt": "p", "responses": ["a", "b", "c"]}


def read_one(path, kind):
    [record], counts = read_rows(path, kind)
    assert (counts.rows, counts.kept, counts.lost, counts.noted) == (1, 1, 0, {})
    assert record.row_id.endswith("rows.jsonl:1")
    return record


def same(record, expected):
    return replace(record, row_id="") == expected


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "p", "completion": "a", "label": True}, Label("p", "a", True, "")),
        ({"prompt": "p", "response": "a", "label": 0}, Label("p", "a", False, "")),
        ({"prompt": "p", "completion": "a", "label": "True"}, Label("p", "a", True, "")),
        ({"prompt": "p", "completion": "a", "kto_tag": "0"}, Label("p", "a", False, "")),
        ({"prompt": [HI], "completion": [HEY], "label": 1.0}, Label([HI], "hey", True, "")),
        ({"messages": [HI, HEY, HI, YO], "label": False}, Label([HI, HEY, HI], "yo", False, "")),
        ({"conversations": SHAREGPT, "kto_tag": True}, Label([HI], "hey", True, "")),
        ({"instruction": "Go.", "input": "", "output": "ok", "kto_tag": False}, Label(alpaca_prompt("Go."), "ok", False, "")),
    ],
)  # fmt: skip
def test_labels(jsonl, row, expected):
    assert same(read_one(jsonl(row), "labels"), expected)


def test_a_pair_is_two_labels_each_a_row_with_its_own_id(jsonl):
    path = jsonl({"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "chosen": "c", "rejected": "c"})
    rows, counts = read_rows(path, "labels")
    assert rows == [Label("p", "a", True, f"{path}:1[chosen]"), Label("p", "b", False, f"{path}:1[rejected]")]
    assert (counts.rows, counts.kept, counts.noted, counts.dropped) == (3, 2, {EXPANDED: 1}, {EQUAL_PAIR: 1})
    assert f"  noted 1: {EXPANDED} ({path}:1)" in counts.lines()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "p", "completion": "a", "label": 2}, r":1:label: must be true or false \(or 1 or 0\) \(2\)"),
        ({"messages": [HEY], "label": True}, "messages: an assistant message alone has no prompt"),
        ({"prompt": "p", "completion": "a"}, "no labels here: found columns prompt, completion"),
    ],
)
def test_bad_labels(jsonl, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(row), "labels")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({**THREE, "ranking": [2, 0, 1]}, Ranking("p", ("a", "b", "c"), (1, 2, 0), "")),
        ({**THREE, "ranking": [[2, 0], 1]}, Ranking("p", ("a", "b", "c"), (0, 1, 0), "")),
        ({**THREE, "ranking": ["b", ["c", "a"]]}, Ranking("p", ("a", "b", "c"), (1, 0, 1), "")),
        ({**THREE, "ranks": [3, 1, 1]}, Ranking("p", ("a", "b", "c"), (1, 0, 0), "")),
        ({**THREE, "scores": [1, 7.5, 1]}, Ranking("p", ("a", "b", "c"), (1, 0, 1), "", (1.0, 7.5, 1.0))),
        ({"instruction": "Go on.", "generations": ["a", "b"], "ratings": [4, 5]}, Ranking("Go on.", ("a", "b"), (1, 0), "", (4.0, 5.0))),
        (  # UltraFeedback
            {
                "instruction": "Go on.",
                "completions": [
                    {"response": "a", "overall_score": 8.5, "model": "x"},
                    {"response": "b", "overall_score": "9"},
                ],
            },
            Ranking("Go on.", ("a", "b"), (1, 0), "", (8.5, 9.0)),
        ),
        (  # Nectar
            {"prompt": "p", "answers": [{"answer": "a", "rank": 2.0}, {"answer": "b", "rank": 1.0}]},
            Ranking("p", ("a", "b"), (1, 0), ""),
        ),
        (
            {"prompt": [HI], "responses": [[HEY], [YO]], "ranking": [1, 0], "margin": 0.5},
            Ranking([HI], ("hey", "yo"), (1, 0), "", None, 0.5),
        ),
        (
            {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 2, "score_chosen": 9, "score_rejected": 3},
            Ranking("p", ("a", "b"), (0, 1), "", (9.0, 3.0), 2.0),
        ),
        ({"chosen": [HI, HEY], "rejected": [HI, YO]}, Ranking([HI], ("hey", "yo"), (0, 1), "")),
    ],
)  # fmt: skip
def test_rankings(jsonl, row, expected):
    assert same(read_one(jsonl(row), "rankings"), expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**THREE, "ranking": ["a", "b", "d"]}, r"names a response that is not there \('d'"),
        ({**THREE, "ranking": "abc"}, "ranking: must be a list, is text"),
        ({**THREE, "scores": [1, 2]}, r"scores: must be as many as responses \(2 and 3\)"),
        ({**THREE, "scores": [1, 2, None]}, "scores: holds no number for a response"),
        ({**THREE, "ranking": [0, 1, 2], "margin": 1}, "margin: tells by how much the better of two"),
        ({"prompt": "p", "completions": ["a", "b"]}, "must hold objects with a response and a score, holds text"),
        ({"prompt": "p", "completions": [{"response": "a"}]}, "completions: a response without its score"),
        ({"prompt": "p", "completions": [{"score": 1}]}, "completions: a response without its response"),
        ({"completions": [{"response": "a", "score": 1}, {"response": "b", "score": 1}]}, "prompt: missing"),
    ],
)
def test_bad_rankings(jsonl, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(row), "rankings")


def test_rankings_are_comparisons_of_every_ordered_pair(jsonl):
    path = jsonl({**THREE, "ranking": [2, [0, 1]]}, {**THREE, "ranking": [[0, 1, 2]]}, {**THREE, "ranking": [1, 0, 2]})
    rows, counts = read_rows(path, "comparisons")
    assert rows[:2] == [
        Comparison("p", "c", "a", None, f"{path}:1[2>0]"),
        Comparison("p", "c", "b", None, f"{path}:1[2>1]"),
    ]
    assert [(row.chosen, row.rejected) for row in rows[2:]] == [("a", "c"), ("b", "a"), ("b", "c")]
    assert (counts.rows, counts.kept, counts.noted, counts.dropped) == (6, 5, {EXPANDED: 2}, {ALL_TIED: 1})
    assert len(read_rows(path, "comparisons", max_rows=1)[0]) == 2  # a row is kept whole


def message(text, role="assistant", rank=None, replies=(), **more):
    return {"text": text, "role": role, "rank": rank, "replies": list(replies), **more}


TREE = {
    "message_tree_id": "t",
    "prompt": message(
        "q",
        "prompter",
        replies=[
            message("bad", rank=1),
            message(
                "good",
                rank=0,
                replies=[message("q2", "prompter", replies=[message("x", rank=0), message("y", rank=1), message("z")])],
            ),
            message("gone", rank=2, deleted=True),
        ],
    ),
}


def test_every_prompt_of_a_tree_with_ranked_replies_is_a_ranking(jsonl):
    path = jsonl(TREE, {"message_tree_id": "u", "prompt": message("q", "prompter", replies=[message("a", rank=0)])})
    rows, counts = read_rows(path, "rankings")
    user, good, second = (
        {"role": role, "content": text} for role, text in [("user", "q"), ("assistant", "good"), ("user", "q2")]
    )
    assert rows == [
        Ranking([user], ("bad", "good"), (1, 0), f"{path}:1"),
        Ranking([user, good, second], ("x", "y"), (0, 1), f"{path}:1[1.0]"),
    ]
    assert counts.dropped == {NO_RANKED_REPLIES: 1}
    assert [row.row_id for row in read_rows(path, "comparisons")[0]] == [f"{path}:1[1>0]", f"{path}:1[1.0][0>1]"]


def test_steps_of_trl(jsonl):
    row = {"prompt": "p", "completions": ["one", "two"], "labels": [True, 0]}
    assert same(read_one(jsonl(row), "steps"), Steps("p", ("one", "two"), (True, False), ""))


def test_steps_of_prm800k(jsonl):
    """The solution that was followed, and before it each other continuation that was rated."""
    steps = [
        {"completions": [{"text": "a", "rating": 1}, {"text": "b", "rating": -1}], "chosen_completion": 0},
        {"completions": [{"text": "c", "rating": 0}], "chosen_completion": None, "human_completion": {"text": "d"}},
        {"completions": [{"text": "e", "rating": -1}], "chosen_completion": None, "human_completion": None},
    ]
    path = jsonl({"question": {"problem": "p"}, "label": {"steps": steps}})
    rows, counts = read_rows(path, "steps")
    assert [(row.steps, row.labels) for row in rows] == [
        (("b",), (False,)),
        (("a", "c"), (True, True)),  # neutral is right
        (("a", "d", "e"), (True, True, False)),
    ]
    assert [row.row_id for row in rows] == [f"{path}:1[{index}]" for index in range(3)]
    assert (counts.rows, counts.noted) == (3, {EXPANDED: 1})


def test_steps_before_one_that_nobody_rated_are_kept(jsonl):
    """An annotator who gave up leaves a last step without a rating; those before it stand in no other row."""
    steps = [{"completions": [{"text": text, "rating": 1}], "chosen_completion": 0} for text in ("a", "b")]
    for last in (
        {"completions": [], "chosen_completion": None},
        {"completions": [{"text": "c"}], "chosen_completion": 0},
    ):
        path = jsonl({"question": {"problem": "p"}, "label": {"steps": [*steps, last]}})
        assert [(row.steps, row.labels) for row in read_rows(path, "steps")[0]] == [(("a", "b"), (True, True))]


def test_steps_of_math_shepherd(jsonl):
    text = "What is 1+1? Step 1: It is 2. {0}\nStep 2: So 3. {1}"
    row = {"input": text.format("ки", "ки"), "label": text.format("+", "-"), "task": "GSM8K"}
    expected = Steps("What is 1+1? ", ("Step 1: It is 2.", "Step 2: So 3."), (True, False), "")
    assert same(read_one(jsonl(row), "steps"), expected)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input": "Q Step 1: x ки", "label": "Q Step 1: y +"}, "label: is not the input's text with"),
        ({"input": "Step 1: x ки", "label": "Step 1: x +"}, "input: has no question before"),
        ({"input": "Q Step 1: x", "label": "Q Step 1: x"}, "input: has no step that ends with"),
        (
            {"question": {"problem": "p"}, "label": {"steps": [{"completions": [{"text": "a", "rating": 3}]}]}},
            "label: the rating of a step must be -1, 0 or 1",
        ),
        ({"question": {"problem": "p"}, "label": {"steps": [{"completions": ["a"]}]}}, "completions: must be a list of obj"),
        ({"question": "p", "label": {"steps": [1]}}, "question: must be an object, is text"),
    ],
)  # fmt: skip
def test_bad_steps(jsonl, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(row), "steps")

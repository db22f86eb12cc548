"""Judgment rows: read from any file, appended at once, mended after a kill."""

import json

import pytest

from alignment.errors import UserError
from alignment.evaluation import EndpointConfig, JudgeConfig, build_judge, file_judge
from alignment.judging.judgments import RowLog, judgment_key, read_judgments
from tests.conftest import lines_file, read_lines

GOOD = {"id": "row 0", "prompt": "p", "first": "a", "second": "b", "verdict": 1}


def test_a_judgment_keeps_every_column_of_its_row(tmp_path):
    more = {"judge": "Ann", "first_model": "x", "second_model": "y", "probability": 0.7, "seconds": 3, "flags": ["odd"]}
    rows = [GOOD, {**GOOD, "verdict": None, "judge": None}, {**GOOD, **more}]
    path = lines_file(tmp_path / "j.jsonl", rows)
    plain, unread, full = read_judgments(path)
    assert (plain.id, plain.prompt, plain.first, plain.second, plain.verdict) == ("row 0", "p", "a", "b", 1.0)
    assert (plain.judge, plain.first_model, plain.probability, plain.extra) == ("", None, None, {})
    assert unread.verdict is None and unread.judge == "" and unread.location == f"{path}:2"
    assert (full.judge, full.first_model, full.second_model, full.probability) == ("Ann", "x", "y", 0.7)
    assert full.extra == {"seconds": 3, "flags": ["odd"]}


@pytest.mark.parametrize("read", [read_judgments, file_judge])
def test_all_rows_that_are_no_judgments_are_named_with_file_and_line(tmp_path, read):
    broken = ["{no", [1], {"id": "row 0", "verdict": 1}, {**GOOD, "first": 3}, {**GOOD, "verdict": "A"}]
    broken += [{**GOOD, "verdict": True}, {**GOOD, "judge": 3}, {**GOOD, "probability": 1.5}]
    path = lines_file(tmp_path / "j.jsonl", [GOOD, *broken, GOOD])
    with pytest.raises(UserError) as caught:
        read(path)
    lines = str(caught.value).splitlines()
    assert [line.removeprefix(f"{path}:").split(":")[0] for line in lines] == [str(i) for i in range(2, 10)]
    assert "'first', 'second'" in lines[2]
    with pytest.raises(UserError, match="no such file"):
        read(tmp_path / "missing.jsonl")


def test_a_torn_last_line_is_read_over_and_told_and_a_torn_line_before_it_is_an_error(tmp_path, capsys):
    torn = json.dumps(GOOD)[:30]
    path = lines_file(tmp_path / "j.jsonl", [GOOD, torn])
    path.write_bytes(path.read_bytes()[:-1])
    assert len(read_judgments(path)) == 1 and f"{path}:2: the last line is torn" in capsys.readouterr().err
    with pytest.raises(UserError, match=r":2:.*not JSON"):
        read_judgments(lines_file(path, [GOOD, torn, GOOD]))


@pytest.mark.parametrize("cut", [0, 1, 20, -2, -1])
def test_a_log_goes_on_behind_what_a_kill_left(tmp_path, cut, capsys):
    path = tmp_path / "deep" / "log.jsonl"
    RowLog(path).append({"key": "one", "text": "ä\n"})
    RowLog(path).append({"key": "two"})
    line = json.dumps({"key": "three", "first": "é" * 9}, ensure_ascii=False).encode() + b"\n"
    with open(path, "ab") as file:
        file.write(line[:cut])  # -1 lacks the line end alone
    log = RowLog(path)
    kept = ["one", "two"] + (["three"] if cut == -1 else [])
    assert [row["key"] for row in log.rows] == kept
    assert ("the last line is torn" in capsys.readouterr().err) == (cut in (1, 20, -2))
    log.append({"key": "four"})
    assert [row["key"] for row in read_lines(path)] == [*kept, "four"]


@pytest.mark.parametrize(
    ("file", "row"),
    [
        *[("judgments.jsonl", {**GOOD, "verdict": verdict}) for verdict in (0.7, True, "x", 5, [1], float("nan"))],
        ("judgments.jsonl", {"id": "row 0", "key": "k"}),
        ("judgments.jsonl", {**GOOD, "prompt_tokens": "x"}),
        ("judgments.jsonl", {**GOOD, "seconds": None}),
        ("judgments.jsonl", {**GOOD, "answer_tokens": float("nan")}),
        ("ratings.jsonl", {"id": "row 0", "response": "a", "rating": "7"}),
        ("ratings.jsonl", {"id": "row 0", "response": "a", "rating": 8}),
        ("ratings.jsonl", {"id": "row 0", "response": 1, "rating": 7}),
    ],
)
def test_a_log_is_checked_as_it_is_read_again(file, row, tmp_path):
    """[E5] A changed row would count, or end the run at some later place."""
    good = GOOD if file == "judgments.jsonl" else {"id": "row 0", "response": "a", "rating": 6.5, "seconds": 0.1}
    endpoint = EndpointConfig(url="http://127.0.0.1:9/v1", model="m")
    template = "rubric" if file == "ratings.jsonl" else "pairwise"
    config = JudgeConfig(judge="endpoint", endpoint=endpoint, judge_template=template)
    lines_file(tmp_path / file, [good, row])
    with pytest.raises(UserError, match=f"{file}:2: "):
        build_judge(config, tmp_path)
    lines_file(tmp_path / file, [good, good])
    build_judge(config, tmp_path)


def test_a_log_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match=f"{tmp_path}: cannot be written"):
        RowLog(tmp_path).append({"key": "one"})


def test_a_key_holds_judge_prompt_texts_and_their_order():
    keys = [
        ("j", "p", "a", "b"),
        ("k", "p", "a", "b"),
        ("j", "q", "a", "b"),
        ("j", "p", "b", "a"),
        ("j", "p", "", "ab"),
    ]
    assert len({judgment_key(*key) for key in keys}) == 5
    one, other = [{"role": "user", "content": "p"}], [{"content": "p", "role": "user"}]
    assert judgment_key("j", one, "a", "b") == judgment_key("j", other, "a", "b")

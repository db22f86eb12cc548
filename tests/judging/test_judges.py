"""Judges, and how they are asked."""

import math

import pytest

from alignment.data.rows.records import Prompt
from alignment.errors import UserError
from alignment.evaluation import compare, file_judge, longer_judge, score_judge, win_rate, write_annotation_form
from alignment.judging.faults import comparison_figures, position_warnings
from alignment.judging.judges import length_effect
from alignment.statistics.winrate import Z_95, sign_test
from tests.conftest import lines_file, read_lines

PROMPTS = [Prompt(f"question {i}", {}, f"row {i}") for i in range(4)]
OURS = ["a long answer", "short", "same", "ours"]
BASELINE = ["brief", "a longer one", "same", "theirs"]


def test_a_judge_that_goes_by_position_alone_decides_nothing():
    """I16: its 32 contradictions are no 32 ties: nothing is known of the rate, and all of the bias."""
    prompts = [Prompt(f"question {i}", {}, f"row {i}") for i in range(32)]
    result = compare(prompts, ["a"] * 32, ["b"] * 32, lambda prompts, first, second: [1.0] * len(prompts))
    assert (result.win_rate.rate, result.win_rate.low, result.win_rate.high) == (0.5, 0.0, 1.0)
    assert (result.win_rate.ties, result.inconsistent["count"], result.failures) == (32, 32, 0)
    wilson = 1 / (1 + Z_95**2 / 32)  # the lower bound of 32 of 32
    every = {"rate": 1.0, "low": pytest.approx(wilson), "high": 1.0, "n": 32}
    assert result.position_bias == every and result.inconsistent == {**every, "count": 32}


def test_i16_failures_are_counted_and_never_scored_as_losses():
    def judge(prompts, first, second):
        return [
            None if prompt.row_id == "row 1" else float("a" in text)
            for prompt, text in zip(prompts, first, strict=True)
        ]

    ours, baseline = ["a", "a", "a", "a"], ["b", "b", "b", "b"]
    result = compare(PROMPTS, ours, baseline, judge, max_failed_share=0.25)
    assert result.verdicts == [1.0, None, 1.0, 1.0]
    assert (result.failures, result.win_rate.n, result.win_rate.losses, result.win_rate.rate) == (1, 3, 0, 1.0)
    with pytest.raises(UserError, match="failed on 1 of 4"):
        compare(PROMPTS, ours, baseline, judge, max_failed_share=0.2)


def test_score_judge_scores_each_distinct_response_once():
    asked = []

    def score(prompts, responses):
        asked.extend(zip((prompt.row_id for prompt in prompts), responses, strict=True))
        return [float(len(asked) + i) for i in range(len(responses))]  # a scorer whose answers drift

    result = compare(PROMPTS, OURS, BASELINE, score_judge(score))
    assert len(asked) == len(set(asked)) == 7  # 2 for each prompt but one whose responses are the same
    assert result.verdicts[2] == 0.5 and result.inconsistent["count"] == 0


def test_score_judge_ties_within_the_margin_and_fails_on_nan():
    scores = {"a": 1.0, "b": 1.2, "c": 2.0, "d": math.nan}
    judge = score_judge(lambda _, responses: [scores[response] for response in responses], tie_margin=0.5)
    assert judge(PROMPTS, ["a", "a", "c", "d"], ["b", "c", "a", "a"]) == [0.5, 0.0, 1.0, None]


def filled_in(path, judge):
    """The questions in `path` with a judge's verdicts."""
    return [{**row, "verdict": judge(row["first"], row["second"])} for row in read_lines(path)]


def test_verdicts_go_out_as_a_form_in_one_order_and_come_back_from_a_file(tmp_path):
    path = tmp_path / "questions.jsonl"
    write_annotation_form(path, PROMPTS, OURS, BASELINE)
    rows = filled_in(path, lambda a, b: (len(a) > len(b)) + (len(a) == len(b)) / 2)
    assert len(rows) == 3  # each of the 4 pairs once, but for the one of equal texts, which is a tie
    packed = lines_file(tmp_path / "verdicts.jsonl.gz", rows)
    people, longer = (compare(PROMPTS, OURS, BASELINE, judge) for judge in (file_judge(packed), longer_judge))
    alike = ("win_rate", "verdicts", "longer_preferred", "length_slope")
    assert [getattr(people, name) for name in alike] == [getattr(longer, name) for name in alike]
    assert people.position_bias["n"] == 3
    assert people.inconsistent == {"count": 0, "rate": 0.0, "low": 0.0, "high": 1.0, "n": 0}


def test_the_order_in_a_form_is_drawn_from_the_texts_and_tells_nobody_whose_they_are(tmp_path):
    path = tmp_path / "form.jsonl"
    prompts = [Prompt(f"question {i}", {}, f"row {i}") for i in range(60)]
    ours, baseline = [f"ours {i}" for i in range(60)], [f"theirs {i}" for i in range(60)]
    write_annotation_form(path, prompts, ours, baseline)
    rows = read_lines(path)
    assert 15 < sum(row["first"].startswith("ours") for row in rows) < 45 and len(rows) == 60
    assert set(rows[0]) == {"id", "prompt", "first", "second", "verdict"}
    before = path.read_text()
    write_annotation_form(path, prompts, baseline, ours)
    assert path.read_text() == before


def test_verdicts_on_other_texts_are_failures(tmp_path):
    path = tmp_path / "verdicts.jsonl"
    write_annotation_form(path, PROMPTS, OURS, BASELINE)
    lines_file(path, filled_in(path, lambda a, b: 0.5))
    result = compare(PROMPTS, [*OURS[:3], "new"], BASELINE, file_judge(path), max_failed_share=0.5)
    assert result.failures == 1
    with pytest.raises(UserError, match="on other prompts or responses"):
        compare(PROMPTS, ["new"] * 4, BASELINE, file_judge(path))


def test_an_empty_form_is_called_so_and_a_half_filled_one_is_counted(tmp_path, capsys):
    path = tmp_path / "verdicts.jsonl"
    write_annotation_form(path, PROMPTS, OURS, BASELINE)
    with pytest.raises(UserError, match=rf"^0 of 3 verdicts are filled in in {path}"):
        file_judge(path)
    rows = filled_in(path, lambda a, b: float(a in OURS) if "long" not in a + b else None)
    lines_file(path, rows)
    judge = file_judge(path)
    assert f"1 of 3 verdicts are filled in in {path}" in capsys.readouterr().err
    assert judge(PROMPTS, OURS, BASELINE) == [None, None, 0.5, 1.0]
    assert judge(PROMPTS, BASELINE, OURS) == [None, None, 0.5, 0.0]


@pytest.mark.parametrize(
    ("votes", "verdict", "agreement"),
    [
        ([("Ann", "a", "b", 1), ("Bob", "b", "a", 0), ("Cid", "a", "b", 0)], 1.0, 1 / 3),  # 1, 1, 0 for a
        ([("Ann", "a", "b", 1), ("Bob", "b", "a", 1)], 0.5, 0.0),  # one each
        ([("Ann", "a", "b", 1), ("Bob", "a", "b", 0.5), ("Cid", "a", "b", 0)], 0.5, 1 / 3),  # no majority
        ([("Ann", "a", "b", 0), ("Ann", "a", "b", 1)], 1.0, None),  # a label given again counts in place of the first
        (
            [("Ann", "a", "b", 1), ("Ann", "b", "a", 1), ("Bob", "a", "b", 1)],
            0.5,
            0.5,
        ),  # Ann contradicts herself: a tie
    ],
)
def test_of_several_people_the_majority_counts_and_their_agreement_is_shown(tmp_path, votes, verdict, agreement):
    rows = [dict(zip(("judge", "first", "second", "verdict"), vote, strict=True)) for vote in votes]
    judge = file_judge(lines_file(tmp_path / "v.jsonl", [{"id": "row 0", **row} for row in rows]))
    result = compare(PROMPTS[:1], ["a"], ["b"], judge)
    assert result.verdicts == [verdict]
    assert sum(judge.usage()["verdicts"].values()) == len({(who, *shown) for who, *shown, _ in votes})
    assert judge.usage().get("agreement") == (None if agreement is None else pytest.approx(agreement))
    repeated = votes[0][0] == votes[1][0] and votes[0][1] != votes[1][1]
    assert (result.inconsistent["count"], result.inconsistent["n"]) == (repeated, repeated)


def slope_over_lengths(ours, theirs, verdicts, contradictory, clusters=None):
    """The slope where each item is a cluster of its own, unless they are named."""
    return length_effect(ours, theirs, verdicts, clusters or range(len(ours)), contradictory)["length_slope"]


def test_contradictions_are_tosses_for_the_longer_response_too():
    """[B-L4] Of a judge that takes the first nothing is known of its taste for length; one prompt is one item."""
    prompts = [Prompt(f"question {i}", {}, f"row {i}") for i in range(30)]
    ours, theirs = ["a" * (i + 2) for i in range(30)], ["b"] * 30
    result = compare(prompts, ours, theirs, lambda prompts, first, second: [1.0] * len(prompts))
    assert result.longer_preferred == {"rate": 0.5, "low": 0.0, "high": 1.0, "n": 30}
    alone = length_effect(ours, theirs, [1.0] * 30, ["p"] * 30, [False] * 30)
    assert alone["longer_preferred"]["low"] == win_rate([1.0]).low
    verdicts, contradictory = [1.0, 0.5, 0.0] * 10, [False, True, False] * 10
    ties, tosses = (slope_over_lengths(ours, theirs, verdicts, coins) for coins in ([False] * 30, contradictory))
    assert tosses["low"] < ties["low"] < ties["slope"] == tosses["slope"]


@pytest.mark.parametrize("count", range(3, 14))
def test_a_slope_over_lengths_that_do_not_differ_is_not_known(count):
    """[B-M9] No and Yes have one ratio in all rows, which rounding must not make a spread of 1e-16."""
    coins = [False] * count
    wins = [1.0, 0.0] * (count // 2) + [0.5] * (count % 2)
    assert slope_over_lengths(["No"] * count, ["Yes"] * count, wins, coins) is None
    ours = ["a" * (i + 1) for i in range(count)]
    assert slope_over_lengths(ours, ["b"] * count, [float(i % 2) for i in range(count)], coins, ["p"] * count) is None


def test_the_sign_test_has_one_vote_for_each_prompt():
    """[B-M5] Ten prompts of 20 rows, seven of them won: p of 7 against 3, not of 140 against 60."""
    prompts = [Prompt(f"question {i % 10}", {}, f"row {i}") for i in range(200)]
    result = compare(prompts, [f"a{i}" for i in range(200)], ["b"] * 200, score_judge(lambda prompts, texts: [
        float((int(p.row_id[4:]) % 10 < 7) == (text != "b")) for p, text in zip(prompts, texts, strict=True)
    ]))  # fmt: skip
    figures = comparison_figures(prompts, [f"a{i}" for i in range(200)], ["b"] * 200, result)
    assert result.win_rate.wins == 140 and figures["sign_test"]["p"] == pytest.approx(sign_test(7, 3))


# --- judges that go by position -------------------------------------------------------------------------------------


def test_a_preference_for_the_second_place_is_a_bias_too_and_failures_are_no_part_of_it():
    prompts = [Prompt(f"question {i}", {}, f"row {i}") for i in range(20)]

    def judge(prompts, first, second):
        return [None if p.row_id == "row 0" and a == "a" else 0.0 for p, a in zip(prompts, first, strict=True)]

    result = compare(prompts, ["a"] * 20, ["b"] * 20, judge)
    assert (result.position_bias["rate"], result.failures, result.inconsistent["count"]) == (0.0, 1, 19)
    assert result.position_bias["high"] < 0.5
    assert "shown second" in position_warnings("it", result)[0]


def test_a_consistent_judge_has_no_bias_and_intervals_of_some_width():
    result = compare(PROMPTS, OURS, BASELINE, longer_judge)
    assert result.position_bias["low"] < 0.5 < result.position_bias["high"]
    assert result.inconsistent["high"] == pytest.approx(1 - 1 / (1 + Z_95**2 / 4))  # none of four, by Wilson
    assert result.win_rate == win_rate(result.verdicts)  # as without a look at the orders


def test_two_verdicts_of_nobody_named_on_one_pair_are_refused(tmp_path):
    """Two people's rows in one file, or a slip."""
    row = {"id": "row 0", "first": "a", "second": "b"}
    path = lines_file(tmp_path / "verdicts.jsonl", [{**row, "verdict": 1}, {**row, "verdict": 0}])
    with pytest.raises(UserError, match=rf"{path}:2: id 'row 0' has verdict 0.0, but 1.0 in {path}:1"):
        file_judge(path)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "cannot read"), (b"", "0 of 0 verdicts"), (b"\n{\xff", r":2: .*not UTF-8")]
)
def test_files_that_hold_no_verdicts_are_refused(tmp_path, content, message):
    path = tmp_path / "verdicts.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        file_judge(path)

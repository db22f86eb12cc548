"""Rows made from other rows: pairs of labeled texts, continuations of running text."""

import json

import pytest

from alignment.data.rows.read import read_rows
from alignment.data.tools.derive import ContinuationsConfig, PairsConfig, run_continuations, run_pairs
from alignment.errors import UserError


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_text_is_used_once_and_stands_on_its_labels_side(tmp_path):
    rows = [{"text": f"good {n}", "label": "pos"} for n in range(5)] + [
        {"text": f"bad {n}", "label": "neg"} for n in range(7)
    ]
    source = write(tmp_path / "rows.jsonl", [*rows, {"text": "so so", "label": "neutral"}])
    run_pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out")))
    pairs = read(tmp_path / "out/comparisons.jsonl")
    assert sorted(pair["chosen"] for pair in pairs) == [f" good {n}" for n in range(5)]
    assert len({pair["rejected"] for pair in pairs}) == 5
    assert all(pair["rejected"].startswith(" bad") and pair["prompt"] == "Review:" for pair in pairs)
    assert len(read_rows(str(tmp_path / "out/comparisons.jsonl"), "comparisons")[0]) == 5


def test_the_seed_decides_who_meets_whom(tmp_path):
    rows = [{"text": f"{label} {n}", "label": label} for n in range(20) for label in ("pos", "neg")]
    source = write(tmp_path / "rows.jsonl", rows)
    found = []
    for number, seed in enumerate((0, 0, 1)):
        run_pairs(PairsConfig(source, "pos", "neg", str(tmp_path / str(number)), seed=seed))
        found.append(read(tmp_path / str(number) / "comparisons.jsonl"))
    assert found[0] == found[1] != found[2]


def test_pairings_use_each_text_so_often_with_other_partners(tmp_path):
    rows = [{"text": f"{label} {n}", "label": label} for n in range(20) for label in ("pos", "neg")]
    source = write(tmp_path / "rows.jsonl", rows)
    run_pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out"), pairings=3))
    run_pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "once")))
    pairs = read(tmp_path / "out/comparisons.jsonl")
    assert pairs[:20] == read(tmp_path / "once/comparisons.jsonl")
    for start in (0, 20, 40):
        assert sorted(pair["chosen"] for pair in pairs[start : start + 20]) == sorted(f" pos {n}" for n in range(20))
    assert len({(pair["chosen"], pair["rejected"]) for pair in pairs}) > 50
    with pytest.raises(ValueError, match="pairings must be at least 1"):
        PairsConfig(source, "pos", "neg", "out", pairings=0)


def test_rows_without_the_columns_and_labels_without_rows_are_named(tmp_path):
    source = write(tmp_path / "rows.jsonl", [{"text": "fine", "label": "pos"}, {"label": "neg"}])
    with pytest.raises(UserError, match=r"rows.jsonl:2: needs `text` \(text\) and `label`"):
        run_pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out")))
    source = write(tmp_path / "rows.jsonl", [{"text": "fine", "label": "pos"}])
    with pytest.raises(UserError, match="no row has the label 'neg'"):
        run_pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out")))
    with pytest.raises(ValueError, match="two labels"):
        PairsConfig(source, "pos", "pos", "out")


STORY = 'A cat sat on the mat. "Who are you?" it asked. Nobody came to answer it. So it slept!\n\nToo short.'


@pytest.mark.parametrize(
    ("settings", "prompt", "response"),
    [
        ({}, "A cat sat on the mat.", ' "Who are you?" it asked. Nobody came to answer it. So it slept!'),
        ({"response_sentences": 2}, "A cat sat on the mat.", ' "Who are you?" it asked.'),
        (
            {"prompt_sentences": 3},
            'A cat sat on the mat. "Who are you?" it asked.',
            " Nobody came to answer it. So it slept!",
        ),
    ],
)
def test_opening_and_rest_are_the_paragraph_again(tmp_path, settings, prompt, response):
    source = write(tmp_path / "texts.jsonl", [{"text": STORY}])
    run_continuations(ContinuationsConfig(source, str(tmp_path / "out"), **settings))
    assert read(tmp_path / "out/demonstrations.jsonl") == [{"prompt": prompt, "completion": response}]
    assert STORY.startswith(prompt + response)
    assert json.loads((tmp_path / "out/results.json").read_text()) == {"demonstrations": 1, "paragraphs": 2}


def test_no_paragraph_that_is_long_enough_is_said(tmp_path):
    source = write(tmp_path / "texts.jsonl", [{"text": STORY}])
    with pytest.raises(UserError, match="no paragraph is long enough"):
        run_continuations(ContinuationsConfig(source, str(tmp_path / "out"), prompt_sentences=9))
    with pytest.raises(ValueError, match="response_sentences must be at least 1"):
        ContinuationsConfig(source, "out", response_sentences=0)


def test_labels_may_be_numbers_and_zero_is_one(tmp_path):
    rows = [{"text": f"text {n}", "label": n % 2} for n in range(6)]
    run_pairs(PairsConfig(write(tmp_path / "rows.jsonl", rows), "1", "0", str(tmp_path / "out")))
    pairs = read(tmp_path / "out/comparisons.jsonl")
    assert sorted(pair["rejected"] for pair in pairs) == [" text 0", " text 2", " text 4"]
    assert sorted(pair["chosen"] for pair in pairs) == [" text 1", " text 3", " text 5"]

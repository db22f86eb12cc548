"""Rows made of other rows: splits that keep together what belongs together, pairs of labeled texts, continuations."""

import gzip
import json
from typing import Any

import pytest

from alignment.config.load import packaged_folder
from alignment.data.rows.read import read_rows
from alignment.errors import UserError
from alignment.pipeline.stages import load_stage_file
from tests.conftest import read_lines, write_lines

rows_of: Any = load_stage_file(packaged_folder("recipes") / "rows.py")
SplitConfig, PairsConfig, ContinuationsConfig = rows_of.SplitConfig, rows_of.PairsConfig, rows_of.ContinuationsConfig

HALVES = {"train": 0.5, "heldout": 0.5}


def read(path):
    return read_lines(path)


def test_every_row_is_in_one_part_as_it_was(tmp_path):
    rows = [{"prompt": f"p{n}", "completion": "c", "note": n} for n in range(60)]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    rows_of.split(SplitConfig(source, "demonstrations", HALVES, str(tmp_path / "out")))
    parts = [read(tmp_path / "out" / f"{name}.jsonl") for name in HALVES]
    assert sorted(parts[0] + parts[1], key=lambda row: row["note"]) == rows
    assert min(map(len, parts)) > 15
    assert json.loads((tmp_path / "out/results.json").read_text())["rows"] == dict(
        zip(HALVES, map(len, parts), strict=True)
    )


@pytest.mark.parametrize("by", ["prompt", "opening"])
def test_equal_prompts_and_equal_openings_stay_together(tmp_path, by):
    turns = "\n\nHuman: question {}\n\nAssistant:" + (
        " yes\n\nHuman: and then?\n\nAssistant:" if by == "opening" else ""
    )
    rows = [{"prompt": turns.format(n), "chosen": "a", "rejected": "b"} for n in range(30)]
    rows += [{"prompt": f"\n\nHuman: question {n}\n\nAssistant:", "chosen": "c", "rejected": "d"} for n in range(30)]
    rows_of.split(
        SplitConfig(write_lines(tmp_path / "rows.jsonl", rows), "comparisons", HALVES, str(tmp_path / "out"), by=by)
    )
    sides = [
        {row["prompt"].split("question ")[1].split("\n")[0] for row in read(tmp_path / "out" / f"{name}.jsonl")}
        for name in HALVES
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 30


@pytest.mark.parametrize("by", ["prompt", "opening", "row"])
def test_a_row_of_several_records_is_written_once(tmp_path, by):
    def replies(*texts):
        return [{"role": "assistant", "text": text, "rank": rank} for rank, text in enumerate(texts)]

    rows = []
    for n in range(30):
        again = {"role": "prompter", "text": "and then?", "replies": replies("x", "y")}
        first, second = replies("a", "b")
        tree = {"role": "prompter", "text": f"question {n}", "replies": [{**first, "replies": [again]}, second]}
        rows.append({"message_tree_id": str(n), "prompt": tree})
    source = write_lines(tmp_path / "rows.jsonl", rows)
    for kind in ("rankings", "comparisons"):
        rows_of.split(SplitConfig(source, kind, HALVES, str(tmp_path / kind), by=by))
        parts = [read(tmp_path / kind / f"{name}.jsonl") for name in HALVES]
        assert sorted(map(json.dumps, parts[0] + parts[1])) == sorted(map(json.dumps, rows))


def test_bad_rows_are_named_or_counted(tmp_path):
    rows = [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}] * 3
    rows += [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: x\n\nAssistant: c"}]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    config = SplitConfig(source, "comparisons", {"all": 1.0}, str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"rows.jsonl:4:rejected: .* differs from chosen's"):
        rows_of.split(config)
    rows_of.split(SplitConfig(source, "comparisons", {"all": 1.0}, str(tmp_path / "out"), on_bad_row="skip"))
    assert len(read(tmp_path / "out/all.jsonl")) == 3
    assert any("dropped 1" in line for line in json.loads((tmp_path / "out/results.json").read_text())["counts"])


def test_running_text_is_cut_where_a_document_starts(tmp_path):
    path = tmp_path / "stories.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("Once a cat sat.\n\nIt slept.\n\n\n\nOnce a dog ran.\n\nOnce more, it ran.\n")
    assert rows_of.read_documents(str(path), ["Once a "]) == [
        "Once a cat sat.\n\nIt slept.",
        "Once a dog ran.\n\nOnce more, it ran.",
    ]
    assert len(rows_of.read_documents(str(path), [])) == 4
    config = SplitConfig(str(path), "text", {"all": 1.0}, str(tmp_path / "out"), by="row", starts=["Once a "])
    rows_of.split(config)
    assert [row["text"][:10] for row in read(tmp_path / "out/all.jsonl")] == ["Once a cat", "Once a dog"]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"parts": {"a": 0.5, "b": 0.4}}, "add up to 1"),
        ({"parts": {"a": 1.5, "b": -0.5}}, "above 0"),
        ({"parts": {}}, "above 0"),
        ({"parts": {"a": 1.0}, "kind": "text", "by": "opening"}, "text has none"),
    ],
)
def test_settings_that_make_no_split_are_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        SplitConfig(**{"source": "x.jsonl", "kind": "comparisons", "output": "out", **settings})


def test_each_text_is_used_once_and_stands_on_its_labels_side(tmp_path):
    """Labels may be numbers, and 0 is one."""
    rows = [{"text": f"good {n}", "label": 1} for n in range(5)] + [{"text": f"bad {n}", "label": 0} for n in range(7)]
    source = write_lines(tmp_path / "rows.jsonl", [*rows, {"text": "so so", "label": "neutral"}])
    rows_of.pairs(PairsConfig(source, "1", "0", str(tmp_path / "out")))
    pairs = read(tmp_path / "out/comparisons.jsonl")
    assert sorted(pair["chosen"] for pair in pairs) == [f" good {n}" for n in range(5)]
    assert len({pair["rejected"] for pair in pairs}) == 5
    assert all(pair["rejected"].startswith(" bad") and pair["prompt"] == "Review:" for pair in pairs)
    assert len(read_rows(str(tmp_path / "out/comparisons.jsonl"), "comparisons")[0]) == 5


def test_pairings_use_each_text_so_often_with_other_partners(tmp_path):
    rows = [{"text": f"{label} {n}", "label": label} for n in range(20) for label in ("pos", "neg")]
    source = write_lines(tmp_path / "rows.jsonl", rows)
    rows_of.pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out"), pairings=3))
    rows_of.pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "once")))
    pairs = read(tmp_path / "out/comparisons.jsonl")
    assert pairs[:20] == read(tmp_path / "once/comparisons.jsonl")
    for start in (0, 20, 40):
        assert sorted(pair["chosen"] for pair in pairs[start : start + 20]) == sorted(f" pos {n}" for n in range(20))
    assert len({(pair["chosen"], pair["rejected"]) for pair in pairs}) > 50
    with pytest.raises(ValueError, match="pairings must be at least 1"):
        PairsConfig(source, "pos", "neg", "out", pairings=0)


def test_rows_without_the_columns_and_labels_without_rows_are_named(tmp_path):
    source = write_lines(tmp_path / "rows.jsonl", [{"text": "fine", "label": "pos"}, {"label": "neg"}])
    with pytest.raises(UserError, match=r"rows.jsonl:2: needs `text` \(text\) and `label`"):
        rows_of.pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out")))
    source = write_lines(tmp_path / "rows.jsonl", [{"text": "fine", "label": "pos"}])
    with pytest.raises(UserError, match="no row has the label 'neg'"):
        rows_of.pairs(PairsConfig(source, "pos", "neg", str(tmp_path / "out")))
    with pytest.raises(ValueError, match="another label"):
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
    source = write_lines(tmp_path / "texts.jsonl", [{"text": STORY}])
    rows_of.continuations(ContinuationsConfig(source, str(tmp_path / "out"), **settings))
    assert read(tmp_path / "out/demonstrations.jsonl") == [{"prompt": prompt, "completion": response}]
    assert STORY.startswith(prompt + response)
    assert json.loads((tmp_path / "out/results.json").read_text()) == {"demonstrations": 1, "paragraphs": 2}


def test_shares_are_kept():
    parts = {"a": 0.7, "b": 0.2, "c": 0.1}
    found = [rows_of.part_of(str(number), parts) for number in range(4000)]
    # the standard deviation of a share p is sqrt(p (1 - p) / 4000) < 0.008
    assert all(abs(found.count(name) / 4000 - share) < 0.03 for name, share in parts.items())

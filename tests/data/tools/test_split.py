"""Splits: every row goes to one part, always the same one, and rows that belong together stay together."""

import gzip
import json

import pytest

from alignment.data.tools.split import SplitConfig, part_of, read_documents, run_split
from alignment.errors import UserError

HALVES = {"train": 0.5, "heldout": 0.5}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_shares_are_kept():
    parts = {"a": 0.7, "b": 0.2, "c": 0.1}
    found = [part_of(str(number), parts) for number in range(4000)]
    # the standard deviation of a share p is sqrt(p (1 - p) / 4000) < 0.008
    assert all(abs(found.count(name) / 4000 - share) < 0.03 for name, share in parts.items())


def test_a_larger_part_keeps_the_rows_of_the_smaller():
    small = {str(n) for n in range(500) if part_of(str(n), {"train": 0.3, "rest": 0.7}) == "train"}
    large = {str(n) for n in range(500) if part_of(str(n), {"train": 0.6, "rest": 0.4}) == "train"}
    assert small < large


def test_another_salt_is_another_split():
    assert {part_of(str(n), HALVES, "x") == part_of(str(n), HALVES) for n in range(50)} == {True, False}


def test_every_row_is_in_one_part_as_it_was(tmp_path):
    rows = [{"prompt": f"p{n}", "completion": "c", "note": n} for n in range(60)]
    source = write(tmp_path / "rows.jsonl", rows)
    run_split(SplitConfig(source, "demonstrations", HALVES, str(tmp_path / "out")))
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
    run_split(SplitConfig(write(tmp_path / "rows.jsonl", rows), "comparisons", HALVES, str(tmp_path / "out"), by=by))
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
    source = write(tmp_path / "rows.jsonl", rows)
    for kind in ("rankings", "comparisons"):
        run_split(SplitConfig(source, kind, HALVES, str(tmp_path / kind), by=by))
        parts = [read(tmp_path / kind / f"{name}.jsonl") for name in HALVES]
        assert sorted(map(json.dumps, parts[0] + parts[1])) == sorted(map(json.dumps, rows))


def test_bad_rows_are_named_or_counted(tmp_path):
    rows = [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: a\n\nAssistant: c"}] * 3
    rows += [{"chosen": "\n\nHuman: a\n\nAssistant: b", "rejected": "\n\nHuman: x\n\nAssistant: c"}]
    source = write(tmp_path / "rows.jsonl", rows)
    config = SplitConfig(source, "comparisons", {"all": 1.0}, str(tmp_path / "out"))
    with pytest.raises(UserError, match=r"rows.jsonl:4:rejected: .* differs from chosen's"):
        run_split(config)
    run_split(SplitConfig(source, "comparisons", {"all": 1.0}, str(tmp_path / "out"), on_bad_row="skip"))
    assert len(read(tmp_path / "out/all.jsonl")) == 3
    assert any("dropped 1" in line for line in json.loads((tmp_path / "out/results.json").read_text())["counts"])


def test_running_text_is_cut_where_a_document_starts(tmp_path):
    path = tmp_path / "stories.txt.gz"
    with gzip.open(path, "wt") as file:
        file.write("Once a cat sat.\n\nIt slept.\n\n\n\nOnce a dog ran.\n\nOnce more, it ran.\n")
    assert read_documents(path, ["Once a "]) == [
        "Once a cat sat.\n\nIt slept.",
        "Once a dog ran.\n\nOnce more, it ran.",
    ]
    assert len(read_documents(path, [])) == 4
    config = SplitConfig(str(path), "text", {"all": 1.0}, str(tmp_path / "out"), by="row", starts=["Once a "])
    run_split(config)
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


def test_an_empty_part_is_refused(tmp_path):
    source = write(tmp_path / "rows.jsonl", [{"text": "one"}])
    with pytest.raises(UserError, match="nothing falls into part"):
        run_split(SplitConfig(source, "text", HALVES, str(tmp_path / "out"), by="row"))


def test_a_text_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match=r"none.txt: cannot be read"):
        run_split(SplitConfig(str(tmp_path / "none.txt"), "text", {"all": 1.0}, str(tmp_path / "out"), by="row"))


def test_renamed_columns_and_skipped_rows_split_too(tmp_path):
    rows = [{"q": f"p{n}", "a": "c" if n % 5 else ""} for n in range(40)]
    source, columns = write(tmp_path / "rows.jsonl", rows), {"prompt": "q", "completion": "a"}
    config = SplitConfig(source, "demonstrations", HALVES, str(tmp_path / "out"), columns=columns, on_bad_row="skip")
    run_split(config)
    found = [row for name in HALVES for row in read(tmp_path / "out" / f"{name}.jsonl")]
    assert sorted(map(str, found)) == sorted(str(row) for row in rows if row["a"])
    with pytest.raises(UserError, match="8 bad rows"):
        run_split(SplitConfig(source, "demonstrations", HALVES, str(tmp_path / "out"), columns=columns))


def test_rows_of_one_prompt_may_part_where_each_row_stands_for_itself(tmp_path):
    rows = [{"prompt": "p", "completion": f"c{n}"} for n in range(40)]
    source = write(tmp_path / "rows.jsonl", rows)
    run_split(SplitConfig(source, "demonstrations", HALVES, str(tmp_path / "out"), by="row"))
    assert min(len(read(tmp_path / "out" / f"{name}.jsonl")) for name in HALVES) > 5

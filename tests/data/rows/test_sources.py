"""Sources of several files: directories, globs, and running text."""

import json

import pytest

from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.rows.files import source_files
from alignment.data.rows.read import read_rows
from alignment.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """b.jsonl, a.jsonl, below/c.jsonl, and what is no data: a README, a checkpoint of an editor."""
    for name, text in [("b", "two"), ("a", "one"), ("below/c", "three"), (".ipynb_checkpoints/a", "old")]:
        path = tmp_path / "rows" / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "rows" / "README.md").write_text("no rows")
    return tmp_path / "rows"


@pytest.mark.parametrize(
    ("pattern", "texts"),
    [
        ("", ["one", "two", "three"]),
        ("/*.jsonl", ["one", "two"]),
        ("/**/*.jsonl", ["one", "two", "three"]),
        ("/[b-z].jsonl", ["two"]),
        ("/below", ["three"]),
    ],
)
def test_directories_and_globs_are_one_source_in_order_of_their_names(folder, bpe, pattern, texts):
    rows, counts = read_rows(f"{folder}{pattern}", "text")
    assert [row.text for row in rows] == texts and counts.rows == len(texts)
    assert rows[0].row_id.endswith(".jsonl:1")
    examples, counts = prepare(DataConfig(f"{folder}{pattern}"), "text", bpe)
    assert [bpe.decode(example.ids[1:-1]) for example in examples] == texts and counts.kept == len(texts)


def test_a_file_that_is_added_to_a_directory_is_read(folder, bpe):
    assert len(prepare(DataConfig(str(folder)), "text", bpe)[0]) == 3
    (folder / "d.jsonl").write_text('{"text": "four"}\n')
    assert len(prepare(DataConfig(str(folder)), "text", bpe)[0]) == 4


def test_files_of_several_formats_are_one_source(folder):
    (folder / "d.csv").write_text("text\nfour\n")
    (folder / "e.txt").write_text("five\nsix\n\n\nseven\n")
    rows, _ = read_rows(folder, "text")
    assert [row.text for row in rows] == ["one", "two", "three", "four", "five\nsix", "seven"]
    assert [row.row_id.rpartition("/")[2] for row in rows[-2:]] == ["e.txt:1", "e.txt:5"]


def test_what_names_no_rows_is_told(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    for source, message in [
        (tmp_path / "empty", "a directory without files of rows"),
        (folder / "*.parquet", "no file matches"),
        (folder / "*", "README.md: cannot tell the format by its name"),
        (folder / "none.jsonl", "no such file"),
    ]:
        with pytest.raises(UserError, match=message):
            read_rows(str(source), "text")
    assert source_files("owner/name[test]") is None  # a Hub id, not a glob


def test_bad_rows_of_all_files_are_told_at_once(folder):
    (folder / "a.jsonl").write_text('{"text": 1}\n')
    (folder / "below" / "c.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError) as caught:
        read_rows(str(folder), "text")
    assert "a.jsonl:1:text: must be text" in str(caught.value) and "c.jsonl:1:text: is empty" in str(caught.value)

"""Sources of several files: directories, globs, and running text."""

import json
from dataclasses import replace

import pytest

from alignment.data.config import DataConfig
from alignment.data.doctor import check_file
from alignment.data.prepare import preparation_of, prepare
from alignment.data.rows.files import open_sources, source_files
from alignment.data.rows.read import read_rows
from alignment.data.streaming import open_stream
from alignment.errors import UserError
from alignment.judging.inputs import read_records


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


@pytest.fixture
def write_rows(tmp_path):
    """Writes one row of text into each of these files of a directory; the text is the file's name."""

    def write(*names: str):
        for name in names:
            path = tmp_path / "named" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"text": name}) + "\n")
        return tmp_path / "named"

    return write


SPLITS = ("train.jsonl", "test.jsonl", "validation-00000-of-00002.jsonl", "validation-00001-of-00002.jsonl")


@pytest.mark.parametrize(
    ("names", "split", "read"),
    [
        (SPLITS, "train", ["train.jsonl"]),
        (SPLITS, "test", ["test.jsonl"]),
        (SPLITS, "validation", list(SPLITS[2:])),
        (SPLITS, "dev", list(SPLITS[2:])),  # another word for it
        (("train/0.jsonl", "train/1.jsonl", "eval/0.jsonl"), "train", ["train/0.jsonl", "train/1.jsonl"]),
        (("de/train.jsonl", "en/train.jsonl", "en/test.jsonl"), "train", ["de/train.jsonl", "en/train.jsonl"]),
        (("my_train_rows.jsonl", "my_eval_rows.jsonl"), "eval", ["my_eval_rows.jsonl"]),
        (("train_sft-00000-of-00001.jsonl", "train_gen-00000-of-00001.jsonl"), "train_gen", ["train_gen-00000-of-00001.jsonl"]),
        (("trained.jsonl", "latest.jsonl"), "train", ["latest.jsonl", "trained.jsonl"]),  # no word of a split
        (("test/a.jsonl", "b.jsonl"), "test", ["test/a.jsonl"]),
    ],
)  # fmt: skip
def test_files_of_a_directory_that_are_named_after_splits_are_those_splits(write_rows, bpe, names, split, read):
    directory = write_rows(*names)
    assert [row.text for row in read_rows(directory, "text", split=split)[0]] == read
    assert [str(path.relative_to(directory)) for path in source_files(str(directory), split) or []] == read
    examples, _ = prepare(DataConfig(str(directory), split=split), "text", bpe)
    assert [bpe.decode(example.ids[1:-1]) for example in examples] == read


def test_rows_of_one_directory_are_those_of_their_splits(write_rows, bpe):
    config = DataConfig(str(directory := write_rows(*SPLITS)), evaluation=str(directory), evaluation_split="test")
    parts = [prepare(config, "text", bpe, part=part)[0] for part in ("train", "evaluation")]
    assert [[bpe.decode(each.ids[1:-1]) for each in part] for part in parts] == [["train.jsonl"], ["test.jsonl"]]


@pytest.mark.parametrize("split", ["trian", "eval"])
def test_a_missing_split_is_answered_with_those_that_exist(write_rows, split):
    with pytest.raises(UserError) as caught:
        read_rows(write_rows(*SPLITS), "text", split=split)
    (line,) = str(caught.value).splitlines()
    assert f"'{split}'" in line and "test, train, validation" in line


def test_a_stream_of_a_directory_reads_one_split(write_rows):
    assert [each.name.rpartition("/")[2] for each in open_sources(str(write_rows(*SPLITS)), "test")] == ["test.jsonl"]


def test_files_of_no_split_are_left_out_and_named(write_rows, bpe, tmp_path, capsys):
    directory = write_rows(*SPLITS[:2], "LICENSE.txt")
    config = DataConfig(str(directory), evaluation=f"{directory}/*.jsonl", cache=str(tmp_path / "cache"))
    (line,) = check_file(directory, "text").counts.lines()[1:]
    assert "noted 2" in line and "(LICENSE.txt, test.jsonl)" in line and "'train'" in line
    read_records(config, "text")
    assert line in capsys.readouterr().err
    assert line in prepare(config, "text", bpe)[1].lines()
    assert not prepare(config, "text", bpe, part="evaluation")[1].noted  # a glob reads all it names
    (directory / "NOTICE.txt").write_text("new")
    cached = prepare(config, "text", bpe)[1]  # of the rows; what is left out is looked up anew
    assert "noted 3" in cached.lines()[1]
    assert "noted 3" in open_stream(preparation_of("text"), replace(config, streaming=True), bpe)[1].lines()[1]

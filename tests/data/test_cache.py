"""Prepared rows are kept under a key of all that they depend on, whole or not at all, and made by one process."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from filelock import FileLock

from alignment.data import cache as cache_module
from alignment.data import prepare as prepare_module
from alignment.data.cache import cache_lines, list_entries
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.prepare import prepare
from alignment.data.rows import files as row_files
from alignment.data.rows.read import read_rows
from alignment.data.table import JoinedTables, Table, TableWriter
from alignment.data.tokenize import tokenize_demonstrations
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
from tests.conftest import write_lines

ROWS = [{"prompt": f"p {n} the cat", "completion": f"c {n} sat on the mat"} for n in range(40)]


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test."""
    monkeypatch.setenv("ALIGNMENT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of a few rows."""
    monkeypatch.setattr(prepare_module, "CHUNK_BYTES", 600)
    monkeypatch.setattr(row_files, "FIRST_BYTES", 200)


@pytest.fixture
def chunk_sizes(monkeypatch) -> list[int]:
    """Rows of each chunk that is written."""
    sizes, add = [], TableWriter.add
    monkeypatch.setattr(
        TableWriter, "add", lambda self, encoded: (sizes.append(len(encoded.rows) - 1), add(self, encoded))
    )
    return sizes


def table_of(config, tokenizer, kind="demonstrations", part="train") -> Table:
    table, _ = prepare(config, kind, tokenizer, part)
    assert isinstance(table, Table)
    return table


def test_rows_from_the_cache_are_those_that_were_prepared(cache, jsonl, bpe, small_chunks, chunk_sizes):
    config = DataConfig(jsonl(*ROWS))
    expected, _ = tokenize_demonstrations(read_rows(config.train, "demonstrations")[0], bpe, 1024)
    first, again = table_of(config, bpe), table_of(config, bpe)
    assert (first.cached, again.cached) == (False, True) and first.key == again.key
    assert list(first) == list(again) == expected and again.tally == first.tally and again.tally.kept == 40
    assert len(chunk_sizes) > 3


# What the key depends on: every change gives other rows than those in the cache


def test_h09_another_tokenizer_prepares_anew(cache, jsonl, bpe):
    config = DataConfig(jsonl(*ROWS))
    other = train_bpe(["p c the cat sat on the mat 0 1 2 3"] * 20, 300)
    for tokenizer in (bpe, other):
        row = table_of(config, tokenizer)[0]
        assert tokenizer.decode(row.ids, skip_special_tokens=True).replace(" ", "") == "p0thecatc0satonthemat"
    assert len(list_entries(cache)) == 2


def test_h09_one_character_of_the_template_prepares_anew(cache, jsonl, chatml, templates):
    rows = jsonl({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hey"}]})
    before = table_of(DataConfig(rows), chatml)
    template = chatml.chat_template
    try:
        chatml.chat_template = template.replace("assistant\n", "assistant!\n")
        after = table_of(DataConfig(rows), chatml)
    finally:
        chatml.chat_template = template
    assert before.key != after.key and "assistant!" in chatml.decode(after[0].ids)
    assert table_of(DataConfig(rows), chatml).key == before.key


def test_h09_one_changed_byte_prepares_anew_whatever_its_times(cache, tmp_path, bpe):
    path = tmp_path / "rows.jsonl"
    write_lines(path, ROWS)
    stat = path.stat()
    before = table_of(DataConfig(str(path)), bpe)
    path.write_text(path.read_text().replace("p 3 ", "p 9 "))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    after = table_of(DataConfig(str(path)), bpe)
    assert before.key != after.key and before[3] != after[3] and before[4] == after[4]


@pytest.mark.parametrize("change", [{"max_length": 5}, {"on_bad_row": "skip"}, {"max_rows": 7}, {"turns": "last"}])
def test_h09_a_setting_prepares_anew(cache, jsonl, bpe, change):
    config = DataConfig(jsonl(*ROWS), max_cut_share=1.0)
    table_of(config, bpe)
    assert not table_of(replace(config, **change), bpe).cached and len(list_entries(cache)) == 2


def test_h09_other_code_prepares_anew(cache, jsonl, bpe, monkeypatch):
    config = DataConfig(jsonl(*ROWS))
    table_of(config, bpe)
    monkeypatch.setattr(cache_module, "preparation_code_hash", lambda: "other code")
    assert not table_of(config, bpe).cached


def test_settings_without_effect_on_tokens_find_the_same_rows(cache, jsonl, bpe):
    config = DataConfig(jsonl(*ROWS))
    table_of(config, bpe)
    for change in ({"max_lost_share": 0.9}, {"processes": 1}, {"cache": str(cache)}):
        assert table_of(replace(config, **change), bpe).cached, change


# Whole or not at all


def in_a_fork(work) -> int:
    """The wait status of a forked process that does the work."""
    child = os.fork()
    if child == 0:
        try:
            work()
            os._exit(0)
        except BaseException:
            os._exit(9)
    return os.waitpid(child, 0)[1]


@pytest.mark.parametrize("method", ["add", "close"])
def test_a_writer_that_is_killed_leaves_nothing_that_is_read(cache, jsonl, bpe, monkeypatch, small_chunks, method):
    config = DataConfig(jsonl(*ROWS))
    original = getattr(TableWriter, method)

    def kill(writer, *arguments):
        original(writer, *arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(TableWriter, method, kill)
        assert os.WTERMSIG(in_a_fork(lambda: table_of(config, bpe))) == signal.SIGKILL
    assert list_entries(cache) == []
    table = table_of(config, bpe)
    assert not table.cached and len(list(table)) == 40
    assert sorted(path.name for path in (cache / "entries").iterdir()) == [table.key]  # what was left is removed


def test_several_processes_prepare_once_and_all_get_the_rows(cache, jsonl, bpe, monkeypatch, tmp_path):
    config = DataConfig(jsonl(*ROWS))
    original = prepare_module._make

    def slow(*arguments, **options):
        with open(tmp_path / "made", "a") as file:
            file.write("x")
        time.sleep(0.5)
        return original(*arguments, **options)

    monkeypatch.setattr(prepare_module, "_make", slow)
    with ThreadPoolExecutor(3) as pool:
        forks = [pool.submit(in_a_fork, lambda: list(table_of(config, bpe))) for _ in range(3)]
    assert [fork.result() for fork in forks] == [0, 0, 0] and (tmp_path / "made").read_text() == "x"


@pytest.mark.parametrize("verified", ["always", "where the times of a file have changed"])
@pytest.mark.parametrize(
    "fault", ["a flipped byte", "a short file", "a missing file", "the manifest", "no manifest", "a deep manifest"]
)
def test_a_damaged_entry_is_noticed_and_made_again(cache, jsonl, bpe, monkeypatch, fault, verified):
    if verified != "always":
        monkeypatch.setattr(cache_module, "VERIFY_BYTES", 0)
    config = DataConfig(jsonl(*ROWS))
    table = table_of(config, bpe)
    expected, rows = list(table), table.directory / "tokens"
    match fault:
        case "a flipped byte":
            content = bytearray(rows.read_bytes())
            content[len(content) // 2] ^= 1
            rows.write_bytes(content)
        case "a short file":
            os.truncate(rows, rows.stat().st_size - 8)
        case "a missing file":
            rows.unlink()
        case "the manifest":
            manifest = table.directory / "manifest.json"
            manifest.write_text(manifest.read_text().replace('"rows": 40', '"rows": 39'))
        case "no manifest":
            (table.directory / "manifest.json").unlink()
        case "a deep manifest":
            (table.directory / "manifest.json").write_text("[" * 100_000)
            assert [entry.kind for entry in list_entries(cache)] == ["damaged"]
    again = table_of(config, bpe)
    assert not again.cached and "were damaged" in again.notes[0] and list(again) == expected
    assert table_of(config, bpe).cached and table_of(config, bpe).notes == []


def test_a_cache_that_cannot_be_written_is_refused(tmp_path, jsonl, bpe):
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(UserError, match=r"file: cannot be written .* data\.cache or ALIGNMENT_CACHE"):
        table_of(DataConfig(jsonl(*ROWS), cache=str(tmp_path / "file")), bpe)


def test_bad_rows_leave_no_entry(cache, jsonl, bpe):
    with pytest.raises(UserError, match="1 bad row"):
        prepare(DataConfig(jsonl(*ROWS, {"prompt": "x", "completion": ""})), "demonstrations", bpe)
    assert list_entries(cache) == []


# Chunks and processes


def test_several_processes_give_the_same_rows_in_the_same_order(cache, jsonl, bpe, small_chunks, tmp_path):
    path = jsonl(*ROWS, {"prompt": "x"}, *ROWS)
    configs = [DataConfig(path, on_bad_row="skip", processes=n, cache=str(tmp_path / str(n))) for n in (1, 2)]
    one, two = (table_of(config, bpe) for config in configs)
    assert not two.cached and list(one) == list(two) and one.tally == two.tally and one.tally.dropped


@pytest.mark.parametrize("processes", [1, 2])
def test_all_bad_rows_of_all_chunks_and_sources_are_reported_in_order(cache, jsonl, bpe, small_chunks, processes):
    bad = {"prompt": "x", "completion": ""}
    first = jsonl(*[bad if n % 3 == 0 else ROWS[n] for n in range(40)], name="first.jsonl")
    second = jsonl(ROWS[0], bad, name="second.jsonl")
    with pytest.raises(UserError) as error:
        prepare(DataConfig([first, second], processes=processes), "demonstrations", bpe)
    lines = str(error.value).splitlines()
    assert lines[0].startswith("15 bad rows;")
    places = [line.split(":")[0].rpartition("/")[2] + ":" + line.split(":")[1] for line in lines[1:]]
    assert places == [f"first.jsonl:{n + 1}" for n in range(0, 40, 3)] + ["second.jsonl:2"]


def test_a_format_that_begins_far_down_is_found(cache, jsonl, bpe, small_chunks):
    path = jsonl(*[{"note": "nothing here"}] * 60, *ROWS)
    table = table_of(DataConfig(path, on_bad_row="skip", max_lost_share=0.9), bpe)
    assert len(table) == 40 and table[0].row_id.endswith(":61")
    with pytest.raises(UserError, match="no demonstrations here: found columns note"):
        prepare(DataConfig(jsonl(*[{"note": "nothing"}] * 60, name="other.jsonl")), "demonstrations", bpe)


def test_max_rows_stops_across_chunks_and_sources(cache, jsonl, bpe, small_chunks):
    paths = [jsonl(*ROWS, name="a.jsonl"), jsonl(*ROWS, name="b.jsonl")]
    rows, counts = prepare(DataConfig(paths, max_rows=45), "demonstrations", bpe)
    assert isinstance(rows, JoinedTables) and [len(table) for table in rows.tables] == [40, 5] and counts.kept == 45
    assert [row.source for row in rows] == [0] * 40 + [1] * 5


# The order of rows


# Listing and clearing


def test_entries_are_listed_and_cleared(cache, jsonl, bpe):
    path = jsonl(*ROWS)
    table = table_of(DataConfig(path), bpe)
    [head, line, last] = cache_lines()
    assert head.split()[:4] == ["key", "kind", "source", "rows"] and last == f"{cache}: 1 entry, {last.split()[-2]} MB"
    assert line.startswith(table.key) and "demonstrations" in line and path in line and " 40 " in line
    assert cache_lines(older_than=1) == [f"{cache}: 0 entries, 0.0 MB"]
    manifest = table.directory / "manifest.json"
    os.utime(manifest, (time.time() - 3 * 86400,) * 2)
    assert cache_lines(clear=True, older_than=5)[-1].endswith("deleted 0 entries, 0.0 MB")
    assert "deleted 1 entry" in cache_lines(clear=True, older_than=2)[-1] and list_entries(cache) == []
    assert len(list(table)) == 40  # whoever has mapped it still reads it


def test_an_entry_that_is_being_prepared_is_not_cleared(cache, jsonl, bpe):
    key = table_of(DataConfig(jsonl(*ROWS)), bpe).key
    with FileLock(cache / "locks" / key):
        lines = cache_lines(clear=True)
    assert lines[0].startswith(f"left {key}") and "deleted 0 entries" in lines[1] and len(list_entries(cache)) == 1


def test_findings_of_the_checks_are_kept_with_the_rows(cache, jsonl, bpe, small_chunks):
    config = DataConfig(jsonl(*ROWS, *ROWS[:20]))
    first, again = table_of(config, bpe), table_of(config, bpe)
    assert again.cached and first.findings == again.findings
    assert any("20 rows are exact copies" in finding["text"] for finding in again.findings), again.findings


def test_h09_columns_and_splits_of_a_source_prepare_anew(cache, jsonl, bpe):
    path = jsonl({"prompt": "a", "completion": "b", "other": "c"})
    plain = table_of(DataConfig([SourceConfig(path)]), bpe)
    renamed = table_of(DataConfig([SourceConfig(path, columns={"completion": "other"})]), bpe)
    assert plain.key != renamed.key and plain[0].ids != renamed[0].ids

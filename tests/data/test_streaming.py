"""Streamed rows: each once an epoch whatever the ranks, the same order after any resume, and memory that does not grow."""

import gc
import gzip
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.prepare import preparation_of, prepare
from alignment.data.rows.files import open_sources
from alignment.data.streaming import ALONE, Ranks, Share, StreamedOrder, open_stream
from alignment.errors import UserError
from alignment.training import shard_rows
from tests.distributed.processes import is_running, run_ranks


def write_rows(path, count, name="", start=0):
    """`count` demonstrations whose response tells them apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": "the cat", "completion": f" {name}{start + row}"}) + "\n" for row in range(count)]
    text = "".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def streamed(
    tokenizer, train, *, kind="demonstrations", batch_size=4, seed=0, ranks=ALONE, note=str, check=len, **settings
):
    settings = {"shuffle_buffer": 10, "max_length": 64, **settings}
    config = DataConfig(train, streaming=True, **settings)
    rows, _ = open_stream(preparation_of(kind), config, tokenizer)
    return StreamedOrder(rows, batch_size=batch_size, seed=seed, ranks=ranks, note=note, check=check)


def names(stream, steps):
    return [row.row_id.rpartition("/")[2] for step in steps for row in stream.rows_at(step)]


@pytest.fixture
def folder(tmp_path):
    """37 rows in three files, one of them compressed."""
    for name, count in {"a.jsonl": 16, "b.jsonl.gz": 14, "c.jsonl": 7}.items():
        write_rows(tmp_path / "rows" / name, count, name[0])
    return str(tmp_path / "rows")


# Order


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_row_comes_once_an_epoch_over_all_ranks(bpe, folder, ranks):
    stream, seen = streamed(bpe, folder), Counter()
    steps = range(37)  # 148 rows: four epochs
    for step in steps:
        batch = stream.rows_at(step)
        own = [shard_rows(batch, list, rank, ranks) for rank in range(ranks)]
        assert sorted(row.row_id for rows in own for row in rows) == sorted(row.row_id for row in batch)
        seen.update((epoch, row.row_id) for row, epoch in zip(batch, stream.epochs_at(step), strict=True))
    assert len(seen) == 4 * 37 and set(seen.values()) == {1}


def test_rows_are_those_of_the_same_file_read_as_a_whole(bpe, folder):
    whole, _ = prepare(DataConfig(folder, max_length=64), "demonstrations", bpe)
    stream = streamed(bpe, folder, batch_size=37)
    assert sorted(stream.rows_at(0), key=lambda row: row.row_id) == sorted(whole, key=lambda row: row.row_id)


def test_order_is_shuffled_in_windows_and_files_by_epoch(bpe, folder):
    stream = streamed(bpe, folder, batch_size=37)
    epochs = [names(stream, [step]) for step in range(6)]
    assert len({tuple(epoch) for epoch in epochs}) == 6
    assert len({tuple(dict.fromkeys(name[0] for name in epoch)) for epoch in epochs}) > 1  # order of the files
    for epoch in epochs:
        for number in range(4):  # each window holds successive rows, of which those of one file lie side by side
            window = epoch[10 * number : 10 * number + 10]
            for file in "abc":
                lines = sorted(int(name.rpartition(":")[2]) for name in window if name[0] == file)
                assert lines == list(range(lines[0], lines[0] + len(lines))) if lines else True
        assert epoch[:10] != sorted(epoch[:10], key=lambda name: int(name.rpartition(":")[2]))
    in_order = streamed(bpe, f"{folder}/a.jsonl", batch_size=16, shuffle_buffer=1)
    assert names(in_order, [0]) == [f"a.jsonl:{line}" for line in range(1, 17)]


def test_order_depends_on_the_seed_and_on_nothing_that_was_asked_before(bpe, folder):
    forwards = streamed(bpe, folder, seed=3)
    rows = [forwards.rows_at(step) for step in range(24)]
    backwards = streamed(bpe, folder, seed=3)
    for step in (23, 5, 5, 0, 11):
        assert backwards.rows_at(step) == rows[step]
    assert [row for step in range(3) for row in streamed(bpe, folder, seed=3, batch_size=12).rows_at(step)] == [
        row for batch in rows[:9] for row in batch
    ]
    assert streamed(bpe, folder, seed=4).rows_at(0) != rows[0]


def test_a_resumed_stream_gives_the_batch_before_its_state_too(bpe, folder):
    whole, resumed = streamed(bpe, folder), streamed(bpe, folder)
    rows = [whole.rows_at(step) for step in range(3)]
    resumed.restore(whole.state())  # after batch 2
    assert [resumed.rows_at(step) for step in (2, 1)] == [rows[2], rows[1]]


@pytest.mark.parametrize("mixing", ["concatenate", "weights"])
def test_a_resumed_stream_goes_on_the_same_at_every_step(bpe, folder, tmp_path, mixing):
    """96 rows: steps lie inside windows of 10, on their borders, and on those of epochs of 37 (concatenate) or 16."""
    sources = [SourceConfig(folder, weight=3.0), SourceConfig(write_rows(tmp_path / "d.jsonl", 16, "d"), weight=1.0)]
    train = folder if mixing == "concatenate" else sources
    whole = streamed(bpe, train, mixing=mixing)
    rows, states = [], []
    for step in range(24):
        states.append(json.dumps(whole.state()))
        rows.append((whole.rows_at(step), whole.epochs_at(step)))
    for step in range(24):
        resumed = streamed(bpe, train, mixing=mixing)
        resumed.restore(json.loads(states[step]))
        for later in range(step, min(step + 4, 24)):
            assert (resumed.rows_at(later), resumed.epochs_at(later)) == rows[later]
            if later < 23:
                assert json.dumps(resumed.state()) == states[later + 1]
    assert max(map(len, states)) < 3000  # a checkpoint holds numbers, not rows


def test_a_resume_reads_one_window_and_not_what_came_before(bpe, tmp_path, monkeypatch):
    from alignment.data import streaming

    path = write_rows(tmp_path / "long.jsonl", 500)
    stream = streamed(bpe, path)
    stream.rows_at(100)
    state = stream.state()
    resumed, read = streamed(bpe, path), []
    prepare_chunk = streaming.prepare_chunk
    monkeypatch.setattr(
        streaming, "prepare_chunk", lambda job, chunk: read.extend(chunk.rows) or prepare_chunk(job, chunk)
    )
    resumed.restore(state)
    assert resumed.rows_at(101) == stream.rows_at(101)
    assert len(read) <= 30


def test_other_files_are_no_resume(bpe, folder):
    stream = streamed(bpe, folder)
    stream.rows_at(3)
    state = stream.state()
    write_rows(Path(open_sources(folder, "train")[0].name), 17, "a")
    with pytest.raises(UserError, match="not those of the checkpoint"):
        streamed(bpe, folder).restore(state)


# The process that reads ahead


def readers():
    """Process ids of the readers of this process."""
    gc.collect()  # of other tests
    return [int(str(process.pid)) for process in multiprocessing.active_children()]


@pytest.mark.parametrize("mixing", ["concatenate", "weights"])
def test_windows_read_ahead_are_those_read_in_this_process(bpe, folder, tmp_path, monkeypatch, mixing):
    """Three epochs and a resume in each; what is compared are the arrays of the window and not only its rows."""
    sources = [SourceConfig(folder, weight=3.0), SourceConfig(write_rows(tmp_path / "d.jsonl", 16, "d"), weight=1.0)]

    def seen():
        stream, found = streamed(bpe, folder if mixing == "concatenate" else sources, mixing=mixing), []
        for step in range(28):
            if step in (5, 12, 20):
                stream.restore(json.loads(json.dumps(stream.state())))
            found.append((stream.rows_at(step), stream.epochs_at(step), stream.state()))
            found += [
                [each.tobytes() for table in cursor.window().rows.tables for each in table.encoded]
                for cursor in stream._cursors
            ]
        return found, len(readers())

    ahead, processes = seen()
    assert processes == (1 if mixing == "concatenate" else 2) and readers() == []
    monkeypatch.setattr("alignment.data.streaming.sys.platform", "other")
    assert seen() == (ahead, 0)


def test_files_of_every_format_are_read_ahead(bpe, tmp_path, monkeypatch):
    """pyarrow has threads in the process that forks, and an open file of every format is at the second window's begin."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [f"the cat {row}" for row in range(40)]
    write_rows(tmp_path / "a.jsonl.gz", 40)
    csv = "".join(f"the cat, {row}\n" for row in range(40))
    (tmp_path / "b.csv").write_text("prompt,completion\n" + csv)
    pq.write_table(pa.table({"prompt": rows, "completion": rows}), tmp_path / "c.parquet", row_group_size=7)
    for path in sorted(tmp_path.iterdir()):
        ahead = streamed(bpe, str(path))
        found = [ahead.rows_at(step) for step in range(25)]
        assert len(readers()) == 1
        del ahead
        with monkeypatch.context() as context:
            context.setattr("alignment.data.streaming.sys.platform", "other")
            assert [streamed(bpe, str(path)).rows_at(step) for step in range(25)] == found, path


def test_a_bad_row_ends_a_run_in_the_same_words_wherever_it_is_read(bpe, tmp_path, monkeypatch):
    path = write_rows(tmp_path / "rows.jsonl", 1100)
    lines = Path(path).read_text().splitlines()
    Path(path).write_text("\n".join([*lines[:1030], '{"prompt": "the cat", "completion": 7}', *lines[1031:]]))
    messages = []
    for platform in ("linux", "other"):
        monkeypatch.setattr("alignment.data.streaming.sys.platform", platform)
        stream = streamed(bpe, path, batch_size=10, shuffle_buffer=1024)
        assert len([stream.rows_at(step) for step in range(102)]) == 102  # the first window has no bad row
        for _ in range(2):  # asked again, it is read here
            with pytest.raises(UserError) as caught:
                stream.rows_at(102)
            messages.append(str(caught.value))
    assert len(set(messages)) == 1 and f"{path}:1031:completion: must be text" in messages[0]


def test_another_error_of_the_reader_comes_with_its_traceback(bpe, folder, monkeypatch):
    class Odd(Exception):
        def __init__(self, one, two):  # cannot be read back by pickle
            super().__init__("no such thing")

    stream = streamed(bpe, folder)

    def fail(job, chunk):
        raise Odd(1, 2)

    rows_from, real = stream._cursors[0]._rows_from, multiprocessing.current_process().pid
    monkeypatch.setattr(
        stream._cursors[0], "_rows_from", lambda *at: rows_from(*at) if os.getpid() == real else fail(*at)
    )
    stream.rows_at(0)
    with pytest.raises(RuntimeError, match=r"(?s)in fail.*Odd: no such thing"):
        list(map(stream.rows_at, range(4)))


@pytest.mark.parametrize("late", [False, True])
def test_the_death_of_the_reader_is_one_message(bpe, folder, late):
    """It dies while it waits, or has sent part of what it read: more than the connection holds."""
    stream = streamed(bpe, folder)
    stream.rows_at(0)
    [reader] = readers()
    if late:
        os.kill(reader, signal.SIGSTOP)
        threading.Timer(0.3, os.kill, (reader, signal.SIGKILL)).start()
    else:
        os.kill(reader, signal.SIGKILL)
    with pytest.raises(UserError, match=r"data\.streaming: the process that reads the next rows was ended"):
        list(map(stream.rows_at, range(20)))
    assert readers() == []


def test_signals_to_all_processes_of_a_run_leave_the_reader_to_it(bpe, folder):
    whole, stream = streamed(bpe, folder), streamed(bpe, folder)
    rows = [whole.rows_at(step) for step in range(20)]
    del whole
    stream.rows_at(0)
    [reader] = readers()
    time.sleep(0.3)  # it ignores them from its start on
    for each in (signal.SIGTERM, signal.SIGINT):
        os.kill(reader, each)
    assert [stream.rows_at(step) for step in range(20)] == rows and readers() == [reader]


ENDS = {"end": "", "error": "raise RuntimeError", "quick": "os._exit(0)", "kill": "os.kill(os.getpid(), 9)"}


@pytest.mark.parametrize("end", ENDS)
def test_no_process_is_left_however_a_run_ends(tmp_path, end):
    """Of two sources: the second reader holds a copy of the first one's connection."""
    program = f"""
import multiprocessing, os, pathlib, sys
from tests.data.conftest import CORPUS, train_bpe
from tests.data.test_streaming import SourceConfig, streamed, write_rows
paths = [write_rows(pathlib.Path(sys.argv[1]) / name, 90) for name in ("a.jsonl", "b.jsonl")]
train = [SourceConfig(path, weight=1.0) for path in paths]
stream = streamed(train_bpe(CORPUS, 400), train, mixing="weights")
stream.rows_at(0), stream.rows_at(1)
print(*(process.pid for process in multiprocessing.active_children()), flush=True)
{ENDS[end]}
"""
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=120)
    found = list(map(int, done.stdout.split()))
    assert len(found) == 2, done.stderr
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(map(is_running, found)):
        time.sleep(0.05)
    assert not any(map(is_running, found))


# Ranks


def stream_of_rank(rank, size, build, counts):
    """A stream of one rank, which is given what the others would give; `counts`: chunks that the rank has prepared."""
    others = [build(Ranks(each, size))._cursors for each in range(size)]

    def gather(value):
        if isinstance(value, Share):
            state = stream._cursors[0].state
            shares[:] = [cursors[0].read_share(state) for cursors in others]
            turns[:] = [0]
            return [share._replace(chunks=()) for share in shares]
        if isinstance(value, UserError):
            return [*[None] * rank, value]
        counts.append(len(value))
        turns[0] += 1
        return [list(share.chunks[turns[0] - 1 : turns[0]]) for share in shares[:rank]] + [
            value, *(list(share.chunks[turns[0] - 1 : turns[0]]) for share in shares[rank + 1 :])
        ]  # fmt: skip

    shares, turns = [], [0]
    stream = build(Ranks(rank, size, gather))
    return stream


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_divide_the_work_and_have_the_batches_of_one(bpe, folder, monkeypatch, size):
    """Windows of 10 rows in chunks of 3 and less: 4 to 6, as windows reach over files."""
    monkeypatch.setattr("alignment.data.streaming.CHUNK_ROWS", 3)
    build = partial(streamed, bpe, folder)
    alone = build()
    rows = [(alone.rows_at(step), alone.epochs_at(step), alone.state()) for step in range(24)]
    for rank in range(size):
        counts = []
        stream = stream_of_rank(rank, size, lambda ranks: build(ranks=ranks), counts)
        assert [(stream.rows_at(step), stream.epochs_at(step), stream.state()) for step in range(24)] == rows
        assert len(counts) >= 20 and sum(counts) >= len(counts) - 12  # one chunk a turn; in a window's last turn none


def test_two_processes_have_the_batches_of_one_and_its_error(tmp_path):
    """A bad row behind the rows that are read before the run."""
    path = write_rows(tmp_path / "rows.jsonl", 1400)
    with open(path, "a") as file:
        file.write('{"prompt": 7}\n')
    alone, both = (run_ranks(count, "tests.distributed.streamed", path, "400") for count in (1, 2))
    assert both == alone and "rows.jsonl:1390'" in both and "rows.jsonl:1401:prompt: must be text" in both


def test_ranks_that_read_other_rows_are_refused(bpe, folder):
    stream = streamed(bpe, folder, ranks=Ranks(0, 2, lambda share: [share, share._replace(total=share.total + 1)]))
    with pytest.raises(UserError, match="ranks read other rows than each other"):
        stream.rows_at(0)


# Sources


def test_files_of_every_format_go_on_at_every_position(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = [f'row {row}, "quoted"\nsecond line {row}' for row in range(30)]
    (tmp_path / "a.jsonl").write_text("\n\n".join(json.dumps({"text": text}) for text in texts))
    quoted = "".join('"{}",x\r\n'.format(text.replace('"', '""')) for text in texts)
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbftext,other\r\n" + quoted.encode())
    (tmp_path / "c.csv.gz").write_bytes(gzip.compress(b"text,other\n" + quoted.encode()))
    pq.write_table(pa.table({"text": texts}), tmp_path / "d.parquet", row_group_size=7)
    (tmp_path / "e.txt").write_text("\n\n\n".join(texts) + "\n")
    (tmp_path / "f.txt.gz").write_bytes(gzip.compress("\n \n".join(texts).encode()))
    opened = open_sources(str(tmp_path), "train")
    assert len(opened) == 6
    for each in opened:
        rows = list(each.read(None))
        assert [row.values["text"] for row in rows] == texts, each.name
        for number, row in enumerate(rows, start=1):
            assert list(each.read(json.loads(json.dumps(row.end)))) == rows[number:], each.name


def test_a_hub_data_set_is_streamed_and_gone_on_with(bpe, tmp_path, monkeypatch):
    """The library's own streaming, of local files in the position of the Hub's."""
    import datasets

    files, real = [write_rows(tmp_path / f"{name}.jsonl", 25, name) for name in "ab"], datasets.load_dataset
    calls = []

    def load(*arguments, **options):
        calls.append((arguments, options))
        return real("json", data_files=files, split="train", streaming=options["streaming"])

    monkeypatch.setattr(datasets, "load_dataset", load)
    whole = streamed(bpe, "owner/name:part[test]")
    assert calls[0] == (("owner/name", "part"), {"split": "test", "streaming": True})
    rows, states = [], []
    for step in range(25):  # two epochs
        states.append(json.dumps(whole.state()))
        rows.append(whole.rows_at(step))
    first = Counter(row.row_id for row in [row for batch in rows for row in batch][:50])
    assert len(first) == 50 and set(first) == {f"owner/name:part[test]:{row}" for row in range(1, 51)}
    for step in (1, 3, 9, 12, 13, 24):
        resumed = streamed(bpe, "owner/name:part[test]")
        resumed.restore(json.loads(states[step]))
        assert resumed.rows_at(step) == rows[step]


def test_sources_are_drawn_by_weight_each_row_once_an_epoch(bpe, tmp_path):
    a, b = (write_rows(tmp_path / f"{name}.jsonl", count, name) for name, count in (("a", 30), ("b", 12)))
    stream = streamed(bpe, [SourceConfig(a, weight=3.0), SourceConfig(b, weight=1.0)], mixing="weights", batch_size=50)
    drawn = [
        (row, epoch)
        for step in range(40)
        for row, epoch in zip(stream.rows_at(step), stream.epochs_at(step), strict=True)
    ]
    of_a = [(row.row_id, epoch) for row, epoch in drawn if row.source == 0]
    assert abs(len(of_a) / 2000 - 0.75) < 0.04
    assert max(Counter(of_a).values()) == 1 and len({name for name, _ in of_a}) == 30
    assert {epoch for row, epoch in drawn if row.source == 1} > {0, 10, 30}


# Memory


def test_memory_does_not_grow_with_the_rows(bpe, tmp_path):
    """Three times the rows in the same memory: a window of 500 rows and 50 tokens each, and the rows that fill the next."""
    peaks = {}
    for count in (1500, 4500):
        path = tmp_path / f"{count}.jsonl"
        with open(path, "w") as file:
            file.writelines(json.dumps({"text": f"the cat sat on the mat {row} " * 4}) + "\n" for row in range(count))
        stream = streamed(bpe, str(path), kind="text", shuffle_buffer=500, batch_size=50)
        stream.rows_at(0)
        tracemalloc.start()
        for step in range(1, count // 50):
            stream.rows_at(step)
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[4500] < 1.2 * peaks[1500] < 5e6


# Faults


def test_a_bad_row_ends_the_run_when_it_is_read(bpe, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, 2000)
    lines = path.read_text().splitlines()
    lines[1499] = '{"prompt": "the cat", "completion": 7}'
    lines[1502] = "nonsense"
    path.write_text("\n".join(lines))
    stream = streamed(bpe, str(path), batch_size=10)
    assert len([stream.rows_at(step) for step in range(149)]) == 149
    with pytest.raises(UserError) as caught:
        list(map(stream.rows_at, range(149, 152)))
    message = str(caught.value)
    assert f"{path}:1500:completion: must be text" in message
    assert "set data.on_bad_row=skip" in message


def test_bad_rows_are_counted_where_they_are_skipped(bpe, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, 60)
    path.write_text(path.read_text().replace('" 7"', "7").replace('" 44"', "44"))
    notes = []
    stream = streamed(bpe, str(path), on_bad_row="skip", batch_size=29, note=notes.append)
    first = Counter(names(stream, range(2)))
    assert len(first) == 58 and not {"rows.jsonl:8", "rows.jsonl:45"} & set(first)
    stream.rows_at(2)
    said = " ".join(notes)
    assert "rows.jsonl:8" in said and "rows.jsonl:45" in said and "epoch 1 has ended" in said


def test_a_source_that_goes_bad_ends_the_run(bpe, tmp_path):
    path = tmp_path / "rows.jsonl"
    write_rows(path, 1100)
    with open(path, "a") as file:
        file.writelines('{"prompt": "the cat"}\n' for _ in range(2000))
    stream = streamed(bpe, str(path), on_bad_row="skip", shuffle_buffer=100, batch_size=50)
    with pytest.raises(UserError, match="rows were dropped"):
        list(map(stream.rows_at, range(40)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mixing": "proportional"}, "does not know"),
        ({"max_rows": 5}, "training.max_steps says"),
        ({"train": [SourceConfig("a.jsonl", max_rows=5)]}, "training.max_steps says"),
        ({"shuffle_buffer": 0}, "must be at least 1"),
    ],
)
def test_settings_that_streaming_cannot_follow_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig(**{"train": ["a.jsonl", "b.jsonl"], "streaming": True, **settings})


@pytest.mark.parametrize(
    ("name", "message"),
    [("rows.json", "read as a whole"), ("none.jsonl", "no such file"), ("empty.jsonl", "0 rows")],
)
def test_sources_that_cannot_be_streamed_are_refused(bpe, tmp_path, name, message):
    (tmp_path / "rows.json").write_text("[]")
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(UserError, match=message):
        streamed(bpe, str(tmp_path / name))


def test_what_needs_all_rows_refuses_a_stream(bpe, folder):
    from alignment.data.pretraining.prepare import prepare_text
    from alignment.data.stream import stream_of

    config = DataConfig(folder, streaming=True)
    for refused in (
        lambda: prepare(config, "demonstrations", bpe),
        lambda: stream_of(config, [], batch_size=1, seed=0),
        lambda: prepare_text(config, "sentence_pairs", bpe),
    ):
        with pytest.raises(UserError, match=r"data\.streaming"):
            refused()
    held_out, counts = prepare(
        DataConfig(folder, evaluation=folder, streaming=True), "demonstrations", bpe, "evaluation"
    )
    assert len(held_out) == 37 and not counts.trained_on

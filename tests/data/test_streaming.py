"""Streamed rows: each once an epoch whatever the ranks, the same order after any resume, and memory that does not grow."""

import gzip
import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.prepare import preparation_of, prepare
from alignment.data.rows.files import open_sources
from alignment.data.streaming import StreamedOrder, open_stream
from alignment.errors import UserError
from alignment.training.terms import shard_rows


def write_rows(path, count, name="", start=0):
    """`count` demonstrations whose response tells them apart."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": "the cat", "completion": f" {name}{start + row}"}) + "\n" for row in range(count)]
    text = "".join(lines).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return str(path)


def streamed(tokenizer, train, *, kind="demonstrations", batch_size=4, seed=0, note=str, check=len, **settings):
    settings = {"shuffle_buffer": 10, "max_length": 64, **settings}
    config = DataConfig(train, streaming=True, **settings)
    rows, _ = open_stream(preparation_of(kind), config, tokenizer)
    return StreamedOrder(rows, batch_size=batch_size, seed=seed, note=note, check=check)


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


def test_order_is_shuffled_within_windows_and_files_in_an_order_of_the_epoch(bpe, folder):
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


def test_sources_are_drawn_by_their_weights_each_row_once_an_epoch_of_its_source(bpe, tmp_path):
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
    [("rows.json", "one list, which is read as a whole"), ("none.jsonl", "no such file"), ("empty.jsonl", "0 rows")],
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

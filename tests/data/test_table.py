"""Tables give back the very examples that were written, whatever the kind, and columns without reading rows."""

import json
import tracemalloc
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from alignment.data.batches import Example
from alignment.data.rows.records import Tally
from alignment.data.table import (
    JoinedTables,
    Table,
    TableWriter,
    column_of,
    encode_examples,
    longest_rows,
    mask_of,
    runs_of,
)
from tests.examples import labeled_example, pair_example, prompt_example, ranked_example, sides, step_example

T, F = True, False


def document(ids, mask, row_id):
    return Example.single(ids, mask, row_id)


DIALOGUE = document([5, 6, 7, 8, 9, 2], [F, F, T, F, T, T], "rows.jsonl:1")
PAIR = pair_example(
    document([1, 4, 9, 70000, 2], [F, F, F, T, T], "a/rows.jsonl:3"),
    document([1, 4, 9, 5, 6, 2], [F, F, F, T, T, T], "a/rows.jsonl:3"),
    0.5,
    "a/rows.jsonl:3",
)
NO_PROMPT = pair_example(document([4, 5], [T, T], "x:1"), document([4, 6, 7], [T, T, T], "x:1"), None, "x:1")
EXAMPLES = {
    "demonstrations": [DIALOGUE, document([3, 2], [T, T], "rows.jsonl:12"), document([3, 2], [F, F], "org/set[a:b]:7")],
    "comparisons": [PAIR, NO_PROMPT],
    "prompts": [
        prompt_example([1, 2, 3], "a", {"note": [1, None, {"é": "\ud800"}]}, "p.csv:2", True),
        prompt_example([7], [{"role": "user", "content": "hé"}], {}, "p.csv:5"),
    ],
    "labels": [
        labeled_example(document([1, 2], [F, T], "k:1"), True, "k:1"),
        labeled_example(document([1, 3], [F, T], "k:2"), False, "k:2"),
    ],
    "rankings": [
        ranked_example((sides(PAIR)[0], sides(PAIR)[1], sides(PAIR)[0]), (1, 0, 1), PAIR.row_id),
        ranked_example((sides(PAIR)[0], sides(PAIR)[1]), (0, 1), PAIR.row_id, margin=2.0),
    ],
    "steps": [step_example([1, 2, 3, 4], (1, 3), (True, False), "s:9"), step_example([1], (0,), (True,), "s:10")],
}
EXAMPLES["text"] = EXAMPLES["demonstrations"]


@pytest.fixture
def write(tmp_path):
    """Writes batches of examples as a table and opens it."""

    def write_table(*batches):
        directory = tmp_path / f"table-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        writer = TableWriter(directory)
        for batch in batches:
            writer.add(encode_examples(batch, {example.row_id: 2**64 - 1 for example in batch}))
        manifest = {**writer.close(), "key": "ab12", "tally": asdict(Tally(tokens=3))}
        return Table.open(directory, json.loads(json.dumps(manifest)), notes=["a note"])

    return write_table


@pytest.mark.parametrize("kind", EXAMPLES)
def test_every_kind_of_example_comes_back_equal(write, kind):
    examples = EXAMPLES[kind]
    table = write(examples[:1], [], examples[1:])
    assert list(table) == examples and len(table) == len(examples)
    assert [table[index] for index in range(-len(table), 0)] == examples
    assert table[:1] == examples[:1] and table[::-1] == examples[::-1]
    with pytest.raises(IndexError):
        table[len(table)]
    assert column_of(table, "longest").tolist() == column_of(examples, "longest").tolist()
    assert column_of(table, "total").tolist() == column_of(examples, "total").tolist()
    assert table.column("prompt_hash").tolist() == [2**64 - 1] * len(examples)
    assert column_of(table, "cut").tolist() == column_of(examples, "cut").tolist()
    assert (table.key, table.notes, table.tally.tokens) == ("ab12", ["a note"], 3)
    assert table.column("documents").tolist() == [len(row.documents) for row in examples]


def test_the_first_example_of_each_data_row_is_known_across_batches(write):
    ids = ["a:1", "a:1", "a:2[0>1]", "a:2[0>2]", "a:2[0>2]", "b:1", "c:1", "c:1"]
    rows = [document([number + 1], [T], name) for number, name in enumerate(ids)]
    table = write(rows[:5], rows[5:6], rows[6:])
    assert table.column("record").tolist() == [0, 0, 1, 2, 2, 3, 4, 4] and list(table) == rows
    part = table.select(np.array([1, 4, 7]), key="x")
    assert part.column("record").tolist() == [0, 2, 4] and list(part) == [rows[1], rows[4], rows[7]]


@pytest.mark.parametrize("mask", [[], [T], [F], [F, F, T, T], [T, F, T], [F, T, F, T, F]])
def test_a_mask_is_the_lengths_of_its_runs(mask):
    assert mask_of(runs_of(mask)) == mask
    assert runs_of([F, F, T, T, T, F]) == [2, 3, 1] and runs_of([T]) == [0, 1]


def test_tables_and_lists_join_into_one_sequence(write):
    table, rows = write(EXAMPLES["text"]), [document([8, 9, 9, 9], [T] * 4, "m:1")]
    other = table.changed(source=3)
    joined = table + rows + other
    assert isinstance(joined, JoinedTables) and len(joined) == 7 and len(joined.tables) == 3
    assert list(joined) == [joined[index] for index in range(7)] == [*table, *rows, *other]
    assert [row.source for row in joined] == [0] * 4 + [3] * 3
    assert (rows + table)[0] == rows[0] and joined[-1] == other[2] and joined[3:4] == rows
    assert column_of(joined, "longest").tolist() == [6, 2, 2, 4, 6, 2, 2] and column_of(joined, "total").sum() == 24
    nothing: list[Example] = []
    assert table + nothing is table and nothing + table is table
    for index in (7, -8):
        with pytest.raises(IndexError):
            joined[index]


def test_the_longest_rows_come_first_and_equal_ones_in_their_order(write):
    rows = [document([1] * n, [T] * n, f"x:{line}") for line, n in enumerate((3, 5, 3, 5, 2))]
    names = ["x:1", "x:3", "x:0"]
    assert [row.row_id for row in longest_rows(write(rows[:2], rows[2:]), 3)] == names
    assert [row.row_id for row in longest_rows(rows, 3)] == names


def pages_mapped(table):
    """KiB of the files of a table that are mapped and in memory."""
    maps = Path("/proc/self/smaps").read_text().split(f"{table.directory}/")[1:]
    return sum(int(part.partition("Rss:")[2].split()[0]) for part in maps)


def test_reading_a_table_leaves_no_pages_mapped(write):
    rows = [document([line] * 500, [T] * 500, f"x:{line}") for line in range(4000)]
    table = write(rows)
    for index in np.random.default_rng(0).permutation(4000).tolist()[: 128 * 31]:
        assert table[index].ids == rows[index].ids
    assert pages_mapped(table) < 64  # KiB, of the table's 8 MB


def test_a_column_takes_its_own_bytes_and_leaves_no_pages_mapped(write):
    rows = [document([3, 2], [F, T], f"x:{line}") for line in range(40_000)]
    table = write(*(rows[start : start + 1000] for start in range(0, 40_000, 1000)))
    tracemalloc.start()
    lengths = column_of(table, "longest")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths.tolist() == [2] * 40_000 and peak < 1.3 * lengths.nbytes
    assert pages_mapped(table) == 0
    assert table.column("record").tolist() == list(range(40_000))

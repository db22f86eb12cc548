"""Tables give back the very examples that were written, whatever the kind, and columns without reading rows."""

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from alignment.data.codecs import CODECS, mask_of, runs_of
from alignment.data.examples import (
    Example,
    LabeledExample,
    PairExample,
    PromptExample,
    RankedExample,
    StepExample,
)
from alignment.data.rows.records import Tally
from alignment.data.table import (
    JoinedTables,
    Table,
    TableWriter,
    encode_batch,
    join_row_id,
    lengths_of,
    longest_rows,
    manifest_of,
    name_of_row,
    split_row_id,
    totals_of,
)

T, F = True, False


def document(ids, mask, row_id):
    return Example(ids, mask, row_id)


DIALOGUE = document([5, 6, 7, 8, 9, 2], [F, F, T, F, T, T], "rows.jsonl:1")
PAIR = PairExample(
    document([1, 4, 9, 70000, 2], [F, F, F, T, T], "a/rows.jsonl:3"),
    document([1, 4, 9, 5, 6, 2], [F, F, F, T, T, T], "a/rows.jsonl:3"),
    0.5,
    "a/rows.jsonl:3",
)
NO_PROMPT = PairExample(document([4, 5], [T, T], "x:1"), document([4, 6, 7], [T, T, T], "x:1"), None, "x:1")
EXAMPLES = {
    "demonstrations": [DIALOGUE, document([3, 2], [T, T], "rows.jsonl:12"), document([3, 2], [F, F], "org/set[a:b]:7")],
    "comparisons": [PAIR, NO_PROMPT],
    "prompts": [
        PromptExample([1, 2, 3], "a", {"note": [1, None, {"é": "\ud800"}]}, "p.csv:2", True),
        PromptExample([7], [{"role": "user", "content": "hé"}], {}, "p.csv:5"),
    ],
    "labels": [
        LabeledExample(document([1, 2], [F, T], "k:1"), True, "k:1"),
        LabeledExample(document([1, 3], [F, T], "k:2"), False, "k:2"),
    ],
    "rankings": [
        RankedExample((PAIR.chosen, PAIR.rejected, PAIR.chosen), (1, 0, 1), PAIR.row_id),
        RankedExample((PAIR.chosen, PAIR.rejected), (0, 1), PAIR.row_id, margin=2.0),
    ],
    "steps": [StepExample([1, 2, 3, 4], (1, 3), (True, False), "s:9"), StepExample([1], (0,), (True,), "s:10")],
}
EXAMPLES["text"] = EXAMPLES["demonstrations"]


@pytest.fixture
def write(tmp_path):
    """Writes batches of examples as a table and opens it."""

    def write_table(kind, *batches):
        directory = tmp_path / f"table-{len(list(tmp_path.iterdir()))}"
        directory.mkdir()
        writer = TableWriter(directory, CODECS[kind])
        for batch in batches:
            names: dict[str, int] = {}
            hashes = {example.row_id: 2**64 - 1 for example in batch}
            writer.add(encode_batch(CODECS[kind], batch, names, hashes), list(names))
        manifest = manifest_of(writer.close(), key="ab12", tally=Tally(tokens=3), notes=["a note"])
        return Table(directory, CODECS[kind], json.loads(json.dumps(manifest)))

    return write_table


@pytest.mark.parametrize("kind", CODECS)
def test_every_kind_of_example_comes_back_equal(write, kind):
    examples = EXAMPLES[kind]
    table = write(kind, examples[:1], [], examples[1:])
    assert list(table) == examples and len(table) == len(examples)
    assert [table[index] for index in range(-len(table), 0)] == examples
    assert table[:1] == examples[:1] and table[::-1] == examples[::-1]
    assert [type(row) for row in table] == [type(row) for row in examples]
    with pytest.raises(IndexError):
        table[len(table)]
    assert [table.row_id(index) for index in range(len(table))] == [row.row_id for row in examples]
    assert lengths_of(table).tolist() == lengths_of(examples).tolist()
    assert totals_of(table).tolist() == totals_of(examples).tolist()
    assert table.column("prompt_hash").tolist() == [2**64 - 1] * len(examples)
    assert (table.key, table.notes, table.tokens) == ("ab12", ["a note"], 3)


def test_values_have_python_types_that_do_not_depend_on_the_table(write):
    row = write("comparisons", [PAIR])[0]
    assert {type(token) for token in row.chosen.ids} == {int} and {type(value) for value in row.chosen.mask} == {bool}
    assert type(row.margin) is float and write("comparisons", [NO_PROMPT])[0].margin is None


def test_the_shared_prompt_is_stored_once(write):
    long = document([1] * 10_000, [F] * 9_990 + [T] * 10, "x:1")
    pair = PairExample(long, document([1] * 9_990 + [2] * 10, long.mask, "x:1"), None, "x:1")
    table = write("comparisons", [pair])
    assert list(table) == [pair]
    assert sum(path.stat().st_size for path in table.directory.iterdir()) < 4 * 10_000 + 8_000


def test_prompts_that_differ_in_one_token_are_kept_apart(write):
    pair = PairExample(document([1, 2, 3], [F, F, T], "x:1"), document([1, 9, 3, 4], [F, F, T, T], "x:1"), None, "x:1")
    assert list(write("comparisons", [pair])) == [pair]


@pytest.mark.parametrize(
    "row_id",
    [
        "a.jsonl:7",
        "a:b[c]:0",
        "no line",
        "a:07",
        "a:7#2",
        "a{}:3",
        "x:999999999999999999999",
        "a:3\n",
        ":1",
        "a:3[0>2]",
        "a:3[chosen]",
        "a:3[0.1][2>0]",
        "a:3[b:4]",
    ],
)
def test_a_row_id_is_split_and_joined_again(row_id):
    assert join_row_id(*split_row_id(row_id)) == row_id


def test_row_ids_of_one_file_share_one_name(write):
    table = write("text", [document([1, 2], [T, T], f"some/file.jsonl:{line}") for line in range(1, 500)])
    assert table.manifest["names"] == ["some/file.jsonl:{}"] and table.row_id(498) == "some/file.jsonl:499"


def test_row_ids_of_expanded_rows_share_their_endings(write):
    ids = [f"file.jsonl:{line}{end}" for line in range(1, 50) for end in ("[0>1]", "[0.1][0>2]", "[chosen]")]
    table = write("text", [document([1, 2], [T, T], row_id) for row_id in ids])
    assert table.manifest["names"] == ["file.jsonl:{}[0>1]", "file.jsonl:{}[0.1][0>2]", "file.jsonl:{}[chosen]"]
    assert [row.row_id for row in table] == ids


@pytest.mark.parametrize("mask", [[], [T], [F], [F, F, T, T], [T, F, T], [F, T, F, T, F]])
def test_a_mask_is_the_lengths_of_its_runs(mask):
    assert mask_of(runs_of(mask)) == mask
    assert runs_of([F, F, T, T, T, F]) == [2, 3, 1] and runs_of([T]) == [0, 1]


def test_tables_and_lists_join_into_one_sequence(write):
    table, rows = write("text", EXAMPLES["text"]), [document([8, 9, 9, 9], [T] * 4, "m:1")]
    other = table.with_source(3)
    joined = table + rows + other
    assert isinstance(joined, JoinedTables) and len(joined) == 7 and len(joined.tables) == 3
    assert [joined.source_of(index) for index in range(7)] == [0, 0, 0, 1, 2, 2, 2]
    assert list(joined) == [joined[index] for index in range(7)] == [*table, *rows, *other]
    assert [row.source for row in joined] == [0] * 4 + [3] * 3
    assert (rows + table)[0] == rows[0] and joined[-1] == other[2] and joined[3:4] == rows
    assert lengths_of(joined).tolist() == [6, 2, 2, 4, 6, 2, 2] and joined.tokens == totals_of(joined).sum() == 24
    assert name_of_row(joined, 3) == "m:1" and name_of_row(joined, 4) == "rows.jsonl:1"
    nothing: list[Example] = []
    assert table + nothing is table and nothing + table is table
    for index in (7, -8):
        with pytest.raises(IndexError):
            joined[index]


def test_the_longest_rows_come_first_and_equal_ones_in_their_order(write):
    rows = [document([1] * n, [T] * n, f"x:{line}") for line, n in enumerate((3, 5, 3, 5, 2))]
    names = ["x:1", "x:3", "x:0"]
    assert [row.row_id for row in longest_rows(write("text", rows[:2], rows[2:]), 3)] == names
    assert [row.row_id for row in longest_rows(rows, 3)] == names


def test_an_empty_table_has_no_rows(write):
    table = write("text", [])
    assert len(table) == 0 and list(table) == [] and table.lengths.tolist() == [] and not table


def pages_mapped(table):
    """KiB of the first file of a table that are mapped and in memory."""
    maps = Path("/proc/self/smaps").read_text().split(str(table.directory / "rows-00000.arrow"))[1]
    return int(maps.partition("Rss:")[2].split()[0])


def test_reading_a_table_leaves_no_pages_mapped(write):
    rows = [document([line] * 500, [T] * 500, f"x:{line}") for line in range(4000)]
    table = write("text", rows)
    for index in np.random.default_rng(0).permutation(4000).tolist()[: 128 * 31]:
        assert table[index].ids == rows[index].ids
    assert pages_mapped(table) < 64  # KiB, of the table's 8 MB


def test_a_column_takes_its_own_bytes_and_leaves_no_pages_mapped(write):
    rows = [document([3, 2], [F, T], f"x:{line}") for line in range(40_000)]
    table = write("text", *(rows[start : start + 1000] for start in range(0, 40_000, 1000)))
    table.column("line")  # opens the file
    tracemalloc.start()
    lengths = table.lengths
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lengths.dtype == np.int32 and lengths.tolist() == [2] * 40_000 and peak < 1.3 * lengths.nbytes
    assert pages_mapped(table) == 0
    assert table.column("line").tolist() == list(range(40_000))

"""Hazards of rows by name: truncation that removes the answer, pairs that become identical, duplicates."""

import json

import pytest

from alignment.data.batches import collate_pairs
from alignment.data.checks import Checks
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Comparison, Demonstration, LabeledResponse, Ranking
from alignment.data.tokenize import (
    EQUAL,
    PROMPT_CUT,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_rankings,
)
from alignment.data.tokenizers.train import train_bpe
from tests.examples import sides

PROMPT = "abcdefgh" * 5  # 40 tokens


@pytest.fixture(scope="module")
def bytes_only():
    """A tokenizer without merges: one token per ASCII character."""
    return train_bpe(["~"], 259)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_h06_a_long_prompt_gives_way_and_the_whole_response_is_kept(bytes_only):
    """Length 16, prompt 40, completion 5: 5 tokens and the end count, 10 of the prompt are left."""
    [example], counts = tokenize_demonstrations([Demonstration(PROMPT, "hello", "r")], bytes_only, 16)
    assert (len(example.ids), sum(example.mask)) == (16, 6)
    assert bytes_only.decode(example.ids[-6:]) == "hello</s>"
    assert counts.cut == {PROMPT_CUT: 1} and counts.first == {PROMPT_CUT: ["r"]}
    [labeled], _ = tokenize_labels([LabeledResponse(PROMPT, "hello", True, "r")], bytes_only, 16)
    assert sides(labeled)[0] == example
    [ranked], _ = tokenize_rankings([Ranking(PROMPT, ("hello", "jello"), (0, 1), "r")], bytes_only, 16)
    assert sides(ranked)[0] == example


SAME = "abcdefgh" * 5  # 40 tokens that are equal


def test_h07_a_pair_that_is_cut_to_the_same_tokens_is_dropped_and_counted(bytes_only):
    row = Comparison("p", SAME + "x", SAME + "y", None, "r")
    pairs, counts = tokenize_comparisons([row], bytes_only, 24)
    assert (len(pairs), counts.kept, counts.dropped, counts.first) == (0, 0, {EQUAL: 1}, {EQUAL: ["r"]})
    pairs, counts = tokenize_comparisons([row], bytes_only, 64)  # where they fit, they differ
    assert (len(pairs), counts.dropped) == (1, {})


@pytest.mark.parametrize(("equal", "level"), [(1, "note"), (3, "warning")])
def test_h07_more_than_one_percent_of_equal_pairs_is_a_warning(bytes_only, equal, level):
    rows = [Comparison("p", SAME + "x", SAME + "y", None, f"e{index}") for index in range(equal)]
    rows += [Comparison("p", f"a{index}", f"b{index}", None, f"r{index}") for index in range(200 - equal)]
    pairs, counts = tokenize_comparisons(rows, bytes_only, 24)
    assert len(pairs) == 200 - equal
    checks = Checks("comparisons", bytes_only, 24)
    checks.add(rows, pairs)
    [finding] = [each for each in checks.findings(counts, max_cut_share=0.5, max_length=24) if each.name == EQUAL]
    assert finding.level == level


def test_h26_every_pair_has_its_own_row_id_so_that_none_counts_twice(bytes_only, tmp_path):
    """Metrics of several ranks drop padding by row id: copies and the pairs of one ranking must differ in theirs."""
    row = {"prompt": "p", "responses": ["a", "b", "c"], "ranking": [0, 1, 2]}
    records, _ = read_rows(write(tmp_path / "rows.jsonl", row, row), "comparisons")
    pairs, _ = tokenize_comparisons(records, bytes_only, 24)
    assert len({pair.row_id for pair in pairs}) == len(pairs) == 6
    assert sum(batch.weight for batch in collate_pairs(pairs, 64)) == 6

"""Hazards of rows by name: truncation that removes the answer, pairs that become identical, duplicates."""

import json

import pytest

from alignment.data.batches import collate_pairs
from alignment.data.checks import Checks
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Comparison, Demonstration, LabeledResponse, Ranking, Tally
from alignment.data.tokenize import (
    EQUAL,
    FEW_RESPONSES,
    PROMPT_CUT,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_rankings,
)
from alignment.data.tokenizers.train import train_bpe
from alignment.errors import UserError
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


@pytest.mark.parametrize("max_length", range(2, 20))
def test_h06_no_row_that_is_kept_lacks_something_to_learn(bytes_only, max_length):
    """Also where a negative bound would empty the shorter response: 1 token beside one of 60."""
    pairs, counts = tokenize_comparisons([Comparison(PROMPT, "x", "y" * 60, None, "r")], bytes_only, max_length)
    assert counts.kept + counts.lost == 1
    for pair in pairs:
        for side in (sides(pair)[0], sides(pair)[1]):
            assert len(side.ids) <= max_length and any(side.mask)
    examples, _ = tokenize_demonstrations([Demonstration(PROMPT, "y" * 60, "r")], bytes_only, max_length)
    assert all(any(example.mask) and len(example.ids) <= max_length for example in examples)


def test_h06_a_run_that_would_lose_more_than_a_set_share_is_refused(bytes_only, tmp_path):
    lost, kept = {"prompt": "p", "response": "</s>"}, {"prompt": "p", "response": "x"}
    path = write(tmp_path / "rows.jsonl", lost, kept)
    assert len(prepare(DataConfig(path, max_length=16), "demonstrations", bytes_only)[0]) == 1
    with pytest.raises(UserError, match=r"1 of 2 rows were dropped \(data.max_lost_share is 0.1\)"):
        prepare(DataConfig(path, max_length=16, max_lost_share=0.1), "demonstrations", bytes_only)
    long = write(tmp_path / "long.jsonl", {"prompt": PROMPT, "response": "x"})
    with pytest.raises(UserError, match=r"too many of the 1 rows do not fit \(data.max_cut_share is 0.5\)"):
        prepare(DataConfig(long, max_length=16), "demonstrations", bytes_only)


SAME = "abcdefgh" * 5  # 40 tokens that are equal


def test_h07_a_pair_that_is_cut_to_the_same_tokens_is_dropped_and_counted(bytes_only):
    row = Comparison("p", SAME + "x", SAME + "y", None, "r")
    pairs, counts = tokenize_comparisons([row], bytes_only, 24)
    assert (len(pairs), counts.kept, counts.dropped, counts.first) == (0, 0, {EQUAL: 1}, {EQUAL: ["r"]})
    pairs, counts = tokenize_comparisons([row], bytes_only, 64)  # where they fit, they differ
    assert (len(pairs), counts.dropped) == (1, {})


def test_h07_responses_of_a_ranking_that_become_equal_form_no_pair(bytes_only):
    row = Ranking("p", (SAME + "x", SAME + "y"), (0, 1), "r")
    assert tokenize_rankings([row], bytes_only, 24)[1].dropped == {EQUAL: 1}
    row = Ranking("p", (SAME + "x", SAME + "y", "z"), (0, 1, 2), "r")
    assert tokenize_rankings([row], bytes_only, 24)[1].dropped == {FEW_RESPONSES: 1}


@pytest.mark.parametrize(("equal", "level"), [(1, "note"), (3, "warning")])
def test_h07_more_than_one_percent_of_equal_pairs_is_a_warning(bytes_only, equal, level):
    rows = [Comparison("p", SAME + "x", SAME + "y", None, f"e{index}") for index in range(equal)]
    rows += [Comparison("p", f"a{index}", f"b{index}", None, f"r{index}") for index in range(200 - equal)]
    pairs, counts = tokenize_comparisons(rows, bytes_only, 24)
    assert len(pairs) == 200 - equal
    checks = Checks("comparisons", bytes_only)
    checks.add(rows, pairs)
    [finding] = [each for each in checks.findings(counts, max_cut_share=0.5, max_length=24) if each.name == EQUAL]
    assert finding.level == level


def test_h26_copies_of_a_pair_are_counted_and_never_merged_in_silence(tmp_path):
    row = {"prompt": "p", "chosen": "a", "rejected": "b"}
    records, counts = read_rows(write(tmp_path / "rows.jsonl", row, row, row, {**row, "chosen": "c"}), "comparisons")
    assert len(records) == counts.kept == 4  # a copy is a row: leaving it out is the user's decision
    checks = Checks("comparisons")
    checks.add(records)
    texts = [finding.text for finding in checks.findings(Tally(rows=4, kept=4), max_cut_share=0.5, max_length=24)]
    assert "2 rows are exact copies of an earlier one" in texts


def test_h26_every_pair_has_its_own_row_id_so_that_none_counts_twice(bytes_only, tmp_path):
    """Metrics of several ranks drop padding by row id: copies and the pairs of one ranking must differ in theirs."""
    row = {"prompt": "p", "responses": ["a", "b", "c"], "ranking": [0, 1, 2]}
    records, _ = read_rows(write(tmp_path / "rows.jsonl", row, row), "comparisons")
    pairs, _ = tokenize_comparisons(records, bytes_only, 24)
    assert len({pair.row_id for pair in pairs}) == len(pairs) == 6
    assert sum(batch.weight for batch in collate_pairs(pairs, 64)) == 6

"""Generated sums: worked as written, answered by the true sum, no pair of numbers in two files, the same from the same seed."""

import json
import re
from itertools import combinations
from random import Random
from typing import Any

import pytest

from alignment.config.load import packaged_folder
from alignment.pipeline.stages import load_stage_file

sums: Any = load_stage_file(packaged_folder("recipes") / "verifiable/sums.py")
FOLDS, RANGES, SumCounts, SumsConfig = sums.FOLDS, sums.RANGES, sums.SumCounts, sums.SumsConfig
fold_of, run, work_out = sums.fold_of, sums.run, sums.work_out
SMALL = SumCounts(200, 20, 2000, 100, 100)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    directory = run(SumsConfig(str(tmp_path_factory.mktemp("sums")), rows=SMALL))
    return {name: [json.loads(line) for line in open(directory / f"{name}.jsonl", encoding="utf-8")] for name in RANGES}


def pairs_in(row):
    """Every pair of numbers that a row adds."""
    text = row.get("prompt") or row["text"]
    return [tuple(sorted(map(int, found))) for found in re.findall(r"^(\d+)\+(\d+):", text, re.MULTILINE)]


def test_work_by_hand():
    rng = Random(0)
    assert work_out(rng, 0.0, False, 482, 379) == " 2+9=11 8+7+1=16 4+3+1=8 #### 861"
    assert work_out(rng, 0.0, True, 482, 379) == " 2+9=11 8+7=15 4+3=7 #### 751"
    assert work_out(rng, 0.0, False, 999, 999) == " 9+9=18 9+9+1=19 9+9+1=19 #### 1998"
    assert work_out(rng, 0.0, False, 100, 200) == " 0+0=0 0+0=0 1+2=3 #### 300"


def test_slips_are_by_one_and_never_below_zero():
    for seed in range(20):
        first, second, third = re.findall(r"=(\d+)", work_out(Random(seed), 1.0, False, 101, 208))
        assert int(first) in (8, 10) and int(second) in (0, 1, 2) and int(third) in (2, 4)


def test_answers_are_the_true_sums(rows):
    for name in ("prompts", "prompts_eval"):
        assert all(sum(pairs_in(row)[0]) == int(row["answer"]) for row in rows[name])


def test_about_half_of_the_demonstrations_are_right(rows):
    right = [int(row["completion"].rpartition("#### ")[2]) == sum(pairs_in(row)[0]) for row in rows["demonstrations"]]
    assert 0.42 < sum(right) / len(right) < 0.56  # (0.3 + 0.7 * 0.4) * 0.95^3 = 0.50: no carry in 3 of 10 sums


def test_no_two_files_share_a_pair_of_numbers(rows):
    assert sorted(number for those in RANGES.values() for number in those) == list(range(FOLDS))
    found = {name: {pair for row in those for pair in pairs_in(row)} for name, those in rows.items()}
    assert all(fold_of(*pair) in RANGES[name] for name, pairs in found.items() for pair in pairs)
    for one, other in combinations(found, 2):
        assert not found[one] & found[other], (one, other)


def test_the_same_seed_gives_the_same_bytes(tmp_path):
    few = SumCounts(3, 3, 3, 3, 3)
    first, again, other = (
        {path.name: path.read_bytes() for path in run(SumsConfig(str(tmp_path / name), seed, rows=few)).iterdir()}
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert first == again and first != other and len(first) == len(RANGES)

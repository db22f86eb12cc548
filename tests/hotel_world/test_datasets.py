"""The world's files: the rows they hold, the facts they do not share, and the same bytes from the same seed."""

from itertools import combinations

import pytest

from alignment.hotel_world.datasets import FOLDS, RANGES, RowCounts, write_world
from alignment.hotel_world.grammar import parse_prompt
from tests.conftest import read_lines

SMALL = RowCounts(300, 60, 200, 200, 100, 100, 100)
COLUMNS = {
    "pretrain": {"text"},
    "demonstrations": {"prompt", "completion"},
    "comparisons": {"prompt", "chosen", "rejected"},
    "prompts": {"prompt", "facts", "asked"},
}


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, list[dict]]:
    paths = write_world(tmp_path_factory.mktemp("world"), sizes=SMALL)
    return {name: read_lines(path) for name, path in paths.items()}


def test_every_file_has_its_rows_and_columns(rows):
    for name, found in rows.items():
        assert len(found) == getattr(SMALL, name)
        kind = name.removesuffix("_heldout").removesuffix("_eval")
        assert all(row.keys() == COLUMNS[kind] for row in found)
    for row in rows["prompts_eval"]:
        reading = parse_prompt(row["prompt"])
        assert (row["facts"], row["asked"]) == (reading.facts, list(reading.asked))


def test_no_two_files_share_a_fact_sheet(rows):
    assert sorted(number for those in RANGES.values() for number in those) == list(range(FOLDS))
    texts = {name: [row.get("prompt") or row["text"] for row in those] for name, those in rows.items()}
    found = {name: {frozenset(parse_prompt(text).facts.items()) for text in those} for name, those in texts.items()}
    for one, other in combinations(found, 2):
        assert not found[one] & found[other], (one, other)


def test_texts_are_short_and_the_vocabulary_is_closed(rows):
    words = {word.strip(".,:?") for row in rows["pretrain"] for word in row["text"].split()}
    assert 200 < len(words) < 400
    assert max(len(row["prompt"].split()) for row in rows["prompts"]) <= 50
    assert max(len(row["completion"].split()) for row in rows["demonstrations"]) <= 48


def test_same_seed_same_bytes_and_another_seed_others(tmp_path):
    first, second, other = (
        write_world(tmp_path / name, seed=seed, sizes=SMALL) for name, seed in (("a", 4), ("b", 4), ("c", 5))
    )
    for name in RANGES:
        assert first[name].read_bytes() == second[name].read_bytes()
        assert first[name].read_bytes() != other[name].read_bytes()

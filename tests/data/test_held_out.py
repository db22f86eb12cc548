"""A share of the training rows is held out by their prompts: no prompt on both sides, and no row moves for another."""

from collections import Counter

import numpy as np
import pytest

from alignment.data.config import DataConfig, SourceConfig
from alignment.data.prepare import HELD_OUT, held_out, prepare
from alignment.data.pretraining.prepare import prepare_text
from alignment.data.rows.read import prompt_key, read_rows, text_hash
from alignment.data.table import JoinedTables, column_of
from alignment.data.tasks import TaskFormat, prepare_labeled
from alignment.errors import UserError

WORDS = ("cat", "mat", "price", "hello", "friend", "system")


def rows_of(kind: str, number: int) -> dict:
    """Row `number` of a kind; two rows in succession have the same prompt."""
    prompt = f"p {number // 2} the {WORDS[number % 6 // 2]}"
    texts = [f"c {number} sat", f"d {number} sat on", f"e {number} sat on the mat"]
    return {
        "text": {"text": f"{prompt} sat on the mat"},
        "demonstrations": {"prompt": prompt, "completion": texts[0]},
        "comparisons": {"prompt": prompt, "chosen": texts[0], "rejected": texts[1]},
        "prompts": {"prompt": prompt},
        "labels": {"prompt": prompt, "completion": texts[0], "label": number % 3 == 0},
        "rankings": {"prompt": prompt, "responses": texts[: 2 + number % 2], "ranking": [0, 1, 2][: 2 + number % 2]},
        "steps": {"prompt": prompt, "completions": texts, "labels": [True, True, False]},
    }[kind]


def both(config: DataConfig, kind, tokenizer):
    return [prepare(config, kind, tokenizer, part)[0] for part in ("train", "evaluation")]


def token_sets(sides):
    return [{tuple(row.ids) for row in side} for side in sides]


@pytest.mark.parametrize("kind", ["text", "demonstrations", "comparisons", "prompts", "labels", "rankings", "steps"])
def test_every_row_is_on_one_side_and_no_prompt_on_both(kind, jsonl, bpe):
    path = jsonl(*(rows_of(kind, number) for number in range(120)))
    train, held = both(DataConfig(path, evaluation_share=0.25), kind, bpe)
    whole, _ = prepare(DataConfig(path), kind, bpe)
    places = {row.row_id: number for number, row in enumerate(whole)}
    assert sorted([*train, *held], key=lambda row: places[row.row_id]) == list(whole)
    prompts = {record.row_id: prompt_key(record) for record in read_rows(path, kind)[0]}
    sides = [{prompts[row.row_id] for row in side} for side in (train, held)]
    assert not sides[0] & sides[1] and len(sides[0] | sides[1]) == 60
    assert all(
        [places[row.row_id] for row in side] == sorted(places[row.row_id] for row in side) for side in (train, held)
    )
    assert column_of(train, "longest").tolist() == [max(map(len, row.documents)) for row in train]
    assert (
        column_of(held, "total").tolist() == [sum(map(len, row.documents)) for row in held]
        and held[-1] == list(held)[-1]
    )
    for side in (train, held):
        assert side.tally.documents == sum(len(row.documents) for row in side)
        assert side.tally.tokens == sum(len(ids) for row in side for ids in row.documents)
    assert train.tally.noted[HELD_OUT] == len(held) == held.tally.rows == held.tally.kept
    assert train.tally.kept == train.tally.rows == 120 - len(held) and train.key != held.key != whole.key


def test_the_share_is_met_and_a_larger_one_holds_out_more_of_the_same():
    hashes = np.array([text_hash(f"'prompt {number}'") for number in range(20_000)], np.uint64)
    small, large = held_out(hashes, 0.02), held_out(hashes, 0.2)
    assert abs(small.mean() - 0.02) < 0.004 and abs(large.mean() - 0.2) < 0.012  # four standard errors
    assert not (small & ~large).any() and held_out(hashes, 0.02).tolist() == small.tolist()


def test_hash_of_a_prompt_never_changes():
    assert text_hash("'Where is the pool?'") == 7069757784488215195 and text_hash("") == 13020603013274838756


def test_added_rows_and_sources_move_no_old_row(jsonl, bpe):
    old = [rows_of("demonstrations", number) for number in range(80)]
    new = [rows_of("demonstrations", number) for number in range(80, 200)]
    before = token_sets(both(DataConfig(jsonl(*old), evaluation_share=0.3), "demonstrations", bpe))
    path = jsonl(*new, *reversed(old))
    after = token_sets(both(DataConfig(path, evaluation_share=0.3), "demonstrations", bpe))
    assert all(some <= every for some, every in zip(before, after, strict=True)) and min(map(len, before)) > 10
    more = jsonl(*old, *new, name="more.jsonl")
    config = DataConfig([path, SourceConfig(more, name="more")], evaluation_share=0.3, processes=2)
    sides = both(config, "demonstrations", bpe)
    assert all(isinstance(side, JoinedTables) and len(side.tables) == 2 for side in sides)
    assert token_sets(sides) == after and all({row.source for row in side} == {0, 1} for side in sides)


def test_rows_that_were_lost_and_cut_are_told_once_of_the_training_rows(jsonl, bpe):
    rows = [{"prompt": f"p {number}", "completion": "sat " * (60 if number % 2 else 1)} for number in range(40)]
    config = DataConfig(
        jsonl(*rows, {"prompt": ""}), evaluation_share=0.2, max_length=20, on_bad_row="skip", max_cut_share=0.6
    )
    (_, counts), (_, held) = (prepare(config, "demonstrations", bpe, part) for part in ("train", "evaluation"))
    assert sum(counts.dropped.values()) == 1 and sum(counts.cut.values()) == 20 and not held.cut and not held.dropped
    assert any("held out by data.evaluation_share" in line for line in counts.lines())


def test_documents_in_pieces_and_expanded_rows_stay_together(jsonl, bpe):
    path = jsonl(*({"text": f"{number} " + "the cat sat on the mat " * 12} for number in range(40)))
    config = DataConfig(path, evaluation_share=0.4, max_length=16)
    sides = [prepare_text(config, "causal", bpe, part)[0] for part in ("train", "evaluation")]
    names = [Counter(row.row_id for row in side) for side in sides]
    assert not set(names[0]) & set(names[1]) and min(min(each.values()) for each in names) > 1
    assert [side.tally.kept for side in sides] == [len(each) for each in names] and sum(map(len, names)) == 40
    rankings = [{"prompt": f"p {n}", "responses": ["a cat", "b mat", "c sat"], "ranking": [2, 0, 1]} for n in range(30)]
    sides = both(DataConfig(jsonl(*rankings), evaluation_share=0.4), "comparisons", bpe)
    lines = [{row.row_id.split("[")[0] for row in side} for side in sides]
    assert not lines[0] & lines[1] and sum(map(len, sides)) == 90


def test_an_empty_side_is_refused_with_the_way_out(jsonl, bpe):
    config = DataConfig(jsonl(*(rows_of("demonstrations", 0) for _ in range(4))), evaluation_share=0.01)
    with pytest.raises(UserError, match=r"evaluation_share=0.01 parts 4 examples .* no row is held out; raise it"):
        prepare(config, "demonstrations", bpe, "evaluation")
    config = DataConfig(config.train, evaluation_share=0.999999)
    with pytest.raises(UserError, match="no row is left to train on; lower it"):
        prepare(config, "demonstrations", bpe)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation_share": 0.0}, "must be above 0"),
        ({"evaluation_share": 1.0}, "must be below 1"),
        ({"evaluation_share": 0.1, "evaluation": "b.jsonl"}, "data.evaluation names others"),
        ({"evaluation_share": 0.1, "evaluation_split": "test"}, "take it out"),
        ({"evaluation_share": 0.1, "streaming": True}, "all read before the run"),
    ],
)
def test_conflicts_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DataConfig("a.jsonl", **settings)


def test_labeled_rows_for_tasks(jsonl, bpe):
    path = jsonl(
        *({"text": f"t {number // 2} the cat", "label": "yes" if number % 5 else "rare"} for number in range(60))
    )
    config = DataConfig(path, evaluation_share=0.3)
    train = prepare_labeled(config, TaskFormat("classification"), bpe)
    held = prepare_labeled(config, TaskFormat("classification"), bpe, "evaluation", names=train.names)
    assert len(train.rows) + len(held.rows) == 60 and not {row.inputs for row in train.rows} & {
        row.inputs for row in held.rows
    }
    assert (
        set(train.names.values()) == {"yes", "rare"}
        and train.counts.rows == len(train.rows)
        and not held.counts.trained_on
    )

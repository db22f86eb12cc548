"""Every setting of a data config reaches the reading of each kind of rows."""

import gc
from dataclasses import replace

import pytest

from alignment.data import checks
from alignment.data.checks import Fault
from alignment.data.config import DataConfig, SourceConfig
from alignment.data.prepare import prepare
from alignment.data.rows.records import Tally
from alignment.data.tasks import TaskFormat, prepare_labeled
from alignment.data.text import chat
from alignment.data.tokenize import PLAIN_PROMPT
from alignment.errors import UserError

PAIR = {"q": "the", "good": " cat", "bad": " mat"}
COLUMNS = {"prompt": "q", "chosen": "good", "rejected": "bad"}
LABELED = {"sentence": "the cat", "gold": "yes"}


def test_columns_limits_and_bad_rows_of_a_config_are_kept_to(jsonl, bpe):
    path = jsonl({**PAIR, "bad": ""}, PAIR, {**PAIR, "bad": " cat"}, {**PAIR, "q": "on"}, PAIR, PAIR)
    config = DataConfig(path, columns=COLUMNS, max_rows=2, on_bad_row="skip")
    examples, counts = prepare(config, "comparisons", bpe)
    assert [example.row_id for example in examples] == [f"{path}:2", f"{path}:4"]
    assert (counts.rows, counts.kept, counts.lost) == (4, 2, 2)
    with pytest.raises(UserError, match="1 bad row;"):
        prepare(DataConfig(path, columns=COLUMNS), "comparisons", bpe)


def test_too_many_cut_rows_and_what_the_checks_find_are_told_at_once(jsonl, bpe, monkeypatch):
    fault = Fault("long", "are long", lambda row, special: True, 0.0, "error")
    monkeypatch.setattr(checks, "TOKEN_FAULTS", (*checks.TOKEN_FAULTS, fault))
    path = jsonl(*({**PAIR, "good": " cat on the mat" * 9, "bad": f" {i}"} for i in range(4)))
    config = DataConfig(path, columns=COLUMNS, max_length=12)
    with pytest.raises(UserError, match=r"(?s)data\.max_cut_share.*data\.check=warn"):
        prepare(config, "comparisons", bpe)
    with pytest.raises(UserError) as error:
        prepare(replace(config, check="warn"), "comparisons", bpe)
    assert "data.check" not in str(error.value)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_cycles_is_as_it_was(enabled, jsonl, bpe):
    before = gc.isenabled()
    gc.enable() if enabled else gc.disable()
    try:
        prepare(DataConfig(jsonl({"text": "a pool"})), "text", bpe)
        assert gc.isenabled() is enabled
    finally:
        gc.enable() if before else gc.disable()


def test_labeled_rows_keep_to_the_config_too(jsonl, bpe):
    path = jsonl({"gold": "no"}, LABELED, {**LABELED, "gold": "no"}, LABELED)
    config = DataConfig(path, columns={"text": "sentence", "label": "gold"}, max_rows=2, on_bad_row="skip")
    prepared = prepare_labeled(config, TaskFormat("classification"), bpe)
    examples, counts, names = prepared.examples, prepared.counts, prepared.names
    assert [example.row_id for example in examples] == [f"{path}:2", f"{path}:3"]
    assert (counts.rows, counts.kept, counts.lost) == (3, 2, 1) and names == {0: "no", 1: "yes"}


def test_the_split_of_a_hub_set_is_the_configs(monkeypatch, bpe):
    import datasets

    calls = []

    def load(name, split):
        calls.append((name, split))
        return datasets.Dataset.from_list([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    config = DataConfig("owner/name", split="some")
    prepare(config, "text", bpe)
    prepare_labeled(config, TaskFormat("classification"), bpe)
    assert set(calls) == {("owner/name", "some")}


def test_tallies_of_two_steps_are_those_of_both():
    reading, making = Tally(rows=9, kept=7), Tally(rows=7, kept=6, documents=6, tokens=50)
    for counts, number in ((reading, 1), (making, 6)):
        counts.drop("bad", f"row {number}")
        counts.note_cut("long", f"row {number + 1}")
    reading.drop("bad", "row 3")
    both = reading.followed_by(making)
    assert (both.rows, both.kept, both.documents, both.tokens) == (9, 6, 6, 50)
    assert both.dropped == {"bad": 3} and both.cut == {"long": 2} and both.lost == 3
    assert both.first == {"bad": ["row 1", "row 3", "row 6"], "long": ["row 2", "row 7"]}
    beside = reading.merged_with(making)
    assert (beside.rows, beside.kept, beside.documents, beside.tokens) == (16, 13, 6, 50)
    assert beside.dropped == {"bad": 3} and beside.cut == {"long": 2}


def test_text_prompts_beside_a_chat_template_are_counted(jsonl, chatml):
    path = jsonl({"prompt": "the cat", "completion": " sat"}, {"prompt": "the mat", "completion": " sat"})
    plain, counts = prepare(DataConfig(path), "demonstrations", chatml)
    assert counts.noted == {PLAIN_PROMPT: 2}
    asked, counts = prepare(DataConfig(path, as_messages=True), "demonstrations", chatml)
    assert not counts.noted and "<|im_start|>" not in chatml.decode(plain[0].ids)
    user = [{"role": "user", "content": "the cat"}]
    assert asked[0].ids == chat.prompt_ids(chatml, user) + chat.response_ids(chatml, "sat", user)


def test_a_chat_template_that_no_row_enters_is_refused(jsonl, bpe):
    source = SourceConfig(jsonl({"prompt": "the cat", "completion": " sat"}), chat_template="zephyr")
    with pytest.raises(UserError, match="as_messages"):
        prepare(DataConfig([source]), "demonstrations", bpe)
    assert len(prepare(DataConfig([source], as_messages=True), "demonstrations", bpe)[0]) == 1


def test_running_text_has_no_messages(jsonl, bpe):
    with pytest.raises(UserError, match="as_messages"):
        prepare(DataConfig(jsonl({"text": "the cat"}), as_messages=True), "text", bpe)

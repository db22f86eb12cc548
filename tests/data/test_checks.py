"""The checks of the data doctor: the same findings however the rows are cut, kept with prepared rows, and their errors stop a run."""

import pickle

import pytest

from alignment.data.checks import Checks
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.rows.records import Comparison, Demonstration, LabeledResponse, Ranking, Steps, Tally, Text
from alignment.data.table import check_findings
from alignment.data.tokenize import tokenize_demonstrations
from alignment.errors import UserError


def found(made, rows=0):
    counts = Tally(rows=rows, kept=rows)
    return {finding.name: finding for finding in made.findings(counts, max_cut_share=0.5, max_length=64)}


ROWS = [
    *(Demonstration(f"the cat {index}", f" sat on mat {index}", f"r{index}") for index in range(150)),
    Demonstration("the cat 1", " sat on mat 1", "copy"),
    Demonstration("x", " caf\u00c3\u00a9", "mojibake"),
    Demonstration("x", " \ufffd", "replacement"),
    Demonstration("x", " <s> y", "control"),
]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_chunks_joined_say_what_all_rows_together_say(bpe, size):
    whole = Checks("demonstrations", bpe, 64)
    whole.add(ROWS, tokenize_demonstrations(ROWS, bpe, 64)[0])
    joined = Checks("demonstrations", bpe, 64)
    for start in range(0, len(ROWS), size):
        part = Checks("demonstrations", bpe, 64)
        part.add(ROWS[start : start + size], tokenize_demonstrations(ROWS[start : start + size], bpe, 64)[0])
        joined.merge(pickle.loads(pickle.dumps(part)))
    assert found(joined) == found(whole)
    assert {"copies", "mojibake", "replacement characters", "control strings"} <= set(found(whole))


def test_cut_rows_are_no_unstopped_ones_where_one_in_eight_is_read(bpe):
    rows = [Demonstration("the", " cat" * (3 if index % 2 else 40), f"r{index}") for index in range(800)]
    made = Checks("demonstrations", bpe, 16, weight=8)
    made.add(rows, tokenize_demonstrations(rows, bpe, 16)[0])
    assert "no stop token" not in made.faults


def test_a_weight_looks_at_fewer_rows_and_counts_each_for_several():
    made = Checks("text", weight=8)
    made.add([Text(f"{index % 3000} \ufffd", f"r{index}") for index in range(4000)])
    finding = found(made)["replacement characters"]
    number, copies = int(finding.text.split()[1]), int(found(made)["copies"].text.split()[0])
    assert finding.text.startswith("about ") and number % 8 == 0 and 3400 < number < 4600
    assert copies % 8 == 0 and 700 < copies < 1300 and len(made.seen["rows"]) < 500


@pytest.mark.parametrize(
    ("kind", "rows", "says"),
    [
        ("comparisons", [Comparison("p", "a", "b", None, "1"), Comparison("p", "b", "a", None, "2")], "1 prompts have the same"),
        ("comparisons", [Comparison("p", "a", "b", None, "1"), Comparison("q", "b", "a", None, "2")], ""),
        ("rankings", [Ranking("p", ("a", "b", "c"), (0, 1, 2), "1"), Ranking("p", ("c", "b"), (0, 1), "2")], "1 prompts"),
        ("labels", [LabeledResponse("p", "a", True, "1"), LabeledResponse("p", "a", False, "2")], "1 prompts"),
        ("labels", [LabeledResponse("p", "a", True, "1"), LabeledResponse("p", "b", False, "2")], ""),
    ],
)  # fmt: skip
def test_contradictions_are_found_across_kinds_of_rows(kind, rows, says):
    made = Checks(kind)
    made.add(rows)
    told = found(made).get("contradictions")
    assert told is None if not says else told is not None and told.text.startswith(says)


def test_labels_that_are_nearly_all_alike_are_a_warning():
    for share, level in [(0.02, "warning"), (0.5, "note"), (0.98, "warning")]:
        made = Checks("steps")
        made.add([Steps("p", (f"a{index}",), (index < 100 * share,), f"r{index}") for index in range(100)])
        assert found(made)["label balance"].level == level


SHORT = {"prompt": [{"role": "user", "content": "hi"}], "response": "ho"}


def test_an_error_stops_the_run_unless_it_is_told_not_to(jsonl, chatml, templates):
    chatml.chat_template = "hi{{ bos_token }}" + templates["chatml with bos"]
    path = jsonl(SHORT, {**SHORT, "response": "the cat"})
    for _ in range(2):  # the second time from the cache
        examples, _ = prepare(DataConfig(path), "demonstrations", chatml)
        with pytest.raises(
            UserError, match=r"rows.jsonl: 2 rows have two BOS next to each other \(.*\n.*data.check=warn"
        ):
            check_findings(examples, "stop")
        assert check_findings(examples, "warn")[0].startswith("error: 2 rows have two BOS next")
        assert check_findings(examples, "off") == []


def test_a_bos_that_opens_each_turn_is_no_fault(jsonl, chatml, templates):
    turn = "{% for message in messages %}"
    chatml.chat_template = templates["chatml"].replace(turn, turn + "{{ bos_token }}")  # SmolLM2's BOS is <|im_start|>
    dialogue = [{"role": role, "content": "the cat"} for role in ("user", "assistant", "user", "assistant")]
    examples, _ = prepare(DataConfig(jsonl({"messages": dialogue})), "demonstrations", chatml)
    assert list(examples[0].documents[0]).count(chatml.bos_token_id) == 4
    assert check_findings(examples, "stop") == []


def test_only_the_last_reply_has_to_end_in_a_stop_token(jsonl, chatml, templates):
    ends = "{% if loop.last or loop.index % 2 %}<|im_end|>{% else %}<pad>{% endif %}"  # gpt-oss ends an earlier reply in <|end|>
    chatml.chat_template = templates["chatml"].replace("<|im_end|>", ends)
    dialogue = [{"role": role, "content": "the cat"} for role in ("user", "assistant", "user", "assistant")]
    examples, _ = prepare(DataConfig(jsonl({"messages": dialogue})), "demonstrations", chatml)
    assert check_findings(examples, "stop") == []


def test_warnings_are_noted_source_by_source(jsonl, bpe):
    good = [{"prompt": f"the cat {index}", "response": " sat"} for index in range(3)]
    first, second = jsonl(*good, name="a.jsonl"), jsonl(*good, good[0], name="b.jsonl")
    examples, _ = prepare(DataConfig([first, second]), "demonstrations", bpe)
    assert check_findings(examples, "stop") == ["warning: 1 rows are exact copies of an earlier one"]

"""Cutting to length, and pairs that become equal: nothing is lost silently (HAZARDS H06, H07, H09)."""

import re
from dataclasses import replace
from itertools import pairwise

import pytest

from alignment.data.batches import collate_pairs
from alignment.data.checks import Checks
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import Comparison, Demonstration, LabeledResponse, Prompt, Ranking, Text, choose_turns
from alignment.data.text import chat
from alignment.data.text.templates import with_chat_template
from alignment.data.tokenize import (
    EMPTY,
    EQUAL,
    PROMPT_CUT,
    RESPONSE_CUT,
    TEXT_CUT,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_prompts,
    tokenize_rankings,
    tokenize_texts,
    truncate,
)
from alignment.errors import UserError
from tests.conftest import write_lines
from tests.examples import sides


def letters(count):
    """So many tokens: characters outside ASCII letters never merged in training."""
    return "".join(chr(0x21 + index % 15) for index in range(count))


def test_h06_long_response_is_cut_at_its_end_and_counted(bytes_only):
    # a quarter of 16 stays with the prompt, BOS among it; 12 tokens of the response, none of them the end token
    [example], counts = tokenize_demonstrations([Demonstration("prompt", letters(40), "r1")], bytes_only, 16)
    assert bytes_only.decode(example.ids) == "<s>mpt" + letters(40)[:12]
    assert example.mask == [False] * 4 + [True] * 12
    assert counts.cut == {PROMPT_CUT: 1, RESPONSE_CUT: 1}


def test_a_row_whose_turns_stand_apart_is_cut_once(chatml):
    dialogue = [{"role": role, "content": role} for role in ("user", "assistant") * 3]
    rows = choose_turns([Demonstration(dialogue[:-1], "assistant", "r1", dialogue)], "each")
    examples, counts = tokenize_demonstrations(rows, chatml, 8)
    assert len(examples) == 3 and counts.cut == {PROMPT_CUT: 1}


def test_cut_turns_that_stand_apart_are_no_missing_stop_tokens(chatml):
    dialogue = [{"role": role, "content": role * 9} for role in ("user", "assistant") * 3]
    rows = choose_turns([Demonstration(dialogue[:-1], "assistant", "r1", dialogue)], "each")
    examples, counts = tokenize_demonstrations(rows, chatml, 8)
    checks = Checks("demonstrations", chatml, 8)
    checks.add(rows, examples)
    assert counts.cut == {PROMPT_CUT: 1, RESPONSE_CUT: 1} and "no stop token" not in checks.faults
    shorter = replace(examples[0], documents=[examples[0].documents[0][:-1]], masks=[examples[0].masks[0][:-1]])
    checks.add(rows, [shorter])
    assert checks.faults["no stop token"] == (1, ["r1"])  # one that was not cut


@pytest.mark.parametrize("max_length", range(8, 40))
def test_a_cut_before_a_turn_that_begins_with_a_bos_leaves_one(chatml, templates, max_length):
    turn = "{% for message in messages %}"  # SmolLM2's BOS is <|im_start|>
    tokenizer = with_chat_template(chatml, templates["chatml"].replace(turn, turn + "{{ bos_token }}"))
    dialogue = [{"role": role, "content": "the cat"} for role in ("user", "assistant") * 2]
    rows = [Demonstration(dialogue[:-1], "sat", "r1", dialogue)]
    [trained], _ = tokenize_demonstrations(rows, tokenizer, max_length)
    pairs = [Comparison(dialogue[:-1], "the cat sat " * 60, "sat", None, "r1")]
    [pair], _ = tokenize_comparisons(pairs, tokenizer, 4 * max_length)
    assert len(pair.documents[0]) == 4 * max_length  # a response that is cut fills its document
    [prompt], _ = tokenize_prompts([Prompt(dialogue[:-1], {}, "r1")], tokenizer, max_length)
    bos = tokenizer.bos_token_id
    for ids in (trained.ids, prompt.ids):
        assert ids[0] == bos and (bos, bos) not in pairwise(ids) and len(ids) <= max_length
    assert len(trained.mask) == len(trained.ids) and not trained.mask[0]


@pytest.mark.parametrize("max_length", [2, 3, 4, 5, 9, 17])
@pytest.mark.parametrize("bos", [0, None])
def test_h06_every_response_keeps_a_token_and_every_length_is_kept_to(max_length, bos):
    for prompt_length in (1, 2, 5, 30):
        for lengths in ((1, 1), (2, 30), (30, 2), (30, 30)):
            prompt = [0, *range(100, 100 + prompt_length - 1)]
            head, tails = truncate(prompt, [list(range(200, 200 + length)) for length in lengths], max_length, bos)
            assert head and all(tails)
            assert all(len(head) + len(tail) <= max_length for tail in tails)
            if prompt_length + max(lengths) <= max_length:
                assert (head, [len(tail) for tail in tails]) == (prompt, list(lengths))
            if bos is not None:
                assert head == [0, *prompt[1:][len(prompt) - len(head) :]]
            else:
                assert head == prompt[len(prompt) - len(head) :]


def test_h06_dialogue_keeps_its_last_reply(chatml):
    long = [{"role": "user", "content": "the mat " * 30}, {"role": "assistant", "content": "the cat " * 30}]
    last = [{"role": "user", "content": "price"}, {"role": "assistant", "content": "$46"}]
    row = Demonstration([*long, last[0]], "$46", "r1", [*long, *last])
    [example], counts = tokenize_demonstrations([row], chatml, 30)
    assert len(example.ids) == len(example.mask) == 30
    assert example.ids[0] == chatml.bos_token_id
    assert chatml.decode(example.ids).endswith(
        "<|im_start|>user\nprice<|im_end|>\n<|im_start|>assistant\n$46<|im_end|>"
    )
    assert counts.cut == {PROMPT_CUT: 1}


def test_h06_response_of_nothing_but_the_end_token_is_dropped(bytes_only):
    rows = [Demonstration("hi", "</s>", "r1"), Demonstration("hi", "ho", "r2")]
    examples, counts = tokenize_demonstrations(rows, bytes_only, 16)
    assert [example.row_id for example in examples] == ["r2"]
    assert (counts.rows, counts.kept, counts.dropped) == (2, 1, {EMPTY: 1})
    pairs, counts = tokenize_comparisons([Comparison("hi", "ho", "</s>", None, "r1")], bytes_only, 16)
    assert (pairs, counts.dropped) == ([], {EMPTY: 1})


def test_h07_texts_that_differ_only_in_the_end_token_are_equal(bytes_only):
    _, counts = tokenize_comparisons([Comparison("hi", "a", "a</s>", None, "r1")], bytes_only, 24)
    assert counts.dropped == {EQUAL: 1}


def test_h04_both_sides_of_a_cut_pair_share_their_prompt(bytes_only):
    [pair], _ = tokenize_comparisons([Comparison(letters(40), "a", letters(10), None, "r1")], bytes_only, 24)
    prompt = pair.masks[0].index(True)
    assert prompt == pair.masks[1].index(True) == 13
    assert pair.documents[0][:prompt] == pair.documents[1][:prompt]


@pytest.mark.parametrize("length", [1, 6, 7, 8, 13, 14, 15, 40])
def test_long_texts_are_cut_into_pieces_and_nothing_is_lost(bytes_only, metaspace, length):
    for tokenizer in (bytes_only, metaspace):
        row = Text(letters(length) if tokenizer is bytes_only else "cat " * length, "r1")
        whole = chat.texts_ids(tokenizer, [row.text])[0]
        examples, counts = tokenize_texts([row], tokenizer, 8)
        predicted = [index for example in examples for index in example.ids[1:]]
        assert predicted == whole[1:]  # every token but the first is predicted once, in order
        assert all(2 <= len(example.ids) <= 8 for example in examples)
        assert counts.cut == ({TEXT_CUT: 1} if len(whole) > 8 else {})
        if tokenizer is bytes_only:
            assert all(
                example.ids.count(tokenizer.bos_token_id) == 1 == example.ids[:1].count(0) for example in examples
            )


def test_prepare_counts_reading_and_tokenizing_together(jsonl, bytes_only):
    same, good = {"prompt": "x", "chosen": "a", "rejected": "a"}, {"prompt": "x", "chosen": "a", "rejected": "b"}
    path = jsonl(good, same, {**good, "rejected": "a</s>"}, good, {**good, "chosen": None})
    pairs, counts = prepare(
        DataConfig(path, evaluation=path, on_bad_row="skip", max_lost_share=0.9),
        "comparisons",
        bytes_only,
        "evaluation",
    )
    assert (len(pairs), counts.rows, counts.kept, counts.lost, counts.documents) == (2, 5, 2, 3, 4)
    assert counts.tokens == sum(len(side.ids) for pair in pairs for side in (sides(pair)[0], sides(pair)[1]))
    assert counts.lines()[0] == "2 of 5 rows kept, 4 documents, 16 tokens"


def test_refused_messages_are_told_for_all_rows_and_each_refusal_once(chatml, templates):
    chatml.chat_template = templates["refusing"]
    rows = [
        Prompt([{"role": role, "content": "x"}], {}, f"r{index}") for index, role in enumerate(["user"] * 9 + ["tool"])
    ]
    with pytest.raises(UserError) as caught:
        tokenize_prompts(rows, chatml, 16)
    lines = str(caught.value).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["r0", "r9"]
    assert lines[0].endswith("(and 8 more: r1, r2, ...)")


@pytest.mark.parametrize(
    ("kind", "row", "told"),
    [
        ("prompts", {"prompt": letters(40)}, PROMPT_CUT),
        ("demonstrations", {"prompt": "hi", "completion": letters(40)}, RESPONSE_CUT),
        ("comparisons", {"prompt": "hi", "chosen": "a", "rejected": letters(40)}, RESPONSE_CUT),
        ("comparisons", {"prompt": "hi", "chosen": letters(40), "rejected": "a"}, RESPONSE_CUT),
    ],
)
def test_h06_too_many_cut_rows_are_refused(bytes_only, jsonl, kind, row, told):
    whole = {"prompt": "hi", "completion": "ho", "chosen": "a", "rejected": "b"}
    path = jsonl(*[{**row, "id": number} for number in range(3)], whole, whole)
    with pytest.raises(UserError, match=rf"(?s)rows.jsonl: .*cut 3: {re.escape(told)}.*raise data.max_length"):
        prepare(DataConfig(path, max_length=16), kind, bytes_only)
    kept, counts = prepare(DataConfig(path, max_length=16, max_cut_share=0.6), kind, bytes_only)
    assert len(kept) == 5 and counts.cut[told] == 3


def test_a_later_piece_begins_with_the_bos_or_the_last_token(bytes_only, metaspace):
    for tokenizer, text in ((bytes_only, letters(20)), (metaspace, "the cat sat on the mat " * 4)):
        whole = chat.texts_ids(tokenizer, [text])[0]
        first, *later = (example.ids for example in tokenize_texts([Text(text, "r1")], tokenizer, 8)[0])
        assert len(later) >= 2
        before = [first, *later[:-1]]
        leads = [0] * len(later) if tokenizer is bytes_only else [ids[-1] for ids in before]
        assert [ids[0] for ids in later] == leads
        assert tokenizer is bytes_only or whole.count(tokenizer.bos_token_id) == 0


def test_losing_more_than_the_share_is_refused_with_the_reasons(jsonl, bytes_only):
    path = jsonl({"text": "a"}, {"text": ""}, {"text": None}, {"text": "b"}, {"text": " "})
    prepare(DataConfig(path, on_bad_row="skip", max_lost_share=0.6), "text", bytes_only)
    with pytest.raises(UserError) as caught:
        prepare(DataConfig(path, on_bad_row="skip"), "text", bytes_only)
    for part in ("3 of 5 rows were dropped", "dropped 1: text: is empty", f"({path}:2)", "data.max_lost_share"):
        assert part in str(caught.value)


PROMPT = "abcdefgh" * 5  # 40 tokens


def write(path, *rows):
    write_lines(path, rows)
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

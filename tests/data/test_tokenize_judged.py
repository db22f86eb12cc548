"""Tokens of labels, rankings and steps: cut to length like pairs, and nothing is lost silently."""

import copy

import pytest

from alignment.data.rows.records import Comparison, Demonstration, LabeledResponse, Ranking, Steps
from alignment.data.tokenize import (
    EQUAL,
    EQUAL_IN_RANKING,
    FEW_RESPONSES,
    NO_STEP,
    PROMPT_CUT,
    RESPONSE_CUT,
    STEPS_CUT,
    TOKENIZE,
    tokenize_comparisons,
    tokenize_demonstrations,
    tokenize_labels,
    tokenize_rankings,
    tokenize_steps,
)
from tests.examples import sides


@pytest.mark.parametrize("max_length", [8, 64])
@pytest.mark.parametrize("prompt", ["the price is $46", [{"role": "user", "content": "hello there"}]])
def test_labels_are_the_tokens_of_demonstrations(chatml, prompt, max_length):
    [labeled], counts = tokenize_labels([LabeledResponse(prompt, " today", True, "r")], chatml, max_length)
    [plain], expected = tokenize_demonstrations([Demonstration(prompt, " today", "r")], chatml, max_length)
    assert sides(labeled)[0] == plain and labeled.values["desirable"]
    assert counts == expected


@pytest.mark.parametrize("max_length", [8, 64])
def test_a_ranking_of_two_is_the_pair(bpe, max_length):
    prompt, good, bad = "the cat sat on the mat", " and the other", " hello"
    [ranked], counts = tokenize_rankings([Ranking(prompt, (bad, good), (1, 0), "r", None, 0.5)], bpe, max_length)
    [pair], expected = tokenize_comparisons([Comparison(prompt, good, bad, 0.5, "r")], bpe, max_length)
    assert sides(ranked) == sides(pair)[::-1]
    assert (ranked.values, counts) == ({"ranks": [1, 0], "margin": 0.5}, expected)


def test_all_responses_of_a_ranking_follow_the_same_prompt_tokens(bytes_only):
    # 12 tokens: the longest response takes 8 and its end token, which leaves 3 of the prompt's 7
    row = Ranking("prompt", ("abcdefgh", "ab", "abcd"), (0, 2, 1), "r")
    [example], counts = tokenize_rankings([row], bytes_only, 12)
    assert [bytes_only.decode(ids) for ids in example.documents] == [
        "<s>ptabcdefgh</s>",
        "<s>ptab</s>",
        "<s>ptabcd</s>",
    ]
    assert all(response.mask == [False] * 3 + [True] * (len(response.ids) - 3) for response in sides(example))
    assert counts.cut == {PROMPT_CUT: 1} and (counts.documents, counts.tokens) == (3, 12 + 6 + 8)


def test_responses_that_become_the_same_tokens_are_left_out(bytes_only):
    # cut to 6 response tokens; ties that are equal leave one, others that are equal leave none
    tied = Ranking("p", ("abcdefgh", "abcdefxy", "z"), (0, 0, 1), "tied")
    contrary = Ranking("p", ("abcdefgh", "abcdefxy", "z", "y"), (0, 1, 2, 3), "contrary")
    few = Ranking("p", ("abcdefgh", "abcdefxy", "z"), (0, 1, 2), "few")
    pair = Ranking("p", ("abcdefgh", "abcdefxy"), (0, 1), "pair")
    examples, counts = tokenize_rankings([tied, contrary, few, pair], bytes_only, 8)
    assert [[bytes_only.decode(ids[2:]) for ids in example.documents] for example in examples] == [
        ["abcdef", "z</s>"],
        ["z</s>", "y</s>"],
    ]
    assert [example.values["ranks"] for example in examples] == [[0, 1], [0, 1]]
    assert counts.cut == {EQUAL_IN_RANKING: 2, RESPONSE_CUT: 2}
    assert counts.dropped == {FEW_RESPONSES: 1, EQUAL: 1}
    assert (counts.rows, counts.kept) == (4, 2)


def test_the_label_of_a_step_stands_on_the_last_token_of_its_separator(bytes_only):
    row = Steps("p", ("ab", "cde"), (True, False), "r", "\n\n")
    [example], counts = tokenize_steps([row], bytes_only, 64)
    assert bytes_only.decode(example.ids) == "<s>pab\n\ncde\n\n"
    assert example.values == {"ends": [5, 10], "labels": [True, False]}
    assert (counts.kept, counts.tokens, counts.cut) == (1, 11, {})


def test_steps_that_do_not_fit_are_left_out_with_their_labels(bytes_only):
    row = Steps("prompt", ("ab", "cde", "f"), (True, False, True), "r")
    # 9 tokens: 2 for the prompt (a quarter), 7 for the steps: 3 + 4, and none of the last 2
    [example], counts = tokenize_steps([row], bytes_only, 9)
    assert bytes_only.decode(example.ids) == "<s>tab\ncde\n"
    assert example.values == {"ends": [4, 8], "labels": [True, False]}
    assert counts.cut == {STEPS_CUT: 1, PROMPT_CUT: 1}
    examples, counts = tokenize_steps([row, Steps("p", ("abcdefghij",), (True,), "long")], bytes_only, 8)
    assert [example.values["ends"] for example in examples] == [[4]]  # 6 for the steps: the second would take 7
    assert counts.dropped == {NO_STEP: 1} and counts.first[NO_STEP] == ["long"]


def test_steps_have_trls_layout(bpe):
    """trl: prompt, then each step's tokens and the separator's, the label on the last of them."""
    row = Steps("the price", (" is $46", "Price: $4"), (True, False), "r")
    [example], _ = tokenize_steps([row], bpe, 64)
    expected = [bpe.bos_token_id, *bpe("the price", add_special_tokens=False)["input_ids"]]
    ends = []
    for step in row.steps:
        expected += bpe(step, add_special_tokens=False)["input_ids"] + bpe("\n", add_special_tokens=False)["input_ids"]
        ends.append(len(expected) - 1)
    assert example.ids == expected and example.values["ends"] == ends


@pytest.mark.parametrize("kind", ["demonstrations", "comparisons", "labels", "rankings", "steps"])
def test_a_tag_that_generation_opens_stands_once_in_every_kind(chatml, kind):
    """[C3] The template's generation prompt and the rows both write `<think>`: once in the tokens, one note a row."""
    tokenizer = copy.copy(chatml)
    tokenizer.chat_template = chatml.chat_template.replace("assistant\n{%", "assistant\n<think>\n{%")
    prompt, good, bad = [{"role": "user", "content": "hello"}], "<think>\nthe cat", "<think>the mat"
    row = {
        "demonstrations": Demonstration(prompt, good, "r"),
        "comparisons": Comparison(prompt, good, bad, None, "r"),
        "labels": LabeledResponse(prompt, good, True, "r"),
        "rankings": Ranking(prompt, (good, bad), (0, 1), "r"),
        "steps": Steps(prompt, (good, "on"), (True, False), "r"),
    }[kind]
    [example], counts = TOKENIZE[kind]([row], tokenizer, 128)
    texts = [tokenizer.decode(ids) for ids in example.documents]
    assert [text.count("<think>") for text in texts] == [1] * len(texts) and "<think>\nthe cat" in texts[0]
    assert sum(count for note, count in counts.noted.items() if "<think>" in note) == 1


@pytest.mark.parametrize("kind", ["demonstrations", "comparisons", "labels", "rankings", "steps"])
def test_no_kind_puts_a_plain_reply_into_a_block_left_open(chatml, kind):
    """[S1] Also where the other reply of a row goes on from it: both follow the same prompt."""
    tokenizer = copy.copy(chatml)
    tokenizer.chat_template = chatml.chat_template.replace("assistant\n{%", "assistant\n<think>\n{%")
    prompt, plain, other = [{"role": "user", "content": "hello"}], "the cat", "hm</think>the mat"
    row = {
        "demonstrations": Demonstration(prompt, plain, "r"),
        "comparisons": Comparison(prompt, plain, other, None, "r"),
        "labels": LabeledResponse(prompt, plain, True, "r"),
        "rankings": Ranking(prompt, (plain, other), (0, 1), "r"),
        "steps": Steps(prompt, (plain, " on"), (True, False), "r", separator="\n"),
    }[kind]
    [example], counts = TOKENIZE[kind]([row], tokenizer, 128)
    texts = [tokenizer.decode(ids).partition("assistant\n")[2] for ids in example.documents]
    expected = ["the cat\n on\n"] if kind == "steps" else ["the cat<|im_end|>", "<think>\nhm</think>the mat<|im_end|>"]
    assert texts == expected[: len(texts)] and sum("<think>" in note for note in counts.noted) == 1
    if len(texts) > 1:
        starts = [mask.index(True) for mask in example.masks]
        assert starts[0] == starts[1] and example.documents[0][: starts[0]] == example.documents[1][: starts[0]]


def test_the_command_line_knows_every_kind():
    from typing import get_args

    from alignment import cli
    from alignment.data.rows.records import Kind

    assert get_args(cli.Kind) == get_args(Kind)

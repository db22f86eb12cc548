"""The data doctor: each fault is found, a sound file passes, and the first rows are shown as they are trained on."""

import pytest

from alignment.data.batches import Example
from alignment.data.doctor import check_file, show_example
from alignment.data.rows.records import Tally, Text
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.data.tokenizers.train import train_tokenizer
from alignment.errors import UserError


def found(report, level):
    return [finding.text for finding in report.findings if finding.level == level]


def test_healthy_demonstrations(jsonl, bpe, tmp_path):
    save_tokenizer(bpe, tmp_path / "tokenizer")
    report = check_file(
        jsonl({"prompt": "the cat", "response": " sat\n"}, {"prompt": "hello", "response": "you</s>"}),
        "demonstrations",
        tmp_path / "tokenizer",
    )
    assert report.ok and report.findings == []
    text = report.render()
    assert "no errors" in text and "2 of 2 rows kept" in text
    assert "<s>|the| cat [ sat|\\n|</s>]" in text
    assert "6 tokens, 3 count: context 0-2, counts 3-5" in text


def test_length_gap_of_pairs(jsonl):
    rows = [{"prompt": f"p{index}", "chosen": "a" * (3 + index), "rejected": "b"} for index in range(3)]
    report = check_file(jsonl(*rows), "comparisons")  # 2, 3 and 4 characters longer
    assert found(report, "warning") == [
        "chosen is +3.0 characters longer on average; 'the longer one wins' is right in 100.0%"
    ]
    balanced = [{"prompt": "p", "chosen": "ab", "rejected": "c"}, {"prompt": "p", "chosen": "c", "rejected": "de"}]
    assert found(check_file(jsonl(*balanced), "comparisons"), "note")[0].endswith("right in 50.0%")


def test_so_many_cuts_that_a_run_refuses_them_are_an_error(jsonl, bpe):
    long, short = {"prompt": "the cat sat on " * 9, "response": "mat"}, {"prompt": "the", "response": "cat"}
    report = check_file(jsonl(long, short, long), "demonstrations", bpe, None, 12)
    assert any("2 of 3 rows at max_length 12: prompt longer" in text for text in found(report, "error"))


def test_every_kind_can_be_shown(jsonl, bpe):
    pair = {"prompt": "the", "chosen": " cat", "rejected": " mat", "margin": 0.5}
    report = check_file(jsonl(pair), "comparisons", bpe)
    assert "margin 0.5" in report.samples[0] and "[ mat|</s>]" in report.samples[0]
    assert "[<s>|the|</s>]" in check_file(jsonl({"text": "the"}), "text", bpe).samples[0]
    assert "2 tokens, 0 count: context 0-1" in check_file(jsonl({"prompt": "the"}), "prompts", bpe).samples[0]


@pytest.mark.parametrize("text", ["猫", "În două zile 🐈!", "a\u0307\n猫猫"])
def test_tokens_of_one_character_are_shown_as_that_character(bpe, text):
    """[D13 j] The vocabulary spells a byte as a letter of GPT-2's alphabet: shown for half a character alone."""
    from alignment.data.tokenize import tokenize_texts

    [example], _ = tokenize_texts([Text(text, "r")], bpe, 99)
    line = show_example(example, bpe).splitlines()[1]
    assert line.replace("|", "").strip() == f"[<s>{text}</s>]".replace("\n", "\\n")
    half = Example.single(example.ids[:2], [True] * 2, "r")
    assert bpe.convert_ids_to_tokens(example.ids[1]) in show_example(half, bpe)


def test_wrong_usage_is_refused(jsonl, bpe, tmp_path):
    path = jsonl({"text": "a"})
    for options, message in [
        ({"template": tmp_path / "x"}, "--chat-template needs --tokenizer"),
        ({"tokenizer": bpe, "template": tmp_path / "x"}, "no such file, and no built-in template"),
        ({"tokenizer": tmp_path / "x"}, "no such directory"),
        ({"max_length": 1}, "at least 2"),
    ]:
        with pytest.raises(UserError, match=message):
            check_file(path, "text", **options)


def test_what_counts_in_a_long_row_is_shown_where_it_stands(bpe):
    example = Example.single([5] * 300, [False] * 290 + [True] * 10, "r1")
    [line] = [line for line in show_example(example, bpe).splitlines() if "[" in line]
    before, _, counted = line.partition("[")
    assert before.count("|") == 149 and counted.count("|") == 9 and counted.endswith("]")


def test_the_last_turn_without_a_stop_token_is_an_error(monkeypatch, jsonl, bpe):
    """A dialogue of two trained turns, the first one stopped."""
    from alignment.data import doctor

    ids, mask = [0, 50, 1, 52, 53, 51], [False, True, True, False, True, True]
    made = ([Example.single(ids, mask, "r1")], Tally(rows=1, kept=1))
    monkeypatch.setitem(doctor.TOKENIZE, "demonstrations", lambda *arguments: made)
    report = check_file(jsonl({"prompt": "a", "response": "b"}), "demonstrations", bpe)
    assert found(report, "error") == ["1 rows train no stop token (r1)"]


def test_a_response_cut_at_its_end_does_not_lack_a_stop_token(jsonl, bpe):
    report = check_file(jsonl({"prompt": "the", "response": " cat sat" * 30}), "demonstrations", bpe, max_length=12)
    told = [finding.text for finding in report.findings]
    assert any("response longer than fits" in text for text in told)
    assert not any("train no stop token" in text for text in told)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_control_strings_of_either_response_are_noticed(jsonl, bpe, side):
    row = {"prompt": "x", "chosen": "the cat", "rejected": "a mat", side: "a<s>b"}
    report = check_file(jsonl(row), "comparisons", bpe)
    assert "1 rows hold '<s>' in their text; it is read as text, not as a token" in found(report, "warning")


def test_an_unknown_token_is_noticed_wherever_it_stands(jsonl):
    characters = train_tokenizer("characters", ["the cat"])
    report = check_file(jsonl({"text": "the hat"}, {"text": "the cat!"}, {"text": "cat"}), "text", characters)
    assert found(report, "warning") == [f"1 rows have unknown tokens ({report.source}:2)"]


def test_template_may_be_a_built_in_name(jsonl, bpe):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}]
    report = check_file(jsonl({"messages": messages}), "demonstrations", bpe, "alpaca")
    shown = "".join(report.samples).replace("|", "")
    assert report.ok and "### Instruction" in shown and bpe.chat_template is None
    with pytest.raises(UserError, match=r"has no special token .*start_header_id"):
        check_file(jsonl({"messages": messages}), "demonstrations", bpe, "llama3")

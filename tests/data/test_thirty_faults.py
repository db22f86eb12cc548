"""A seeded file for each kind of rows, with faults planted one by one: each is found under its name, and nothing else.

On clean sets no row is called bad without being bad, and no warning is false: those that remain are listed here by name.
"""

import json

import pytest

from alignment.data.doctor import check_file
from alignment.data.rows.records import ALL_TIED, EQUAL_PAIR, EQUAL_RESPONSES
from alignment.data.tokenize import EMPTY, EQUAL, FEW_RESPONSES, NO_STEP, PROMPT_CUT, RESPONSE_CUT, STEPS_CUT
from alignment.data.tokenizers.tokenizer import read_tokenizer_files

WORDS = ["the", "cat", "sat", "on", "mat", "and", "other", "hello", "there", "friend", "price", "today", "tomorrow"]
MAX_LENGTH = 96


def sentence(number, length=6):
    """Different words for every number, so that no row is a copy of another."""
    return (
        " ".join(WORDS[(number * 7 + index * (number % 5 + 1)) % len(WORDS)] for index in range(length)) + f" {number}"
    )


def demonstration(number):
    return {"prompt": f"{sentence(number)}: ", "response": sentence(number + 500, 4 + number % 3)}


def comparison(number):
    lengths = (5, 7) if number % 2 else (7, 5)
    first, second = (sentence(number + 1000 * side, length) for side, length in enumerate(lengths, start=1))
    return {"prompt": f"{sentence(number)}: ", "chosen": first, "rejected": second, "margin": 1.0}


def ranking(number):
    texts = [sentence(number + 1000 * side, 5) for side in (1, 2, 3)]
    return {"prompt": f"{sentence(number)}: ", "responses": texts, "ranking": [2, 0, 1]}


def labeled(number):
    return {**demonstration(number), "label": number % 2 == 0}


def steps(number):
    texts = [sentence(number + 1000 * side, 3) for side in (1, 2)]
    return {"prompt": f"{sentence(number)}: ", "completions": texts, "labels": [True, number % 2 == 0]}


def dialogue(*turns):
    return {"messages": [dict(zip(("role", "content"), turn, strict=True)) for turn in turns]}


def talk(number):
    return dialogue(("user", sentence(number)), ("assistant", sentence(number + 500, 5)))


USER, BOT = ("user", "what is the price"), ("assistant", "the price is $46")
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{1"}}]}
LONG = "the cat sat on the mat and the other cat sat on the other mat " * 12
SAME = LONG + "x", LONG + "y"
COPY = demonstration(3)

FAULTS = {  # kind -> (good rows, name of the finding -> the rows that have the fault)
    "demonstrations": (
        demonstration,
        {
            "not JSON": [b'{"prompt": "x", '],
            "not UTF-8": [b'{"prompt": "\xff", "response": "y"}'],
            "not a JSON object": [["prompt", "response"]],
            "response: missing": [{"prompt": "a question"}],
            "response: must be text, is null": [{"prompt": "a question", "response": None}],
            "response: must be text, is a number": [{"prompt": "a question", "response": 46}],
            "response: is empty": [{"prompt": "a question", "response": ""}],
            "response: is only white space": [{"prompt": "a question", "response": " \n"}],
            "response: holds half a surrogate pair, which is no text": [{"prompt": "a", "response": "b \ud83d"}],
            "prompt: is messages here and text above": [
                {"prompt": [{"role": "user", "content": "x"}], "response": "y"}
            ],
            "label: false marks an undesirable response (KTO's rows), which must not be imitated": [
                {"prompt": "a", "response": "b", "label": False}
            ],
            "copies": [COPY],
            "replacement characters": [{"prompt": "a: ", "response": "caf\ufffd"}],
            "mojibake": [{"prompt": "b: ", "response": "caf\u00c3\u00a9 today"}],
            "control characters": [{"prompt": "c: ", "response": "the\x07 cat"}],
            "markup": [{"prompt": "d: ", "response": '<div class="x">the cat</div>&nbsp;'}],
            "rendered markers": [{"prompt": "<|im_start|>user\nhello ", "response": "the mat"}],
            "role headers": [{"prompt": "e: ", "response": "the mat\n\nHuman: and then?"}],
            "repetition": [{"prompt": "f: ", "response": "the mat.\n" * 6}, {"prompt": "g: ", "response": "so " * 12}],
            "refusals": [{"prompt": "h: ", "response": "I'm sorry, I cannot help with that."}],
            "prompt in response": [
                {"prompt": "where did the cat sit today?", "response": "where did the cat sit today? on the mat"}
            ],
            "control strings": [{"prompt": "j <s>: ", "response": "the mat"}],
            EMPTY: [{"prompt": "k: ", "response": "</s>"}],
            PROMPT_CUT: [{"prompt": LONG, "response": "the mat 1"}],
            RESPONSE_CUT: [{"prompt": "l: ", "response": LONG}],
            "overlap": [],
        },
    ),
    "comparisons": (
        comparison,
        {
            "chosen: missing": [{"prompt": "a", "rejected": "b"}],
            "margin: must be a finite number": [b'{"prompt": "a", "chosen": "b", "rejected": "c", "margin": NaN}'],
            "prompt: ends with an assistant message, so nothing is left to answer": [
                {"prompt": [{"role": "assistant", "content": "x"}], "chosen": "a", "rejected": "b"}
            ],
            EQUAL_PAIR: [{"prompt": "a: ", "chosen": "b", "rejected": "b"}],
            EQUAL: [{"prompt": "a: ", "chosen": SAME[0], "rejected": SAME[1]}],
            "contradictions": [
                {"prompt": "b: ", "chosen": "the mat", "rejected": "the cat"},
                {"prompt": "b: ", "chosen": "the cat", "rejected": "the mat"},
            ],
            "margin": [{"prompt": "c: ", "chosen": "a", "rejected": "b", "margin": -1}],
        },
    ),
    "rankings": (
        ranking,
        {
            "ranking: names a response twice": [{**ranking(900), "ranking": [0, 1, 1, 2]}],
            "ranking: leaves out a response": [{**ranking(901), "ranking": [0, 1]}],
            "ranking: names a response that is not there": [{**ranking(902), "ranking": [1, 2, 3]}],
            "responses: must be at least two to rank": [{"prompt": "a", "responses": ["b"], "ranking": [0]}],
            EQUAL_RESPONSES: [{**ranking(903), "responses": ["a", "b", "a"]}],
            "tied ranking": [{**ranking(904), "ranking": [[0, 1, 2]]}],
            FEW_RESPONSES: [{"prompt": "a: ", "responses": [*SAME, "z"], "ranking": [0, 1, 2]}],
        },
    ),
    "labels": (
        labeled,
        {
            "label: must be true or false (or 1 or 0)": [{**demonstration(900), "label": "maybe"}],
            "label: missing": [demonstration(901)],
            "contradictions": [{**demonstration(902), "label": True}, {**demonstration(902), "label": False}],
        },
    ),
    "steps": (
        steps,
        {
            "labels: must be as many as completions": [{**steps(900), "labels": [True]}],
            "completions: is empty": [{**steps(901), "completions": ["a", ""]}],
            NO_STEP: [{"prompt": "a: ", "completions": [LONG, "b"], "labels": [True, False]}],
            STEPS_CUT: [{"prompt": "a: ", "completions": ["b", LONG], "labels": [True, False]}],
        },
    ),
    "text": (
        lambda number: {"text": sentence(number, 12)},
        {
            "text: is only white space": [{"text": " \n "}],
            "copies": [{"text": sentence(4, 12)}],
            "mojibake": [{"text": "it\u00e2\u20ac\u2122s the cat"}],
        },
    ),
}
TALK_FAULTS = {
    "messages: unknown role": [dialogue(("wizard", "x"), BOT)],
    "messages: no message of the assistant counts": [dialogue(USER)],
    "messages: an assistant message alone has no prompt": [dialogue(BOT)],
    "messages: a tool call must be JSON": [{"messages": [{"role": "user", "content": "x"}, CALL]}],
    "messages: content of a message must be text, is null": [dialogue(("user", None), BOT)],
    "tools: a tool definition must be an object that names its function": [{**dialogue(USER, BOT), "tools": [{}]}],
    "system message": [
        dialogue(("system", "be kind"), USER, ("system", "be curt"), ("user", "so"), ("assistant", "a"))
    ],
    "turns": [dialogue(("user", "one"), ("user", "two"), ("assistant", "three"))],
}


def names_of(report):
    return {finding.name for finding in report.findings}


def write(path, rows):
    path.write_bytes(b"".join((row if isinstance(row, bytes) else json.dumps(row).encode()) + b"\n" for row in rows))
    return path


def background(kind):
    """What is said of the good rows themselves, as a note: how long responses are, how many are right."""
    return {"comparisons": {"length bias"}, "labels": {"label balance"}, "steps": {"label balance"}}.get(kind, set())


@pytest.mark.parametrize("kind", FAULTS)
def test_every_planted_fault_is_found_under_its_name_and_no_other(kind, tmp_path, bpe):
    good, faults = FAULTS[kind]
    rows = [good(number) for number in range(200)]
    evaluation = write(tmp_path / "held_out.jsonl", [{**good(5)}, good(777)]) if "overlap" in faults else None
    clean = check_file(write(tmp_path / "clean.jsonl", rows), kind, bpe, max_length=MAX_LENGTH, show=0)
    assert names_of(clean) == background(kind) and not [f for f in clean.findings if f.level != "note"]
    planted = [row for fault in faults.values() for row in fault]
    path = write(tmp_path / "rows.jsonl", rows + planted)
    report = check_file(path, kind, bpe, max_length=MAX_LENGTH, evaluation=evaluation, show=0)
    missed = set(faults) - names_of(report)
    assert not missed
    assert names_of(report) - set(faults) <= background(kind) | {PROMPT_CUT, RESPONSE_CUT}


def test_faults_of_dialogues(tmp_path, chatml):
    rows = [talk(number) for number in range(60)]
    planted = [row for fault in TALK_FAULTS.values() for row in fault]
    assert not check_file(write(tmp_path / "clean.jsonl", rows), "demonstrations", chatml, show=0).findings
    report = check_file(write(tmp_path / "rows.jsonl", rows + planted), "demonstrations", chatml, show=0)
    assert names_of(report) == set(TALK_FAULTS)


@pytest.mark.parametrize(
    ("rows", "kind", "name"),
    [
        ([{**comparison(number), "chosen": sentence(number, 12)} for number in range(60)], "comparisons", "length bias"),
        ([{**labeled(number), "label": number > 0} for number in range(60)], "labels", "label balance"),
        ([{**steps(number), "labels": [True, True]} for number in range(60)], "steps", "label balance"),
        ([{**demonstration(number), "response": "the same"} for number in range(60)], "demonstrations", "same response"),
        ([{"prompt": sentence(n), "response": sentence(n + 99)} for n in range(60)], "demonstrations", "no separation"),
        ([{**ranking(number), "ranking": [[0, 1, 2]]} for number in range(9)], "comparisons", ALL_TIED),
        ([{**comparison(number), "score_chosen": 1, "score_rejected": 2} for number in range(9)], "rankings", "scores"),
    ],
)  # fmt: skip
def test_faults_of_whole_sets(rows, kind, name, tmp_path, bpe):
    if name == ALL_TIED:
        rows = [*rows, ranking(77)]
    report = check_file(write(tmp_path / "rows.jsonl", rows), kind, bpe, show=0)
    assert name in names_of(report)


CLEAN = [  # file, kind, columns, and the findings above a note that are true of it
    pytest.param(*("gsm8k/train", "demonstrations", {"prompt": "question", "response": "answer"}, set()), marks=pytest.mark.slow),
    ("gsm8k/test", "demonstrations", {"prompt": "question", "response": "answer"}, set()),
    ("oasst_trees/trees", "rankings", {}, {"length bias"}),  # the longer one wins in 78 % of the pairs
    ("oasst_trees/trees", "comparisons", {}, {"length bias"}),
    ("llamafactory_demo/alpaca_en", "demonstrations", {}, {"copies"}),  # 12 of 818
    ("llamafactory_demo/dpo_en", "comparisons", {}, {"copies"}),  # 3 of 248
    ("llamafactory_demo/kto_en", "labels", {}, set()),
    ("llamafactory_demo/c4_docs", "text", {}, {"replacement characters"}),  # 4 of 240
    ("llamafactory_demo/wiki_docs", "text", {}, set()),
]  # fmt: skip


@pytest.mark.real_data
@pytest.mark.parametrize(("name", "kind", "columns", "true"), CLEAN)
def test_clean_sets_raise_no_error_and_no_false_warning(real_data, templates, name, kind, columns, true):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "gpt2")
    tokenizer.chat_template = templates["chatml"].replace("<|im_end|>", "<|endoftext|>")
    report = check_file(real_data / f"{name}.jsonl.gz", kind, tokenizer, max_length=8192, columns=columns, show=0)
    assert {finding.name for finding in report.findings if finding.level != "note"} <= true
    assert report.ok


@pytest.mark.slow
@pytest.mark.real_data
def test_hh_rlhf_raises_the_faults_that_it_has_and_no_others(real_data):
    true = {
        "rejected: the dialogue before the last assistant turn differs from chosen's",
        "rejected: the last assistant turn is empty", "chosen: the last assistant turn is empty",
        "rejected: ends with a human turn", EQUAL_PAIR, "length bias",
    }  # fmt: skip
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "gpt2")
    for part in ("harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"):
        report = check_file(
            real_data / "hh_rlhf" / f"{part}.jsonl.gz", "comparisons", tokenizer, max_length=8192, show=0
        )
        assert {finding.name for finding in report.findings if finding.level != "note"} <= true

"""Files to records: every row kind and format, and every fault with its location (file:line:key), all at once."""

import csv
import gzip
import json
from dataclasses import replace

import pytest

from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.rows import files
from alignment.data.rows.fields import BadRow
from alignment.data.rows.files import read_chunks
from alignment.data.rows.formats import alpaca_prompt, parse_comparison
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import EQUAL_PAIR, Prompt, Text
from alignment.data.rows.records import Comparison as Pair
from alignment.data.rows.records import Demonstration as Demo
from alignment.errors import UserError

DEMO, PAIRS = "demonstrations", "comparisons"
HI = {"role": "user", "content": "hi"}
HEY = {"role": "assistant", "content": "hey"}
YO = {"role": "assistant", "content": "yo"}
BE_KIND = {"role": "system", "content": "Be kind."}
SHAREGPT = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hey"}]
DIALOGUE = "\n\nHuman: hi\n\nAssistant: hey\n\nHuman: more\n\nAssistant:"


def read_one(path, kind, **options):
    [record], counts = read_rows(path, kind, **options)
    assert (counts.rows, counts.kept, counts.lost) == (1, 1, 0)
    return record


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [
        ("text", {"text": " a b\n"}, Text(" a b\n", "")),
        (DEMO, {"prompt": "hi ", "completion": " hey"}, Demo("hi ", " hey", "")),
        (DEMO, {"prompt": "hi", "response": "hey"}, Demo("hi", "hey", "")),
        (DEMO, {"prompt": [HI], "completion": [HEY]}, Demo([HI], "hey", "")),
        (DEMO, {"messages": [HI, HEY]}, Demo([HI], "hey", "")),
        (DEMO, {"messages": [HI, HEY], "prompt": "x", "completion": "y"}, Demo([HI], "hey", "")),
        (DEMO, {"messages": None, "prompt": "x", "response": "y"}, Demo("x", "y", "")),
        (DEMO, {"messages": [HI, HEY, HI, YO]}, Demo([HI, HEY, HI], "yo", "", [HI, HEY, HI, YO])),
        (DEMO, {"conversations": SHAREGPT}, Demo([HI], "hey", "")),
        (DEMO, {"instruction": "Add.", "input": "1 2", "output": "3"}, Demo(alpaca_prompt("Add.", "1 2"), "3", "")),
        (DEMO, {"instruction": "Go.", "input": "", "output": "ok"}, Demo(alpaca_prompt("Go."), "ok", "")),
        (DEMO, {"instruction": "Go.", "output": "ok"}, Demo(alpaca_prompt("Go."), "ok", "")),
        (DEMO, {"chosen": DIALOGUE + " yes", "rejected": DIALOGUE + " no"}, Demo(DIALOGUE, " yes", "")),
        (PAIRS, {"prompt": "hi", "chosen": "a", "rejected": "b"}, Pair("hi", "a", "b", None, "")),
        (PAIRS, {"prompt": "hi", "chosen": "a", "rejected": "b", "margin": 2}, Pair("hi", "a", "b", 2.0, "")),
        (PAIRS, {"prompt": [HI], "chosen": [HEY], "rejected": [YO]}, Pair([HI], "hey", "yo", None, "")),
        (PAIRS, {"prompt": [HI], "chosen": "a", "rejected": "b"}, Pair([HI], "a", "b", None, "")),
        (PAIRS, {"prompt": "hi", "chosen": [HEY], "rejected": [YO]}, Pair([HI], "hey", "yo", None, "")),
        (PAIRS, {"chosen": [HI, HEY], "rejected": [HI, YO]}, Pair([HI], "hey", "yo", None, "")),
        (
            PAIRS,  # the prompt stands in its column and in the dialogues
            {"prompt": "hi", "chosen": [HI, HEY], "rejected": [HI, YO]},
            Pair([HI], "hey", "yo", None, ""),
        ),
        *(
            (PAIRS, {"prompt": prompt, "chosen": [*before, HEY], "rejected": [*before, YO]}, Pair(whole, "hey", "yo", None, ""))
            for prompt, before, whole in [
                ([BE_KIND, HI], [HI], [BE_KIND, HI]),  # dialogues without the system message
                ([HI], [BE_KIND, HI], [BE_KIND, HI]),
                ([HI], [HI, HEY, HI], [HI, HEY, HI]),
                ("<|user|>hi<|assistant|>", [HI], [HI]),  # the dialogue as it was rendered
                ([HI], [YO, HI], [HI, YO, HI]),  # completions of several messages
                ("hi", [YO, HI], [HI, YO, HI]),
                ("", [HI], [HI]),
            ]
        ),
        (PAIRS, {"chosen": DIALOGUE + " yes", "rejected": DIALOGUE + " no"}, Pair(DIALOGUE, " yes", " no", None, "")),
        (
            PAIRS,
            {"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "yo"}},
            Pair([HI], "hey", "yo", None, ""),
        ),
        (  # OpenAI's content as a list of text parts
            DEMO,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in ("h", "i")]}, HEY]},
            Demo([HI], "hey", ""),
        ),
        (DEMO, {"system": "Be kind.", "conversations": SHAREGPT}, Demo([BE_KIND, HI], "hey", "")),
        (DEMO, {"system": " ", "tools": "[]", "messages": [HI, HEY]}, Demo([HI], "hey", "")),
        (DEMO, {"system": "Be kind.", "messages": [BE_KIND, HI, HEY]}, Demo([BE_KIND, HI], "hey", "")),
        (DEMO, {"system": "Be kind.", "messages": [HI, HEY, HI, YO]}, Demo([BE_KIND, HI, HEY, HI], "yo", "", [BE_KIND, HI, HEY, HI, YO])),
        (DEMO, {"prompt": "hi", "completion": "hey", "label": True}, Demo("hi", "hey", "")),
        (DEMO, {"messages": [HI, {**HEY, "weight": 0}, HI, YO]}, Demo([HI, HEY, HI], "yo", "")),
        (DEMO, {"messages": [HI, HEY, HI, {**YO, "weight": 0}]}, Demo([HI], "hey", "")),
        (
            PAIRS,
            {"system": "Be kind.", "conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": YO},
            Pair([BE_KIND, HI], "hey", "yo", None, ""),
        ),
        ("prompts", {"system": "Be kind.", "messages": [HI]}, Prompt([BE_KIND, HI], {"system": "Be kind."}, "")),
        ("prompts", {"prompt": "hi", "system": "a name", "tools": [1]}, Prompt("hi", {"system": "a name", "tools": [1]}, "")),
        ("prompts", {"prompt": "hi", "facts": [1], "id": "x"}, Prompt("hi", {"facts": [1], "id": "x"}, "")),
        ("prompts", {"prompt": [HI]}, Prompt([HI], {}, "")),
        ("prompts", {"messages": [HI, HEY, HI]}, Prompt([HI, HEY, HI], {}, "")),
    ],
)  # fmt: skip
def test_every_shape_of_row(jsonl, kind, row, expected):
    record = read_one(jsonl(row), kind)
    assert replace(record, row_id="") == expected
    assert record.row_id.endswith("rows.jsonl:1")


def test_a_dialogue_keeps_the_turns_that_do_not_count_as_context(jsonl):
    dialogue = [
        HI, HEY, HI, {**YO, "train": False}, {**HI, "train": None}, {**HEY, "train": True}, HI, {**YO, "weight": 0},
    ]  # fmt: skip
    record = read_one(jsonl({"messages": dialogue}), DEMO)
    assert (record.prompt, record.response) == ([HI, HEY, HI, YO, HI], "hey")
    assert record.messages == [HI, HEY, HI, YO, HI, HEY]
    assert record.trained == (True, False, True)


@pytest.mark.parametrize(
    "flag",
    [{"loss": False}, {"training": 0}, {"trainable": "false"}, {"loss_mask": 0.0}, {"loss_weight": 0}, {"train": "no"}],
)
def test_a_turn_with_any_known_flag_of_false_does_not_count(jsonl, flag):
    assert read_one(jsonl({"messages": [HI, {**HEY, **flag}, HI, YO]}), DEMO) == read_one(
        jsonl({"messages": [HI, {**HEY, "weight": 0}, HI, YO]}), DEMO
    )
    for kind, row in [
        (PAIRS, {"chosen": [HI, {**HEY, **flag}], "rejected": [HI, YO]}),
        ("labels", {"messages": [HI, {**HEY, **flag}], "label": True}),
        (DEMO, {"prompt": "hi", "completion": {**HEY, **flag}}),
    ]:
        with pytest.raises(UserError, match="has weight 0"):
            read_rows(jsonl(row), kind)


def test_columns_and_keys_that_nobody_reads_are_counted_in_one_line(jsonl):
    row = {"messages": [{**HI, "id": 1, "mood": "odd"}, HEY], "prompt": "hi", "id": 1, "color": "x", "tools": None}
    counts = read_rows(jsonl(row, {**row, "score": 2}, {**row, "score": ""}, {**row, "prompt": None}), DEMO)[1]
    assert counts.unread == {"prompt": 3, "messages.mood": 4, "color": 4, "score": 1}
    (line,) = counts.lines()[1:]
    assert line.endswith("color (4), messages.mood (4), prompt (3), score (1)")
    both = counts.merged_with(read_rows(jsonl({**row, "prompt": "<image> hi"}), DEMO)[1])
    assert both.unread == {"prompt": 4, "messages.mood": 5, "color": 5, "score": 1}


@pytest.mark.parametrize(
    ("kind", "row", "unread"),
    [
        (PAIRS, {"prompt": "a", "instruction": "b", "chosen": "c", "rejected": "d", "label": 1, "margin": 2}, {"instruction", "label"}),
        (DEMO, {"prompt": "a", "response": "b", "input": "c", "completion": None}, {"input"}),
        (DEMO, {"instruction": "a", "output": "b", "input": "c", "text": "d"}, {"text"}),
        (DEMO, {"messages": [HI, HEY], "chat": "x"}, {"chat"}),
        (DEMO, {"prompt": "<image> a", "response": "b"}, {"<image>"}),
        ("prompts", {"prompt": [{**HI, "mood": "odd"}], "facts": [1]}, {"messages.mood"}),
        ("rankings", {"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 2, "score_rejected": 1}, set()),
        ("text", {"text": "a", "messages": [HI]}, {"messages"}),
    ],
)  # fmt: skip
def test_what_each_format_reads(jsonl, kind, row, unread):
    assert set(read_rows(jsonl(row), kind)[1].unread) == unread


ROWS = [{"prompt": "hi", "chosen": "ä", "rejected": 'b, "c"\nd'}, {"prompt": "ho", "chosen": "e", "rejected": "f"}]


def write_json(path):
    path.write_text(json.dumps(ROWS), encoding="utf-8")


def write_csv(path):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["prompt", "chosen", "rejected"])
        writer.writeheader()
        writer.writerows(ROWS)


@pytest.mark.parametrize(
    ("name", "write", "places"),
    [
        ("rows.json", write_json, [1, 2]),
        ("rows.csv", write_csv, [2, 4]),  # the first row takes two lines
    ],
)
def test_every_file_format_gives_the_same_rows(tmp_path, name, write, places):
    write(tmp_path / name)
    records, _ = read_rows(tmp_path / name, PAIRS)
    assert [(r.prompt, r.chosen, r.rejected) for r in records] == [
        (r["prompt"], r["chosen"], r["rejected"]) for r in ROWS
    ]
    assert [record.row_id for record in records] == [f"{tmp_path / name}:{place}" for place in places]


@pytest.mark.parametrize(
    ("name", "write", "places"),
    [
        ("lines.json", lambda rows: "\n".join(map(json.dumps, rows)), (1, 2)),
        ("list.jsonl", json.dumps, (1, 2)),
        ("pretty.jsonl", lambda rows: "\ufeff" + json.dumps(rows, indent=2), (1, 2)),
        ("wrapped.json", lambda rows: json.dumps({"version": 1, "data": rows}, indent=2), (1, 2)),
        ("one.json", lambda rows: json.dumps(rows[0], indent=2), (1,)),
    ],
)
def test_json_is_read_whatever_its_name_says(tmp_path, name, write, places):
    """[C17] Lines named .json, a list named .jsonl, an object around the list, one object alone."""
    (tmp_path / name).write_text(write(ROWS))
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(write(ROWS).encode()))
    for path in (tmp_path / name, tmp_path / f"{name}.gz"):
        config = DataConfig(str(path), cache=str(tmp_path / "cache"))
        assert [record.row_id for record in read_rows(path, PAIRS)[0]] == [f"{path}:{place}" for place in places]
        assert [raw.location for chunk in read_chunks(config.train, "train", 2**20) for raw in chunk.raw_rows()] == [
            f"{path}:{place}" for place in places
        ]


def test_a_long_field_of_csv_is_read(tmp_path):
    (tmp_path / "rows.csv").write_text(f"text\n{'a' * 200_000}\nb\n")
    assert [len(record.text) for record in read_rows(tmp_path / "rows.csv", "text")[0]] == [200_000, 1]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.txt.gz", "rows.csv", "rows.json.gz"])
def test_a_line_beyond_bounds_is_told_before_it_fills_the_memory(tmp_path, monkeypatch, bpe, name):
    """[E10] A few megabytes of gzip may unpack to gigabytes."""
    monkeypatch.setattr(files, "WHOLE_BYTES", 2**26, raising=False)  # of a list, which is one line of gigabytes
    content = b'{"text": "a"}\n{"text": "' + b"a" * 2**26 + b'"}\n'
    (tmp_path / name).write_bytes(gzip.compress(content, 1) if name.endswith(".gz") else content)
    for read in (
        lambda: read_rows(tmp_path / name, "text"),
        lambda: prepare(DataConfig(str(tmp_path / name)), "text", bpe),
    ):
        with pytest.raises(UserError, match=rf"{name}:2: a line of more than 64 MiB"):
            read()


def test_blank_lines_and_a_byte_order_mark_are_no_rows(jsonl):
    path = jsonl(b"\xef\xbb\xbf" + b'{"text": "a"}', b"", b'{"text": "b"}')
    records, counts = read_rows(path, "text")
    assert [record.text for record in records] == ["a", "b"]
    assert records[1].row_id.endswith(":3")
    assert counts.rows == 2


FAULTS = [
    ({"prompt": "x", "response": ""}, ":response: is empty"),
    ({"prompt": "x", "response": " \n"}, ":response: is only white space"),
    ({"prompt": [HI], "response": "x"}, ":prompt: is messages here and text above"),
    ({"prompt": "x", "response": [HI]}, ":response: must be one assistant message"),
    ({"prompt": "x", "response": "\ud800"}, ":response: holds half a surrogate pair"),
    (["x"], ": a row must be a JSON object, this is a list"),
    (b'{"prompt": "x", }', ":17: not JSON"),
    (b'{"prompt": "\xff"}', ": byte 13 of the line (byte 178 of the file) is not UTF-8"),  # 5 lines of 33 before
]


@pytest.mark.parametrize(("row", "message"), FAULTS)
def test_bad_row_is_named_by_file_line_and_key(jsonl, row, message):
    good = {"prompt": "x", "response": "y"}
    path = jsonl(good, good, good, good, good, row, good)
    with pytest.raises(UserError) as caught:
        read_rows(path, DEMO)
    assert str(caught.value).startswith("1 bad row;")
    assert f"{path}:6{message}" in str(caught.value)
    records, counts = read_rows(path, DEMO, on_bad_row="skip")
    assert (len(records), counts.rows, counts.kept, counts.lost) == (6, 7, 6, 1)
    assert counts.first == {next(iter(counts.dropped)): [f"{path}:6"]}


def test_all_bad_rows_are_told_at_once_up_to_a_cap(jsonl):
    path = jsonl({"text": "good"}, *[{"text": None}] * 30)
    with pytest.raises(UserError) as caught:
        read_rows(path, "text")
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("30 bad rows")
    assert lines[1] == f"{path}:2:text: must be text, is null"
    assert len(lines) == 22 and lines[-1] == "... and 10 more"


# The first good row of a kind, and what is wrong with the second
GOOD = {DEMO: {"messages": [HI, HEY]}, PAIRS: {"prompt": "x", "chosen": "a", "rejected": "b"}}


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (DEMO, {"messages": []}, "is an empty list"),
        (DEMO, {"messages": [{"role": "user", "content": " "}, HEY]}, "content of a message is only white space"),
        (DEMO, {"messages": [HI, {**HEY, "tool_calls": [{}]}]}, "a tool call must be an object that names its function"),
        (DEMO, {"messages": [{**HI, "tool_calls": [{"name": "f"}]}, HEY]}, "only the assistant can call tools"),
        (DEMO, {"messages": [*SHAREGPT[:1], {"from": "function_call", "value": "f(x)"}]}, "a tool call must be JSON"),
        (DEMO, {"messages": [HI, {"role": "assistant", "content": None, "tool_calls": []}]}, "content of a message must be"),
        (DEMO, {"messages": [HI, {**HEY, "reasoning": ["x"]}]}, "reasoning must be text"),
        (DEMO, {"messages": [HI, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "content of a message must be text"),
        (PAIRS, {"chosen": DIALOGUE + " a", "rejected": "\n\nHuman: other\n\nAssistant: b"}, "rejected: the dialogue before"),
        (PAIRS, {"chosen": DIALOGUE + " ", "rejected": DIALOGUE + " b"}, "chosen: the last assistant turn is empty"),
        (PAIRS, {"chosen": DIALOGUE + " a\n\nHuman: x", "rejected": DIALOGUE + " b"}, "chosen: ends with a human turn"),
        (PAIRS, {"chosen": "a", "rejected": "b"}, "chosen: no prompt column"),
        (PAIRS, {"prompt": None, "chosen": "a", "rejected": "b"}, "prompt: is null"),
        (PAIRS, {"chosen": [HEY], "rejected": [YO]}, "shares no first message"),
        (PAIRS, {"chosen": [HI, HEY, HI, YO], "rejected": [HI, YO]}, "must be one assistant message"),
        (PAIRS, {"prompt": "x", "chosen": "a", "rejected": "b", "margin": True}, "margin: must be a finite number"),
        (PAIRS, b'{"prompt": "x", "chosen": "a", "rejected": "b", "margin": 1e999}', "margin: must be a finite number"),
    ],
)  # fmt: skip
def test_bad_rows(jsonl, kind, row, message):
    with pytest.raises(UserError, match=message):
        read_rows(jsonl(GOOD[kind], row), kind)


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([HI, HEY], [HI, YO]),
        ([HI, HEY, HI, YO], [HI, HEY, HI, HEY]),
        ([HI, HEY], [HI, HEY]),  # a tie keeps its last message
        ([HI, HEY, HI, YO], [HI, YO]),
        ([HI, HEY, HI, YO], [HI, HEY]),
    ],
)
def test_the_shared_beginning_of_two_dialogues_is_the_prompt_as_in_trl(chosen, rejected):
    wanted = pytest.importorskip("trl").extract_prompt({"chosen": chosen, "rejected": rejected})
    if any(len(wanted[key]) != 1 for key in ("chosen", "rejected")):
        with pytest.raises(BadRow, match="one assistant message"):
            parse_comparison({"chosen": chosen, "rejected": rejected}, "")
    else:
        pair = parse_comparison({"chosen": chosen, "rejected": rejected}, "")
        replies = [wanted["chosen"][0]["content"], wanted["rejected"][0]["content"]]
        assert (pair.prompt, [pair.chosen, pair.rejected]) == (wanted["prompt"], replies)


def test_ties_are_counted(jsonl):
    path = jsonl({"prompt": "x", "chosen": "a", "rejected": "a"}, {"prompt": "x", "chosen": "a", "rejected": "b"})
    records, counts = read_rows(path, PAIRS)
    assert (len(records), counts.dropped) == (1, {EQUAL_PAIR: 1})


def test_wrong_column_mapping_is_told_with_the_nearest_names(jsonl):
    with pytest.raises(UserError) as caught:
        read_rows(jsonl({"question": "x", "answer": "y"}), DEMO, columns={"promt": "question", "response": "anser"})
    assert "data.columns.promt: demonstrations have no such column; did you mean 'prompt'?" in str(caught.value)
    assert "data.columns.response=anser: no such column; did you mean 'answer'?" in str(caught.value)


def test_what_an_object_holds_can_be_named_as_a_column(jsonl):
    """[C16] verl's rows keep the reference answer in reward_model.ground_truth."""
    rows = [
        {"prompt": "a", "reward_model": {"style": "rule", "ground_truth": n}, "info": {"q": "b"}} for n in ("1", "2")
    ]
    columns = {"answer": "reward_model.ground_truth"}
    records, _ = read_rows(jsonl(*rows), "prompts", columns=columns)
    assert [record.extra for record in records] == [
        {"answer": n, **{k: v for k, v in row.items() if k != "prompt"}} for n, row in zip("12", rows, strict=True)
    ]
    assert read_rows(jsonl(*rows), DEMO, columns={"prompt": "info.q", "response": "prompt"})[0][0].prompt == "b"
    with pytest.raises(
        UserError, match=r"reward_model.truth: no such column; did you mean 'reward_model.ground_truth'"
    ):
        read_rows(jsonl(*rows), "prompts", columns={"answer": "reward_model.truth"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", r"^0 rows in \S+$"),
        ("list.json", b"[]", "0 rows in"),
        ("empty.csv", b"", "0 rows in"),
        ("number.json", b"\n1\n", "must hold a list of rows"),
        ("sixteen.jsonl", b"\xff\xfe" + '{"text": "a"}'.encode("utf-16-le"), "UTF-16"),
        ("sixteen.csv", b"\xfe\xff" + "text\na".encode("utf-16-be"), "UTF-16"),
        ("returns.csv", b"text,more\ra,b\r", "carriage returns"),
        ("twice.jsonl", b'{"text": "a", "more": {"b": 1, "b": 2}}', "1:1: .*stands twice: b"),
        ("twice.json", b'[{"text": "a", "text": "b"}]', "stands twice: text"),
        ("half.jsonl", b'{"text": "a", "\\ud800": 1}', "a key holds half a surrogate pair"),
        ("broken.json", b'[{"text": "a"},\n x]', r"broken.json:2:2: not JSON"),
        ("latin.csv", b"text\nfine\nb\xe4r\n", r"latin.csv:3: byte 2 of the line is not UTF-8"),
        ("short.csv", b"text,more\na\n", r"short.csv:2: 1 fields where the first line names 2"),
        ("twice.csv", b"text,text\na,b\n", "stands twice"),
        ("quote.csv", b'text\n"a"b\n', r"quote.csv:2: not CSV"),
        ("fake.jsonl.gz", b"plain", "broken or incomplete gzip"),
        ("cut.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "broken or incomplete gzip"),
        ("fake.parquet", b"plain", "not a readable parquet file"),
        ("rows.xml", b"<a/>", "cannot tell the format"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_rows(tmp_path / name, "text")


@pytest.mark.parametrize(
    "source", ["missing.jsonl", "./missing", "/no/such/rows", "a/b/c", "folder/rows.parquet", "x.txt"]
)
def test_missing_file_is_not_taken_for_a_hub_id(source):
    with pytest.raises(UserError, match=r"no such file$"):
        read_rows(source, "text")


@pytest.fixture
def hub(monkeypatch):
    """A Hub of one data set; calls of `load_dataset` are noted, and the rows say which split they are of."""
    import datasets

    calls = []

    def load(*names, split, streaming=False):
        calls.append((*names, split))
        rows = datasets.Dataset.from_list([{"prompt": f"{split} {n}", "completion": "ok"} for n in range(9)])
        return rows.to_iterable_dataset() if streaming else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    return calls


@pytest.mark.parametrize(
    ("source", "call", "place"),
    [
        ("owner/name", ("owner/name", "train"), "owner/name[train]:1"),
        ("owner/name[test]", ("owner/name", "test"), "owner/name[test]:1"),
        ("owner/name[test[:3]]", ("owner/name", "test"), "owner/name[test[:3]]:1"),
        ("owner/name:en[test]", ("owner/name", "en", "test"), "owner/name:en[test]:1"),
        ("owner/name:en", ("owner/name", "en", "train"), "owner/name:en[train]:1"),
    ],
)
def test_a_hub_source_may_name_its_config_and_split(hub, source, call, place):
    records, _ = read_rows(source, DEMO)
    assert hub == [call] and records[0].row_id == place and len(records) == (3 if "[:3]" in source else 9)


@pytest.mark.parametrize(
    "settings",
    [
        {"evaluation": "owner/set", "evaluation_split": "test_sft"},
        {"evaluation": "owner/set[test_sft]"},
        {"train": "owner/set[train_sft]", "split": "test_sft", "evaluation": "owner/set"},
    ],
)
def test_held_out_rows_of_a_hub_set_come_from_their_own_split(hub, bpe, settings):
    config = DataConfig(**{"train": "owner/set", "split": "train_sft", **settings})
    train, held_out = (prepare(config, DEMO, bpe, part)[0] for part in ("train", "evaluation"))
    assert train[0].row_id == "owner/set[train_sft]:1" and held_out[0].row_id == "owner/set[test_sft]:1"


@pytest.mark.parametrize("evaluation", ["owner/set", "owner/set[train_sft]", ["other/set", "owner/set"]])
def test_holding_out_the_split_that_is_trained_on_is_refused(evaluation):
    with pytest.raises(ValueError, match=r"owner/set.* 'train_sft', which is trained on; name the held-out one"):
        DataConfig(train="owner/set", evaluation=evaluation, split="train_sft")


def test_held_out_rows_that_are_also_trained_on_are_told(jsonl, bpe):
    rows = [{"prompt": f"p {n}", "completion": f"c {n}"} for n in range(6)]
    config = DataConfig(
        train=jsonl(*rows[:4], name="train.jsonl"),
        evaluation=jsonl({**rows[1], "completion": "other"}, rows[3], rows[5], name="held_out.jsonl"),
    )
    held_out = prepare(config, DEMO, bpe, "evaluation")[1].lines()[-1]
    assert "held out 2: the prompt or text is also trained on" in held_out
    assert "held_out.jsonl:1, " in held_out and "held_out.jsonl:2)" in held_out
    assert all("held out" not in line for line in prepare(config, DEMO, bpe, "train")[1].lines())


def test_hub_failure_says_both_possibilities(monkeypatch):
    import datasets

    def load(name, split):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"owner/name: no such file, and the Hub .* no route"):
        read_rows("owner/name", "text")


@pytest.mark.parametrize(
    ("kind", "row", "message"),
    [
        (DEMO, {"messages": [HI, HEY], "kto_tag": "False"}, "kto_tag: false marks an undesirable"),
        *(
            (DEMO, {"prompt": "a", "completion": "b", "label": label}, "label: false marks an undesirable")
            for label in (False, 0, 0.0, "0", "0.0", " False", "no")
        ),
        *(
            (kind, {"prompt": "<image> a", **row, column: value}, f"{column}: pictures, sounds and videos are not taken")
            for kind, row in [
                (DEMO, {"completion": "b"}),
                (PAIRS, {"chosen": "b", "rejected": "c"}),
                ("prompts", {}),
                ("rankings", {"responses": ["b", "c"], "ranks": [1, 2]}),
            ]
            for column, value in [("image", "cat.png"), ("images", ["a"]), ("video", {"path": "x"}), ("audios", [{"bytes": "x"}])]
        ),
        (DEMO, {"prompt": "a", "completion": "b", "documents": ["c"]}, "documents: are not given"),
        (DEMO, {"messages": [{**HI, "image": "cat.png"}, HEY]}, "messages: image of a message: pictures"),
        (DEMO, {"messages": [{**HI, "tools": [{"name": "f"}]}, HEY]}, "messages: tools of a message"),
        (DEMO, {"messages": [HI, {**HEY, "mask": False}]}, "messages: mask of a message"),
        (DEMO, {"messages": [HI, {**HEY, "train_detail": [{"begin": 0}]}]}, "messages: train_detail of a message"),
        (DEMO, {"messages": [HI, {**HEY, "weight": 1, "loss": False}]}, "messages: two weights of a message contradict"),
        (PAIRS, {"prompt": [YO, HI], "chosen": [BE_KIND, HI, HEY], "rejected": [BE_KIND, HI, YO]}, "prompt: contradicts"),
        (PAIRS, {"prompt": "other", "chosen": [HI, HEY], "rejected": [HI, YO]}, "prompt: contradicts"),
        (PAIRS, {"prompt": [HI], "chosen": [HEY, HI, YO], "rejected": [YO, HI, HEY]}, "chosen: must be one assistant message"),
        (DEMO, {"messages": [HI, HEY], "tools": [{"title": "f"}]}, "tools: a tool definition must be an"),
        (DEMO, {"prompt": "a", "response": "b", "tools": [{"name": "f"}]}, "tools: a plain text prompt"),
        (DEMO, {"prompt": "a", "response": "b", "history": [["c", "d"]]}, "history: earlier turns"),
        ("labels", {"messages": [HI, {**HEY, "reasoning": "x"}], "label": 1}, "messages: holds tool calls or reasoning"),
        (DEMO, {"prompt": "a", "response": {**HEY, "reasoning": "x"}}, "response: holds tool calls or reas"),
        (PAIRS, {"prompt": [HI], "chosen": "a", "rejected": "b", "tools": '[{"name": "f"}'}, "tools: must be a list of tool definitions"),
        (DEMO, {"prompt": "hi", "completion": "a", "system": "Be kind."}, "system: a plain text prompt has"),
        (DEMO, {"messages": [BE_KIND, HI, HEY], "system": "Be curt."}, "system: differs from the system"),
        (DEMO, {"messages": [HI, {**HEY, "weight": 0}]}, "messages: no message of the assistant counts"),
        (DEMO, {"messages": [{**HI, "weight": 1}, HEY]}, "messages: only the assistant's messages can count"),
        (DEMO, {"messages": [HI, {**HEY, "weight": 0.5}]}, "messages: the weight of a message must be 0 or 1 .0.5."),
        (DEMO, {"prompt": [HI], "completion": [{**HEY, "weight": 0}]}, "completion: has weight 0"),
        ("prompts", {"prompt": [{**HI, "content": [{"type": "image"}]}]}, "prompt: content of a message must be text, is a .*pictures"),
    ],
)  # fmt: skip
def test_what_a_record_cannot_say_is_refused_and_never_left_out_in_silence(jsonl, kind, row, message):
    with pytest.raises(UserError, match=f"rows.jsonl:1:{message}"):
        read_rows(jsonl(row), kind)


def test_columns_of_media_without_a_value_are_none(jsonl):
    empty = {"images": [], "image": {"bytes": None, "path": None}, "audio": None, "videos": [None], "documents": ""}
    path = jsonl({"messages": [{**HI, "images": []}, HEY], **empty})
    assert read_one(path, DEMO) == Demo([HI], "hey", f"{path}:1")


@pytest.mark.parametrize("kind", ["prompts", PAIRS])
def test_a_prompt_that_the_assistant_ends_is_a_bad_row_like_others(jsonl, kind):
    """[D8b] HH-RLHF has dialogues whose last two turns are the assistant's; as messages nothing can follow."""
    twice = f"{DIALOGUE} wait\n\nAssistant:"
    rows = [{"prompt": text, "chosen": "a", "rejected": "b"} for text in (DIALOGUE, twice, twice)]
    with pytest.raises(UserError, match=r"(?s)2 bad rows.*:2:prompt: ends with an assistant.*:3:prompt"):
        read_rows(jsonl(*rows), kind, as_messages=True)
    records, counts = read_rows(jsonl(*rows), kind, as_messages=True, on_bad_row="skip")
    assert (len(records), counts.lost) == (1, 2)
    assert read_rows(jsonl(*rows), kind)[1].kept == 3  # as text the prompt ends in an open turn


def test_nothing_usable_is_an_error_even_when_skipping(jsonl):
    with pytest.raises(UserError, match="no row can be used"):
        read_rows(jsonl({"text": ""}), "text", on_bad_row="skip")
    with pytest.raises(UserError, match="no row can be used"):
        read_rows(jsonl({"prompt": "x", "chosen": "a", "rejected": "a"}), PAIRS)


def test_unknown_kind():
    with pytest.raises(UserError, match="unknown kind"):
        read_rows("x.jsonl", "texts")


def test_a_renamed_column_no_longer_stands_under_its_own_name(jsonl):
    path = jsonl({"messages": "hi", "response": "hey"})
    assert read_one(path, DEMO, columns={"prompt": "messages"}) == Demo("hi", "hey", f"{path}:1")
    path = jsonl({"text": "hi", "color": "x"})
    assert read_one(path, "prompts", columns={"prompt": "text"}).extra == {"color": "x"}

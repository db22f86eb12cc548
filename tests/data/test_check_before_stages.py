"""The data doctor runs while rows are prepared: its errors stop the run, its warnings are noted, also from the cache."""

import pytest

from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.data.table import check_findings
from alignment.errors import UserError

ROW = {"prompt": [{"role": "user", "content": "hi"}], "response": "ho"}


def test_an_error_stops_the_run_unless_it_is_told_not_to(jsonl, chatml, templates):
    chatml.chat_template = "{{ bos_token }}hi" + templates["chatml with bos"]
    path = jsonl(ROW, {**ROW, "response": "the cat"})
    for _ in range(2):  # the second time from the cache
        examples, _ = prepare(DataConfig(path), "demonstrations", chatml)
        with pytest.raises(UserError, match=r"rows.jsonl: 2 rows have more than one BOS \(.*\n.*data.check=warn"):
            check_findings(examples, "stop")
        assert check_findings(examples, "warn")[0].startswith("error: 2 rows have more than one BOS")
        assert check_findings(examples, "off") == []


def test_warnings_are_noted_source_by_source(jsonl, bpe):
    good = [{"prompt": f"the cat {index}", "response": " sat"} for index in range(3)]
    first, second = jsonl(*good, name="a.jsonl"), jsonl(*good, good[0], name="b.jsonl")
    examples, _ = prepare(DataConfig([first, second]), "demonstrations", bpe)
    assert check_findings(examples, "stop") == ["warning: 1 rows are exact copies of an earlier one"]


def test_a_wrong_setting_is_refused():
    with pytest.raises(ValueError, match=r"check must be 'stop' or 'warn' or 'off', got 'no'"):
        DataConfig("rows.jsonl", check="no")  # type: ignore[arg-type]

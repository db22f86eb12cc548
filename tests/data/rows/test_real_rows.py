"""Real rows, with their real dirt: HH-RLHF pairs, Alpaca and ShareGPT demonstrations, documents."""

import gzip
import json

import pytest

from alignment.data.batches import collate_pairs
from alignment.data.prepare import TOKENIZE
from alignment.data.rows.read import read_rows
from alignment.data.rows.records import EQUAL_PAIR
from alignment.data.tokenize import tokenize_comparisons
from alignment.data.tokenizers.tokenizer import read_tokenizer_files
from alignment.errors import UserError

pytestmark = pytest.mark.real_data
ASSISTANT = "\n\nAssistant:"


def raw_rows(path):
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


@pytest.mark.parametrize("part", ["harmless-base", "helpful-base", "helpful-online", "helpful-rejection-sampled"])
def test_hh_rlhf_splits_at_the_last_assistant_turn_and_counts_its_dirt(real_data, part):
    path = real_data / "hh_rlhf" / f"{part}.jsonl.gz"
    raw = raw_rows(path)
    heads = [[row[key].rpartition(ASSISTANT)[0] for key in ("chosen", "rejected")] for row in raw]
    tails = [[row[key].rpartition(ASSISTANT)[2] for key in ("chosen", "rejected")] for row in raw]
    unusable = [any(not tail.strip() or "\n\nHuman:" in tail for tail in pair) for pair in tails]
    differ = sum(a != b for (a, b), bad in zip(heads, unusable, strict=True) if not bad)
    equal = sum(row["chosen"] == row["rejected"] for row in raw)

    records, counts = read_rows(path, "comparisons", on_bad_row="skip")
    assert counts.rows == len(raw)
    assert (
        counts.dropped.get("rejected: the dialogue before the last assistant turn differs from chosen's", 0) == differ
    )
    assert counts.dropped.get(EQUAL_PAIR, 0) == equal
    assert counts.kept == len(raw) - sum(unusable) - differ - equal
    wanted = {int(record.row_id.rpartition(":")[2]): record for record in records}
    for line, record in wanted.items():
        assert record.prompt + record.chosen == raw[line - 1]["chosen"]
        assert record.prompt + record.rejected == raw[line - 1]["rejected"]


def test_hh_rlhf_dirt_of_all_parts(real_data):
    """Published: 17 of 8552 rows differ before the last turn, 36 are equal; fewer where only a part lies here."""
    parts = sorted((real_data / "hh_rlhf").glob("*.jsonl.gz"))
    raw = [row for part in parts for row in raw_rows(part)]
    differ = sum(row["chosen"].rpartition(ASSISTANT)[0] != row["rejected"].rpartition(ASSISTANT)[0] for row in raw)
    equal = sum(row["chosen"] == row["rejected"] for row in raw)
    assert (len(raw), differ, equal) in [(8552, 17, 36), (6870, 12, 30)]
    with pytest.raises(UserError, match="rejected: the dialogue before the last assistant turn differs"):
        read_rows([str(part) for part in parts], "comparisons")


@pytest.mark.parametrize(
    ("name", "kind", "columns"),
    [
        ("llamafactory_demo/alpaca_en", "demonstrations", {}),
        ("code_alpaca_2k/code_alpaca_2k", "demonstrations", {}),
        ("instruction_rasbt/instruction_preference", "demonstrations", {}),
        ("instruction_rasbt/instruction_preference", "comparisons", {}),
        ("t0_p3_sample/p3", "demonstrations", {}),
        ("gsm8k/train", "demonstrations", {"prompt": "question", "response": "answer"}),
        ("dolly_sample/dolly", "demonstrations", {"input": "context", "output": "response"}),
        ("hhh_alignment/hhh", "comparisons", {}),
        ("llamafactory_demo/c4_docs", "text", {}),
        ("us_speeches/speeches", "text", {}),
        ("simple_safety_tests/prompts", "prompts", {"prompt": "prompts_final"}),
    ],
)
def test_real_files_of_every_kind_become_tokens(real_data, name, kind, columns):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "gpt2")
    records, counts = read_rows(real_data / f"{name}.jsonl.gz", kind, columns=columns, on_bad_row="skip", max_rows=200)
    examples, making = TOKENIZE[kind](records, tokenizer, 512)
    assert counts.kept + counts.lost == counts.rows
    assert counts.kept >= 0.95 * counts.rows
    assert making.kept >= 0.95 * making.rows
    assert len(examples) >= making.kept


def test_messages_of_pairs_need_a_template(real_data, templates):
    tokenizer = read_tokenizer_files(real_data / "tokenizers" / "gpt2")
    records, _ = read_rows(real_data / "llamafactory_demo" / "dpo_en.jsonl.gz", "comparisons", on_bad_row="skip")
    assert len(records) > 200
    with pytest.raises(UserError, match=r"dpo_en.jsonl.gz:1: .* need a chat template"):
        tokenize_comparisons(records, tokenizer, 512)
    tokenizer.chat_template = templates["chatml"]
    pairs, counts = tokenize_comparisons(records, tokenizer, 512)
    assert counts.kept == len(pairs) > 200
    assert sum(batch.weight for batch in collate_pairs(pairs, 4096)) == len(pairs)

"""Rows that do not fit the model's positions are found before the first update, in every stage, all at once."""

import pytest

from alignment import generate, load_model, load_tokenizer
from alignment.adapters import PrefixSpec
from alignment.data.config import DataConfig
from alignment.errors import UserError
from alignment.training import TrainingConfig
from tests.conftest import write_lines

LONG = "Where is the spa, and when does it open? " * 20  # more than the 320 positions of the tiny models
ROWS = {
    "pretrain": lambda text: {"text": text},
    "sft": lambda text: {"prompt": text, "completion": " Here."},
    "reward": lambda text: {"prompt": text, "chosen": " Here.", "rejected": " There."},
    "dpo": lambda text: {"prompt": text, "chosen": " Here.", "rejected": " There."},
    "ppo": lambda text: {"prompt": text},
}


@pytest.fixture
def rows(tmp_path):
    def write(kind, *texts):
        path = tmp_path / "rows.jsonl"
        write_lines(path, (ROWS[kind](text) for text in texts))
        return str(path)

    return write


@pytest.mark.parametrize("kind", ROWS)
def test_one_long_row_is_found_before_the_first_update(kind, rows, checkpoints, stage, make_stage, tmp_path):
    data = DataConfig(rows(kind, *["Where is it?"] * 20, LONG, LONG + "Now?"), max_length=2048)
    more = {"reward_model": str(stage("reward") / "model")} if kind == "ppo" else {}
    training = TrainingConfig(batch_size=2, max_steps=11)
    run, config = make_stage(kind, checkpoints["llama"], tmp_path / "run", data=data, training=training, **more)
    with pytest.raises(UserError, match=r"2 of 22 .*320 positions; the longest is .*rows.jsonl:22 .*data.max_length"):
        run(config)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_new_tokens_and_a_prefix_take_positions_too(rows, checkpoints, stage, make_stage, tmp_path):
    """A prompt of 300 tokens and 12 new ones fit 320 positions, and do not beside a prefix of 10, or with 24 new ones."""
    data = DataConfig(rows("ppo", LONG, *["Where is it?"] * 3), max_length=300)
    more = {"reward_model": str(stage("reward") / "model"), "data": data}
    run, config = make_stage("ppo", checkpoints["llama"], tmp_path / "new", max_new_tokens=24, **more)
    with pytest.raises(UserError, match=r"1 of 4 .*300 tokens, 24 new ones\).* or max_new_tokens"):
        run(config)
    run, config = make_stage("ppo", checkpoints["llama"], tmp_path / "prefix", adapter=PrefixSpec(tokens=10), **more)
    with pytest.raises(UserError, match=r"300 tokens, 12 new ones, a prefix or soft prompt of 10\)"):
        run(config)


def test_generate_names_the_prompt_that_is_too_long(checkpoints):
    model, tokenizer = load_model(checkpoints["llama"]), load_tokenizer(checkpoints["llama"])
    with pytest.raises(UserError, match=r"1 of 2 .*320 positions; the longest is prompt 1 .*lower max_new_tokens"):
        generate(model, tokenizer, ["Where?", LONG], max_new_tokens=8)

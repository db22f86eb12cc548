"""`alignment init`: kinds of rows are recognized, the configs it writes load and `--dry-run` clean, and nothing is replaced."""

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from alignment import cli, load_tokenizer
from alignment.commands.init import fitting_values, kind_of
from alignment.config.load import load_config
from alignment.data.config import DataConfig
from alignment.data.prepare import prepare
from alignment.errors import UserError
from alignment.judging.inputs import read_records
from alignment.pipeline.stages import find_stage
from alignment.planning.layout import Device
from tests.conftest import write_lines


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


def init(base: str, *rows: str, columns: tuple[str, ...] = ()) -> int:
    files = [word for file in rows for word in ("--rows", file)]
    renamed = [word for pair in columns for word in ("--columns", pair)]
    return cli.main(["init", "--base", base, *files, *renamed, "--gpu-memory", "0", "--output", "mine"])


def read(stage: str) -> dict:
    return yaml.safe_load(Path(f"mine/{stage}.yaml").read_text())


def test_the_written_configs_run_one_after_another(checkpoints, world, capsys):
    """Each command that is printed is first tried with --dry-run, then run, so that the next one finds its model."""
    base = checkpoints["llama"]
    assert init(base, world["prompts"], world["comparisons"], world["demonstrations"]) == 0
    commands = capsys.readouterr().out.splitlines()
    assert [command.split()[1] for command in commands] == ["sft", "dpo", "reward", "ppo", "evaluate"]
    assert read("sft")["policy"] == base and read("dpo")["policy"] == read("ppo")["policy"] == "mine/sft/model"
    assert read("ppo")["reward_model"] == "mine/reward/model" and "pretrain" not in read("ppo")
    for command in commands[:-1]:
        words = shlex.split(command)[1:]
        assert cli.main([*words, "--dry-run"]) == 0, capsys.readouterr().err
        if words[0] in ("sft", "reward"):
            assert cli.main([*words, "training.max_steps=1"]) == 0
    assert {path.name for path in Path("mine").iterdir() if path.is_dir()} == {"sft", "reward"}
    load_config(find_stage("winrate")[0], "mine/winrate.yaml", ["data.as_messages=true"])  # as with a chat template
    winrate = read("winrate")
    assert winrate["models"].keys() == {"base", "sft", "dpo", "ppo"} and winrate["data"]["train"] == [world["prompts"]]


def test_the_win_rate_is_on_prompts_that_no_stage_trains_on(checkpoints, capsys):
    demonstrations = [{"prompt": f"Where is room {number}?", "completion": " There."} for number in range(400)]
    write_lines(Path("sft.jsonl"), demonstrations)
    pairs = [{"prompt": row["prompt"], "chosen": "a", "rejected": "b"} for row in demonstrations[::-1]]
    pairs[0]["chosen"] = "long " * 60  # one row of 400 does not set the length of all
    write_lines(Path("pairs.jsonl"), pairs)
    assert init(checkpoints["llama"], "sft.jsonl", "pairs.jsonl") == 0
    share = read("sft")["data"]["evaluation_share"]
    assert all(read(stage)["data"]["evaluation_share"] == share for stage in ("dpo", "winrate"))
    judged = {row.prompt for row in read_records(DataConfig(**read("winrate")["data"]), "prompts")}
    assert len(judged) >= 50
    tokenizer = load_tokenizer(checkpoints["llama"])
    for stage, kind in (("sft", "demonstrations"), ("dpo", "comparisons")):
        trained, _ = prepare(DataConfig(**read(stage)["data"]), kind, tokenizer)
        prompts = {tokenizer.decode(row.documents[0]) for row in trained}
        assert len(trained) + len(judged) == 400 and not any(text in found for text in judged for found in prompts)
    text = Path("mine/dpo.yaml").read_text()
    assert "1 of 400 rows are cut" in text and "held out" not in text and "no stage trains on" in text
    # A dialogue with its answer is no prompt: the win rate is then on those of the comparisons.
    message = {"role": "user", "content": "Where?"}
    Path("chat.jsonl").write_text(json.dumps({"messages": [message, {"role": "assistant", "content": "a"}]}) + "\n")
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in "ab")
    row = {"prompt": [message], "chosen": chosen, "rejected": rejected}
    Path("pairs.jsonl").write_text(json.dumps(row) + "\n")
    shutil.rmtree("mine")
    shutil.copytree(checkpoints["llama"], "base")
    Path("base/chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    assert init("base", "chat.jsonl", "pairs.jsonl") == 0
    assert read("winrate")["data"]["train"] == ["pairs.jsonl"] and "evaluation_share" not in read("sft")["data"]
    assert all(f"# {key}" in text for key in ("every weight trains", "optim.learning_rate", "training.batch_size"))


def test_lora_by_choice_and_larger_steps_for_smaller_bases():
    full, lora = (fitting(GPT2, 16), fitting(GPT2, 16, lora=True))
    assert lora["adapter"]["kind"] == "lora" and lora["optim"]["learning_rate"] == 2e-4
    assert full["optim"]["learning_rate"] == 8e-5  # 1e-5 of 8B times sqrt(8e9 / 124e6) = 8.03


def test_lengths_and_batches_come_from_the_rows(checkpoints, tmp_path):
    words = ["one", "two two", "three " * 20]
    rows = "".join(f'{{"prompt": "Say {word}", "response": "{word}"}}\n' for word in words * 100)
    (tmp_path / "rows.jsonl").write_text(rows)
    assert init(checkpoints["llama"], "rows.jsonl") == 0
    sft = read("sft")
    assert 100 < sft["data"]["max_length"] < 320 and sft["training"]["batch_size"] == 300 // 16
    assert not Path("mine/dpo.yaml").exists()


GPT2, QWEN = "openai-community/gpt2", "Qwen/Qwen3-0.6B-Base"  # their facts are packaged


def fitting(base: str, memory: int, **how: bool) -> dict:
    changes = {"policy": base, "output": "out", "data": {"train": "rows.jsonl", "max_length": 512}}
    return fitting_values("sft", changes, 1000, Device(True, memory * 10**9, "a card", 100.0), near=Path(), **how)[0]


@pytest.mark.parametrize(
    ("base", "memory", "adapter", "weights"),
    [
        (GPT2, 16, None, None),
        (GPT2, 3, "lora", None),
        pytest.param(QWEN, 4, "lora", {"quantize": "nf4"}, marks=pytest.mark.slow),
    ],
)
def test_the_variant_is_the_first_that_the_plan_says_fits(base, memory, adapter, weights):
    values = fitting(base, memory)
    assert values.get("adapter", {}).get("kind") == adapter and values.get("weights") == weights
    assert values["training"]["precision"] == "bf16" and values["training"]["batch_size"] == 1000 // 16


@pytest.mark.parametrize(("has", "precision"), [(True, "bf16"), (False, "fp32")])
def test_a_processor_gets_bfloat16_where_it_has_instructions(monkeypatch, has, precision):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, "avx512_bf16": has})
    changes = {"policy": GPT2, "output": "out", "data": {"train": "rows.jsonl", "max_length": 64}}
    values = fitting_values("sft", changes, 1000, Device(False, 64 * 10**9, "a processor", 0.1), near=Path())[0]
    assert values["training"]["precision"] == precision


def test_a_card_that_holds_no_variant_is_a_mistake_of_the_user():
    with pytest.raises(UserError, match=r"sft: none of .* fits with this base on a card"):
        fitting(GPT2, 1)


def test_kinds_are_recognized(world, tmp_path):
    for kind in ("comparisons", "demonstrations", "prompts"):
        assert kind_of(world[kind], {}) == kind
    (tmp_path / "other.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(UserError, match=r"other.jsonl: no rows of comparisons, demonstrations, prompts"):
        kind_of("other.jsonl", {})


def test_columns_of_other_names_are_named_and_stand_in_the_config(checkpoints, capsys):
    Path("rows.csv").write_text("question,answer\n" + "Where is the spa?,On floor two.\n" * 20)
    assert init(checkpoints["llama"], "rows.csv") == 2
    assert "--columns OURS=THEIRS" in capsys.readouterr().err
    assert init(checkpoints["llama"], "rows.csv", columns=("prompt=question", "completion=answer")) == 0
    assert read("sft")["data"]["columns"] == {"prompt": "question", "completion": "answer"}
    assert cli.main(["sft", "mine/sft.yaml", "--dry-run"]) == 0
    load_config(find_stage("winrate")[0], "mine/winrate.yaml", [])
    assert read("winrate")["data"]["columns"] == {"prompt": "question"}


def test_nothing_is_replaced_and_prompts_alone_train_nothing(checkpoints, world, capsys):
    assert init(checkpoints["llama"], world["prompts"]) == 2
    assert "only prompts; give rows to train on" in capsys.readouterr().err
    Path("mine").mkdir()
    Path("mine/sft.yaml").write_text("mine: 1\n")
    assert init(checkpoints["llama"], world["demonstrations"]) == 2
    assert "holds sft.yaml" in capsys.readouterr().err and read("sft") == {"mine": 1}


def test_what_is_not_given_is_asked(checkpoints, world):
    answers = f"{checkpoints['llama']}\n0\nasked\n{world['demonstrations']}\n"
    result = CliRunner().invoke(cli.app, ["init"], input=answers)
    assert result.exit_code == 0, result.output
    assert "alignment sft asked/sft.yaml" in result.output and Path("asked/sft.yaml").is_file()

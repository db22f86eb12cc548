"""SmolLM2-135M-Instruct through the library, beside transformers: what a reader of the README does first."""

import json
import re
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoTokenizer

from alignment import generate, load_model, load_tokenizer, ppo, reward
from alignment.algorithms.sft import SFTConfig, run
from alignment.cli import main
from alignment.config.load import load_config
from alignment.data.text.chat import prompt_ids
from tests.conftest import BASES, read_lines, write_lines
from tests.docs.blocks import commands
from tests.docs.pages import read_blocks
from tests.stopping import assert_goes_on

pytestmark = pytest.mark.real_base
SMOLLM2 = str(BASES / "smollm2")
LORA = {"kind": "lora", "rank": 4, "alpha": 8}
RATE = {"learning_rate": 1e-4}
ROWS = [{"prompt": f"Where is room {n}?", "completion": f"On floor {n % 5}."} for n in range(8)]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": "No idea."} for row in ROWS]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> None:
    """The Hub's cache with SmolLM2 under its name, as a download leaves it, and an empty working directory."""
    repository = tmp_path / "hub" / "models--HuggingFaceTB--SmolLM2-135M-Instruct"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in Path(SMOLLM2).iterdir():
        (repository / "blobs" / file.name).hardlink_to(file)
        (repository / "snapshots" / ("0" * 40) / file.name).symlink_to(f"../../blobs/{file.name}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)


def test_your_own_data_of_the_readme_runs_as_it_is_printed(hub, tmp_path, capsys):
    section = next(i for i, block in enumerate(read_blocks("README.md")) if block.language == "jsonl")
    rows, mine, winrate, shell = read_blocks("README.md")[section : section + 4]
    demonstration, comparison = rows.text.splitlines()
    prompt = {"prompt": json.loads(comparison)["prompt"]}
    files = {"demonstrations": demonstration, "comparisons": comparison, "prompts": json.dumps(prompt)}
    for name, line in files.items():  # eight different rows of each kind
        lines = [line.replace("the spa", f"room {number}") for number in range(8)]
        Path(f"{name}.jsonl").write_text("\n".join(lines))
    for block in (mine, winrate):
        Path(re.findall(r"# ([\w.]+)\n", block.text)[0]).write_text(block.text)
    for command in commands(shell.text):
        more = ["training.batch_size=8", "max_new_tokens=8"][: {"sft": 1, "dpo": 1, "evaluate": 2}.get(command[1], 0)]
        assert main([*command[1:], *more[command[1] == "evaluate" :]]) == 0, command
    assert [line["step"] for line in read_lines(Path("runs/mine/sft/metrics.jsonl"))] == [1, 2]
    assert len(read_lines(Path("runs/mine/dpo/metrics.jsonl"))) == 2
    assert "error" not in capsys.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained("runs/mine/merged")
    ids = AutoTokenizer.from_pretrained("runs/mine/merged")("Where is room 3?", return_tensors="pt")["input_ids"]
    assert_close(load_model("runs/mine/merged")(ids).logits, merged(ids).logits, rtol=0, atol=2e-3)


def test_logits_template_and_greedy_text_equal_those_of_transformers():
    theirs, tokenizer = AutoModelForCausalLM.from_pretrained(SMOLLM2), AutoTokenizer.from_pretrained(SMOLLM2)
    ours = load_model(SMOLLM2)
    ids = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)[
        "input_ids"
    ]
    assert prompt_ids(load_tokenizer(SMOLLM2), CHAT) == ids[0].tolist()
    with torch.no_grad():
        assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-3)
        expected = theirs.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
    made = generate(ours, load_tokenizer(SMOLLM2), [CHAT], max_new_tokens=12, temperature=0.0)
    assert made.token_ids[0] == expected[: len(made.token_ids[0])]
    assert "Paris" in made.texts[0]


def test_a_lora_run_that_is_stopped_goes_on_to_the_same_bits(tmp_path):
    rows = tmp_path / "rows.jsonl"
    write_lines(rows, ROWS)

    def make(name: str):
        settings = {"policy": SMOLLM2, "data": {"train": str(rows), "max_length": 64}, "adapter": LORA, "optim": RATE}
        settings |= {"training": {"batch_size": 4, "max_steps": 3}, "output": str(tmp_path / name)}
        path = tmp_path / f"{name}.yaml"
        path.write_text(json.dumps(settings))
        return run, load_config(SFTConfig, str(path))

    assert_goes_on(make, 2, tmp_path)


def test_ppo_with_a_reward_model_of_the_same_base(tmp_path):
    training = {"batch_size": 4, "max_steps": 1}
    judge = reward(policy=SMOLLM2, rows=PAIRS, adapter=LORA, optim=RATE, training=training, output=str(tmp_path / "rm"))
    tuned = ppo(
        policy=SMOLLM2, reward_model=str(judge.path / "model"), rows=[{"prompt": row["prompt"]} for row in ROWS],
        adapter=LORA, optim=RATE, training={"batch_size": 4, "max_steps": 2}, max_new_tokens=6, output=str(tmp_path / "ppo"),
    )  # fmt: skip
    first, second = tuned.metrics
    assert abs(first["kl"]) < 1e-5 and first["first_ratio_error"] < 1e-4
    assert second["kl"] != 0.0

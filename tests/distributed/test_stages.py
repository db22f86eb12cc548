"""The command line under `accelerate launch` on two CPU processes: the weights and metrics of one process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from string import Template
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.conftest import read_lines
from tests.distributed.processes import EVERY_KIND, ROOT, relative_error

pytestmark = pytest.mark.distributed_slow

PPO = "ppo ppo/tiny policy=$llama reward_model=$reward data.train=$prompts max_new_tokens=8 training.max_steps=2"
SEVERAL = [
    {"reward_model": "$reward", "normalize": "running", "clip": [-2, 2]},
    {"function": "tests.rewards.test_reward_runs:vowels", "normalize": "running", "weight": 0.5},
]
KIN = f"{PPO} pretrain_coef=0 training.batch_size=5 responses_per_prompt=3 minibatches=2"  # shares of unequal size
ONLINE = "online-dpo online_dpo/tiny policy=$llama data.train=$prompts training.max_steps=2 training.batch_size=7"
LOSSES = ("score", "response_tokens", "policy_loss")
STAGES: dict[str, tuple[str, str, tuple[str, ...]]] = {  # launch file, command, metrics that must be equal
    "ppo": ("zero3", f"{PPO} pretrain.train=$pretrain training.batch_size=8", (*LOSSES, "value_loss", "pretrain_loss")),
    "grpo": ("ddp", f"{KIN} advantages=grpo kl_in=loss kl_estimator=k3 loss_normalization=sequence_mean target_kl=1e-9",
             (*LOSSES, "kl_loss", "updates")),
    "reinforce++": ("ddp", f"{KIN} advantages=reinforce++", (*LOSSES, "kl")),
    "remax": ("ddp", f"{KIN} advantages=remax top_p=0.8", (*LOSSES, "kl")),
    "shared value model": ("ddp", f"{KIN} value_model=shared", (*LOSSES, "value_loss", "kl")),
    "several rewards": (
        "ddp",
        f"{PPO} pretrain_coef=0 training.batch_size=7 minibatches=2 reward_model=null rewards={json.dumps(SEVERAL)}",
        (*LOSSES, "score/reward_model", "score/vowels", "value_loss"),
    ),
    "left out": (  # a function that fails by what is written: neither statistics nor the loss count these rows
        "ddp",
        f"{PPO} pretrain_coef=0 training.batch_size=7 advantages=grpo responses_per_prompt=4 minibatches=2 reward_model=null "
        'loss_normalization=token_mean rewards=[{"function":"tests.rewards.test_reward_runs:some"}]',
        ("score", "unscored_share", "policy_loss", "grad_norm"),
    ),
    "online dpo by several rewards": (
        "ddp",
        f"{ONLINE} max_new_tokens=8 loss=odpo reward_model=null rewards={json.dumps(SEVERAL)}",
        ("score", "score/vowels", "unjudged", "pairs", "loss"),
    ),
    "online dpo": (
        "zero3",
        f"{ONLINE} max_new_tokens=8 reward_model=$reward responses_per_prompt=3 minibatches=2",
        ("score", "chosen_score", "pairs", "kl", "loss", "margin", "grad_norm"),
    ),
    "distillation": (
        "fsdp2",
        "distill distill/tiny policy=$llama teacher=$sft data.train=$prompts max_new_tokens=8 training.max_steps=2 "
        "training.batch_size=7 responses_per_prompt=3 minibatches=2",
        ("response_tokens", "reverse_kl", "loss", "grad_norm"),
    ),
}  # fmt: skip


@pytest.fixture
def command(world, checkpoints, stage):
    """Fills the names of models and rows into a command line."""

    def fill(text: str) -> list[str]:
        names: dict[str, Any] = {"llama": checkpoints["llama"]}
        names |= {name: f"{stage(name)}/model" for name in ("reward", "sft") if f"${name}" in text}
        parts = text.replace(", ", ",").replace(": ", ":").split()
        return [Template(part).safe_substitute(world, **names) for part in parts]

    return fill


def run(output: Path, kind: str | None, *arguments: str) -> list[dict[str, Any]]:
    """`alignment ...` in one process, or in two as configs/launch/KIND.yaml says; the lines of metrics.jsonl."""
    launcher = ["-m", "alignment"]
    if kind is not None:
        port = str(20000 + os.getpid() % 20000)
        options = ["--config_file", f"configs/launch/{kind}.yaml", "--num_processes", "2", "--main_process_port", port]
        launcher = ["-m", "accelerate.commands.launch", *options, "-m", "alignment"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, *arguments, f"output={output}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_lines(output / "metrics.jsonl")


def largest_error(one: Path, two: Path) -> float:
    return relative_error(load_file(two), load_file(one))


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_logs_on_two_processes_what_it_logs_on_one(tmp_path, command, name):
    """Samples are seeded by row, so that scores agree whatever the number of processes (H37)."""
    kind, text, keys = STAGES[name]
    if kind == "zero3" and importlib.util.find_spec("deepspeed") is None:
        kind = "ddp"
    one, two = (run(tmp_path / str(way), way, *command(text)) for way in (None, kind))
    for mine, other in zip(one, two, strict=True):
        assert mine.keys() == other.keys() and other.get("first_ratio_error", 0.0) <= 1e-5
        for key in keys:
            assert other[key] == pytest.approx(mine[key], rel=1e-3, abs=1e-5), key
    assert not keys[1].startswith("unscored") or 0 < one[0]["unscored_share"] < 0.5


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_sft_on_two_processes_gives_the_weights_of_one(tmp_path, command, kind):
    settings = command(
        "sft sft/tiny policy=$llama data.train=$demonstrations training.max_steps=5 training.batch_size=7 "
        "training.micro_batch_tokens=256 add_tokens=[<tool>,</tool>]"
    )
    for way in (None, kind):
        run(tmp_path / str(way), way, *settings)
    models = [tmp_path / str(way) / "model/model.safetensors" for way in (None, kind)]
    assert len(load_file(models[1])["lm_head.weight"]) == 386  # 384 and two; ranks read slices
    assert largest_error(*models) <= 1e-5


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_ppo_with_a_stacked_lora_is_the_same_on_two_processes(tmp_path, command, stage, kind):
    """Replicas share the base among the networks, FSDP2 and ZeRO shard each by itself; the start's LoRA stays frozen."""
    settings = command(
        "ppo ppo/tiny data.train=$prompts pretrain_coef=0 adapter.kind=lora adapter.rank=2 training.max_steps=2 "
        "training.batch_size=8 max_new_tokens=8 micro_rollout_batch_size=4"
    )
    settings += [f"policy={stage('sft lora')}/model", f"reward_model={stage('reward lora')}/model"]
    lines = {way: run(tmp_path / str(way), way, *settings) for way in (None, kind)}
    for way in lines:
        notes = json.loads((tmp_path / str(way) / "lineage.json").read_text())["notes"]
        shared = any("shared with value model and reward model" in note for note in notes)
        assert shared == (way in (None, "ddp")) and not (tmp_path / str(way) / "base").exists()
    for one, two in zip(lines[None], lines[kind], strict=True):
        for key in (*LOSSES, "value_loss", "kl"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    assert largest_error(*(tmp_path / str(way) / "model/adapter_model.safetensors" for way in lines)) <= 1e-3

"""The command line under `accelerate launch` on two CPU processes: the weights of one process, and PPO that runs."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")
KINDS = ["ddp", "fsdp2", pytest.param("zero2", marks=needs_deepspeed), pytest.param("zero3", marks=needs_deepspeed)]
pytestmark = pytest.mark.distributed_slow


def run(output: Path, kind: str | None, *arguments: str) -> Path:
    """`alignment ...` in one process, or in two as configs/launch/KIND.yaml says; gives the model's directory."""
    launcher = ["-m", "alignment"]
    if kind is not None:
        port = str(20000 + os.getpid() % 20000)
        file = f"configs/launch/{kind}.yaml"
        options = ["--config_file", file, "--num_processes", "2", "--main_process_port", port]
        launcher = ["-m", "accelerate.commands.launch", *options, "-m", "alignment"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, *arguments, f"output={output}"]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return output / "model"


def metrics_on_one_and_two(directory: Path, settings: list[str]) -> Iterator[tuple[dict, dict]]:
    """The metrics of each step of `alignment ...` in one process, and of the same in two."""
    lines = {}
    for name, launcher in (("one", None), ("two", "ddp")):
        run(directory / name, launcher, *settings)
        lines[name] = [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]
    return zip(lines["one"], lines["two"], strict=True)


@pytest.mark.parametrize("kind", KINDS)
def test_sft_on_two_processes_gives_the_weights_of_one(tmp_path, world, checkpoints, kind):
    settings = [
        "sft", "sft/tiny", f"policy={checkpoints['llama']}", f"data.train={world['demonstrations']}",
        "training.max_steps=5", "training.batch_size=7", "training.micro_batch_tokens=256",
    ]  # fmt: skip
    one = load_file(run(tmp_path / "one", None, *settings) / "model.safetensors")
    two = load_file(run(tmp_path / "two", kind, *settings) / "model.safetensors")
    assert one.keys() == two.keys()
    worst = max(float((two[name] - one[name]).norm() / one[name].norm()) for name in one)
    print(f"{kind}: largest relative difference of a tensor {worst:.1e}")
    assert worst <= 1e-5


@pytest.mark.parametrize("kind", ["fsdp2", pytest.param("zero3", marks=needs_deepspeed)])
def test_tokens_that_sft_adds_have_the_rows_of_one_process_where_ranks_read_slices(tmp_path, checkpoints, kind):
    rows = [{"prompt": "How is it?", "completion": f" <tool>look {number}</tool>"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        "sft", "sft/tiny", f"policy={checkpoints['llama']}", f"data.train={tmp_path}/rows.jsonl",
        "training.max_steps=2", "training.batch_size=4", "add_tokens=[<tool>,</tool>]",
    ]  # fmt: skip
    one, two = (load_file(run(tmp_path / str(name), name, *settings) / "model.safetensors") for name in (None, kind))
    assert len(two["model.embed_tokens.weight"]) == len(two["lm_head.weight"]) == 386  # 384 and two
    assert max(float((two[name] - one[name]).norm() / one[name].norm()) for name in one) <= 1e-5


@pytest.mark.parametrize("kind", ["ddp", pytest.param("zero3", marks=needs_deepspeed)])
def test_ppo_on_two_processes_draws_what_one_draws(tmp_path, world, checkpoints, stage, kind):
    """Rollouts are seeded by row, so the first scores agree whatever the number of processes (H37)."""
    settings = [
        "ppo", "ppo/tiny", f"policy={checkpoints['llama']}", f"reward_model={stage('reward')}/model",
        f"data.train={world['prompts']}", f"pretrain.train={world['pretrain']}",
        "training.max_steps=2", "training.batch_size=8", "max_new_tokens=8",
    ]  # fmt: skip
    lines = {}
    for name, launcher in (("one", None), ("two", kind)):
        run(tmp_path / name, launcher, *settings)
        lines[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for one, two in zip(lines["one"], lines["two"], strict=True):
        assert two["first_ratio_error"] <= 1e-5
        for key in ("score", "response_tokens", "policy_loss", "value_loss", "pretrain_loss"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize(
    "settings",
    [
        ["advantages=grpo", "kl_in=loss", "kl_estimator=k3", "loss_normalization=sequence_mean", "target_kl=1e-9"],
        ["advantages=reinforce++"], ["advantages=remax", "top_p=0.8"], ["value_model=shared"],
    ],
    ids=["grpo", "reinforce++", "remax", "shared"],
)  # fmt: skip
def test_the_kin_of_ppo_learn_on_two_processes_what_they_learn_on_one(tmp_path, world, checkpoints, stage, settings):
    """Five prompts on two processes, three responses each, in two minibatches: shares of unequal size."""
    common = [
        "ppo", "ppo/tiny", f"policy={checkpoints['llama']}", f"reward_model={stage('reward')}/model", "pretrain_coef=0",
        f"data.train={world['prompts']}", "training.max_steps=2", "training.batch_size=5", "max_new_tokens=8",
        "responses_per_prompt=3", "minibatches=2",
    ]  # fmt: skip
    lines = {}
    for name, launcher in (("one", None), ("two", "ddp")):
        run(tmp_path / name, launcher, *common, *settings)
        lines[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
    for one, two in zip(lines["one"], lines["two"], strict=True):
        assert one.keys() == two.keys() and two["first_ratio_error"] <= 1e-5
        for key in {"score", "response_tokens", "policy_loss", "value_loss", "kl", "kl_loss", "updates"} & one.keys():
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


def test_ppo_on_two_processes_normalizes_several_rewards_as_one_does(tmp_path, world, checkpoints, stage):
    rewards = [
        {"reward_model": f"{stage('reward')}/model", "normalize": "running", "clip": [-2, 2]},
        {"function": "tests.rewards.test_reward_runs:vowels", "normalize": "running", "weight": 0.5},
        {"length": {"max": 5, "penalty": 0.1}},
    ]
    settings = [
        "ppo", "ppo/tiny", f"policy={checkpoints['llama']}", "reward_model=null", f"rewards={json.dumps(rewards)}",
        f"data.train={world['prompts']}", "pretrain_coef=0", "training.max_steps=3", "training.batch_size=7",
        "minibatches=2", "max_new_tokens=8", "training.save_every_steps=1",
    ]  # fmt: skip
    for one, two in metrics_on_one_and_two(tmp_path, settings):
        for key in ("score", "score/reward_model", "score/vowels", "score/length", "policy_loss", "value_loss"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("form", ["token_mean", "sequence_mean"])
def test_ppo_on_two_processes_leaves_out_the_same_responses_as_on_one(tmp_path, world, checkpoints, form):
    """A function that fails by what is written: neither the statistics nor what the loss is divided by count these rows."""
    settings = [
        "ppo", "ppo/tiny_grpo", f"policy={checkpoints['llama']}", "reward_model=null", "value_model=reward_model",
        'rewards=[{"function": "tests.rewards.test_reward_runs:some"}]', f"data.train={world['prompts']}",
        f"loss_normalization={form}", "responses_per_prompt=4", "training.max_steps=2", "training.batch_size=7",
        "minibatches=2", "max_new_tokens=8",
    ]  # fmt: skip
    for one, two in metrics_on_one_and_two(tmp_path, settings):
        assert 0 < one["unscored_share"] < 0.5
        for key in ("score", "unscored_share", "score_std", "policy_loss", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


def test_online_dpo_on_two_processes_compares_by_several_rewards_as_on_one(tmp_path, world, checkpoints, stage):
    rewards = [
        {"reward_model": f"{stage('reward')}/model", "normalize": "running", "clip": [-2, 2]},
        {"function": "tests.rewards.test_reward_runs:vowels", "normalize": "first", "weight": 0.5},
    ]
    settings = [
        "online-dpo", "online_dpo/tiny", f"policy={checkpoints['llama']}", "reward_model=null", f"rewards={json.dumps(rewards)}",
        f"data.train={world['prompts']}", "loss=odpo", "training.max_steps=2", "training.batch_size=7", "max_new_tokens=8",
    ]  # fmt: skip
    for one, two in metrics_on_one_and_two(tmp_path, settings):
        assert one.keys() == two.keys()
        for key in (
            "score",
            "score/reward_model",
            "score/vowels",
            "unscored_share/vowels",
            "unjudged",
            "pairs",
            "loss",
        ):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("kind", ["ddp", pytest.param("zero3", marks=needs_deepspeed)])
def test_online_dpo_on_two_processes_draws_what_one_draws(tmp_path, world, checkpoints, stage, kind):
    """Samples are seeded by prompt and number of the response, pairs gathered in the order of the prompts; 7 prompts."""
    settings = [
        "online-dpo", "online_dpo/tiny", f"policy={checkpoints['llama']}", f"reward_model={stage('reward')}/model",
        f"data.train={world['prompts']}", "responses_per_prompt=3", "minibatches=2", "training.micro_batch_tokens=256",
        "training.max_steps=2", "training.batch_size=7", "max_new_tokens=8",
    ]  # fmt: skip
    lines, samples = {}, {}
    for name, launcher in (("one", None), ("two", kind)):
        run(tmp_path / name, launcher, *settings)
        lines[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        samples[name] = (tmp_path / name / "samples.jsonl").read_text().splitlines()[:3]
    texts = {name: [json.loads(line)["response"] for line in rows] for name, rows in samples.items()}
    assert texts["one"] == texts["two"]
    for one, two in zip(lines["one"], lines["two"], strict=True):
        assert one["pairs"] == two["pairs"] > 0
        for key in ("score", "chosen_score", "rejected_score", "response_tokens", "kl", "loss", "margin", "grad_norm"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key


@pytest.mark.parametrize("kind", KINDS)
def test_ppo_over_one_base_and_a_stacked_lora_gives_on_two_processes_what_it_gives_on_one(tmp_path, world, stage, kind):
    """Replicas share the base among the networks, FSDP2 and ZeRO shard each by itself; the start's LoRA stays frozen."""
    settings = [
        "ppo", "ppo/tiny", f"policy={stage('sft lora')}/model", f"reward_model={stage('reward lora')}/model",
        f"data.train={world['prompts']}", "pretrain_coef=0", "adapter.kind=lora", "adapter.rank=2",
        "training.max_steps=2", "training.batch_size=8", "max_new_tokens=8", "micro_rollout_batch_size=4",
    ]  # fmt: skip
    lines, models = {}, {}
    for name, launcher in (("one", None), ("two", kind)):
        models[name] = load_file(run(tmp_path / name, launcher, *settings) / "adapter_model.safetensors")
        lines[name] = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        notes = json.loads((tmp_path / name / "lineage.json").read_text())["notes"]
        shared = any("shared with value model and reward model" in note for note in notes)
        assert shared == (launcher in (None, "ddp")) and not (tmp_path / name / "base").exists()
    for one, two in zip(lines["one"], lines["two"], strict=True):
        assert two["first_ratio_error"] <= 1e-5
        for key in ("score", "response_tokens", "policy_loss", "value_loss", "kl"):
            assert two[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5), key
    assert models["one"].keys() == models["two"].keys()
    for name, tensor in models["one"].items():
        assert float((models["two"][name] - tensor).norm()) <= 1e-3 * float(tensor.norm()), name

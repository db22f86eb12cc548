"""Training on a GPU: stages in bfloat16, 4-bit bases, several GPUs, and how often the loop waits for the device."""

import dataclasses
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from alignment import load_model
from alignment.adapters import LoRASpec
from alignment.generation import SamplingConfig, decode_responses
from alignment.training import restore_checkpoint, save_checkpoint
from tests.training.test_optimizers import language_engine, train, types_of_state

ROOT = Path(__file__).parents[2]
SYNCS_PER_UPDATE = 3  # losses and norm together, the count of tokens, and one to spare
SYNCS_PER_STEP = 0.5  # of decoding: the running rows are counted every 8 steps


def in_bfloat16(config, **changes):
    """The config with training in bfloat16 on rows long enough for the variable-length kernel."""
    return dataclasses.replace(config, training=dataclasses.replace(config.training, precision="bf16", **changes))


def synchronizations(work) -> int:
    """How often `work` waits for the device, as torch counts it."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            work()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(each.message) for each in caught)


@pytest.mark.parametrize("kind", ["sft", "reward", "dpo"])
@pytest.mark.parametrize("adapter", [None, LoRASpec(rank=4)], ids=["full", "lora"])
def test_a_stage_runs_in_bfloat16_and_its_loss_is_finite(
    device, make_stage, checkpoints, read_metrics, tmp_path, kind, adapter
):
    run, config = make_stage(kind, checkpoints["llama"], tmp_path / "run", adapter=adapter)
    run(in_bfloat16(config))
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses and all(loss == loss and abs(loss) < 100 for loss in losses)
    if kind == "dpo":
        assert losses[0] == pytest.approx(0.693147, abs=1e-3)


def test_ppo_samples_and_learns_in_bfloat16(device, stage, make_stage, read_metrics, tmp_path):
    run, config = make_stage(
        "ppo", str(stage("sft") / "model"), tmp_path / "run", reward_model=str(stage("reward") / "model")
    )
    run(in_bfloat16(config))
    lines = read_metrics(tmp_path / "run")
    assert all(line["first_ratio_error"] < 0.3 for line in lines)  # bfloat16 alone moves ratios
    assert lines[0]["kl"] == pytest.approx(0.0, abs=0.05)


@pytest.mark.parametrize("quantize", ["nf4", "int8"])
def test_a_quantized_base_trains_under_lora(device, make_stage, checkpoints, read_metrics, tmp_path, quantize):
    pytest.importorskip("bitsandbytes")
    from alignment.models.weights_config import WeightsConfig

    run, config = make_stage(
        "sft",
        checkpoints["llama"],
        tmp_path / "run",
        adapter=LoRASpec(rank=8),
        weights=WeightsConfig(quantize=quantize),
    )
    run(in_bfloat16(config, max_steps=12))
    losses = [line["loss"] for line in read_metrics(tmp_path / "run")]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit"])
def test_a_run_with_moments_in_8_bits_goes_on_as_if_never_interrupted(device, tmp_path, name):
    pytest.importorskip("bitsandbytes")
    engine = language_engine(name)
    train(engine, 3)
    path = save_checkpoint(tmp_path, 3, {"policy": engine}, {}, {}, keep=1)
    other = language_engine(name, seed=7)
    restore_checkpoint(path, {"policy": other}, {})
    assert types_of_state(engine) == types_of_state(other)
    assert all(one.equal(two) for one, two in zip(state_tensors(engine), state_tensors(other), strict=True))
    # Sums of gradients come in any order on a GPU, which a code of 8 bits may amplify.
    assert train(other, 4) == pytest.approx(train(engine, 4), rel=1e-3)


def state_tensors(engine) -> list[torch.Tensor]:
    """Weights, and the optimizer's numbers of each."""
    state = engine.backend.optimizer.state
    found = []
    for parameter in engine.backend.unwrapped.parameters():
        found += [parameter, *(each for _, each in sorted(state[parameter].items()) if isinstance(each, torch.Tensor))]
    return found


def test_the_training_loop_hardly_waits_for_the_device(device, make_stage, checkpoints, tmp_path):
    run, config = make_stage("sft", checkpoints["llama"], tmp_path / "first")
    run(in_bfloat16(config, max_steps=1))  # kernels are chosen here
    counts = []
    for number, steps in enumerate((2, 12)):
        run, config = make_stage("sft", checkpoints["llama"], tmp_path / f"run{number}")
        counts.append(
            synchronizations(lambda run=run, config=config, steps=steps: run(in_bfloat16(config, max_steps=steps)))
        )
    assert (counts[1] - counts[0]) / 10 <= SYNCS_PER_UPDATE


def test_decoding_hardly_waits_for_the_device(device, checkpoints):
    model = load_model(checkpoints["llama"], device="cuda")
    prompts = [[5, 6, 7], [8, 9], [10, 11, 12, 13]]
    decode_responses(model, prompts, SamplingConfig(8, 1.0), [])
    short, long = (
        synchronizations(lambda steps=steps: decode_responses(model, prompts, SamplingConfig(steps, 1.0), []))
        for steps in (16, 80)
    )
    assert (long - short) / 64 <= SYNCS_PER_STEP


two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@two_gpus
@pytest.mark.parametrize("launch", ["ddp", "fsdp2", "zero2", "zero3"])
def test_two_gpus_train_as_one_over_nccl(checkpoints, world, read_metrics, tmp_path, launch):
    config = tmp_path / "sft.yaml"
    config.write_text(
        f"policy: {checkpoints['llama']}\noutput: {tmp_path}/out\ndata: {{train: {world['demonstrations']}, max_length: 256}}\n"
        "optim: {learning_rate: 1.0e-3}\ntraining: {max_steps: 4, batch_size: 8}\n"
    )
    losses = []
    for name, launcher in (
        ("one", []),
        (
            "two",
            [
                "accelerate.commands.launch",
                "--config_file",
                f"configs/launch/{launch}.yaml",
                "--num_processes",
                "2",
                "-m",
            ],
        ),
    ):
        command = [sys.executable, "-m", *launcher, "alignment", "sft", str(config), f"output={tmp_path / name}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append([line["loss"] for line in read_metrics(tmp_path / name)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


@two_gpus
@pytest.mark.parametrize("launch", ["ddp", "fsdp2", "zero3"])
def test_ppo_samples_and_learns_in_bfloat16_on_two_gpus(stage, world, read_metrics, tmp_path, launch):
    config = tmp_path / "ppo.yaml"
    config.write_text(
        f"policy: {stage('sft') / 'model'}\nreward_model: {stage('reward') / 'model'}\noutput: {tmp_path}/out\n"
        f"data: {{train: {world['prompts']}, max_length: 256}}\nmax_new_tokens: 12\nepochs: 2\nminibatches: 2\n"
        "optim: {learning_rate: 1.0e-3}\ntraining: {max_steps: 3, batch_size: 8, precision: bf16}\n"
    )
    launcher = [
        "accelerate.commands.launch",
        "--config_file",
        f"configs/launch/{launch}.yaml",
        "--num_processes",
        "2",
        "-m",
    ]
    command = [sys.executable, "-m", *launcher, "alignment", "ppo", str(config)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = read_metrics(tmp_path / "out")
    assert len(lines) == 3 and all(line["first_ratio_error"] < 0.3 for line in lines)  # bfloat16 alone moves ratios
    assert lines[0]["kl"] == pytest.approx(0.0, abs=0.05)

"""Train on two processes and on one, print how far apart they are, and exit 1 where a cell is outside its bounds.

Rows: SFT, reward model, DPO and PPO, each of the full weights, with LoRA and with a prefix. Figures are the largest
relative difference of any tensor or metric from one process; columns: weights of the final model; metrics; resumed,
weights of the same run resumed from the checkpoint in its middle; alone, resumed there by one process, but under ZeRO;
opened, absolute difference of what our loader's model and transformers' or peft's give for a few texts.

7 rows of data, so that the ranks' shares are unequal; micro-batches of few tokens; responses that end at different steps;
a policy with dropout for DPO, where it must stay off. On the CPU over gloo; one launch for each way to spread a model.

Further adapters can be named: dora ia3 prompt prefix_network bottleneck pissa patterns token_rows modules; nf4 int8
(LoRA over quantized weights).

    python scripts/two_processes.py [--ways ddp fsdp2 zero2 zero3] [--stages ppo ...] [--adapters lora ...]
"""

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

from measuring import ROOT, write_checkpoint

WAYS = ("ddp", "fsdp2", "zero2", "zero3")
STAGES = ("sft", "reward", "dpo", "ppo")
ADAPTERS = ("full", "lora", "prefix")
KINDS = ("dora", "ia3", "prompt", "prefix_network", "bottleneck", "pissa", "patterns", "token_rows", "modules")
QUANTIZED = ("nf4", "int8")  # under LoRA
BOUNDS = {"weights": 1e-5, "metrics": 1e-3, "resumed": 1e-5, "alone": 1e-5, "opened": 1e-4}
ROWS, STEPS = 7, 4
CLOCKS = ("second", "mfu")  # in the names of metrics that a clock makes


def main() -> int:
    """Run what was asked for and return the exit code."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS + KINDS + QUANTIZED, default=list(ADAPTERS))
    parser.add_argument("--output", type=Path, help="keep the runs here; a temporary directory by default")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)  # inside a launched process
    options = parser.parse_args()
    cells = [(stage, adapter) for stage in options.stages for adapter in options.adapters]
    if options.train:
        train(cells, options.output)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        prepare(folder / "start")
        launch(None, cells, folder / "one")
        held = True
        print(f"{'way':6} {'stage':7} {'adapter':7} " + " ".join(f"{name:>8}" for name in BOUNDS))
        for way in options.ways:
            launch(way, cells, folder / way)
            for cell in cells:
                found = measure(folder / way, folder / "one", cell)
                holds = all(value <= BOUNDS[name] for name, value in found.items())
                figures = " ".join(f"{found[name]:8.1e}" if name in found else " " * 7 + "-" for name in BOUNDS)
                print(f"{way:6} {cell[0]:7} {cell[1]:7} {figures}  {'' if holds else 'OUTSIDE'}", flush=True)
                held &= holds
    print("every cell is within its bounds" if held else "some cells are outside their bounds")
    return 0 if held else 1


# What the runs start from


def prepare(folder: Path) -> None:
    """Data files of the embedded world, a tokenizer, two policies and a reward model."""
    import torch

    from alignment.hotel_world.datasets import RowCounts, generate_rows, write_world
    from alignment.models.huggingface.checkpoint import load_scalar_model, save_model

    sizes = dict.fromkeys(("demonstrations", "comparisons", "comparisons_heldout", "prompts"), ROWS)
    write_world(folder / "world", sizes=RowCounts(pretrain=20, pretrain_heldout=2, prompts_eval=2, **sizes))
    llama = {
        "model_type": "llama", "max_position_embeddings": 320, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    gpt2 = {
        "model_type": "gpt2", "n_positions": 320, "n_embd": 32, "n_layer": 2, "n_head": 4,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    }  # fmt: skip

    for name, config in (("llama", llama), ("gpt2", gpt2), ("reward", llama)):

        def change(model: Any, ends: bool = name == "llama") -> None:
            for parameter in model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape)
            if ends:
                end_sometimes(model, model.config["eos_token_id"])

        texts = (row["text"] for row in generate_rows("pretrain", seed=0, count=20))
        write_checkpoint(folder / name, config, texts, 384, change=change)
    save_model(load_scalar_model(folder / "reward", new_head="normal"), folder / "reward")


def end_sometimes(model: Any, end_id: int) -> None:
    """Give the end token a probability near 0.15 after any text."""
    import torch

    tokens = torch.arange(280).view(-1, 7)
    states: list[Any] = []
    hook = model.head.register_forward_hook(lambda module, arguments, result: states.append(arguments[0]))
    model(tokens)
    hook.remove()
    usual = states[0].reshape(-1, states[0].shape[-1]).mean(0)
    model.head.weight[end_id] = 4.0 * usual / usual.square().sum()


# Inside a launched process


def train(cells: list[tuple[str, str]], output: Path) -> None:
    """Each cell twice: from start to end with checkpoints, and once more from the checkpoint in the middle."""
    for cell in cells:
        whole = output / "-".join(cell)
        run(cell, whole)
        resume(cell, whole, whole.with_name(f"{whole.name}-resumed"))


def resume(cell: tuple[str, str], whole: Path, resumed: Path) -> None:
    """Go on from the checkpoint in the middle of a run, in a directory of its own."""
    from alignment.training.distributed import init_distributed

    process_group = init_distributed()
    if process_group.is_main:
        shutil.copytree(whole, resumed, ignore=shutil.ignore_patterns("model", f"step-{STEPS:06d}"))
    process_group.barrier()
    run(cell, resumed)


def run(cell: tuple[str, str], output: Path) -> None:
    """Train one cell."""
    from alignment.algorithms import dpo, reward, sft
    from alignment.algorithms.ppo import ppo

    runs: dict[str, Any] = {"sft": sft.run, "reward": reward.run, "dpo": dpo.run, "ppo": ppo.run}
    runs[cell[0]](settings(*cell, output))


def settings(stage: str, adapter: str, output: Path) -> Any:
    """The config of one run."""
    from alignment.algorithms import dpo, reward, sft
    from alignment.algorithms.ppo import ppo
    from alignment.data.config import DataConfig
    from alignment.models.weights_config import WeightsConfig
    from alignment.training import OptimConfig, TrainingConfig

    start = output.parent.parent / "start"
    rows = {"sft": "demonstrations", "reward": "comparisons", "dpo": "comparisons", "ppo": "prompts"}[stage]
    held_out = str(start / "world" / "comparisons_heldout.jsonl") if stage in ("reward", "dpo") else None
    common: dict[str, Any] = {
        "policy": str(start / ("gpt2" if stage == "dpo" else "llama")),
        "data": DataConfig(train=str(start / "world" / f"{rows}.jsonl"), evaluation=held_out, max_length=256),
        "output": str(output),
        "adapter": adapter_spec(adapter),
        "weights": WeightsConfig(quantize=adapter if adapter in QUANTIZED else None),
        "optim": OptimConfig(learning_rate=3e-2 if adapter in ("prefix", "prompt") else 1e-3, eps=1e-5),
        "training": TrainingConfig(
            max_steps=STEPS, batch_size=ROWS, micro_batch_tokens=150, save_every_steps=STEPS // 2,
            evaluate_every_steps=1,
        ),
    }  # fmt: skip
    if stage == "sft":
        return sft.SFTConfig(**common)
    if stage == "reward":
        return reward.RewardConfig(**common)
    if stage == "dpo":
        return dpo.DPOConfig(**common)
    value_model = "policy" if adapter == "prefix" else "reward_model"
    own: dict[str, Any] = {"max_new_tokens": 12, "epochs": 2, "minibatches": 2, "value_model": value_model}
    return ppo.PPOConfig(reward_model=str(start / "reward"), **common, **own)


def adapter_spec(name: str) -> Any:
    """The settings of an adapter; None: all weights train."""
    from alignment.adapters import BottleneckSpec, DoRASpec, IA3Spec, LoRASpec, PrefixSpec, PromptSpec

    return {
        "full": None,
        "lora": LoRASpec(rank=4, alpha=16.0),
        "prefix": PrefixSpec(tokens=4),
        "dora": DoRASpec(rank=4, alpha=16.0),
        "ia3": IA3Spec(),
        "prompt": PromptSpec(tokens=4),
        "prefix_network": PrefixSpec(tokens=4, projection_width=8),
        "bottleneck": BottleneckSpec(width=5, placement="houlsby"),
        "pissa": LoRASpec(rank=4, alpha=16.0, init="pissa"),
        "patterns": LoRASpec(rank=4, rank_stabilized=True, rank_pattern={"value": 2}),
        "token_rows": LoRASpec(rank=4, token_rows=(5, 9, 300)),
        "modules": LoRASpec(rank=4, modules_to_save=("model.norm", "lm_head")),
    }["lora" if name in QUANTIZED else name]


# Measuring


def launch(way: str | None, cells: list[tuple[str, str]], output: Path) -> None:
    """Train the cells in one process, or in two as configs/launch/WAY.yaml says; what they say is shown on failure."""
    launcher = []
    if way is not None:
        options = ["--config_file", str(ROOT / f"configs/launch/{way}.yaml"), "--num_processes", "2"]
        port = str(20000 + os.getpid() % 20000)
        launcher = ["-m", "accelerate.commands.launch", *options, "--main_process_port", port]
    stages, adapters = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    command = [
        sys.executable, *launcher, str(Path(__file__).resolve()), "--train", "--output", str(output),
        "--stages", *stages, "--adapters", *adapters,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        sys.exit(f"{way or 'one process'}: training failed\n{done.stdout}{done.stderr}")


def measure(two: Path, one: Path, cell: tuple[str, str]) -> dict[str, float]:
    """The figures of one cell, by column."""
    name = "-".join(cell)
    reference = weights(one / name)
    found = {
        "weights": difference(weights(two / name), reference),
        "metrics": metric_difference(*(lines(run / name / "metrics.jsonl") for run in (two, one))),
        "resumed": difference(weights(two / f"{name}-resumed"), reference),
    }
    if cell[1] != "bottleneck":  # peft has no such adapter
        found["opened"] = opened(two / name / "model", cell)
    if not two.name.startswith("zero"):  # whose checkpoints are read by the launch that wrote them alone
        with redirect_stderr(io.StringIO()):  # its progress
            resume(cell, two / name, two / f"{name}-alone")
        found["alone"] = difference(weights(two / f"{name}-alone"), reference)
    return found


def weights(run: Path) -> dict[str, Any]:
    """The tensors of a run's model or adapter."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted((run / "model").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def difference(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    """Largest |ours - theirs| / |theirs| of any tensor; infinite where names or shapes differ."""
    if {name: value.shape for name, value in ours.items()} != {name: value.shape for name, value in theirs.items()}:
        return float("inf")
    norms = {name: float(value.norm()) or 1.0 for name, value in theirs.items()}
    return max(float((ours[name] - theirs[name]).norm()) / norms[name] for name in theirs)


def lines(path: Path) -> list[dict[str, float]]:
    """Objects of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def metric_difference(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> float:
    """Largest |ours - theirs| / max(|theirs|, 0.01) of any metric of any step, clocks left out."""
    if len(ours) != len(theirs) or any(one.keys() != other.keys() for one, other in zip(ours, theirs, strict=True)):
        return float("inf")
    return max(
        abs(one[key] - other[key]) / max(abs(other[key]), 0.01)
        for one, other in zip(ours, theirs, strict=True)
        for key in other
        if not any(part in key for part in CLOCKS)
    )


def opened(directory: Path, cell: tuple[str, str]) -> float:
    """Largest difference between what our loader's model and transformers' or peft's give for a few texts."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    from alignment.adapters import load_adapter, read_base
    from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    stage, adapter = cell
    loader = load_scalar_model if stage == "reward" else load_language_model
    base = directory if adapter == "full" else Path(read_base(directory))
    Peer = AutoModelForSequenceClassification if stage == "reward" else AutoModelForCausalLM
    more = {"num_labels": 1} if stage == "reward" else {}
    if adapter == "full":
        ours, peer = loader(directory), Peer.from_pretrained(directory, **more)
    else:
        fresh = {"new_head": "zero"} if stage == "reward" else {}
        ours = load_adapter(loader(base, **fresh), directory)
        peer = PeftModel.from_pretrained(Peer.from_pretrained(base, **more), directory)
    rows = torch.arange(3, 27).view(2, 12)
    with torch.no_grad():
        ours, theirs = ours.eval()(rows).logits, peer.eval()(input_ids=rows).logits
        if adapter == "prompt":
            theirs = theirs[:, -rows.shape[1] :]  # peft gives the logits of the prompt too
        return float((ours - theirs).abs().max())


if __name__ == "__main__":
    sys.exit(main())

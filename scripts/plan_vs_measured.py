"""`alignment plan` against the measured peak of the same run on a CPU, for nine configs; exit code 1 where they lie more than
10 % apart.

    python scripts/plan_vs_measured.py [--only full nf4 ...] [--width 768] [--layers 12]     # about 15 minutes on one core

Each run has a process of its own. What is measured there: the peak of its resident memory (VmHWM of /proc/self/status,
reset after the networks are loaded) from the first update to the end of the last, minus its resident memory before the
run began. Before that, the same stage was run on a model of a few thousand weights, so that libraries and code are
resident already. glibc is told to map every tensor of 64 KiB or more by itself and to keep nothing that is freed, so that
resident memory follows the live tensors. What is compared with it is the plan's largest phase, without its reserve.

The model is a random Llama, or Phi 3 with a head of its own, with bfloat16 weights, and rows are as long as data.max_length.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import in_process, reset_peak, resident, write_checkpoint, write_reward_model, write_rows
from memory import write_networks

from alignment.algorithms.ppo import ppo
from alignment.commands.plan import plan_config
from alignment.config.load import load_config
from alignment.pipeline.stages import find_stage
from alignment.training import Engine

CHILD = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
CHILD["MALLOC_TRIM_THRESHOLD_"] = "65536"
LORA = {"kind": "lora", "rank": 16, "alpha": 32}
VOCABULARY, ROW_TOKENS, MICRO_BATCH_TOKENS, ROWS = 8192, 256, 1024, 8
PROMPT_TOKENS, NEW_TOKENS = 96, 32

ROWS_DATA = {"train": "INPUTS/rows.jsonl", "max_length": ROW_TOKENS, "max_cut_share": 1.0}
SFT = {"policy": "INPUTS/base", "data": ROWS_DATA, "optim": {"learning_rate": 1e-4}}
PHI3 = {**SFT, "policy": "INPUTS/phi3"}
REWARD = {**SFT, "data": {**ROWS_DATA, "train": "INPUTS/pairs.jsonl"}}
CHECKPOINTING = {"training": {"gradient_checkpointing": True}}
PPO = {
    "data": {"train": "INPUTS/prompts.jsonl", "max_length": PROMPT_TOKENS, "max_cut_share": 1.0}, "epochs": 1,
    "optim": {"learning_rate": 1e-5}, "max_new_tokens": NEW_TOKENS, "micro_rollout_batch_size": ROWS,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> stage, config
    "full": ("sft", SFT),
    "checkpointing": ("sft", {**SFT, **CHECKPOINTING}),
    "lora": ("sft", {**SFT, "adapter": LORA}),
    "nf4": ("sft", {**SFT, "adapter": LORA, "weights": {"quantize": "nf4"}}),
    "phi3": ("sft", PHI3),
    "phi3 lora": ("sft", {**PHI3, "adapter": LORA}),
    "reward lora checkpointing": ("reward", {**REWARD, "adapter": LORA, **CHECKPOINTING}),
    "ppo one base": ("ppo", {**PPO, "policy": "INPUTS/policy", "reward_model": "INPUTS/reward", "adapter": LORA}),
    "ppo separate": ("ppo", {**PPO, "policy": "INPUTS/base", "reward_model": "INPUTS/whole_reward"}),
}


def main() -> int:
    """Print the table; 1 where a plan is outside its bounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    arguments = parser.parse_args()
    bad = 0
    print(f"| config | planned, GB | measured, GB | planned / measured | phase | start, GB |\n|{'---|' * 6}")
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large", Path(folder) / "small"
        write_inputs(large, width=arguments.width, layers=arguments.layers)
        write_inputs(small, width=64, layers=2)
        for name in arguments.only:
            stage, config = write_config(name, large, "measured")
            _, warm_up = write_config(name, small, "measured")
            peak = plan_config(write_config(name, large, "planned")[1], [], stage=stage, tflops=1.0).peak
            found = in_process(measure, stage, config, warm_up, **CHILD)
            ratio = peak.total / found["peak"]
            bad += not 0.9 <= ratio <= 1.1
            figures = (f"{size / 1e9:.3f}" for size in (peak.total, found["peak"]))
            print(
                f"| {name} | {' | '.join(figures)} | {ratio:.3f} | {peak.phase} | {found['start'] / 1e9:.3f} |",
                flush=True,
            )
    return int(bad > 0)


def write_inputs(folder: Path, *, width: int, layers: int) -> None:
    """A base model, an adapter for a policy and one for a reward model on it, a whole reward model, rows and prompts."""
    text = " ".join(f"w{number * 7 % 50}" for number in range(400))
    heads = max(1, width // 64)
    llama = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": heads, "max_position_embeddings": 512,
    }  # fmt: skip
    phi3 = {"model_type": "phi3", "num_key_value_heads": max(1, heads // 2), "tie_word_embeddings": False}
    write_networks(folder, llama, [text] * 20, 400, LORA["rank"])
    write_checkpoint(folder / "phi3", {**llama, **phi3, "dtype": "bfloat16"}, [text] * 20, 400)
    write_reward_model(folder / "whole_reward", folder / "base", torch.bfloat16)
    write_rows(folder / "rows.jsonl", [{"prompt": text[:40], "completion": " " + text * 3}] * 2 * ROWS)
    pair = {"prompt": text[:40], "chosen": " " + text * 3, "rejected": " " + text[10:] * 3}
    write_rows(folder / "pairs.jsonl", [pair] * 2 * ROWS)
    prompts = ({"prompt": text[: PROMPT_TOKENS * 3 + number]} for number in range(2 * ROWS))
    write_rows(folder / "prompts.jsonl", prompts)


def write_config(name: str, inputs: Path, output: str) -> tuple[str, str]:
    """Stage and config file of a case on some inputs."""
    stage, config = CASES[name]
    output = str(inputs / f"{name.replace(' ', '_')}_{output}")
    training = {"max_steps": 2, "batch_size": ROWS, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    training |= config.get("training", {})
    text = json.dumps({**config, "training": training, "output": output})
    Path(f"{output}.yaml").write_text(text.replace("INPUTS", str(inputs)))
    return stage, f"{output}.yaml"


def measure(stage: str, config: str, warm_up: str) -> dict[str, int]:
    """Run a config and return the resident bytes at its start and how far they rose in its updates."""
    config_class, run = find_stage(stage)
    run(load_config(config_class, warm_up))
    start = reset_peak()
    update, collect, loaded, peak = Engine.update, ppo.collect, False, 0

    def networks_are_loaded() -> None:
        nonlocal loaded
        if not loaded:
            reset_peak()
        loaded = True

    def measured(self: Engine, *terms: Any) -> dict[str, float]:
        nonlocal peak
        networks_are_loaded()
        metrics = update(self, *terms)
        peak = resident("VmHWM")
        return metrics

    def first_rollout_resets(*args: Any) -> Any:
        networks_are_loaded()
        return collect(*args)

    with patch.object(Engine, "update", measured), patch.object(ppo, "collect", first_rollout_resets):
        run(load_config(config_class, config))
    return {"start": start, "peak": peak - start}


if __name__ == "__main__":
    raise SystemExit(main())

"""`alignment plan` against the measured peak of the same run on a CPU, for nine configs; exit code 1 where they lie more than
10 % apart.

    python scripts/plan_vs_measured.py                       # all of them, about 15 minutes on one core
    python scripts/plan_vs_measured.py --only full nf4
    python scripts/plan_vs_measured.py --width 1024 --layers 16

Each run has a process of its own. What is measured there: the peak of its resident memory (VmHWM of /proc/self/status,
reset after the networks are loaded) from the first update to the end of the last, minus its resident memory before the
run began. Before that, the same stage was run on a model of a few thousand weights, so that libraries and code are
resident already. glibc is told to map every tensor of 64 KiB or more by itself and to keep nothing that is freed, so that
resident memory follows the live tensors. What is compared with it is the plan's largest phase, without its reserve.

The model is a random Llama, or Phi 3 with a head of its own, with bfloat16 weights, and rows are as long as data.max_length.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MALLOC = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
LORA = {"kind": "lora", "rank": 16, "alpha": 32}
VOCABULARY, ROW_TOKENS, MICRO_BATCH_TOKENS, ROWS = 8192, 256, 1024, 8
PROMPT_TOKENS, NEW_TOKENS = 96, 32

SFT = {
    "policy": "{base}",
    "data": {"train": "{rows}", "max_length": ROW_TOKENS, "max_cut_share": 1.0},
    "optim": {"learning_rate": 1e-4},
}
PHI3 = {**SFT, "policy": "{phi3}"}
REWARD = {**SFT, "data": {**SFT["data"], "train": "{pairs}"}}
CHECKPOINTING = {"training": {"gradient_checkpointing": True}}
PPO = {
    "data": {"train": "{prompts}", "max_length": PROMPT_TOKENS, "max_cut_share": 1.0}, "optim": {"learning_rate": 1e-5}, "epochs": 1,
    "max_new_tokens": NEW_TOKENS, "micro_rollout_batch_size": ROWS,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> stage, config
    "full": ("sft", SFT),
    "checkpointing": ("sft", {**SFT, **CHECKPOINTING}),
    "lora": ("sft", {**SFT, "adapter": LORA}),
    "nf4": ("sft", {**SFT, "adapter": LORA, "weights": {"quantize": "nf4"}}),
    "phi3": ("sft", PHI3),
    "phi3 lora": ("sft", {**PHI3, "adapter": LORA}),
    "reward lora checkpointing": ("reward", {**REWARD, "adapter": LORA, **CHECKPOINTING}),
    "ppo one base": ("ppo", {**PPO, "policy": "{policy}", "reward_model": "{reward}", "adapter": LORA}),
    "ppo separate": ("ppo", {**PPO, "policy": "{base}", "reward_model": "{whole_reward}"}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--measure", nargs=3, metavar=("STAGE", "CONFIG", "WARM_UP"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(*arguments.measure)))
        return 0
    bad = 0
    print(f"| config | planned, GB | measured, GB | planned / measured | phase | start, GB |\n|{'---|' * 6}")
    with tempfile.TemporaryDirectory() as folder:
        large, small = Path(folder) / "large", Path(folder) / "small"
        write_inputs(large, width=arguments.width, layers=arguments.layers)
        write_inputs(small, width=64, layers=2)
        for name in arguments.only:
            planned, phase = plan(name, large)
            found = measured_peak(name, large, small)
            ratio = planned / found["peak"]
            bad += not 0.9 <= ratio <= 1.1
            print(
                f"| {name} | {planned / 1e9:.3f} | {found['peak'] / 1e9:.3f} | {ratio:.3f} | {phase} "
                f"| {found['start'] / 1e9:.3f} |", flush=True,
            )  # fmt: skip
    return int(bad > 0)


# Inputs


def write_inputs(folder: Path, *, width: int, layers: int) -> None:
    """A base model, an adapter for a policy and one for a reward model on it, a whole reward model, rows and prompts."""
    import torch

    from alignment.adapters.attach import attach, save_adapter
    from alignment.adapters.specs import LoRASpec
    from alignment.data.tokenizers.load import save_tokenizer
    from alignment.data.tokenizers.train import train_tokenizer
    from alignment.models.build import build_language_model, build_scalar_model
    from alignment.models.huggingface.checkpoint import save_model

    torch.manual_seed(0)
    texts = [" ".join(f"w{number * 7 % 50}" for number in range(400))] * 20
    tokenizer = train_tokenizer("bpe", texts, 400)
    config = {
        "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": width, "intermediate_size": 4 * width,
        "num_hidden_layers": layers, "num_attention_heads": max(1, width // 64), "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    phi3 = {
        **config, "model_type": "phi3", "num_key_value_heads": max(1, config["num_attention_heads"] // 2),
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1,
    }  # fmt: skip
    models = {
        "base": build_language_model(config), "whole_reward": build_scalar_model(config),
        "phi3": build_language_model(phi3),
    }  # fmt: skip
    for name, model in models.items():
        (folder / name).mkdir(parents=True)
        save_model(model.to(torch.bfloat16), folder / name)
        save_tokenizer(tokenizer, folder / name)
    spec = LoRASpec(rank=16, alpha=32)
    for name, model in (("policy", models["base"]), ("reward", build_scalar_model(config))):
        (folder / name).mkdir()
        save_adapter(attach(model.float(), spec), folder / name, base=str(folder / "base"), revision=None)
        save_tokenizer(tokenizer, folder / name)
    text = texts[0]
    rows = [{"prompt": text[:40], "completion": " " + text * 3} for _ in range(2 * ROWS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " " + text[10:] * 3} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    prompts = [{"prompt": text[: PROMPT_TOKENS * 3 + number]} for number in range(2 * ROWS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))


def write_config(name: str, inputs: Path, output: Path) -> tuple[str, Path]:
    """Stage and config file of a case on some inputs."""
    stage, config = CASES[name]
    names = ("base", "phi3", "policy", "reward", "whole_reward")
    paths = {each: str(inputs / each) for each in names}
    paths |= {each: str(inputs / f"{each}.jsonl") for each in ("rows", "pairs", "prompts")}
    training = {
        "max_steps": 2, "batch_size": ROWS, "micro_batch_tokens": MICRO_BATCH_TOKENS, **config.get("training", {}),
    }  # fmt: skip
    text = json.dumps({**config, "training": training, "output": str(output)})
    for each, path in paths.items():
        text = text.replace(f'"{{{each}}}"', json.dumps(path))
    file = output.with_suffix(".yaml")
    file.write_text(text)
    return stage, file


# Planned


def plan(name: str, inputs: Path) -> tuple[int, str]:
    """Bytes and name of the largest phase of the plan."""
    from alignment.commands.plan import plan_config

    stage, file = write_config(name, inputs, inputs / f"{name.replace(' ', '_')}_planned")
    found = plan_config(str(file), [], stage=stage, tflops=1.0)
    return found.peak.total, found.peak.phase


# Measured


def measured_peak(name: str, large: Path, small: Path) -> dict[str, int]:
    """What `measure` returns in a fresh process."""
    slug = name.replace(" ", "_")
    stage, file = write_config(name, large, large / slug)
    _, warm_up = write_config(name, small, small / slug)
    environment = {**os.environ, **MALLOC, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--measure", stage, str(file), str(warm_up)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name}: the measured run failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(stage: str, config: str, warm_up: str) -> dict[str, int]:
    """Run a config and return the resident bytes at its start and how far they rose in its updates."""
    import gc

    from alignment.config.load import load_config
    from alignment.pipeline.stages import find_stage
    from alignment.training.engine import Engine

    config_class, run = find_stage(stage)
    run(load_config(config_class, warm_up))
    gc.collect()
    start = resident("VmRSS")
    loaded = []

    update = Engine.update

    def first_update_resets(self: Engine, *terms: Any) -> dict[str, float]:
        if not loaded and stage != "ppo":
            reset_peak(loaded)
        return update(self, *terms)

    Engine.update = first_update_resets  # type: ignore[method-assign]
    if stage == "ppo":
        from alignment.algorithms.ppo import ppo

        collect = ppo.collect

        def first_rollout_resets(*args: Any) -> Any:
            if not loaded:
                reset_peak(loaded)
            return collect(*args)

        ppo.collect = first_rollout_resets
    save = find_save(stage)
    peak: list[int] = []
    save(lambda: peak.append(resident("VmHWM")))
    run(load_config(config_class, config))
    return {"start": start, "loaded": loaded[0] - start, "peak": peak[0] - start}


def find_save(stage: str) -> Any:
    """A function that lets something be called before the run saves its model."""
    import importlib

    module = importlib.import_module(
        "alignment.algorithms.ppo.ppo" if stage == "ppo" else f"alignment.algorithms.{stage}"
    )
    name = "save_reward_model" if stage == "reward" else "save_policy"
    original = getattr(module, name)

    def install(before: Any) -> None:
        def save_after(*args: Any, **kwargs: Any) -> Any:
            before()
            return original(*args, **kwargs)

        setattr(module, name, save_after)

    return install


def reset_peak(noted: list[int]) -> None:
    """Let the peak begin anew at what is resident now, which is noted."""
    import gc

    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    noted.append(resident("VmRSS"))


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


if __name__ == "__main__":
    raise SystemExit(main())

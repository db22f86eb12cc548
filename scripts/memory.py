"""Memory of the stages on a random Llama of 290 M parameters, measured on the CPU; JSON lines, then a table.

    python scripts/memory.py [--only NAME ...] [--small]

Each measurement is a process of its own with one thread. It runs the stage on a tiny model first, which imports all that
the stage needs, and then on the large one, a checkpoint in bfloat16. Its figures, in MB of 10^6 bytes:

weights   all parameters, buffers and quantization constants that are alive at the first update, each tensor once
peak      the most resident memory during the stage (VmHWM) less the resident memory before it; the pages of the
          checkpoint's file that were read through a memory map count, too
"""

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = {  # keys of config.json
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 1000},
    "large": {
        "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "num_attention_heads": 16, "vocab_size": 32_000,
    },
}  # fmt: skip
RANK = 8
WORDS = "guest pool spa desk room opens closes at in the on every day night of hotel"


MEASUREMENTS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> stage, `weights` of its config
    "sft lora": ("sft", {}),
    "sft lora float32": ("sft", {"dtype": "float32"}),
    "sft lora nf4": ("sft", {"quantize": "nf4"}),
    "sft lora int8": ("sft", {"quantize": "int8"}),
    "ppo lora": ("ppo", {}),
    "ppo lora float32": ("ppo", {"dtype": "float32"}),
    "ppo lora nf4": ("ppo", {"quantize": "nf4"}),
}


def main() -> None:
    """Write the checkpoints, run each measurement in a process, print rows and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--small", action="store_true", help="only the tiny model, to try the script")
    parser.add_argument("--measure", nargs=3, metavar=("NAME", "SIZE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, size, folder = arguments.measure
        print(json.dumps(measure(*MEASUREMENTS[name], Path(folder), size)))
        return
    size, rows = "tiny" if arguments.small else "large", []
    with tempfile.TemporaryDirectory() as folder:
        for each in dict.fromkeys(["tiny", size]):
            write_parents(Path(folder) / each, SIZES[each])
        for name in arguments.only:
            rows.append({"bench": name, "size": size, **in_process(name, size, folder)})
            print(json.dumps(rows[-1]), flush=True)
    print(f"{'':20}{'weights MB':>12}{'peak MB':>10}{'seconds':>9}")
    for row in rows:
        print(f"{row['bench']:20}{row['weights']:12.1f}{row['peak']:10.1f}{row['seconds']:9.1f}")


def in_process(name: str, size: str, folder: str) -> dict[str, float]:
    """The figures of one measurement, from a process of its own."""
    command = [sys.executable, __file__, "--measure", name, size, folder]
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_parents(folder: Path, sizes: dict[str, int]) -> None:
    """A base model in bfloat16, and two adapters on it as peft writes them: a policy and a reward model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

    from alignment.data.tokenizers.load import save_tokenizer
    from alignment.data.tokenizers.train import train_bpe

    folder.mkdir()
    words = WORDS.split()
    text = [" ".join(words[(i * j) % len(words)] for j in range(1, 9)) for i in range(64)]
    tokenizer = train_bpe(iter(text), 300)
    torch.manual_seed(0)
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = LlamaConfig(**sizes, **special, max_position_embeddings=512, tie_word_embeddings=True)  # pyright: ignore[reportArgumentType]
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "base")
    save_tokenizer(tokenizer, folder / "base")
    kinds = {"policy": (AutoModelForCausalLM, "CAUSAL_LM"), "reward": (AutoModelForSequenceClassification, "SEQ_CLS")}
    for name, (kind, task) in kinds.items():
        lora = LoraConfig(r=RANK, lora_alpha=16, target_modules="all-linear", task_type=task, init_lora_weights=False)
        options = {"num_labels": 1} if task == "SEQ_CLS" else {}
        model = get_peft_model(kind.from_pretrained(folder / "base", dtype=torch.bfloat16, **options), lora)
        model.save_pretrained(str(folder / name))
        save_tokenizer(tokenizer, folder / name)
    rows = [{"prompt": line[:20], "completion": line[20:]} for line in text]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def measure(stage: str, weights: dict[str, Any], folder: Path, size: str) -> dict[str, float]:
    """Run a stage on the tiny model, then on the one of this size, and return the figures of the second run in MB."""
    from alignment.training import Engine

    run_stage(stage, weights, folder / "tiny", folder / f"out-{os.getpid()}-tiny")
    found: list[int] = []
    update = Engine.update

    def counted(engine: Engine, *terms: Any) -> Any:
        found.append(weights_alive())
        return update(engine, *terms)

    Engine.update = counted  # pyright: ignore[reportAttributeAccessIssue]
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before, began = resident("VmRSS"), time.perf_counter()
    run_stage(stage, weights, folder / size, folder / f"out-{os.getpid()}")
    peak = resident("VmHWM") - before
    return {
        "weights": round(found[0] / 1e6, 1), "peak": round(peak / 1e6, 1), "before": round(before / 1e6, 1),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def run_stage(stage: str, weights: dict[str, Any], parents: Path, output: Path) -> None:
    """Few short rows, one update: what is measured is the weights."""
    from alignment.adapters import LoRASpec
    from alignment.algorithms import sft
    from alignment.algorithms.ppo import ppo
    from alignment.data.config import DataConfig
    from alignment.models.weights_config import WeightsConfig
    from alignment.training import TrainingConfig

    common: dict[str, Any] = {
        "data": DataConfig(train=str(parents / "rows.jsonl"), max_length=48), "output": str(output),
        "adapter": LoRASpec(rank=RANK), "training": TrainingConfig(batch_size=2, max_steps=1, micro_batch_tokens=96),
        "weights": WeightsConfig(**weights),
    }  # fmt: skip
    if stage == "sft":
        sft.run(sft.SFTConfig(policy=str(parents / "base"), **common))
    else:
        networks = {"policy": str(parents / "policy"), "reward_model": str(parents / "reward")}
        ppo.run(ppo.PPOConfig(**networks, **common, max_new_tokens=4, epochs=1))


def weights_alive() -> int:
    """Bytes of the tensors of all modules alive, each counted once."""
    import torch

    from alignment.models.weight_bytes import total_bytes

    return total_bytes(*(thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)))


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


if __name__ == "__main__":
    main()

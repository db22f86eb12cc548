"""Memory of the stages on a random Llama of 290 M parameters, measured on the CPU; JSON lines, then a table.

    python scripts/memory.py [--only NAME ...] [--small]

Each measurement is a process of its own with one thread. It runs the stage on a tiny model first, which imports all that
the stage needs, and then on the large one, a checkpoint in bfloat16. Its figures, in MB of 10^6 bytes:

weights   all parameters, buffers and quantization constants that are alive at the first update, each tensor once
peak      the most resident memory during the stage (VmHWM) less the resident memory before it; the pages of the
          checkpoint's file that were read through a memory map count, too
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from measuring import in_process, reset_peak, resident, write_checkpoint, write_rows

from alignment.adapters import LoRASpec
from alignment.adapters.attach import attach, save_adapter
from alignment.data.config import DataConfig
from alignment.data.tokenizers.tokenizer import save_tokenizer
from alignment.models.huggingface.checkpoint import load_language_model, load_scalar_model
from alignment.models.weight_bytes import total_bytes
from alignment.models.weights_config import WeightsConfig
from alignment.pipeline.stages import find_stage
from alignment.training import Engine, TrainingConfig

LLAMA = {"model_type": "llama", "max_position_embeddings": 512, "tie_word_embeddings": True}
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
LARGE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 20, "num_attention_heads": 16}
SIZES = {"tiny": {**LLAMA, **TINY, "vocab_size": 1000}, "large": {**LLAMA, **LARGE, "vocab_size": 32_000}}
RANK = 8
WORDS = "guest pool spa desk room opens closes at in the on every day night of hotel"
CHILD = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
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
    arguments = parser.parse_args()
    size, rows = "tiny" if arguments.small else "large", []
    with tempfile.TemporaryDirectory() as folder:
        for each in {"tiny", size}:
            words = WORDS.split()
            texts = [" ".join(words[i * j % len(words)] for j in range(1, 9)) for i in range(64)]
            write_networks(Path(folder) / each, SIZES[each], texts, 300, RANK)
            write_rows(Path(folder) / each / "rows.jsonl", ({"prompt": x[:20], "completion": x[20:]} for x in texts))
        for name in arguments.only:
            found = in_process(measure, *MEASUREMENTS[name], folder, size, **CHILD)
            rows.append({"bench": name, "size": size, **found})
            print(json.dumps(rows[-1]), flush=True)
    print(f"{'':20}{'weights MB':>12}{'peak MB':>10}{'seconds':>9}")
    for row in rows:
        print(f"{row['bench']:20}{row['weights']:12.1f}{row['peak']:10.1f}{row['seconds']:9.1f}")


def write_networks(folder: Path, config: dict[str, Any], texts: Iterable[str], vocabulary: int, rank: int) -> None:
    """A base model in bfloat16, and two adapters on it: of a policy and of a reward model."""
    base, spec = folder / "base", LoRASpec(rank=rank, alpha=2 * rank)
    tokenizer = write_checkpoint(base, {**config, "dtype": "bfloat16"}, texts, vocabulary)
    loaders = {"policy": load_language_model, "reward": partial(load_scalar_model, new_head="normal")}
    for name, load in loaders.items():
        (folder / name).mkdir()
        save_adapter(attach(load(base), spec), folder / name, base=str(base), revision=None)
        save_tokenizer(tokenizer, folder / name)


def measure(stage: str, weights: dict[str, Any], parents: str, size: str) -> dict[str, float]:
    """Run a stage on the tiny model, then on the one of this size, and return the figures of the second run in MB."""
    folder = Path(parents)
    run_stage(stage, weights, folder / "tiny", folder / f"out-{os.getpid()}-tiny")
    found: list[int] = []
    update = Engine.update

    def counted(engine: Engine, *terms: Any) -> Any:
        found.append(weights_alive())
        return update(engine, *terms)

    before, began = reset_peak(), time.perf_counter()
    with patch.object(Engine, "update", counted):
        run_stage(stage, weights, folder / size, folder / f"out-{os.getpid()}")
    sizes = {"weights": found[0], "peak": resident("VmHWM") - before, "before": before}
    seconds = round(time.perf_counter() - began, 1)
    return {**{name: round(size / 1e6, 1) for name, size in sizes.items()}, "seconds": seconds}


def run_stage(stage: str, weights: dict[str, Any], parents: Path, output: Path) -> None:
    """Few short rows, one update: what is measured is the weights."""
    own: dict[str, Any] = {"policy": str(parents / "base")}
    if stage == "ppo":
        own = {"policy": str(parents / "policy"), "reward_model": str(parents / "reward")}
        own |= {"max_new_tokens": 4, "epochs": 1}
    config, run = find_stage(stage)
    run(
        config(
            data=DataConfig(train=str(parents / "rows.jsonl"), max_length=48), output=str(output),
            adapter=LoRASpec(rank=RANK), training=TrainingConfig(batch_size=2, max_steps=1, micro_batch_tokens=96),
            weights=WeightsConfig(**weights), **own,
        )
    )  # fmt: skip


def weights_alive() -> int:
    """Bytes of the tensors of all modules alive, each counted once."""
    return total_bytes(*(thing for thing in gc.get_objects() if issubclass(type(thing), torch.nn.Module)))


if __name__ == "__main__":
    main()
